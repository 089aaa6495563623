"""Who sends a version to whom, with transfers that end as the test says."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.protocol import NodeInfo, WorkerDied, WorkerSpec
from lockstep.weights.relay.api import ReceiveResult, RelayLink
from lockstep.weights.relay.broadcast_tree import FANOUT, MAX_SENDER_FAILURES, BroadcastTree
from lockstep.weights.relay.relay_manager import RelayNode

LIMIT = 60.0


class Stub:
    """A transfer whose end the test sets."""

    def __init__(self, source: RelayNode, target: RelayNode, number: int) -> None:
        self.source, self.target, self.bytes, self.problem = source, target, 0, "told so"
        self.link = RelayLink(number, source.info.name, target.info.name)
        self.received = ReceiveResult(1, 1, 0.1, True)
        self.verdict: str | None = None
        self.receiving = self
        self.mended = False
        self.sender, self.silent = self, 0.0
        self.spec = WorkerSpec(source.info.name, "weights", 0, "")

    @property
    def progress(self) -> object:
        return self.bytes

    def silent_s(self) -> float:
        return self.silent

    def look(self) -> str | None:
        return self.verdict

    def superseded(self) -> bool:
        return self.mended

    def done(self) -> bool:
        return self.verdict is not None


def node(name: str) -> RelayNode:
    return RelayNode(NodeInfo(name, "127.0.0.1", Path("/nowhere")))


class Desk:
    """Begins transfers, and remembers them."""

    def __init__(self, names: str) -> None:
        self.home, self.others = node("home"), [node(name) for name in names]
        self.begun: list[Stub] = []
        self.arrived: list[str] = []
        self.refuse: set[str] = set()
        self.now, self.hiring = 0.0, set[str]()
        self.round = BroadcastTree(
            7, self.others, [self.home], [0, 1], self.ready, self.begin, self.note, LIMIT, lambda: self.now,  # type: ignore[arg-type]
        )  # fmt: skip

    def ready(self, node: RelayNode) -> bool:
        if node.info.name in self.refuse:
            raise WorkerDied("courier", 0, -9, "")
        return node.info.name not in self.hiring

    def begin(self, source: RelayNode, target: RelayNode, version: int, ranks: list[int]) -> Any:
        assert (version, ranks) == (7, [0, 1])
        self.begun.append(Stub(source, target, len(self.begun)))
        return self.begun[-1]

    def note(self, transfer: Any, version: int) -> None:
        self.arrived.append(transfer.target.info.name)

    def end(self, verdict: str, *names: str) -> bool | None:
        for transfer in self.begun:
            if transfer.verdict is None and (not names or transfer.target.info.name in names):
                transfer.verdict = verdict
        return self.round.look()


def test_who_has_it_passes_it_on() -> None:
    desk = Desk("abcdefghijklmn")
    turns = 0
    desk.round.look()
    assert len(desk.begun) == FANOUT
    while desk.end("done") is None:
        turns += 1
    assert sorted(desk.arrived) == list("abcdefghijklmn")
    assert turns <= 2, "home and two at first, then all that have it send to two each"
    senders = [transfer.source.info.name for transfer in desk.begun]
    assert max(map(senders.count, senders)) <= 2 * FANOUT + 2
    assert desk.round.behind == []


def test_one_that_fails_is_left_behind_and_the_others_get_it() -> None:
    desk = Desk("abc")
    desk.round.look()
    desk.end("receiver", "a")
    while desk.end("done") is None:
        pass
    assert [each.info.name for each in desk.round.behind] == ["a"]
    assert sorted(desk.arrived) == ["b", "c"]


def test_a_sender_that_fails_is_left_out_where_another_has_it() -> None:
    desk = Desk("abc")
    desk.round.look()
    desk.end("done", "a")
    desk.end("sender", "b")
    assert desk.home.stuck
    while desk.end("done") is None:
        pass
    assert sorted(desk.arrived) == ["a", "b", "c"]
    assert desk.begun[-1].source.info.name != "home"


def test_a_sender_that_fails_again_and_again_is_given_up() -> None:
    desk = Desk("a")
    desk.round.look()
    for _ in range(MAX_SENDER_FAILURES):
        desk.end("sender")
    assert len(desk.begun) == MAX_SENDER_FAILURES
    assert desk.round.look() is True
    assert [each.info.name for each in desk.round.behind] == ["a"]


def test_a_node_without_a_courier_is_left_behind() -> None:
    desk = Desk("ab")
    desk.refuse = {"a"}
    desk.round.look()
    assert desk.end("done") is True
    assert [each.info.name for each in desk.round.behind] == ["a"]


def test_giving_up_leaves_all_that_are_not_done() -> None:
    desk = Desk("abcd")
    desk.round.look()
    before = desk.round.progress()
    desk.begun[0].bytes = 5
    assert desk.round.progress() != before
    desk.round.give_up("no more")
    assert sorted(each.info.name for each in desk.round.behind) == list("abcd")
    assert [each.stuck for each in desk.others] == [True, True, False, False]
    assert desk.round.look() is True


def test_what_no_other_try_would_mend_is_raised() -> None:
    class Final(Stub):
        def look(self) -> str | None:
            raise WorkerDied("x", 0, 1, "")

    desk = Desk("a")
    desk.round._begin = lambda *_: Final(desk.home, desk.others[0], 0)  # type: ignore[assignment,return-value]
    desk.round.look()
    with pytest.raises(WorkerDied):
        desk.round.look()


def test_a_sender_that_two_saw_fail_is_replaced_once() -> None:
    desk = Desk("ab")
    desk.round.look()
    desk.end("sender", "a")
    assert desk.home.stuck
    desk.home.stuck, desk.begun[1].mended = False, True  # its next courier, which "a" has by now
    desk.end("sender", "b")
    assert not desk.home.stuck
    while desk.end("done") is None:
        pass
    assert sorted(desk.arrived) == ["a", "b"] and not desk.round.behind


def test_a_sender_that_says_what_is_wrong_is_left_alone() -> None:
    desk = Desk("ab")
    desk.round.look()
    desk.end("done", "a")
    desk.end("refused", "b")
    assert not desk.home.stuck
    while desk.end("done") is None:
        pass
    assert sorted(desk.arrived) == ["a", "b"] and desk.begun[-1].source.info.name == "a"
    desk = Desk("a")
    desk.round.look()
    assert desk.end("refused") is True
    assert desk.round.behind == desk.others and not desk.home.stuck and not desk.others[0].stuck


def test_a_sender_without_a_courier_blames_no_receiver() -> None:
    desk = Desk("abc")
    desk.round.look()
    desk.refuse = {"home"}
    desk.end("done", "a", "b")
    while desk.end("done") is None:
        pass
    assert sorted(desk.arrived) == ["a", "b", "c"] and not desk.round.behind


def test_a_receiver_that_stands_still_is_left_behind_after_the_limit() -> None:
    desk = Desk("ab")
    desk.round.look()
    stuck, well = desk.begun
    for _ in range(4):
        desk.now += LIMIT / 2 + 1
        well.bytes += 1
        assert desk.round.look() is None
        if desk.now > LIMIT:
            break
    assert [each.info.name for each in desk.round.behind] == ["a"] and stuck.target.stuck and not desk.home.stuck
    assert desk.end("done") is True


def test_a_sender_that_says_nothing_is_replaced_while_there_is_time() -> None:
    desk = Desk("a")
    desk.round.look()
    desk.now, desk.begun[0].silent = LIMIT / 2 + 1, LIMIT / 2 + 1
    assert desk.round.look() is None
    assert desk.home.stuck and not desk.others[0].stuck and len(desk.begun) == 2
    desk.now += LIMIT / 2 - 2
    assert desk.round.look() is None
    desk.now += 2  # the target's time goes on, whoever sends
    assert desk.round.look() is True and desk.round.behind == desk.others


def test_who_has_no_courier_yet_is_waited_for_no_longer_than_the_limit() -> None:
    desk = Desk("ab")
    desk.hiring = {"a"}
    desk.round.look()
    assert desk.end("done") is None
    desk.now = LIMIT - 1
    assert desk.round.look() is None
    desk.now = LIMIT + 1
    assert desk.round.look() is True
    assert [each.info.name for each in desk.round.behind] == ["a"] and not desk.others[0].stuck


def test_a_queue_for_a_sender_counts_as_long_as_others_move() -> None:
    desk = Desk("abc")
    desk.round.look()
    for _ in range(5):
        desk.now += LIMIT - 1
        for transfer in desk.begun:
            transfer.bytes += 1
        assert desk.round.look() is None
    desk.end("done", "a")
    assert len(desk.begun) == 3 and not desk.round.behind
