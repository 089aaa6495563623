"""Offsets between clocks."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.doctor.logs.clock_alignment import MIN_OFFSET_S, clock_offsets
from tests.unit.doctor.job_logs import LOST, TIMED_OUT, raised, write

_APART = st.floats(-5000, 5000).filter(lambda seconds: abs(seconds) > MIN_OFFSET_S + 1)
_LATE = st.floats(0, 0.4)


@given(st.lists(_APART, max_size=3), st.lists(st.lists(_LATE, min_size=7, max_size=7), min_size=4, max_size=30))
def test_steady_differences_are_found(apart: list[float], steps: list[list[float]]) -> None:
    ahead = [0.0] * (len(apart) + 1) + apart
    clocks = {clock: {at: 60.0 * at + late[clock] + own for at, late in enumerate(steps)}
              for clock, own in enumerate(ahead)}  # fmt: skip
    found = clock_offsets(clocks)
    assert found.keys() == {clock for clock, own in enumerate(ahead) if own}
    assert all(abs(found[clock] - ahead[clock]) <= 1.0 for clock in found)


@given(st.lists(st.lists(st.floats(0, 1000), min_size=3, max_size=3), min_size=4, max_size=20))
def test_late_ranks_have_no_clock_offset(steps: list[list[float]]) -> None:
    """Delays that vary are not a clock offset."""
    steps = [[0.0, 10.0 + 40 * at, late[2]] for at, late in enumerate(steps)]
    clocks = {clock: {at: 60.0 * at + late[clock] for at, late in enumerate(steps)} for clock in range(2)}
    assert clock_offsets(clocks) == {}


def test_one_timeout_shows_a_time_zone() -> None:
    assert clock_offsets({0: {"a": 100.0}, 1: {"a": 7301.0}, 2: {"a": 102.0}}) == pytest.approx({1: 7199.0}, abs=3)
    assert clock_offsets({0: {"a": 100.0}, 1: {"a": 140.0}}) == {}
    assert clock_offsets({}) == {} and clock_offsets({0: {}, 1: {}}) == {}


def test_the_first_failed_rank_is_found_on_another_clock(tmp_path: Path) -> None:
    """Rank 1's clock is an hour behind."""

    def steps(rank: int, hour: int) -> list[str]:
        return [f"2026-11-21 {hour}:00:{at:02d},{rank}00 [rank{rank}] step {at} loss 0.5" for at in range(20)]

    def end(rank: int, at: str, last: str) -> list[str]:
        return [f"2026-11-21 {at},000 [rank{rank}] ends", *raised(rank, last)]

    verdict = explain([write(
        tmp_path,
        rank0=[*steps(0, 14), *end(0, "14:05:00", "KeyError: 'other'")],
        rank1=[*steps(1, 15), *end(1, "15:01:00", "ValueError: broken row")],
        rank2=[*steps(2, 14), *end(2, "14:05:01", LOST)],
        rank3=[*steps(3, 14), *end(3, "14:06:00", TIMED_OUT)],
    )]).verdict  # fmt: skip
    assert [each.rank for each in verdict.culprits] == [1]
