"""Ctrl-C and SIGTERM: when there is a step to finish, and when not."""

import signal

import pytest

from lockstep.run.interrupt import InterruptHandler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_the_first_stops_at_once_where_there_is_no_step_to_finish(number: signal.Signals) -> None:
    interrupt = InterruptHandler()
    with interrupt.listening(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert interrupt.requested


def test_the_first_waits_for_the_step_and_the_second_does_not() -> None:
    interrupt = InterruptHandler()
    interrupt.steps_begin()
    with interrupt.listening():
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_recovery_may_wait_for_ever_and_is_no_step() -> None:
    interrupt = InterruptHandler()
    interrupt.steps_begin()
    with interrupt.listening():
        with pytest.raises(KeyboardInterrupt), interrupt.recovering():
            signal.raise_signal(signal.SIGTERM)
        again = InterruptHandler()
    again.steps_begin()
    with again.listening(), again.recovering():
        pass
    with again.listening():
        signal.raise_signal(signal.SIGTERM)
    assert again.requested
