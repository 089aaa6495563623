"""Which ranks without a dump are accused."""

import time

import pytest

from lockstep.watch.diagnosis.evidence_types import CommunicatorInfo
from lockstep.watch.dumps.member_rows import GroupRows, MemberRow
from lockstep.watch.dumps.missing_dumps import accuse_missing


def group(name: str, *rows: MemberRow) -> GroupRows:
    return GroupRows(CommunicatorInfo(name), list(rows))


def waits(rank: int, number: int = 8, started: int | None = None) -> MemberRow:
    return MemberRow(rank, number, number - 1, started=number if started is None else started)


def test_the_only_rank_that_can_block_the_others_is_accused_and_placed_before_them() -> None:
    absent = MemberRow(1)
    found = accuse_missing([group("dp", waits(0), absent, waits(2))], [1])
    assert found == {1: "no dump of rank 1, and 2 ranks wait on 'dp' for which nobody else can be late"}
    assert (absent.entered, absent.completed) == (7, 7)


@pytest.mark.parametrize(
    "others",
    [
        [waits(0)],  # one waiter is too few
        [waits(0), waits(2), waits(3, 7)],  # only rank 3 waits in the oldest collective
        [waits(0), waits(2), waits(3, started=7)],  # the device of rank 3 may be late
        [waits(0), waits(2), MemberRow(3)],  # nothing is known of rank 3
    ],
)
def test_nobody_is_accused_if_another_rank_may_be_late(others: list[MemberRow]) -> None:
    absent = MemberRow(1)
    assert accuse_missing([group("dp", absent, *others)], [1]) == {}
    assert absent.entered == MemberRow(1).entered


def test_a_rank_that_may_wait_for_an_independent_one_is_not_accused() -> None:
    blocked = group("dp", waits(0), MemberRow(1), waits(2))
    free, chained = MemberRow(3, 4, 4), waits(3)
    assert accuse_missing([blocked, group("pp", MemberRow(1), free)], [1]) == {}
    chain = [blocked, group("pp", MemberRow(1), MemberRow(3, 4, 4)), group("tp", MemberRow(0, 7, 7), chained)]
    assert accuse_missing(chain, [1]).keys() == {1}  # rank 3 waits for rank 0, and rank 0 for rank 1


def test_ranks_that_may_wait_for_each_other_are_not_accused() -> None:
    shared = group("tp", waits(4), MemberRow(1), MemberRow(2))
    blocked = group("ep", waits(0), waits(3), MemberRow(1))
    assert accuse_missing([blocked, shared], [1, 2]) == {}  # rank 1 may wait in tp for rank 2
    assert accuse_missing([blocked], [1, 2]).keys() == {1}


def test_ranks_that_may_share_an_unlisted_communicator_are_not_accused() -> None:
    blocked = group("tp", waits(0), waits(3), MemberRow(1))
    listed = GroupRows(CommunicatorInfo("pp", "pp"), [waits(0), waits(3)])
    assert accuse_missing([blocked, listed], [1, 2]) == {}  # both may be members of another "pp"
    assert accuse_missing([blocked, listed], [1]).keys() == {1}


def test_many_missing_dumps_of_a_large_job_are_judged_in_seconds() -> None:
    ranks = range(2048)

    def member(rank: int) -> MemberRow:
        return MemberRow(rank) if rank % 8 == 0 else waits(rank)

    groups = [group(f"tp{first}", *map(member, range(first, first + 8))) for first in ranks[::8]]
    before = time.process_time()
    assert list(accuse_missing(groups, ranks[::8])) == list(ranks[::8])
    assert time.process_time() - before < 10
