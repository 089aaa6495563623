"""Communicators and calls in a beacon are read as written, also after rings and texts have wrapped around."""

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
    SEPARATOR,
    TEXTS_AT,
    CommunicatorRecord,
)
from lockstep.watch.beacon.reader import read_beacon, read_calls
from lockstep.watch.beacon.writer import Beacon, close_beacon, open_beacon


@pytest.fixture
def beacon(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield open_beacon("run-1", "policy-1", "policy", 1)
    close_beacon()


def open_slot_in(beacon: Beacon, name: str = "0") -> call_ring.CommunicatorSlot:
    slot = beacon.call_rings().open_slot(11, 22, name, "fsdp", "gloo", 4, 1)
    assert slot is not None
    return slot


def read(beacon: Beacon) -> CommunicatorRecord:
    (only,) = read_beacon(beacon.path).communicators
    return only


def label(beacon: Beacon, operation: str = "all_reduce", root: str = "") -> int:
    return beacon.call_rings().text(SEPARATOR.join([operation, "float32", root, "layers.3", "[2, 3]"]))


def test_a_call_is_read_as_it_was_written(beacon):
    slot, texts = open_slot_in(beacon), beacon.call_rings()
    words = call_ring.pack_text_numbers(label(beacon, root="3"), texts.text("/a/b.py:31 in f"))
    texts.stage("train")
    at = slot.enter(7, 5, 2**64 - 1, words, texts.pack_stage())
    inside = read(beacon)
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

    slot.leave(at)
    after = read(beacon)
    assert after.inside is None and (after.entered, after.completed) == (7, 7)
    assert after.completed_ns >= after.entered_ns > 0


def test_a_failed_call_is_not_completed_and_a_refused_one_not_entered(beacon):
    slot = open_slot_in(beacon)
    slot.leave(slot.enter(1, 1, 5, label(beacon)))
    slot.leave(slot.enter(2, 2, 5, label(beacon)), FLAG_FAILED)
    assert (read(beacon).entered, read(beacon).completed) == (2, 1)
    slot.leave(slot.enter(3, 3, 5, label(beacon)), FLAG_REFUSED)
    state = read(beacon)
    assert (state.entered, state.completed, state.inside) == (2, 1, None)
    assert state.newest.refused and not state.newest.failed


def test_counts_and_calls_are_merged(beacon):
    slot = open_slot_in(beacon)
    assert read(beacon).entered == -1
    slot.mark_counted()
    assert (read(beacon).entered, read(beacon).completed) == (0, 0)  # c10d reports that no collective was entered
    slot.leave(slot.enter(1, 1, 5, label(beacon), 0, FLAG_ASYNC))
    state = read(beacon)
    assert (state.entered, state.completed) == (1, 0)
    assert state.inside.seq == 1  # issued, and not known to be completed
    slot.write_counts(4, 2, 1000, 900)
    state = read(beacon)
    assert (state.entered, state.entered_ns, state.completed, state.completed_ns) == (4, 1000, 2, 900)
    assert state.inside is None


def test_point_to_point_is_a_call_and_no_collective(beacon):
    slot = open_slot_in(beacon)
    slot.leave(slot.enter(1, 1, 5, label(beacon)))
    slot.mark_blind()
    slot.enter(1, 1, 6, label(beacon, "recv"), 0, FLAG_P2P, peer=2)
    state = read(beacon)
    assert state.blind and (state.entered, state.completed, state.issued) == (1, 1, 1)
    assert (state.inside.operation, state.inside.peer, state.inside.p2p) == ("recv", 2, True)


@settings(max_examples=25, deadline=None)
@given(calls=st.integers(0, 700), newest=st.integers(1, 300))
def test_the_ring_holds_the_newest_calls_in_order(tmp_path_factory, calls, newest):
    base = tmp_path_factory.mktemp("ring")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_BEACONS", str(base))
        beacon = open_beacon("run-1", "w", "policy", 0)
        slot = open_slot_in(beacon)
        for number in range(1, calls + 1):
            slot.leave(slot.enter(number, number, number * 3))
        found = read_calls(beacon.path, 0, newest)
        assert [call.seq for call in found] == list(range(1, calls + 1))[-min(newest, CALLS_PER_RING) :]
        assert all(call.signature == 3 * call.seq for call in found)
        assert read_beacon(beacon.path).progress_count == calls
        close_beacon()


def test_an_overwritten_text_is_unknown_and_never_another_text(beacon):
    slot, texts = open_slot_in(beacon), beacon.call_rings()
    old = label(beacon)
    slot.leave(slot.enter(1, 1, 5, call_ring.pack_text_numbers(old, texts.text("here"))))
    for number in range(MAX_TEXTS):
        texts.text(f"text {number}")
    (call,) = read_calls(beacon.path, 0)
    assert (call.operation, call.site, call.signature) == ("", "", 5)
    assert not texts.fresh(old)
    again = label(beacon)
    assert again != old and texts.fresh(again)


def test_slots_are_reused_only_when_closed(beacon):
    texts = beacon.call_rings()
    slots = [texts.open_slot(n, 0, str(n), "", "gloo", 2, 0) for n in range(MAX_COMMUNICATORS)]
    assert len(slots) >= 200 and read_beacon(beacon.path).unrecorded == 0  # Megatron has 30 to 100
    assert all(slots) and texts.open_slot(99, 0, "99", "", "gloo", 2, 0) is None
    assert read_beacon(beacon.path).unrecorded == 1
    slots[5].leave(slots[5].enter(1, 1, 1))
    slots[5].close()
    slots[3].close()
    assert read_beacon(beacon.path).communicators[5].closed
    new = texts.open_slot(99, 0, "99", "", "gloo", 2, 0)
    assert new is not None and new.index == 5
    state = read_beacon(beacon.path).communicators[5]
    assert (state.name, state.closed, state.newest, state.entered) == ("99", False, None, -1)


def test_a_torn_call_is_left_out(beacon):
    slot = open_slot_in(beacon)
    for number in (1, 2, 3):
        slot.leave(slot.enter(number, number, 5))
    at = TEXTS_AT + MAX_TEXTS * 192 + 8 * CALL_WORDS
    with Path(beacon.path).open("r+b") as file:
        os.pwrite(file.fileno(), struct.pack("<Q", 0), at)
    assert [call.number for call in read_calls(beacon.path, 0)] == [1, 3]
    assert read_beacon(beacon.path).torn == 1


def test_a_beacon_without_communicators_stays_small(beacon):
    beacon.stage("train")
    assert beacon.path.stat().st_blocks * 512 <= 80_000
    assert beacon.path.stat().st_size == FILE_SIZE
