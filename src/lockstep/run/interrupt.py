"""Ctrl-C: the first ends the run cleanly after the current step, the second at once. Either way the run can be resumed.

While no step is running, as during the start or a recovery, the first Ctrl-C ends the run at once: waiting for a free
node may take very long.
"""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class InterruptHandler:
    """Records whether the user, or a scheduler with SIGTERM, has asked the run to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._in_steps = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM. The second signal raises KeyboardInterrupt in the controller; outside of steps
        the first one does. Only the main thread can handle signals; in any other one this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def steps_begin(self) -> None:
        """From now on the first signal lets the current step finish."""
        self._in_steps = True

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Wraps a recovery, during which no step is running."""
        before, self._in_steps = self._in_steps, False
        try:
            yield
        finally:
            self._in_steps = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name, stops_at_once = signal.Signals(number).name, self.requested or not self._in_steps
        self.requested = True
        if stops_at_once:
            log.warning("%s: stopping at once", name)
            raise KeyboardInterrupt
        log.warning("%s: finishing this step; repeat to stop at once", name)
