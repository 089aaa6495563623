"""Communicators and calls in a beacon: what is written is read, also when rings and texts have gone round."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.watch.beacon import call_ring
from lockstep.watch.beacon.beacon_records import (
    CALL_WORDS,
    CALLS_PER_RING,
    FILE_SIZE,
    FLAG_ASYNC,
    FLAG_FAILED,
    FLAG_P2P,
    FLAG_REFUSED,
    MAX_COMMUNICATORS,
    MAX_TEXTS,
    RINGS_AT,
    SEPARATOR,
    CommunicatorRecord,
)
from lockstep.watch.beacon.reader import read_beacon, read_calls
from lockstep.watch.beacon.writer import Beacon, close_beacon, open_beacon


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield open_beacon("run-1", "policy-1", "policy", 1)
    close_beacon()


def line_of(mine: Beacon, name: str = "0") -> call_ring.CommunicatorSlot:
    line = mine.call_rings().open_slot(11, 22, name, "fsdp", "gloo", 4, 1)
    assert line is not None
    return line


def read(mine: Beacon) -> CommunicatorRecord:
    (only,) = read_beacon(mine.path).communicators
    return only


def label(mine: Beacon, operation: str = "all_reduce", root: str = "") -> int:
    return mine.call_rings().text(SEPARATOR.join([operation, "float32", root, "layers.3", "[2, 3]"]))


def test_a_call_is_read_as_it_was_written(mine):
    line, texts = line_of(mine), mine.call_rings()
    words = call_ring.pack_text_numbers(label(mine, root="3"), texts.text("/a/b.py:31 in f"))
    texts.stage("train")
    at = line.enter(7, 5, 2**64 - 1, words, texts.pack_stage())
    inside = read(mine)
    assert (inside.name, inside.label, inside.backend, inside.size, inside.rank) == ("0", "fsdp", "gloo", 4, 1)
    assert (inside.identity, inside.members) == (11, 22)
    assert not (inside.closed or inside.blind or inside.counted)
    assert (inside.entered, inside.completed, inside.issued) == (7, -1, 5)
    call = inside.inside
    assert call == inside.newest and call.inside
    assert (call.number, call.seq, call.issued, call.signature) == (1, 7, 5, 2**64 - 1)
    assert (call.operation, call.shapes, call.dtype, call.root) == ("all_reduce", "[2, 3]", "float32", 3)
    assert (call.site, call.where, call.stage) == ("/a/b.py:31 in f", "b.py:31 in f", "train")

    assert call.module == "layers.3"

    line.leave(at)
    after = read(mine)
    assert after.inside is None and (after.entered, after.completed) == (7, 7)
    assert after.completed_ns >= after.entered_ns > 0


def test_a_failed_call_is_not_completed_and_a_refused_one_not_entered(mine):
    line = line_of(mine)
    line.leave(line.enter(1, 1, 5, label(mine)))
    line.leave(line.enter(2, 2, 5, label(mine)), FLAG_FAILED)
    assert (read(mine).entered, read(mine).completed) == (2, 1)
    line.leave(line.enter(3, 3, 5, label(mine)), FLAG_REFUSED)
    state = read(mine)
    assert (state.entered, state.completed, state.inside) == (2, 1, None)
    assert state.newest.refused and not state.newest.failed


def test_counts_and_calls_are_merged(mine):
    line = line_of(mine)
    assert read(mine).entered == -1
    line.counted()
    assert (read(mine).entered, read(mine).completed) == (0, 0)  # c10d's word that nothing was entered
    line.leave(line.enter(1, 1, 5, label(mine), 0, FLAG_ASYNC))
    state = read(mine)
    assert (state.entered, state.completed) == (1, 0)
    assert state.inside.seq == 1  # issued, and nobody says that it is done
    line.counts(4, 2, 1000, 900)
    state = read(mine)
    assert (state.entered, state.entered_ns, state.completed, state.completed_ns) == (4, 1000, 2, 900)
    assert state.inside is None


def test_point_to_point_is_a_call_and_no_collective(mine):
    line = line_of(mine)
    line.leave(line.enter(1, 1, 5, label(mine)))
    line.blind()
    line.enter(1, 1, 6, label(mine, "recv"), 0, FLAG_P2P, peer=2)
    state = read(mine)
    assert state.blind and (state.entered, state.completed, state.issued) == (1, 1, 1)
    assert (state.inside.operation, state.inside.peer, state.inside.p2p) == ("recv", 2, True)


@settings(max_examples=25, deadline=None)
@given(calls=st.integers(0, 700), newest=st.integers(1, 300))
def test_the_ring_holds_the_newest_calls_in_order(tmp_path_factory, calls, newest):
    base = tmp_path_factory.mktemp("ring")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_BEACONS", str(base))
        mine = open_beacon("run-1", "w", "policy", 0)
        line = line_of(mine)
        for number in range(1, calls + 1):
            line.leave(line.enter(number, number, number * 3))
        found = read_calls(mine.path, 0, newest)
        assert [call.seq for call in found] == list(range(1, calls + 1))[-min(newest, CALLS_PER_RING) :]
        assert all(call.signature == 3 * call.seq for call in found)
        assert read_beacon(mine.path).progress_count == calls
        close_beacon()


def test_a_text_that_was_overwritten_is_unknown_and_never_another(mine):
    line, texts = line_of(mine), mine.call_rings()
    old = label(mine)
    line.leave(line.enter(1, 1, 5, call_ring.pack_text_numbers(old, texts.text("here"))))
    for number in range(MAX_TEXTS):
        texts.text(f"text {number}")
    (call,) = read_calls(mine.path, 0)
    assert (call.operation, call.site, call.signature) == ("", "", 5)
    assert not texts.fresh(old)
    again = label(mine)
    assert again != old and texts.fresh(again)


def test_slots_are_used_again_only_when_closed(mine):
    texts = mine.call_rings()
    lines = [texts.open_slot(n, 0, str(n), "", "gloo", 2, 0) for n in range(MAX_COMMUNICATORS)]
    assert all(lines) and texts.open_slot(99, 0, "99", "", "gloo", 2, 0) is None
    lines[5].leave(lines[5].enter(1, 1, 1))
    lines[5].close()
    lines[3].close()
    assert read_beacon(mine.path).communicators[5].closed
    new = texts.open_slot(99, 0, "99", "", "gloo", 2, 0)
    assert new is not None and new.slot == 5
    state = read_beacon(mine.path).communicators[5]
    assert (state.name, state.closed, state.newest, state.entered) == ("99", False, None, -1)


def test_a_call_that_its_writer_did_not_finish_is_left_out(mine):
    line = line_of(mine)
    for number in (1, 2, 3):
        line.leave(line.enter(number, number, 5))
    at = RINGS_AT + MAX_TEXTS * 192 + 8 * CALL_WORDS
    with Path(mine.path).open("r+b") as file:
        os.pwrite(file.fileno(), struct.pack("<Q", 0), at)
    assert [call.number for call in read_calls(mine.path, 0)] == [1, 3]
    assert read_beacon(mine.path).torn == 1


def test_a_beacon_without_communicators_stays_small(mine):
    mine.stage("train")
    assert mine.path.stat().st_blocks * 512 <= 80_000
    assert mine.path.stat().st_size == FILE_SIZE
