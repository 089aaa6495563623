"""Ctrl-C: the first ends the run cleanly after the step, the second at once. Both leave a run that resumes."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class Interrupt:
    """Whether the user (or a scheduler's SIGTERM) asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGINT and SIGTERM over; the second of either raises KeyboardInterrupt where the controller is."""
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        log.warning("%s: finishing this step; once more stops at once", signal.Signals(number).name)
