"""A timeline's follower returns every span and call once, and counts what it has missed."""

import pytest
from recorded_members import Member

from lockstep.watch.agent.timeline_follower import TimelineFollower
from lockstep.watch.beacon import writer
from lockstep.watch.beacon.beacon_records import CALLS_PER_RING, MAX_SPANS
from lockstep.watch.beacon.span_ring import SpanKind


@pytest.fixture
def member(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield Member(1, 2)
    writer.close_beacon()


def read(follower, member):
    found = follower.read([member.beacon.path])
    (process,) = found["processes"]
    (communicator,) = process["communicators"]
    return found, process, communicator


def test_each_call_is_returned_once_and_described(member):
    follower = TimelineFollower()
    member.beacon.stage("train")
    member.call("[4, 2]")
    found, process, communicator = read(follower, member)
    assert (process["name"], process["role"], process["rank"]) == ("policy-1", "policy", 1)
    assert process["stage"][0] == "train"
    assert (communicator["name"], communicator["size"], communicator["rank"]) == ("fsdp", 2, 1)
    number, issued, operation, shapes, dtype, site, _, _, entered, left, flags, peer = communicator["calls"][0]
    texts = found["texts"]
    assert (number, issued, flags, peer) == (1, 1, 0, None)
    assert [texts[each] for each in (operation, shapes, dtype, site)] == [
        "broadcast", "[4, 2]", "float32", "/a/train.py:31 in f",
    ]  # fmt: skip
    assert entered <= left <= found["now_ns"]
    assert read(follower, member)[2]["calls"] == []
    member.call()
    assert [call[0] for call in read(follower, member)[2]["calls"]] == [2]


def test_a_call_that_has_not_returned_comes_again_when_it_has(member):
    follower = TimelineFollower()
    member.call(inside=True)
    assert read(follower, member)[2]["calls"][0][9] == 0
    assert read(follower, member)[2]["calls"] == []
    member.call()
    assert [call[0] for call in read(follower, member)[2]["calls"]] == [2]
    member.slot.leave(member.slot.call_at(1) + 4)
    (returned,) = read(follower, member)[2]["calls"]
    assert returned[0] == 1 and returned[9] > 0


def test_what_was_overwritten_is_counted(member):
    follower = TimelineFollower()
    member.call()
    member.beacon.span(SpanKind.REQUEST, "first", 1)
    read(follower, member)
    for _ in range(CALLS_PER_RING + 7):
        member.call()
    for _ in range(MAX_SPANS + 3):
        member.beacon.span(SpanKind.REQUEST, "more", 1)
    _, process, communicator = read(follower, member)
    assert (len(communicator["calls"]), len(process["spans"])) == (CALLS_PER_RING, MAX_SPANS)
    assert process["lost"] == 7 + 3


def test_the_first_read_returns_the_newest_and_counts_no_loss(member):
    for _ in range(CALLS_PER_RING + 7):
        member.call()
        member.beacon.span(SpanKind.REQUEST, "one", 1)
    _, process, communicator = read(TimelineFollower(newest=5), member)
    assert (len(communicator["calls"]), len(process["spans"]), process["lost"]) == (5, 5, 0)


def test_a_process_that_takes_the_name_is_read_from_its_beginning(member):
    follower = TimelineFollower()
    for _ in range(3):
        member.call()
    read(follower, member)
    again = Member(1, 2)
    again.call()
    again.beacon.span(SpanKind.REQUEST, "new", 1)
    follower._processes[again.beacon.path].identity = (0, 0)
    _, process, communicator = read(follower, again)
    assert ([call[0] for call in communicator["calls"]], process["lost"]) == ([1], 0)
    assert [each[1] for each in process["spans"]] == ["new"]


def test_a_missing_beacon_is_left_out(member, tmp_path):
    assert TimelineFollower().read([tmp_path / "none.beacon"])["processes"] == []
