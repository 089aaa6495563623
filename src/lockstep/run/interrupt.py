"""Ctrl-C: the first ends the run cleanly after the current step, the second at once. Either way it can be resumed.

While no step is running, as at the start or during a recovery, the first one ends the run at once: the wait for a free
node may take very long.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class InterruptHandler:
    """Whether the user, or a scheduler with SIGTERM, has asked the run to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._steps = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM. The second of either raises KeyboardInterrupt in the controller; outside of steps
        the first one does."""
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def steps_begin(self) -> None:
        """From now on the first signal lets the current step finish."""
        self._steps = True

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Around a recovery, in which no step is running."""
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
        log.warning("%s: finishing this step; repeat to stop at once", name)
