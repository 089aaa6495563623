"""Calls that have no bound of their own."""

import threading

import pytest

from lockstep.base import waits
from lockstep.base.threads import run_in_thread
from lockstep.base.wait_state import WaitTimeout


def fail(problem: str) -> None:
    raise RuntimeError(problem)


def test_a_call_gives_its_result_or_its_error() -> None:
    assert waits.future(run_in_thread(lambda: 3, "counts"), waits_for="it", why="the count", timeout_s=10) == 3
    with pytest.raises(RuntimeError, match="no such interface"):
        waits.future(
            run_in_thread(lambda: fail("no such interface"), "fails"), waits_for="it", why="its end", timeout_s=10
        )


def test_a_call_that_does_not_end_is_left_behind() -> None:
    never = threading.Event()
    call = run_in_thread(lambda: never.wait(20), "never ends")
    with pytest.raises(WaitTimeout, match="members of the stream"):
        waits.future(call, waits_for="all", why="members of the stream", timeout_s=0.1)
    assert not call.done()
    never.set()
    assert waits.future(call, waits_for="it", why="its end after all", timeout_s=10)
