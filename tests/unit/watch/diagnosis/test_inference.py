"""Tests of the shared inference: log-odds, confidence, and the cheapest cover against a search of all subsets."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.watch.diagnosis import inference
from lockstep.watch.diagnosis.inference import Calibration, FactorWeight, add_up, cheapest_cover, logistic, surprise


def total_cost(covers: np.ndarray, costs: list[float], left_over: list[float], chosen: tuple[int, ...]) -> float:
    covered = {at for row in chosen for at in np.flatnonzero(covers[row])}
    return sum(costs[row] for row in chosen) + sum(
        each for at, each in enumerate(left_over) if at not in covered and covers[:, at].any()
    )


problems = st.integers(1, 6).flatmap(
    lambda rows: st.integers(1, 6).flatmap(
        lambda columns: st.tuples(
            st.lists(st.lists(st.booleans(), min_size=columns, max_size=columns), min_size=rows, max_size=rows),
            st.lists(st.floats(0, 8), min_size=rows, max_size=rows),
            st.lists(st.floats(0, 8), min_size=columns, max_size=columns),
        )
    )
)


@given(problems)
def test_no_set_is_cheaper(problem: tuple[list[list[bool]], list[float], list[float]]) -> None:
    covers, costs, left_over = np.array(problem[0]), problem[1], problem[2]
    chosen = cheapest_cover(covers, costs, left_over)
    sets = [each for size in range(len(costs) + 1) for each in itertools.combinations(range(len(costs)), size)]
    best = min(total_cost(covers, costs, left_over, each) for each in sets)
    assert total_cost(covers, costs, left_over, tuple(chosen)) == pytest.approx(best, abs=1e-6)


@given(problems)
def test_of_many_hypotheses_none_is_needless(problem: tuple[list[list[bool]], list[float], list[float]]) -> None:
    covers, costs, left_over = np.array(problem[0]), problem[1], problem[2]
    chosen = inference._greedy(covers, np.array(costs), np.array(left_over))
    whole = total_cost(covers, costs, left_over, tuple(chosen))
    for each in chosen:
        assert total_cost(covers, costs, left_over, tuple(row for row in chosen if row != each)) >= whole - 1e-9


def test_one_cause_is_cheaper_than_its_effects() -> None:
    covers = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1]], dtype=bool)
    assert cheapest_cover(covers, [0.5, 0.5, 0.7], [math.inf] * 3) == [2]


def test_independent_incidents_have_a_hypothesis_each() -> None:
    assert cheapest_cover(np.eye(3, dtype=bool), [1.0, 9.0, 1.0], [5.0] * 3) == [0, 2]


def test_many_hypotheses_are_searched_greedily() -> None:
    count = inference.MAX_EXACT + 8
    covers = np.eye(count, dtype=bool)
    covers[7] = True
    assert cheapest_cover(covers, [1.0] * count, [math.inf] * count) == [7]


def test_answers_add_up_and_missing_ones_add_nothing() -> None:
    weights = {"ended": FactorWeight(2.0, -1.0), "first": FactorWeight(0.5)}
    assert add_up(-1.0, {"ended": True, "first": None}, weights) == 1.0
    assert add_up(-1.0, {"ended": False, "first": False}, weights) == -2.0
    with pytest.raises(KeyError, match="late"):
        add_up(0.0, {"late": True}, weights)


@given(st.floats(-700, 700))
def test_surprise_is_the_negative_logarithm_of_the_probability(log_odds: float) -> None:
    assert math.exp(-surprise(log_odds)) == pytest.approx(logistic(log_odds), abs=1e-12)
    assert logistic(log_odds) + logistic(-log_odds) == pytest.approx(1.0)


def test_confidence_has_a_ceiling() -> None:
    assert Calibration(ceiling=0.78).confidence(50.0) == 0.78
    assert Calibration(slope=0.5, offset=0.2).confidence(1.0) == pytest.approx(1 / (1 + math.exp(-0.7)))
