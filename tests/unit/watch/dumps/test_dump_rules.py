"""The rules by which dumps are judged, each on a few entries written by hand."""

import pytest
from hand_dumps import TIMEOUT_S, HandDumps, Op

from lockstep.watch.diagnosis.verdict import VerdictKind
from lockstep.watch.dumps.operation_heads import PendingOperation, RankOperations, match_transfers

WORLD = "default_pg"


def done(group: str, number: int, name: str = "all_reduce") -> Op:
    """An operation that ended before the others were issued."""
    return Op(group, number, name, ended=True, at=50.0)


def waiting_in_world(ranks: tuple[int, ...], number: int, groups: dict[str, tuple[int, ...]]) -> HandDumps:
    """Ranks that wait in a collective of the world and have ended everything else."""
    dumps = HandDumps(groups)
    for rank in ranks:
        dumps.add(rank, done(WORLD, number - 1), Op(WORLD, number), lost=40)
    return dumps


# 1. A rank without entries on a communicator is as far as its pg_status says.


@pytest.mark.parametrize(("status", "culprits"), [((7, 7), {1}), ((8, 7), set())])
def test_a_rank_without_entries_on_a_communicator_is_as_far_as_its_status_says(
    status: tuple[int, int], culprits: set[int]
) -> None:
    dumps = waiting_in_world((2, 3), 8, {WORLD: (0, 1, 2, 3), "tp": (0, 1)})
    dumps.add(0, done(WORLD, 7), Op(WORLD, 8), done("tp", 30), done("tp", 31), lost=40)
    dumps.add(1, done("tp", 30), done("tp", 31), lost=40, status={WORLD: status})
    assert dumps.named() == culprits


@pytest.mark.parametrize("is_newest", [True, False])
@pytest.mark.parametrize(("status", "culprits"), [((4, 4), {2}), ((5, 4), set())])
def test_counters_are_matched_in_the_order_in_which_each_rank_created_its_communicators(
    status: tuple[int, int], culprits: set[int], is_newest: bool
) -> None:
    """`dp 1`, the fourth of the job, is number 1 of rank 2 and number 2 of rank 3, whose number 1 is at 9."""
    dumps = HandDumps({WORLD: range(4), "embedding": (0, 3), "dp 0": (0, 1), "dp 1": (2, 3), "tp 1": (2, 3)})
    if is_newest:
        del dumps.groups["tp 1"]
    later = [done(WORLD, 20)] if is_newest else [done(WORLD, 20), done("tp 1", 12)]
    dumps.add(0, done(WORLD, 20), done("embedding", 9), lost=30)
    dumps.add(1, done(WORLD, 20), lost=30, status={"dp 0": (4, 4)})
    dumps.add(2, *later, lost=30, status={"dp 1": status})
    dumps.add(3, done("embedding", 9), Op("dp 1", 5), *later, lost=30)
    assert dumps.named() == culprits


@pytest.mark.parametrize("has_transfers", [False, True])
def test_counters_of_a_communicator_with_sends_and_receives_say_nothing(has_transfers: bool) -> None:
    """They count both, so 4 may be two collectives and two sends."""
    dumps = HandDumps({WORLD: (0, 1, 2), "pp": (0, 1, 2)})
    dumps.add(0, done(WORLD, 20), lost=30, status={"pp": (4, 4)})
    dumps.add(1, *[done("pp", 3, "send 1->2")] * has_transfers, done("pp", 4), Op("pp", 5), lost=30)
    dumps.add(2, done("pp", 4), Op("pp", 5), lost=30)
    assert dumps.named() == (set() if has_transfers else {0})
    assert (0 in dumps.not_excluded()) is has_transfers


# 2. One member that has completed an operation that needs everybody proves that the others should have.


@pytest.mark.parametrize(("completed", "culprits"), [((0, 1, 2), {3}), ((0,), {1, 2, 3})])
def test_one_member_that_completed_proves_that_a_pending_one_has_stopped(
    completed: tuple[int, ...], culprits: set[int]
) -> None:
    dumps = HandDumps({WORLD: (0, 1, 2, 3)})
    for rank in range(4):
        dumps.add(rank, done(WORLD, 4), Op(WORLD, 5, ended=rank in completed), lost=9)
    assert dumps.named() == culprits
    assert dumps.judge()[0].kind is VerdictKind.DEVICE_LAG


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
@pytest.mark.parametrize(("pending", "culprits"), [((0, 3), set()), ((1, 2, 3), set()), ((3,), {3})])
def test_members_that_have_not_completed_an_operation_with_a_root_may_wait_for_each_other(
    operation: str, pending: tuple[int, ...], culprits: set[int]
) -> None:
    """Rank 0, the root of a reduction, waits for the others; only a single one has nobody left to wait for."""
    dumps = HandDumps({WORLD: range(6)})
    for rank in range(6):
        dumps.add(rank, done(WORLD, 4), Op(WORLD, 5, operation, ended=rank not in pending), lost=9)
    assert dumps.named() == culprits
    assert dumps.not_excluded() == set(pending) - culprits


def test_the_member_that_has_not_started_a_reduction_keeps_its_root() -> None:
    dumps = HandDumps({WORLD: range(4)})
    for rank in range(4):
        dumps.add(rank, Op(WORLD, 5, "reduce", ended=rank in (1, 2), started=rank != 3), lost=9)
    assert dumps.named() == {3}


def test_a_completed_collective_is_what_a_device_runs_whatever_it_issued_before() -> None:
    """Ranks 2 and 3 have an older all_reduce on another stream; that rank 0 completed #5 proves that all ran it."""
    dumps = HandDumps({WORLD: (0, 1, 2, 3), "tp": (2, 3), "ep": (2, 3)})
    for rank in (0, 1):
        dumps.add(rank, done(WORLD, 4), Op(WORLD, 5, ended=True), lost=9)
    for rank in (2, 3):
        dumps.add(rank, done(WORLD, 4), Op("tp", 7), Op(WORLD, 5, ended=rank == 2), done("ep", 2), lost=9)
    assert dumps.named() == {3}


# 3. A rank waits only in its oldest unfinished operation; sends and receives are matched in order.


def test_an_operation_behind_the_oldest_one_is_not_reached() -> None:
    """All have issued #8 of the world, rank 0 behind #4 of tp, which rank 1 has not issued."""
    dumps = waiting_in_world((2, 3), 8, {WORLD: (0, 1, 2, 3), "tp": (0, 1)})
    dumps.add(0, done(WORLD, 7), done("tp", 3), Op("tp", 4), Op(WORLD, 8), lost=40)
    dumps.add(1, done(WORLD, 7), done("tp", 3), Op(WORLD, 8), lost=40)
    verdict, *_ = dumps.judge()
    assert verdict.kind is VerdictKind.CYCLE
    assert {each.rank for each in verdict.culprits} <= {0, 1}


def test_a_wait_behind_another_one_is_followed_to_its_end() -> None:
    dumps = waiting_in_world((2, 3), 8, {WORLD: (0, 1, 2, 3), "tp": (0, 1)})
    dumps.add(0, done(WORLD, 7), done("tp", 3), Op("tp", 4), Op(WORLD, 8), lost=40)
    dumps.add(1, done(WORLD, 7), done("tp", 3), lost=40)
    assert dumps.named() == {1}


@pytest.mark.parametrize("send_is_behind", [False, True])
def test_a_receive_leads_to_the_rank_that_keeps_its_sender(send_is_behind: bool) -> None:
    """Rank 0 waits in tp for rank 2; its send, if it has issued that, is behind."""
    dumps = HandDumps({"tp": (0, 2), "pp": (0, 1)})
    dumps.add(0, done("tp", 3), Op("tp", 4), *[Op("pp", 6, "send 0->1")] * send_is_behind, lost=40)
    dumps.add(1, done("pp", 5, "recv 1<-0"), Op("pp", 6, "recv 1<-0"), lost=40)
    dumps.add(2, done("tp", 3), lost=40)
    assert dumps.named() == {2}


def transfers(*orders: int, ahead: int | None = None, issued: int | None = None) -> RankOperations:
    """Pending sends or receives from rank 0 to 1 on communicator 7; `ahead`, the position of a pending collective."""
    pending = [PendingOperation(order, 7, transfers=((0, 1),)) for order in orders]
    if ahead is not None:
        pending.append(PendingOperation(ahead, 3, sequence=5))
    return RankOperations(pending, None if issued is None else {(7, 0, 1): issued})


@pytest.mark.parametrize(
    ("sender", "receiver", "sends", "receives"),
    [
        (transfers(5, 9), transfers(3), (1, 0), (1, 0)),  # the first pending ones meet, whatever their positions
        (transfers(5, ahead=2), transfers(3), (0, 0), (1, 0)),  # the send is issued and not reached
        (transfers(5, issued=6), transfers(3, issued=6), (6, 5), (6, 5)),  # numbered from the start
        (transfers(5, issued=6), transfers(3, issued=7), (6, 5), (7, 6)),  # the receiver has got the sixth
        (transfers(issued=6), transfers(3, 4, issued=8), (6, 6), (7, 6)),  # nothing pending: six have ended
    ],
)
def test_the_first_pending_send_meets_the_first_pending_receive(
    sender: RankOperations, receiver: RankOperations, sends: tuple[int, int], receives: tuple[int, int]
) -> None:
    found = match_transfers({0: sender, 1: receiver})[7, 0, 1]
    assert {rank: (each.entered, each.completed) for rank, each in found.items()} == {0: sends, 1: receives}
    counted = sender.issued is not None
    assert all(each.counted is counted for each in found.values())


def test_a_send_that_may_have_ended_makes_no_cycle() -> None:
    """Rank 1 waits in a receive whose small send may have ended, so its device may have stopped; rank 0 waits for it.
    That rank 0 has a later send pending does not show that this is the one."""
    dumps = HandDumps({"pp": (0, 1)})
    dumps.add(0, done("pp", 8, "send 0->1"), Op("pp", 9, "recv 0<-1"), Op("pp", 10, "send 0->1"), lost=40)
    dumps.add(1, Op("pp", 8, "recv 1<-0"), Op("pp", 9, "send 1->0"), Op("pp", 10, "recv 1<-0"), lost=40)
    verdict, *_ = dumps.judge()
    assert verdict.kind is VerdictKind.UNKNOWN and dumps.named() == set()


def test_receives_that_two_ranks_wait_in_are_a_cycle_if_all_sends_are_in_the_dumps() -> None:
    dumps = HandDumps({"pp": (0, 1)})
    for rank, other in ((0, 1), (1, 0)):
        dumps.add(rank, Op("pp", 1, f"recv {rank}<-{other}"), Op("pp", 2, f"send {rank}->{other}"))
    assert dumps.judge()[0].kind is VerdictKind.CYCLE and dumps.named() == {0, 1}


# 4. All ranks that keep another one waiting and wait for none themselves are culprits.


def test_all_ranks_that_others_wait_for_and_that_do_not_wait_are_culprits() -> None:
    """Rank 4 waits for none either, and nobody for it."""
    dumps = HandDumps({WORLD: range(5), "dp 0": (0, 1), "dp 1": (2, 3)})
    for rank in range(4):
        group = f"dp {rank // 2}"
        dumps.add(rank, done(WORLD, 7), done(group, 3), *[Op(group, 4)] * (rank % 2 == 0), lost=40)
    dumps.add(4, done(WORLD, 7), lost=40)
    assert dumps.named() == {1, 3}


def test_a_rank_that_waits_for_a_culprit_is_none() -> None:
    """Ranks 4 and 5 wait in the world for all others, ranks 0 and 2 for one each."""
    dumps = waiting_in_world((4, 5), 8, {WORLD: tuple(range(6)), "dp 0": (0, 1), "dp 1": (2, 3)})
    for rank in range(4):
        group = f"dp {rank // 2}"
        dumps.add(rank, done(WORLD, 7), done(group, 3), *[Op(group, 4)] * (rank % 2 == 0), lost=40)
    assert dumps.named() == {1, 3}


# 5. A rank without a dump is accused only if two others wait in one collective that it alone can block.


def with_dumps_of(*ranks: int, members: int = 3, started: bool = True) -> HandDumps:
    """Ranks that wait in a collective of the first `members` ranks."""
    dumps = HandDumps({WORLD: range(members)})
    for rank in ranks:
        dumps.add(rank, Op(WORLD, 7, ended=True, started=started, at=50.0), Op(WORLD, 8, started=started), lost=40)
    return dumps


def test_a_rank_without_a_dump_is_accused_if_it_alone_can_block_two_others() -> None:
    dumps = with_dumps_of(0, 2)
    assert dumps.named() == {1}
    assert max(each.confidence for each in dumps.judge()) <= 0.6


@pytest.mark.parametrize(
    ("dumps", "left"),
    [
        (with_dumps_of(0, members=2), {1}),  # one waits
        (with_dumps_of(0, 2, members=4), {1, 3}),  # two dumps are missing
        (with_dumps_of(0, 2, started=False), {0, 1, 2}),  # the device of another one may not have started it
    ],
    ids=["one waits", "two missing", "starts unknown"],
)
def test_else_a_rank_without_a_dump_is_not_excluded(dumps: HandDumps, left: set[int]) -> None:
    assert dumps.named() == set()
    assert dumps.not_excluded() == left


# 6. How long a wait has lasted is bounded by the times of entries and the time-out, or not said.


def late(**entry: float) -> HandDumps:
    dumps = HandDumps({WORLD: (0, 1)})
    dumps.add(0, done(WORLD, 7), Op(WORLD, 8, **entry), lost=40)
    dumps.add(1, done(WORLD, 7), lost=40)
    return dumps


@pytest.mark.parametrize(
    ("written_at", "waited"),
    [
        (300.0, 200.0),  # dumped on demand, before the time-out
        (100.0 + TIMEOUT_S, TIMEOUT_S),
        (100.0 + TIMEOUT_S + 20, TIMEOUT_S + 20),  # writing takes time
        (9e6, TIMEOUT_S),  # copied months later
        (0.0, 0.0),  # a clock behind that of the recorder: not before the newest entry
    ],
)
def test_a_wait_lasts_until_the_file_was_written_or_the_time_out_passed(written_at: float, waited: float) -> None:
    verdicts = late(at=100.0).judge(written_at)
    since = {link.since_s for verdict in verdicts for link in verdict.waiting}
    assert since == ({waited} if waited else set())


def test_the_start_of_a_wait_whose_entry_is_lost_is_not_said() -> None:
    dumps = HandDumps({WORLD: (0, 1, 2), "tp": (0, 2)})
    for rank in (0, 2):
        dumps.add(rank, done("tp", 30), lost=40, status={WORLD: (8, 7)})
    dumps.add(1, done(WORLD, 7), lost=40)
    verdict, *_ = dumps.judge()
    assert {each.rank for each in verdict.culprits} == {1}
    assert [link.since_s for link in verdict.waiting] == [None]
    assert "has waited" not in verdict.explanation
