"""How long a rank worked, from the calls in its rings."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.train.metric_reduction import WorkMeter
from lockstep.train.trainer_protocol import UNKNOWN_S
from lockstep.watch.beacon import writer
from lockstep.watch.beacon.beacon_records import CALLS_PER_RING
from tests.unit.watch.agent.recorded_members import Member

CPU = torch.device("cpu")


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Member]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield Member(1, 2)
    writer.close_beacon()


def test_blocking_calls_are_not_work(member: Member) -> None:
    meter = WorkMeter()
    for _ in range(3):
        for _ in range(CALLS_PER_RING):
            member.call()
        meter.update()
    load = meter.load(CPU)
    assert load.work_s > 0 and load.blocked_s > 0


def test_calls_that_were_overwritten_before_they_were_added_leave_the_times_unknown(member: Member) -> None:
    """Else what they waited for others would count as work, and a rank that waits would look slow."""
    meter = WorkMeter()
    for _ in range(CALLS_PER_RING + 1):
        member.call()
    load = meter.load(CPU)
    assert (load.work_s, load.blocked_s) == (UNKNOWN_S, UNKNOWN_S) and load.memory > 0


def test_without_recorded_communicators_the_times_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    writer.open_beacon("run", "policy-0", "policy", 0)
    try:
        load = WorkMeter().load(CPU)
    finally:
        writer.close_beacon()
    assert (load.work_s, load.blocked_s) == (UNKNOWN_S, UNKNOWN_S)
