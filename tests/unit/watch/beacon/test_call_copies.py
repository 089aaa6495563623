"""Copies of calls are what decoding the ring would return."""

from collections import defaultdict

import pytest

from lockstep.watch.beacon import writer
from lockstep.watch.beacon.beacon_records import CALLS_PER_RING, FLAG_P2P, FLAG_UNSURE
from lockstep.watch.beacon.call_copies import CALL_BYTES, text_numbers, unpack_calls, unreturned_calls
from lockstep.watch.beacon.call_ring_reader import call_at
from lockstep.watch.beacon.reader import opened_beacon, read_calls
from tests.unit.watch.agent.recorded_members import Member


@pytest.fixture
def member(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield Member(1, 2)
    writer.close_beacon()


@pytest.mark.parametrize("made", [1, 7, CALLS_PER_RING, CALLS_PER_RING + 1, 2 * CALLS_PER_RING + 31])
@pytest.mark.parametrize("newest", [1, 5, 100, 10 * CALLS_PER_RING])
def test_copies_have_what_decoding_finds(member, made, newest):
    member.beacon.stage("train")
    for number in range(made):
        flags = (FLAG_P2P, FLAG_UNSURE, 0)[number % 3] if number % 5 == 0 else 0
        member.call(f"[{number % 40}]", flags, inside=number % 11 == 3)
    with opened_beacon(member.beacon.path) as beacon:
        data = beacon.copy_calls(0, newest)
        texts = defaultdict(str, {number: beacon.texts[number] for number in text_numbers(data)})
    found = tuple(unpack_calls(data, texts))
    assert len(data) == min(made, newest, CALLS_PER_RING) * CALL_BYTES
    assert found == read_calls(member.beacon.path, 0, min(newest, CALLS_PER_RING))
    assert unreturned_calls(data) >= {call.number for call in found if call.inside}


def test_a_call_that_is_being_written_is_left_out(member):
    for _ in range(4):
        member.call()
    at = call_at(0, 3) + CALL_BYTES - 8
    member.rings.memory[at : at + 8] = bytes(8)
    with opened_beacon(member.beacon.path) as beacon:
        data = beacon.copy_calls(0, 10)
    assert [call.number for call in unpack_calls(data, defaultdict(str))] == [1, 2, 4]
    assert unreturned_calls(data) == set()
