"""Calls that have no bound of their own."""

import threading

import pytest

from lockstep.watch import waits
from lockstep.watch.bounded import begun
from lockstep.watch.waits import WaitTimeout


def fail(problem: str) -> None:
    raise RuntimeError(problem)


def test_a_call_gives_its_result_or_its_error() -> None:
    assert waits.future(begun(lambda: 3, "counts"), whom="it", why="the count", timeout_s=10) == 3
    with pytest.raises(RuntimeError, match="no such interface"):
        waits.future(begun(lambda: fail("no such interface"), "fails"), whom="it", why="its end", timeout_s=10)


def test_a_call_that_does_not_end_is_left_behind() -> None:
    never = threading.Event()
    call = begun(lambda: never.wait(20), "never ends")
    with pytest.raises(WaitTimeout, match="members of the stream"):
        waits.future(call, whom="all", why="members of the stream", timeout_s=0.1)
    assert not call.done()
    never.set()
    assert waits.future(call, whom="it", why="its end after all", timeout_s=10)
