"""Which side of a failed transfer is at fault, according to the reports of sender and receiver."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.protocol import NodeInfo, RemoteError, WorkerDied, WorkerSpec
from lockstep.weights.errors import LinkFailed
from lockstep.weights.relay.broadcast_tree import RelayTransfer
from lockstep.weights.relay.relay_api import ReceiveResult, RelayLink, SendProgress
from lockstep.weights.relay.relay_manager import RelayNode

RESET = RemoteError("courier-c", 2, "lockstep.weights.errors.LinkFailed", "reset by peer", "", LinkFailed.error_code)


class Answer:
    """A call with or without an answer."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def done(self) -> bool:
        return self.value is not None

    def result(self, why: str) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Relay:
    """A relay that reports its progress."""

    spec, progress_count = WorkerSpec("courier-a", "weights", 0, ""), 0

    def __init__(self, says: Any) -> None:
        self.says = says

    def alive(self) -> bool:
        return not isinstance(self.says, WorkerDied)

    def submit(self, method: Any, *arguments: Any) -> Answer:
        return Answer(self.says)


def transfer(says: Any, received: Any = None) -> tuple[RelayTransfer, Answer]:
    source, target = (RelayNode(NodeInfo(name, "x", Path("/"))) for name in "ac")
    source.relay, answer = Relay(says), Answer(received)  # type: ignore[assignment]
    begun = RelayTransfer(source, target, RelayLink(1, "a", "c"), source.relay, Relay(None), answer)  # type: ignore[arg-type]
    return begun, answer


def test_a_successful_transfer() -> None:
    begun, answer = transfer(SendProgress(5))
    assert begun.poll() is None and begun.bytes == 5
    answer.value = ReceiveResult(5, 5, 0.1, True)
    assert begun.poll() == "done"


@pytest.mark.parametrize("successor", [None, Relay(SendProgress())], ids=["without", "replaced"])
def test_a_dead_sender_is_at_fault_whatever_replaces_it(successor: Any) -> None:
    begun, answer = transfer(WorkerDied("courier-a", 0, -9, ""))
    assert begun.poll() is None, "the receiver will notice"
    assert not begun.superseded()
    begun.source.relay = successor
    assert begun.poll() is None and begun.superseded()
    answer.value = RESET
    assert begun.poll() == "sender"


def test_the_last_report_of_a_sender_that_died_does_not_blame_the_receiver() -> None:
    begun, received = transfer(None)
    report = Answer()
    sender = begun.sender
    sender.submit = lambda method, *arguments: report  # type: ignore[method-assign, assignment]
    assert begun.poll() is None, "it was asked"
    report.value = SendProgress(7)  # it answers and dies, and then the connection breaks
    sender.submit = lambda method, *arguments: dying  # type: ignore[method-assign, assignment]
    dying = Answer()
    received.value = RESET
    assert begun.poll() is None, "its fate is not known yet"
    dying.value = WorkerDied("courier-a", 0, -9, "")
    assert begun.poll() == "sender"


def test_an_error_that_the_sender_reports_is_not_the_receivers_fault() -> None:
    begun, answer = transfer(
        SendProgress(0, "StaleVersion: version 1 of the weights was requested, nothing was published yet")
    )
    assert begun.poll() is None, "the receiver has not noticed yet"
    answer.value = RESET
    assert begun.poll() == "refused" and "StaleVersion" in begun.problem


@pytest.mark.parametrize(
    "says", [SendProgress(7), SendProgress(7, "LinkFailed: it did not come")], ids=["sends", "waited"]
)
def test_a_broken_link_is_the_receivers_fault(says: SendProgress) -> None:
    begun, _ = transfer(says, RESET)
    assert begun.poll() == "receiver"
