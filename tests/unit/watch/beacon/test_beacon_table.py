from pathlib import Path

import pytest

from lockstep.base.wait_state import WaitRecord, track_wait
from lockstep.watch.beacon import beacon_table
from lockstep.watch.beacon.beacon_records import BeaconState, ProgressCounter
from lockstep.watch.beacon.beacon_table import BeaconSnapshot
from lockstep.watch.beacon.writer import close_beacon, open_beacon

S = 1_000_000_000


def written(name: str = "policy-0", pid: int = 1, tokens: int = 100, **changes: object) -> BeaconState:
    fields: dict = {
        "path": Path("x"), "run": "r", "name": name, "role": name.split("-")[0],
        "rank": int(name.split("-")[1].partition(".")[0]),
        "pid": pid, "start_ticks": 7, "created_ns": 0, "created_wall": 0.0, "beat_ns": 0, "stage": "train",
        "stage_since_ns": 90 * S, "counters": {"tokens": ProgressCounter(tokens, 400, 95 * S)},
    }  # fmt: skip
    return BeaconState(**(fields | changes))


def waits_for(waits_for: str, since: int) -> WaitRecord:
    return WaitRecord("future", waits_for, "scores", since * S, 160 * S, 98 * S, 11, "MainThread")


def at(seconds: int, *beacons: BeaconState, letter: str | None = "S") -> BeaconSnapshot:
    return BeaconSnapshot(seconds * S, beacons, {b.pid: letter for b in beacons})


def test_a_row_says_what_a_process_does() -> None:
    (row,) = beacon_table.process_rows(at(100, written(waits=(waits_for("reward-0", 88),), beat_ns=99 * S)))
    assert (row.alive, row.state, row.stage, row.stage_s, row.beat_s) == (True, "sleeping", "train", 10.0, 1.0)
    assert (row.counters[0].value, row.counters[0].total, row.counters[0].rate) == (100, 400, None)
    assert row.counters[0].still_s == 5.0
    wait = row.waits[0]
    assert (wait.waits_for, wait.since_s, wait.stalled_s, wait.left_s) == ("reward-0", 12.0, 2.0, 60.0)
    assert beacon_table.describe_process(row) == "waits 12 s for reward-0 (future): scores"


def test_rates_come_from_two_readings_of_the_same_process() -> None:
    before, now = at(96, written(tokens=20)), at(100, written(tokens=100), written("engine-0", pid=2))
    engine, policy = beacon_table.process_rows(now, before)
    assert policy.counters[0].rate == 20.0
    assert engine.counters[0].rate is None
    assert beacon_table.describe_process(policy) == "tokens 100/400, 20/s"
    reborn = at(100, written(tokens=100, start_ticks=8))
    assert beacon_table.process_rows(reborn, before)[0].counters[0].rate is None


def test_the_rate_of_a_counter_that_began_again_is_not_negative() -> None:
    before, now = at(96, written(tokens=100)), at(100, written(tokens=20))
    assert beacon_table.process_rows(now, before)[0].counters[0].rate == 5.0


@pytest.mark.parametrize(
    ("letter", "alive", "says"),
    [(None, False, "gone"), ("Z", False, "dead"), ("T", True, "stopped in train"), ("R", True, "waits 12 s")],
)
def test_liveness_comes_from_the_process_not_from_the_beacon(letter: str | None, alive: bool, says: str) -> None:
    (row,) = beacon_table.process_rows(at(100, written(waits=(waits_for("reward-0", 88),)), letter=letter))
    assert row.alive is alive
    assert beacon_table.describe_process(row).startswith(says)
    assert bool(row.waits) is alive


def test_edges_and_the_quiet() -> None:
    asleep = WaitRecord("sleep", "the clock", "the next status update", 99 * S, 101 * S, 99 * S, 12, "status")
    now = at(
        100,
        written("policy-0", 1, waits=(waits_for("policy-1", 88), asleep)),
        written("policy-2", 3, waits=(waits_for("policy-1", 50),)),
        written("policy-1", 2, counters={"tokens": ProgressCounter(1, None, 40 * S)}),
        written("policy-3", 4),
    )
    table = beacon_table.process_rows(now)
    assert beacon_table.wait_edges(table) == [("policy-2", "policy-1", 50.0), ("policy-0", "policy-1", 12.0)]
    assert [row.name for row in beacon_table.idle_processes(table, 30)] == ["policy-1"]


def test_rows_of_a_real_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    own = open_beacon("r", "engine-3", "engine", 3)
    try:
        own.stage("rollout")
        own.progress("tokens", 10)
        before = beacon_table.take_snapshot("r")
        own.progress("tokens", 30)
        with track_wait("sleep", "x", "y", timeout_s=9):
            (row,) = beacon_table.process_rows(beacon_table.take_snapshot("r"), before)
    finally:
        close_beacon()
    assert (row.name, row.role, row.rank, row.alive, row.stage) == ("engine-3", "engine", 3, True, "rollout")
    assert row.counters[0].rate is not None
    assert row.counters[0].rate > 0
    assert row.waits[0].waits_for == "x"


def test_workers_of_a_process_are_in_its_row() -> None:
    workers = [
        written(f"rank-0.{pid}", pid, role="rank-0", rank=pid - 8, parent="rank-0") for pid in (8, 9)
    ]  # fmt: skip
    orphan = written("rank-1.7", 7, role="rank-1", rank=0, parent="rank-1")
    found = beacon_table.process_rows(at(100, written("rank-0", pid=2), *workers, orphan))
    assert [(row.name, [part.pid for part in row.parts]) for row in found] == [("rank-0", [8, 9]), ("rank-1.7", [])]
