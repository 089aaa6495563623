"""The sequence numbers of calls are c10d's, although c10d is rarely queried."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.watch.beacon.reader import read_beacon, read_calls
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.recorder import communicator
from lockstep.watch.recorder.transfers import Message


class C10d:
    """A communicator on which C++ code issues calls as well."""

    def __init__(self) -> None:
        self.number = self.queries = 0

    def _get_sequence_number_for_group(self) -> int:
        self.queries += 1
        return self.number


class Rank:
    """A member that issues calls."""

    def __init__(self) -> None:
        self.beacon = open_beacon("run-1", "policy-0", "policy", 0)
        self.slot = self.beacon.call_rings().open_slot(1, 2, "0", "", "gloo", 2, 0)
        self.c10d = C10d()
        self.member = communicator.CommunicatorMember(self.c10d, self.slot, "0", "0", [0, 1], 0)
        self.truth: dict[int, int] = {}
        """The sequence numbers by number of the call."""

    def call(self, inside: bool = False) -> None:
        at = self.member.enter((5, 0, 0))
        self.c10d.number += 1
        self.truth[self.slot.calls] = self.c10d.number
        if not inside:
            self.slot.leave(at)

    def poll(self) -> None:
        """Two polls of the recorder's thread."""
        self.member.verify()
        self.member.verify()

    def read(self) -> dict[int, int]:
        return {call.number: call.seq for call in read_calls(self.beacon.path, 0)}


@pytest.fixture
def rank(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield Rank()
    close_beacon()


def steady(rank: Rank) -> None:
    for _ in range(communicator.STEADY_CALLS + 2 * communicator.SEQUENCE_CHECK_INTERVAL):
        rank.call()


def test_c10d_is_rarely_queried_while_all_calls_come_from_python(rank):
    steady(rank)
    before = rank.c10d.queries
    for _ in range(80):
        rank.call()
    assert rank.c10d.queries - before <= 80 / communicator.SEQUENCE_CHECK_INTERVAL
    assert rank.read() == {number: seq for number, seq in rank.truth.items() if number > rank.slot.calls - 256}


def test_calls_since_the_last_query_are_unsure_after_a_call_from_cpp(rank):
    steady(rank)
    rank.c10d.number += 3  # from a compiled graph
    for _ in range(20):
        rank.call()
    read = rank.read()
    assert all(rank.truth[number] == seq for number, seq in read.items())
    assert 256 - communicator.SEQUENCE_CHECK_INTERVAL <= len(read) <= 256
    before = rank.c10d.queries
    steady(rank)
    rank.call()
    assert (
        rank.c10d.queries - before == communicator.STEADY_CALLS + 2 * communicator.SEQUENCE_CHECK_INTERVAL + 1
    )  # every call is queried from now on


@pytest.mark.parametrize("others", [0, 2])
def test_the_call_in_which_a_rank_is_stuck_gets_its_number(rank, others):
    steady(rank)
    while rank.member.issued + 1 >= rank.member.next_query:
        rank.call()
    rank.c10d.number += others
    rank.call(inside=True)
    rank.poll()
    read = rank.read()
    assert read[rank.slot.calls] == rank.truth[rank.slot.calls]
    assert all(rank.truth[number] == seq for number, seq in read.items())


def test_a_call_that_has_not_reached_the_backend_keeps_its_number(rank):
    steady(rank)
    while rank.member.issued + 1 >= rank.member.next_query:
        rank.call()
    rank.member.enter((5, 0, 0))  # the backend has not been called yet
    rank.poll()
    assert rank.read()[rank.slot.calls] == rank.c10d.number + 1


def test_a_failed_call_may_not_have_been_counted(rank):
    steady(rank)
    at = rank.member.enter((5, 0, 0))
    rank.slot.leave(at, 4)
    rank.member.resynchronize()
    for _ in range(20):
        rank.call()
    read = rank.read()
    assert all(read[number] == seq for number, seq in list(rank.truth.items())[-20:])


EVENTS = st.lists(st.sampled_from(["call"] * 12 + ["other", "poll"]), min_size=communicator.STEADY_CALLS, max_size=500)


@settings(max_examples=30, deadline=None)
@given(EVENTS)
@example(["call"] * 300 + ["other"] + ["call"] * 3 + ["poll", "call"])
def test_no_wrong_number_remains(tmp_path_factory, events):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_BEACONS", str(tmp_path_factory.mktemp("numbers")))
        rank = Rank()
        steady(rank)
        for event in events:
            if event == "call":
                rank.call()
            elif event == "other":
                rank.c10d.number += 1
            else:
                rank.poll()
        rank.poll()
        assert all(rank.truth[number] == seq for number, seq in rank.read().items())
        close_beacon()


def receive(rank: Rank) -> None:
    """A receive that blocks: c10d has counted it, and its call has not returned."""
    rank.member.offsets.begin(rank.c10d.number)
    rank.member.enter_p2p((5, 0, 0), [Message(False, 1)])
    rank.c10d.number += 1


@pytest.mark.parametrize("calls", [0, 3, 300])
def test_a_receive_that_blocks_is_no_collective(rank, calls):
    """Its communicator would look as if the process had entered a collective that the other members have not."""
    for _ in range(calls):
        rank.call()
    receive(rank)
    rank.member.update_counts(communicator.CollectiveCounts(rank.c10d.number, calls))
    rank.poll()
    found = read_beacon(rank.beacon.path).communicators[0]
    assert (found.entered, found.completed, found.blind) == (calls, calls, False)
    rank.member.offsets.skip(rank.c10d.number, 1)
    rank.call()
    rank.member.update_counts(communicator.CollectiveCounts(rank.c10d.number, rank.c10d.number))
    found = read_beacon(rank.beacon.path).communicators[0]
    assert (found.entered, found.completed, found.blind) == (calls + 1, calls + 1, False)


def test_a_backend_without_sequence_numbers(rank):
    def unknown() -> int:
        raise RuntimeError("not supported")

    other = communicator.CommunicatorMember(
        SimpleNamespace(_get_sequence_number_for_group=unknown), rank.slot, "1", "1", [0], 0
    )
    assert other.sequence() == 0


@pytest.mark.parametrize(
    ("backend", "proves"), [("gloo", True), ("cpu:gloo,cuda:gloo", True), ("cpu:gloo,cuda:nccl", False)]
)
def test_the_number_of_one_of_several_backends_does_not_prove_that_there_was_no_call(rank, backend, proves):
    group = SimpleNamespace(_get_sequence_number_for_group=lambda: 0)  # NCCL's; gloo may have been called from C++
    slot = rank.slot.rings.open_slot(5, 2, "1", "", backend, 2, 0)
    assert communicator.CommunicatorMember(group, slot, "1", "1", [0, 1], 0).sequence_reported == proves
