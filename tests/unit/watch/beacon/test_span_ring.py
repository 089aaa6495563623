"""Spans in a beacon: what has ended is read once, with its times, also after the ring has wrapped around."""

import time

import pytest

from lockstep.base.wait_state import track_wait
from lockstep.watch.beacon.beacon_records import MAX_SPANS
from lockstep.watch.beacon.reader import opened_beacon
from lockstep.watch.beacon.span_ring import SpanKind
from lockstep.watch.beacon.writer import Beacon, close_beacon, open_beacon


@pytest.fixture
def beacon(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield open_beacon("run-1", "policy-1", "policy", 1)
    close_beacon()


def spans(beacon: Beacon, after: int = 0):
    with opened_beacon(beacon.path) as opened:
        return opened.spans(after)


def test_a_stage_is_recorded_when_the_next_one_begins(beacon):
    began = time.monotonic_ns()
    beacon.stage("train")
    assert spans(beacon) == []
    beacon.stage("")
    beacon.stage("publish")
    (only,) = spans(beacon)
    assert (only.number, only.kind, only.name) == (1, SpanKind.STAGE, "train")
    assert began <= only.began_ns <= only.ended_ns <= time.monotonic_ns()


def test_units_follow_each_other_without_a_gap(beacon):
    beacon.stage("train")
    for done in (1, 2, 3):
        beacon.finish_unit("microbatches", done, 3)
    first, second, third = spans(beacon)
    assert [each.name for each in (first, second, third)] == [f"microbatches {n}/3" for n in (1, 2, 3)]
    assert first.ended_ns == second.began_ns and second.ended_ns == third.began_ns
    with opened_beacon(beacon.path) as opened:
        assert opened.state.counters["microbatches"].value == 3
        assert first.began_ns == opened.state.stage_since_ns


def test_a_wait_is_recorded_when_it_ends_unless_it_was_short(beacon):
    with track_wait("future", "reward-0", "scores of step 7", timeout_s=1):
        time.sleep(0.002)
    with track_wait("future", "reward-0", "nothing", timeout_s=1):
        pass
    (only,) = spans(beacon)
    assert (only.kind, only.name) == (SpanKind.WAIT, "reward-0 (future): scores of step 7")
    assert only.thread == "MainThread"
    assert only.ended_ns - only.began_ns >= 2_000_000


def test_the_newest_spans_remain(beacon):
    for number in range(MAX_SPANS + 5):
        beacon.span(SpanKind.REQUEST, f"request {number}", 1, number)
    found = spans(beacon)
    assert [each.number for each in found] == list(range(6, MAX_SPANS + 6))
    assert (found[-1].name, found[-1].amount) == (f"request {MAX_SPANS + 4}", MAX_SPANS + 4)
    assert [each.number for each in spans(beacon, after=MAX_SPANS + 3)] == [MAX_SPANS + 4, MAX_SPANS + 5]
    assert spans(beacon, after=MAX_SPANS + 5) == []


def test_names_are_cut_to_their_room(beacon):
    beacon.span(SpanKind.WEIGHTS, "é" * 100, 1, 2**40)
    (only,) = spans(beacon)
    assert (only.name, only.amount) == ("é" * 40, 2**40)


def test_a_closed_beacon_records_nothing(beacon):
    beacon.close()
    beacon.stage("train")
    beacon.finish_unit("microbatches", 1, 1)
    beacon.span(SpanKind.REQUEST, "request", 1)
    assert spans(beacon) == []
