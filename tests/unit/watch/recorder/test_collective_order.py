"""The order check, which compares the collectives of the ranks of one host."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.watch.recorder.collective_order import MAX_MEMBERS, ROWS, OrderCheck


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))


def order_checks(count: int) -> list[OrderCheck]:
    return [OrderCheck("run-1", 77, rank, f"policy-{rank}", rank + 3) for rank in range(count)]


def test_members_have_distinct_columns() -> None:
    members = order_checks(3)
    assert [each.column for each in members] == [0, 1, 2]
    assert [members[0].member(column) for column in range(3)] == [
        (0, "policy-0", 3), (1, "policy-1", 4), (2, "policy-2", 5),
    ]  # fmt: skip
    again = OrderCheck("run-1", 77, 1, "policy-1", 9)  # the same rank in a new process
    assert (again.column, again.member(1)) == (1, (1, "policy-1", 9))


def test_communicators_are_checked_separately() -> None:
    one, other = OrderCheck("run-1", 77, 0, "policy-0", 0), OrderCheck("run-1", 78, 1, "policy-1", 0)
    assert one.enter(1, 5) is None
    assert other.enter(1, 6) is None


@settings(max_examples=60, deadline=None)
@given(data=st.data(), world=st.integers(2, 4), steps=st.integers(1, 40))
def test_only_out_of_order_calls_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, world: int, steps: int
) -> None:
    """Any interleaving of ranks with one schedule passes; one changed call is refused on the later rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_BEACONS", str(tmp_path_factory.mktemp("order_checks")))
        members = order_checks(world)
        schedule = data.draw(st.lists(st.integers(1, 3), min_size=steps, max_size=steps))
        wrong = data.draw(st.none() | st.integers(0, steps - 1))
        wrong_rank = data.draw(st.integers(0, world - 1))
        position = [0] * world
        refused = None
        while refused is None and any(at < steps for at in position):
            rank = data.draw(st.sampled_from([each for each in range(world) if position[each] < steps]))
            at = position[rank]
            signature = schedule[at] + (10 if at == wrong and rank == wrong_rank else 0)
            entered = [each for each in range(world) if each != rank and position[each] > at]
            other = members[rank].enter(at + 1, signature)
            if other is not None:
                refused = (rank, other, at)
                assert other in entered and at == wrong and (rank == wrong_rank) != (other == wrong_rank)
            position[rank] += 1
        assert (refused is not None) == (wrong is not None)


def test_the_right_call_may_follow_a_refused_one() -> None:
    one, two = order_checks(2)
    assert one.enter(1, 5) is None
    assert two.enter(1, 6) == 0
    assert two.enter(1, 5) is None


def test_a_member_far_ahead_or_behind_causes_no_refusal() -> None:
    one, two = order_checks(2)
    for number in range(1, 3 * ROWS):
        assert one.enter(number, number % 7) is None
    for number in range(1, 3 * ROWS):  # rows that the other has reused are not compared
        wrong = number == 3 * ROWS - 1
        assert two.enter(number, 9 if wrong else number % 7) == (0 if wrong else None)


def test_calls_of_a_dead_member_are_ignored() -> None:
    child = os.fork()
    if child == 0:
        OrderCheck("run-1", 77, 1, "policy-1", 0).enter(1, 9)
        os._exit(0)
    os.waitpid(child, 0)
    own = OrderCheck("run-1", 77, 0, "policy-0", 0)
    assert own.enter(1, 5) is None


def test_of_two_simultaneous_calls_exactly_one_is_refused() -> None:
    one, two = order_checks(2)
    for number in range(1, 300):
        found: dict[int, int | None] = {}
        gate = threading.Barrier(2)

        def enter(rank: int, order_check: OrderCheck, number: int = number, gate: threading.Barrier = gate) -> None:
            gate.wait(10)
            found[rank] = order_check.enter(number, rank + 1)  # noqa: B023

        threads = [
            threading.Thread(target=enter, args=(rank, order_check)) for rank, order_check in enumerate((one, two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(each is None for each in found.values()) == [False, True], found


def test_too_many_members_raise_an_error() -> None:
    order_checks(MAX_MEMBERS)
    with pytest.raises(OverflowError):
        OrderCheck("run-1", 77, MAX_MEMBERS, "one too many", 0)
