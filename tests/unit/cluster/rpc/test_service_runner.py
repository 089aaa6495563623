"""Deferred results, in the worker's main thread."""

from typing import Any

from lockstep.cluster.protocol import DeferredResult
from lockstep.cluster.rpc.codec import signature_of
from lockstep.cluster.rpc.rpc_messages import START_CALL_ID, CallMessage
from lockstep.cluster.rpc.service_runner import ServiceRunner


class Slow:
    def __init__(self) -> None:
        self.asked: list[DeferredResult[int]] = []

    def ask(self, number: int) -> DeferredResult[int]:
        self.asked.append(DeferredResult())
        return self.asked[-1]

    def renew(self) -> None:
        for later in self.asked:
            later.settle(0)


class Sink:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def answer(self, message: Any, payload: Any = b"") -> None:
        self.ids.append(getattr(message, "id", START_CALL_ID))


def test_deferred_results_go_only_to_their_caller() -> None:
    """A later controller does not get them."""
    slow, told = Slow(), Sink()
    service = ServiceRunner(lambda: slow, told)

    def ask(number: int) -> None:
        arguments = memoryview(bytes(signature_of(Slow.ask).encode_arguments((number,), {})))
        service.deliver(CallMessage(number, "ask", False, []), arguments)
        service._run_once()

    service._start()
    ask(7)
    slow.asked[0].settle(3)
    assert told.ids == [START_CALL_ID, 7]
    ask(8)
    service.renew()
    service._run_once()
    assert told.ids == [START_CALL_ID, 7, START_CALL_ID], "call 8 belonged to another generation"
    ask(9)
    slow.asked[-1].settle(1)
    assert told.ids[-1] == 9
