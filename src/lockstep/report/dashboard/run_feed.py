"""Follows the ledger of one run: reads what is new since the last look, and keeps what the page asks for."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.ledger.durable_files import lock_holder
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_folder import INDEX_FILE, LOCK_FILE
from lockstep.ledger.sqlite_index import EventRow
from lockstep.report.dashboard.metric_history import MetricHistory
from lockstep.report.dashboard.stage_spans import CLOCK, MOST_SPANS, StageRow, gantt, run_row, shown_times, within

RunState = Literal["running", "finished", "failed", "stopped", "unknown"]
"""`unknown` until its folder has answered for the first time."""

SETTLED_NS = 50_000_000
"""A file that was written less than this before it was read is read again: its times may be too coarse to show what was
written meanwhile."""
ROWS_AT_ONCE = 1000
"""Steps whose metrics are in memory as text at a time."""
REREAD_STEPS = 8
"""The newest steps, which may get more metrics after they were read."""
REMOTE_S = 600.0
"""A run without an end whose process is on another host counts as running while its last record is younger."""
BUSY_S = 20.0
"""How long a request waits for another one that reads the same run."""


UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError)
"""What reading the records of a ledger may raise that somebody else wrote, or another version."""


class RunBusy(RuntimeError):
    """A run is still being read for another request."""


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run in the list of runs. Times are seconds since the epoch."""

    name: str
    recipe: str
    state: RunState
    step: int
    steps: int | None
    started: float | None
    updated: float | None
    message: str


class RunFeed:
    """What is known of a run. All methods may be called by any thread, and raise LedgerError, OSError, or RunBusy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._signature: tuple[Any, ...] | None = None
        self._metrics_signature: tuple[Any, ...] | None = None
        self._began: float | None = None
        """When the run began: another one may be created in its folder."""
        self._generation = -1
        self._done = 0
        self._metrics_generation, self._metrics_done = -1, 0
        """What `_metrics` has been read of."""
        self._updated: float | None = None
        self._evaluations = MetricHistory()
        self._metrics = MetricHistory()
        self._clock = MetricHistory()
        """The end of each step in seconds since the epoch, in the column `CLOCK`."""
        self._events: list[EventRow] = []
        self._config: dict[str, Any] = {}

    def overview(self) -> RunOverview:
        with self.current():
            events = self._events
            state, message = self._state()
            return RunOverview(
                name=str(self._config.get("name", self.folder.name)),
                recipe=str(self._config.get("recipe", "")),
                state=state,
                step=self._done,
                steps=self._config.get("steps"),
                started=events[0].at if events else None,
                updated=self._updated,
                message=message,
            )

    def metric_names(self) -> tuple[list[str], int]:
        """The names of all metrics, and the number of steps done."""
        with self.current(metrics=True):
            return list(dict.fromkeys([*self._metrics.names, *self._evaluations.names])), self._done

    def curves(self, names: list[str], first: int | None, last: int | None, points: int) -> dict[str, Any]:
        """The curves of these metrics, as far as the run has them. Steps count from 1."""
        with self.current(metrics=True):
            found = {}
            for name in names:
                curve = self._metrics.curve(name, first, last, points)
                curve = curve or self._evaluations.curve(name, first, last, points)
                if curve is not None:
                    found[name] = curve
            return found

    @property
    def size(self) -> int:
        """Bytes of the metrics in memory."""
        return self._metrics.size + self._evaluations.size + self._clock.size

    def forget(self) -> None:
        """Drops the metrics, which are read again when they are asked for, unless the run is being read."""
        if self._lock.acquire(blocking=False):
            try:
                self._metrics, self._evaluations, self._clock = MetricHistory(), MetricHistory(), MetricHistory()
                self._metrics_generation, self._metrics_done, self._metrics_signature = -1, 0, None
            finally:
                self._lock.release()

    def config(self) -> dict[str, Any]:
        with self.current():
            return self._config

    def events(self) -> list[EventRow]:
        with self.current():
            return self._events

    def newest_events(self) -> list[EventRow]:
        """The events of the newest attempt."""
        with self.current():
            return [each for each in self._events if each.generation == self._generation]

    def steps_after(self, step: int, most: int) -> dict[int, dict[str, float]]:
        """The metrics of the newest steps done after this one (from 1), at most `most`, by step."""
        with self.current(metrics=True):
            first = max(step, self._done - most)
            found = self._metrics.since(first)
            for number, values in self._evaluations.since(first).items():
                found.setdefault(number, {}).update(values)
            return {number: found.get(number, {}) for number in range(first + 1, self._done + 1)}

    def stages(self, start: float | None, end: float | None, processes: Sequence[StageRow]) -> dict[str, Any]:
        """The Gantt chart between two times, in seconds since the epoch; None: the newest steps."""
        with self.current(metrics=True):
            start, end = shown_times(self._clock, start, end, time.time())
            run = run_row(self._metrics, self._clock, start, end, MOST_SPANS // 4)
            return gantt(run, within(processes, start, end), self._clock)

    @contextlib.contextmanager
    def current(self, metrics: bool = False) -> Iterator[None]:
        """Holds the run as it is now on disk; `metrics`: with its metrics, which take longer to read."""
        if not self._lock.acquire(timeout=BUSY_S):
            raise RunBusy(f"{self.folder} is still being read: try again")
        try:
            self._refresh(metrics)
            yield
        finally:
            self._lock.release()

    def reading(self, read: Callable[[Ledger], Any]) -> Any:
        """Reads something else from the run's ledger, which is opened for it."""
        with Ledger.reader(self.folder) as ledger:
            return read(ledger)

    def _refresh(self, metrics: bool) -> None:
        signature = _file_times(self.folder)
        if signature == (self._metrics_signature if metrics else self._signature):
            return
        with Ledger.reader(self.folder) as ledger:
            self._read(ledger)
            if metrics:
                self._read_metrics(ledger)
        newest = max(each[0] for each in signature if each is not None)
        self._signature = signature if time.time_ns() - newest > SETTLED_NS else None
        if metrics:
            self._metrics_signature = self._signature

    def _read(self, ledger: Ledger) -> None:
        """Reads all but the metrics."""
        self._generation, self._done = ledger.generation, ledger.steps_done()
        self._events, self._config = ledger.events(), ledger.config()
        began = self._events[0].at if self._events else None
        if began != self._began:
            self._began, self._metrics_generation = began, -1
        newest = ledger.metrics_rows(after=self._done - 2, before=self._done)
        self._updated = max([row.at for row in newest] + [each.at for each in self._events[-1:]], default=None)

    def _read_metrics(self, ledger: Ledger) -> None:
        """Reads the metrics of the steps since the last time, and of a few before. Of a resumed run, which has trained
        steps again, all."""
        done = self._done
        anew = self._generation != self._metrics_generation or done < self._metrics_done
        first = 0 if anew else max(0, self._metrics_done - REREAD_STEPS)  # the index of a step
        if anew:
            self._metrics, self._evaluations, self._clock = MetricHistory(), MetricHistory(), MetricHistory()
        self._metrics.forget_from(first + 1)
        self._clock.forget_from(first + 1)
        for begin in range(first, done, ROWS_AT_ONCE):
            for row in ledger.metrics_rows(after=begin - 1, before=min(begin + ROWS_AT_ONCE, done)):
                self._metrics.add(row.step + 1, row.values)
                self._clock.add(row.step + 1, {CLOCK: row.at})
        self._evaluations.forget_from(first)
        for evaluation in ledger.evaluations(after=first - 2, before=done):
            self._evaluations.add(evaluation.step + 1, evaluation.metrics)
        self._metrics_generation, self._metrics_done = self._generation, done

    def _state(self) -> tuple[RunState, str]:
        newest = [each for each in self._events if each.generation == self._generation]
        ends = [str(each.fields.get("reason", "")) for each in newest if each.kind == "end"]
        if ends:
            reason = ends[-1]
            return ("finished", "") if reason == "finished" else _ended_state(reason)
        lock = self.folder / LOCK_FILE
        if lock.is_file() and lock_holder(lock) is not None:  # a pipe would block
            return "running", ""
        if self._updated is not None and time.time() - self._updated < REMOTE_S:
            return "running", "no process of this host holds the run: it runs on another host, or was just killed"
        return "failed", "killed: its ledger has no end"


def _ended_state(reason: str) -> tuple[RunState, str]:
    return ("stopped" if reason.startswith("interrupted") else "failed"), reason


def _file_times(folder: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """Time of the last write, size and inode of the ledger and of its log. Raises OSError without a ledger."""
    found: list[tuple[int, int, int] | None] = []
    for path in (folder / INDEX_FILE, folder / f"{INDEX_FILE}-wal"):
        try:
            facts = path.stat()
        except FileNotFoundError:
            if not found:
                raise
            found.append(None)
        else:
            found.append((facts.st_mtime_ns, facts.st_size, facts.st_ino))
    return tuple(found)
