"""Ctrl-C: the first ends the run cleanly after the step, the second at once. Both leave a run that resumes.

Where there is no step to finish, as the run starts or waits for a worker in place of one that failed, the first ends it
at once: such a wait may take as long as others have the machines.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class InterruptHandler:
    """Whether the user (or a scheduler's SIGTERM) asked to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._steps = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGINT and SIGTERM over; the second of either raises KeyboardInterrupt where the controller is, and
        outside of steps the first."""
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def steps_begin(self) -> None:
        """From now on there is a step to finish."""
        self._steps = True

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """No step goes on within."""
        before, self._steps = self._steps, False
        try:
            yield
        finally:
            self._steps = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, self.requested or not self._steps
        self.requested = True
        if now:
            log.warning("%s: stopping at once", name)
            raise KeyboardInterrupt
        log.warning("%s: finishing this step; once more stops at once", name)
