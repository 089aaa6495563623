"""Ctrl-C and SIGTERM during steps and outside of them."""

import signal
import threading

import pytest

from lockstep.run.interrupt import InterruptHandler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_outside_of_steps_the_first_signal_stops_at_once(number: signal.Signals) -> None:
    interrupt = InterruptHandler()
    with interrupt.listening(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert interrupt.requested


def test_the_first_signal_finishes_the_step_and_the_second_does_not() -> None:
    interrupt = InterruptHandler()
    interrupt.steps_begin()
    with interrupt.listening():
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_during_recovery_the_first_signal_stops_at_once() -> None:
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


def test_in_another_thread_than_the_main_one_signals_stay_as_they_are() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with InterruptHandler().listening():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert seen == [before]
