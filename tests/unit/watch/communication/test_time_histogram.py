"""Histograms of durations: merging is adding, and quantiles keep their bound."""

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.watch.communication.time_histogram import RELATIVE_ERROR, TimeHistogram

DURATIONS = st.lists(st.integers(0, 10**13), max_size=200)


def histogram(durations: list[int]) -> TimeHistogram:
    made = TimeHistogram()
    for each in durations:
        made.add(each)
    return made


@given(DURATIONS, DURATIONS, DURATIONS)
def test_merging_is_adding_in_any_order(one: list[int], two: list[int], three: list[int]) -> None:
    left = histogram(one)
    left.merge(histogram(two))
    left.merge(histogram(three))
    right = histogram(three)
    inner = histogram(two)
    inner.merge(histogram(one))
    right.merge(inner)
    assert left.counts == right.counts == histogram(one + two + three).counts
    assert left.count == len(one) + len(two) + len(three)


@given(st.lists(st.integers(1, 10**13), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_exact_to_its_bound(durations: list[int], share: float) -> None:
    rank = max(1, math.ceil(share * len(durations)))
    exact = sorted(durations)[rank - 1]
    found = histogram(durations).quantile(share)
    assert exact / (1 + RELATIVE_ERROR) * (1 - 1e-9) <= found <= exact * (1 + RELATIVE_ERROR) * (1 + 1e-9)


@given(DURATIONS)
def test_it_is_read_back_as_it_was_written(durations: list[int]) -> None:
    made = histogram(durations)
    assert TimeHistogram(json.loads(json.dumps(made.to_json()))).counts == made.counts


def test_its_size_does_not_grow_with_the_number_of_durations() -> None:
    made = TimeHistogram()
    for each in np.random.default_rng(0).lognormal(10, 5, 20_000):
        made.add(int(each))
    assert made.count == 20_000 and len(made.counts) < 400
    assert TimeHistogram().quantile(0.5) == 0.0
