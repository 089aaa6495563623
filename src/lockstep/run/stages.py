"""Stages of a step: who is in which, and how long it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.watch import beacon


class Stages:
    """Times the stages of the current step and shows them in the controller's beacon."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self.current = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Stages may be entered several times in a step (their times add up) but not nested."""
        if self.current:
            raise RuntimeError(f"stage {name!r} begins inside stage {self.current!r}")
        self.current = name
        beacon.current().stage(name)
        start = time.monotonic()
        try:
            yield
        finally:
            elapsed = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
            self.totals[name] = self.totals.get(name, 0.0) + elapsed
            self.current = ""
            beacon.current().stage("")

    def take(self) -> dict[str, float]:
        """Seconds per stage since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds
