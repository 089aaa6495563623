"""A timeline's follower returns every span and call once, and counts what it has missed."""

import json
from binascii import a2b_base64
from collections import defaultdict

import pytest
from recorded_members import Member

from lockstep.watch.agent.timeline_follower import TimelineFollower
from lockstep.watch.beacon import writer
from lockstep.watch.beacon.beacon_records import CALLS_PER_RING, MAX_SPANS
from lockstep.watch.beacon.call_copies import unpack_calls
from lockstep.watch.beacon.span_ring import SpanKind


@pytest.fixture
def member(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield Member(1, 2)
    writer.close_beacon()


def read(follower, member):
    """The answer, the process, and its calls, as a reader of the timeline decodes them."""
    found = json.loads(json.dumps(follower.read([member.beacon.path])))
    (process,) = found["processes"]
    texts = defaultdict(str, {int(number): text for number, text in process["texts"].items()})
    calls = [call for each in found["calls"] for call in unpack_calls(a2b_base64(each), texts)]
    assert [each["calls"] for each in process["communicators"]] == list(range(len(found["calls"])))
    return found, process, calls


def test_each_call_is_returned_once_and_described(member):
    follower = TimelineFollower()
    member.beacon.stage("train")
    member.call("[4, 2]")
    found, process, (call,) = read(follower, member)
    assert (process["name"], process["role"], process["rank"]) == ("policy-1", "policy", 1)
    assert process["stage"][0] == "train"
    (communicator,) = process["communicators"]
    assert (communicator["name"], communicator["size"], communicator["rank"]) == ("fsdp", 2, 1)
    assert (call.number, call.issued, call.peer, call.asynchronous, call.failed) == (1, 1, None, False, False)
    assert (call.operation, call.shapes, call.dtype, call.site) == (
        "broadcast", "[4, 2]", "float32", "/a/train.py:31 in f",
    )  # fmt: skip
    assert call.entered_ns <= call.left_ns <= found["now_ns"]
    found, process, calls = read(follower, member)
    assert (calls, process["communicators"], process["texts"]) == ([], [], {}), "without new calls"
    member.call("[5]")
    assert [(each.number, each.shapes) for each in read(follower, member)[2]] == [(2, "[5]")]


def test_a_call_that_has_not_returned_comes_again_when_it_has(member):
    follower = TimelineFollower()
    member.call(inside=True)
    assert read(follower, member)[2][0].left_ns == 0
    assert read(follower, member)[2] == []
    member.call()
    assert [call.number for call in read(follower, member)[2]] == [2]
    member.slot.leave(member.slot.call_at(1) + 4)
    (returned,) = read(follower, member)[2]
    assert returned.number == 1 and returned.left_ns > 0
    assert read(follower, member)[2] == []


def test_what_was_overwritten_is_counted(member):
    follower = TimelineFollower()
    member.call()
    member.beacon.span(SpanKind.REQUEST, "first", 1)
    read(follower, member)
    for _ in range(CALLS_PER_RING + 7):
        member.call()
    for _ in range(MAX_SPANS + 3):
        member.beacon.span(SpanKind.REQUEST, "more", 1)
    _, process, calls = read(follower, member)
    assert [call.number for call in calls] == list(range(9, CALLS_PER_RING + 9))
    assert (len(calls), len(process["spans"])) == (CALLS_PER_RING, MAX_SPANS)
    assert process["lost"] == 7 + 3


def test_a_communicator_that_is_new_is_read_from_its_beginning(member):
    follower = TimelineFollower(newest=5)
    read(follower, member)
    member.reopen()
    for _ in range(CALLS_PER_RING + 7):
        member.call()
    _, process, calls = read(follower, member)
    assert [call.number for call in calls] == list(range(8, CALLS_PER_RING + 8))
    assert process["lost"] == 7


def test_the_first_read_returns_the_newest_and_counts_no_loss(member):
    for _ in range(CALLS_PER_RING + 7):
        member.call()
        member.beacon.span(SpanKind.REQUEST, "one", 1)
    _, process, calls = read(TimelineFollower(newest=5), member)
    assert (len(calls), len(process["spans"]), process["lost"]) == (5, 5, 0)


def test_a_process_that_takes_the_name_is_read_from_its_beginning(member):
    follower = TimelineFollower()
    for _ in range(3):
        member.call()
    read(follower, member)
    again = Member(1, 2)
    again.call()
    again.beacon.span(SpanKind.REQUEST, "new", 1)
    follower._processes[again.beacon.path].identity = (0, 0)
    _, process, calls = read(follower, again)
    assert ([call.number for call in calls], process["lost"]) == ([1], 0)
    assert [each[1] for each in process["spans"]] == ["new"]


def test_a_missing_beacon_is_left_out(member, tmp_path):
    assert TimelineFollower().read([tmp_path / "none.beacon"])["processes"] == []


def test_the_most_recent_calls_of_a_process_are_returned_if_there_are_too_many(member, monkeypatch):
    monkeypatch.setattr("lockstep.watch.agent.timeline_follower.MAX_CALLS", 3)
    for _ in range(5):
        member.call()
    _, process, calls = read(TimelineFollower(), member)
    assert ([call.number for call in calls], process["lost"]) == ([3, 4, 5], 2)
