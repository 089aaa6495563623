"""Functions of the program that started a run, which the run calls after every step."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final


class StepDecision(Enum):
    """What a callback may return."""

    STOP = "stop"
    """End the run after this step: with a checkpoint, an evaluation if one is due, and the export."""


STOP: Final = StepDecision.STOP

OnStep = Callable[[int, Mapping[str, float]], object]
"""Called with the number of steps done, from 1, and the metrics of the last one. Returns `STOP` to end the run; any
other result is ignored."""


class CallbackFailed(RuntimeError):
    """A callback raised an exception, which is the `__cause__`. The run ended after a checkpoint of that step.

    Args:
        callback: the name of the function.
        step: the number of steps that were done.
    """

    def __init__(self, callback: str, step: int, error: BaseException) -> None:
        super().__init__(f"the callback {callback} raised {type(error).__name__} after step {step}: {error}")
        self.callback, self.step = callback, step


class StepCallbacks:
    """Calls the callbacks after each step, in order, and keeps what they decided."""

    def __init__(self, callbacks: Sequence[OnStep] = ()) -> None:
        self.callbacks = tuple(callbacks)
        self.stop_reason = ""
        """Why a callback ends the run; empty if none does."""
        self.failure: CallbackFailed | None = None
        self._called = -1
        """The newest step for which they were called: after a recovery steps are repeated, and callbacks are not."""

    def call(self, step: int, metrics: Mapping[str, float]) -> None:
        """Calls them, unless they were called for this step before. Never raises an `Exception`: the first one becomes
        `failure`, and later callbacks are not called."""
        if step <= self._called:
            return
        self._called = step
        for callback in self.callbacks:
            name = getattr(callback, "__qualname__", type(callback).__qualname__)
            try:
                decision = callback(step, dict(metrics))
            except Exception as error:  # noqa: BLE001  # user code may raise anything
                self.failure = CallbackFailed(name, step, error)
                self.failure.__cause__ = error
                return
            if decision is STOP:
                self.stop_reason = self.stop_reason or f"the callback {name} returned STOP"
