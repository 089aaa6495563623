"""Which node sends a version to which, with fake transfers whose outcome the test sets."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.protocol import NodeInfo, WorkerDied, WorkerSpec
from lockstep.weights.relay.broadcast_tree import FANOUT, MAX_SENDER_FAILURES, BroadcastTree
from lockstep.weights.relay.relay_api import ReceiveResult, RelayLink
from lockstep.weights.relay.relay_manager import RelayNode

LIMIT = 60.0


class Stub:
    """A transfer whose outcome the test sets."""

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

    def poll(self) -> str | None:
        return self.verdict

    def superseded(self) -> bool:
        return self.mended

    def done(self) -> bool:
        return self.verdict is not None


def node(name: str) -> RelayNode:
    return RelayNode(NodeInfo(name, "127.0.0.1", Path("/nowhere")))


class Setup:
    """Begins transfers and records them."""

    def __init__(self, names: str) -> None:
        self.home, self.others = node("home"), [node(name) for name in names]
        self.begun: list[Stub] = []
        self.arrived: list[str] = []
        self.refuse: set[str] = set()
        self.now, self.pending = 0.0, set[str]()
        self.tree = BroadcastTree(
            7, self.others, [self.home], [0, 1], self.ready, self.begin, self.note, LIMIT, lambda: self.now,  # type: ignore[arg-type]
        )  # fmt: skip

    def ready(self, node: RelayNode) -> bool:
        if node.info.name in self.refuse:
            raise WorkerDied("relay", 0, -9, "")
        return node.info.name not in self.pending

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
        return self.tree.poll()


def test_nodes_with_the_version_send_it_to_others() -> None:
    setup = Setup("abcdefghijklmn")
    turns = 0
    setup.tree.poll()
    assert len(setup.begun) == FANOUT
    while setup.end("done") is None:
        turns += 1
    assert sorted(setup.arrived) == list("abcdefghijklmn")
    assert turns <= 2, "home and two at first, then all that have it send to two each"
    senders = [transfer.source.info.name for transfer in setup.begun]
    assert max(map(senders.count, senders)) <= 2 * FANOUT + 2
    assert setup.tree.behind == []


def test_a_failing_receiver_is_given_up_and_the_others_get_the_version() -> None:
    setup = Setup("abc")
    setup.tree.poll()
    setup.end("receiver", "a")
    while setup.end("done") is None:
        pass
    assert [each.info.name for each in setup.tree.behind] == ["a"]
    assert sorted(setup.arrived) == ["b", "c"]


def test_a_failing_sender_is_not_used_again_if_another_has_the_version() -> None:
    setup = Setup("abc")
    setup.tree.poll()
    setup.end("done", "a")
    setup.end("sender", "b")
    assert setup.home.stuck
    while setup.end("done") is None:
        pass
    assert sorted(setup.arrived) == ["a", "b", "c"]
    assert setup.begun[-1].source.info.name != "home"


def test_a_sender_that_fails_repeatedly_is_given_up() -> None:
    setup = Setup("a")
    setup.tree.poll()
    for _ in range(MAX_SENDER_FAILURES):
        setup.end("sender")
    assert len(setup.begun) == MAX_SENDER_FAILURES
    assert setup.tree.poll() is True
    assert [each.info.name for each in setup.tree.behind] == ["a"]


def test_a_node_whose_relay_cannot_start_is_given_up() -> None:
    setup = Setup("ab")
    setup.refuse = {"a"}
    setup.tree.poll()
    assert setup.end("done") is True
    assert [each.info.name for each in setup.tree.behind] == ["a"]


def test_giving_up_marks_all_unfinished_nodes() -> None:
    setup = Setup("abcd")
    setup.tree.poll()
    before = setup.tree.progress()
    setup.begun[0].bytes = 5
    assert setup.tree.progress() != before
    setup.tree.give_up("no more")
    assert sorted(each.info.name for each in setup.tree.behind) == list("abcd")
    assert [each.stuck for each in setup.others] == [True, True, False, False]
    assert setup.tree.poll() is True


def test_permanent_errors_are_raised() -> None:
    class Final(Stub):
        def poll(self) -> str | None:
            raise WorkerDied("x", 0, 1, "")

    setup = Setup("a")
    setup.tree._begin = lambda *_: Final(setup.home, setup.others[0], 0)  # type: ignore[assignment,return-value]
    setup.tree.poll()
    with pytest.raises(WorkerDied):
        setup.tree.poll()


def test_a_sender_with_two_failed_transfers_is_replaced_once() -> None:
    setup = Setup("ab")
    setup.tree.poll()
    setup.end("sender", "a")
    assert setup.home.stuck
    setup.home.stuck, setup.begun[1].mended = False, True  # its next relay, which "a" has by now
    setup.end("sender", "b")
    assert not setup.home.stuck
    while setup.end("done") is None:
        pass
    assert sorted(setup.arrived) == ["a", "b"] and not setup.tree.behind


def test_a_sender_that_reports_a_reason_is_not_replaced() -> None:
    setup = Setup("ab")
    setup.tree.poll()
    setup.end("done", "a")
    setup.end("refused", "b")
    assert not setup.home.stuck
    while setup.end("done") is None:
        pass
    assert sorted(setup.arrived) == ["a", "b"] and setup.begun[-1].source.info.name == "a"
    setup = Setup("a")
    setup.tree.poll()
    assert setup.end("refused") is True
    assert setup.tree.behind == setup.others and not setup.home.stuck and not setup.others[0].stuck


def test_a_sender_whose_relay_cannot_start_fails_no_receiver() -> None:
    setup = Setup("abc")
    setup.tree.poll()
    setup.refuse = {"home"}
    setup.end("done", "a", "b")
    while setup.end("done") is None:
        pass
    assert sorted(setup.arrived) == ["a", "b", "c"] and not setup.tree.behind


def test_a_receiver_without_progress_is_given_up_after_the_limit() -> None:
    setup = Setup("ab")
    setup.tree.poll()
    stuck, well = setup.begun
    for _ in range(4):
        setup.now += LIMIT / 2 + 1
        well.bytes += 1
        assert setup.tree.poll() is None
        if setup.now > LIMIT:
            break
    assert [each.info.name for each in setup.tree.behind] == ["a"] and stuck.target.stuck and not setup.home.stuck
    assert setup.end("done") is True


def test_a_silent_sender_is_replaced_while_there_is_time() -> None:
    setup = Setup("a")
    setup.tree.poll()
    setup.now, setup.begun[0].silent = LIMIT / 2 + 1, LIMIT / 2 + 1
    assert setup.tree.poll() is None
    assert setup.home.stuck and not setup.others[0].stuck and len(setup.begun) == 2
    setup.now += LIMIT / 2 - 2
    assert setup.tree.poll() is None
    setup.now += 2  # the target's time goes on, whoever sends
    assert setup.tree.poll() is True and setup.tree.behind == setup.others


def test_a_relay_that_is_starting_is_awaited_until_the_limit() -> None:
    setup = Setup("ab")
    setup.pending = {"a"}
    setup.tree.poll()
    assert setup.end("done") is None
    setup.now = LIMIT - 1
    assert setup.tree.poll() is None
    setup.now = LIMIT + 1
    assert setup.tree.poll() is True
    assert [each.info.name for each in setup.tree.behind] == ["a"] and not setup.others[0].stuck


def test_a_queued_node_waits_as_long_as_others_make_progress() -> None:
    setup = Setup("abc")
    setup.tree.poll()
    for _ in range(5):
        setup.now += LIMIT - 1
        for transfer in setup.begun:
            transfer.bytes += 1
        assert setup.tree.poll() is None
    setup.end("done", "a")
    assert len(setup.begun) == 3 and not setup.tree.behind
