"""Answers that come later, in the worker's main thread."""

from typing import Any

from lockstep.cluster.codec import signature_of
from lockstep.cluster.messages import STARTED, Call
from lockstep.cluster.protocol import Later
from lockstep.cluster.service import Service


class Slow:
    def __init__(self) -> None:
        self.asked: list[Later[int]] = []

    def ask(self, number: int) -> Later[int]:
        self.asked.append(Later())
        return self.asked[-1]

    def renew(self) -> None:
        for later in self.asked:
            later.settle(0)


class Told:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def answer(self, message: Any, payload: Any = b"") -> None:
        self.ids.append(getattr(message, "id", STARTED))


def test_an_answer_that_is_late_is_for_who_asked() -> None:
    """Not for the controller after that one, which asked no such thing."""
    slow, told = Slow(), Told()
    service = Service(lambda: slow, told)

    def ask(number: int) -> None:
        arguments = memoryview(bytes(signature_of(Slow.ask).encode_arguments((number,), {})))
        service.deliver(Call(number, "ask", False, []), arguments)
        service._turn()

    service._start()
    ask(7)
    slow.asked[0].settle(3)
    assert told.ids == [STARTED, 7]
    ask(8)
    service.renew()
    service._turn()
    assert told.ids == [STARTED, 7, STARTED], "number 8 was of another generation"
    ask(9)
    slow.asked[-1].settle(1)
    assert told.ids[-1] == 9
