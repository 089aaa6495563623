"""A sink that may be slow, or away, behind one that never is."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.report.sinks import Sink
from lockstep.watch import waits
from lockstep.watch.secrets import redact_text

log = logging.getLogger(__name__)

MOST_ROWS = 10_000
"""Rows that may wait; later ones are dropped, and counted."""
CLOSE_S = 30.0
"""At the end of a run its last rows have this long."""


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    values: dict[str, float]
    at: float | None


@dataclass(frozen=True, slots=True)
class _End:
    reason: str


class Background:
    """Hands rows to a sink in a thread of its own, which lives while there are rows. What the sink raises is told once,
    without secrets, and nobody else hears of it: a tracker that is down neither stops nor slows a run."""

    def __init__(self, name: str, opened: Callable[[], Sink], known_secrets: tuple[str, ...] = ()) -> None:
        """`opened` makes the sink; it is called in the thread, at once."""
        self.name, self._opened, self._known = name, opened, known_secrets
        self._sink: Sink | None = None
        self._waiting: deque[_Row | _End] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._told = self._ended = self._broken = False
        self._lost = 0
        with self._lock:
            self._wake()

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Returns at once."""
        with self._lock:
            if self._ended or self._broken or len(self._waiting) >= MOST_ROWS:
                self._lost += not self._ended
                return
            self._waiting.append(_Row(step, dict(values), at))
            self._wake()

    def close(self, reason: str = "") -> None:
        """Gives the last rows `CLOSE_S`. Idempotent."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._waiting.append(_End(reason))
                self._wake()
            thread = self._thread
        if thread is not None:
            try:
                waits.join(thread, whom=self.name, why="its last metrics", timeout_s=CLOSE_S)
            except waits.WaitTimeout:
                self._lost += sum(isinstance(each, _Row) for each in tuple(self._waiting))
                log.warning("%s did not take the last metrics within %g s", self.name, CLOSE_S)
        lost, self._lost = self._lost, 0
        if lost:
            log.warning("%s has not got %d rows of metrics; metrics.jsonl has them all", self.name, lost)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, name=self.name, daemon=True)
            self._thread.start()

    def _drain(self) -> None:
        while True:
            sink = self._open()
            with self._lock:
                if sink is None:
                    self._lost += sum(isinstance(each, _Row) for each in self._waiting)
                    self._waiting.clear()
                if not self._waiting or sink is None:
                    self._thread = None
                    return
                item = self._waiting.popleft()
            try:
                if isinstance(item, _End):
                    sink.close(item.reason)
                else:
                    sink.write(item.step, item.values, item.at)
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on
                self._lost += isinstance(item, _Row)
                self._tell("failed", error)

    def _open(self) -> Sink | None:
        if self._sink is None and not self._broken:
            try:
                self._sink = self._opened()
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on
                self._broken = True
                self._tell("cannot be used", error)
        return self._sink

    def _tell(self, what: str, error: Exception) -> None:
        if self._told:
            return
        self._told = True
        why = redact_text(f"{type(error).__name__}: {error}", self._known)
        log.warning("%s %s (%s); the run goes on, its metrics are in metrics.jsonl", self.name, what, why)
