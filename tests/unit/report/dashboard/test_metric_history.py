"""Columns of metrics, and curves with few points that keep every spike."""

import math
import sys
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.dashboard.metric_history import MetricHistory, metric_facts, reduced_curve

values = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=200)


@given(values, st.integers(2, 20))
def test_no_extreme_is_lost_however_few_points_there_are(given_values: list[float], points: int) -> None:
    steps = np.arange(1, len(given_values) + 1)
    curve = reduced_curve(steps, np.array(given_values), points)
    assert len(curve["steps"]) == min(len(given_values), points)
    assert {len(curve[name]) for name in ("values", "low", "high")} == {len(curve["steps"])}
    known = [value for value in given_values if value == value]
    if known:
        lows = [float(value) for value in curve["low"] if value != "nan"]
        highs = [float(value) for value in curve["high"] if value != "nan"]
        assert min(lows) == float(f"{min(known):.7g}") and max(highs) == float(f"{max(known):.7g}")
    assert ("nan" in curve["values"]) >= any(math.isnan(value) for value in given_values)


def test_a_bucket_has_the_mean_of_its_values() -> None:
    curve = reduced_curve(np.arange(1, 9), np.array([1.0, 3, 0, 0, 5, 5, 2, 100]), 4)
    assert curve == {
        "steps": [2, 4, 6, 8], "values": [2.0, 0.0, 5.0, 51.0], "low": [1.0, 0.0, 5.0, 2.0],
        "high": [3.0, 0.0, 5.0, 100.0],
    }  # fmt: skip


def test_steps_are_chosen_and_read_again() -> None:
    history = MetricHistory()
    for step in range(1, 11):
        history.add(step, {"a": float(step)} | ({"rare": 7.0} if step == 5 else {}))
    history.add(10, {"a": -1.0})
    assert history.curve("a", 3, 4, 600) == {"steps": [3, 4], "values": [3, 4], "low": [3, 4], "high": [3, 4]}
    assert history.curve("nothing", None, None, 600) is None
    history.forget_from(5)
    assert history.names == ["a"] and history.since(3) == {4: {"a": 4.0}}
    history.add(5, {"a": 50.0})
    assert history.since(3) == {4: {"a": 4.0}, 5: {"a": 50.0}}


def test_a_name_says_its_group_and_unit() -> None:
    assert metric_facts("throughput/tokens_per_s") == {
        "name": "throughput/tokens_per_s", "group": "throughput", "unit": "tokens/s"
    }  # fmt: skip
    assert metric_facts("time/train_s")["unit"] == "s"
    assert metric_facts("loss") == {"name": "loss", "group": "other"}


def test_the_size_is_known_while_another_thread_adds_metrics() -> None:
    """A request about one run asks for the sizes of all, of which some are being read for other requests."""
    history, ended = MetricHistory(), threading.Event()

    def add() -> None:
        for number in range(60_000):
            history.add(1, {f"metric/{number}": 1.0})
        ended.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding = threading.Thread(target=add)
        adding.start()
        while not ended.is_set():
            assert history.size >= 0
        adding.join(10.0)
    finally:
        sys.setswitchinterval(before)
    assert history.size == 16 * 60_000
