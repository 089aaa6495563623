"""Deferred results and signals, in the worker's main thread."""

import os
import signal
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


class InterruptedSink(Sink):
    """A signal arrives while the result of call 7 is sent."""

    def answer(self, message: Any, payload: Any = b"") -> None:
        if getattr(message, "id", START_CALL_ID) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):  # Python handles signals between instructions
                pass
        super().answer(message, payload)


class Closing(Slow):
    closed = False

    def number(self, number: int) -> int:
        return number

    def close(self) -> None:
        self.closed = True


def test_a_signal_takes_effect_when_a_result_is_sent() -> None:
    """Otherwise half of a frame is sent, or a frame twice, and the controller refuses what follows."""
    closing, sent = Closing(), InterruptedSink()
    service = ServiceRunner(lambda: closing, sent)
    before = signal.signal(signal.SIGTERM, lambda number, frame: service.interrupt("SIGTERM"))
    try:
        for number in (7, 8):
            arguments = memoryview(bytes(signature_of(Closing.number).encode_arguments((number,), {})))
            service.deliver(CallMessage(number, "number", False, []), arguments)
        service.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sent.ids == [START_CALL_ID, 7] and closing.closed
