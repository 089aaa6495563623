"""Reports a run: console, log, metrics, stage times and startup status while it runs, summary and report at its end."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from pathlib import Path

from lockstep.base import waits
from lockstep.base.folders import make_folder, open_file
from lockstep.base.secrets import redact_text, secret_values
from lockstep.base.text import format_duration
from lockstep.base.wait_state import WaitRecord
from lockstep.config.run_config import RunConfig
from lockstep.data.samples import Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.rank_loads import SlowRank
from lockstep.ledger.run_incidents import incidents_of, incidents_summary
from lockstep.ledger.sqlite_index import CompletionSample
from lockstep.ledger.step_samples import choose_samples
from lockstep.report.command_events import TERMINAL, CommandEvents
from lockstep.report.completion_samples import shortened_sample
from lockstep.report.live_console import RunConsole, beacon_activity
from lockstep.report.metric_sinks import MetricSink, MetricSinks, open_sinks
from lockstep.report.run_summary import package_versions, write_summary
from lockstep.report.warning_handler import WarningHandler
from lockstep.run.errors import Interrupted
from lockstep.run.recovery.verdict_handler import VerdictHandler
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.5
MAX_WORKERS_SHOWN = 2
"""Number of awaited workers whose activity is shown."""


@contextmanager
def startup_status(show: Callable[[str], None], worker_activity: Callable[[str], str]) -> Iterator[None]:
    """Shows twice a second, from another thread, what the calling thread waits for; "" while it does not wait.

    Args:
        worker_activity: returns what the worker of that name is doing, as a verb phrase; "" if unknown.
    """
    thread, done, lock = threading.get_native_id(), threading.Event(), threading.Lock()

    def poll() -> None:
        while not done.is_set():
            status = format_wait(current_beacon().innermost_wait(thread), worker_activity, time.monotonic_ns())
            with lock:  # a text shown after the end would not be removed
                if not done.is_set():
                    show(status)
            waits.sleep(STATUS_INTERVAL_S, "the next status update")

    threading.Thread(target=poll, name="startup-status", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            done.set()
        show("")


def format_wait(wait: WaitRecord | None, worker_activity: Callable[[str], str], now_ns: int) -> str:
    """Describes a wait, and what the awaited workers are doing."""
    if wait is None:
        return ""
    names = wait.waits_for.partition(" and ")[0].split(", ")
    activities = [f"{name} {what}" for name in names[:MAX_WORKERS_SHOWN] if (what := worker_activity(name))]
    details = f": {'; '.join(activities)}" if activities else ""
    return f"{wait.waits_for} ({wait.why}) for {format_duration((now_ns - wait.since_ns) / 1e9)}{details}"


class StageTimers:
    """Times the stages of the current step and shows them in the controller's beacon."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self.current = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times a stage. Stages may be entered several times in a step (their times add up) but not nested."""
        if self.current:
            raise RuntimeError(f"stage {name!r} begins inside stage {self.current!r}")
        self.current = name
        current_beacon().stage(name)
        start = time.monotonic()
        try:
            yield
        finally:
            elapsed = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
            self.totals[name] = self.totals.get(name, 0.0) + elapsed
            self.current = ""
            current_beacon().stage("")

    def take(self) -> dict[str, float]:
        """Seconds per stage since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


STARTUP_STAGES = ("start", "recovery", "reference")
"""Stages outside of steps, in which processes start or prepare, and the current wait is shown."""


class RunReporter:
    """Reports what happens in a run to the console and the metric sinks. All of it is in the ledger as well.

    Args:
        events: where the command reports.
    """

    def __init__(
        self, config: RunConfig, folder: Path, ledger: Ledger, run_id: str, events: CommandEvents = TERMINAL
    ) -> None:
        self.config, self.folder, self.ledger = config, folder, ledger
        self.stages = StageTimers()
        self.console: RunConsole = events.open_run_console(
            config.name, folder, config.steps, config.report, lambda: beacon_activity(run_id)
        )
        self.verdicts = VerdictHandler(self.console, ledger)
        self.worker_activity: Callable[[str], str] = lambda name: ""
        """Describes what the worker of that name is doing."""
        self._sinks: MetricSinks | None = None
        self._reason = "failed"
        self._tokens = 0.0
        self._remarked: set[tuple[str, int]] = set()
        """The slow ranks that were remarked upon."""
        self._start = 0

    def begin(self, version: int) -> None:
        """Begins the reports of a run that has done `version` steps. Later rows of earlier attempts are superseded."""
        newest = self.ledger.newest_metrics("tokens/total", version)
        self._start = version
        self._tokens = 0.0 if newest is None else newest.values["tokens/total"]
        self._sinks = open_sinks(
            self.folder,
            tensorboard=self.config.report.tensorboard,
            resume_after=self.ledger.number(version - 1) if self.ledger.has_metrics() else None,
            others=self._trackers(),
        )
        self.stages.take()
        self.console.start(version)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times and shows a stage of the current step."""
        with self.stages(name):
            self.console.stage(name)
            try:
                with (
                    startup_status(self.console.show_wait, self.worker_activity)
                    if name in STARTUP_STAGES
                    else nullcontext()
                ):
                    yield
            finally:
                self.console.stage("")
        self.verdicts.flush()

    def step_begins(self, step: int) -> None:
        current_beacon().progress("step", step, self.config.steps)

    def choose_samples(self, step: int, rollouts: Rollouts) -> list[CompletionSample]:
        """Returns the completions of a step to show; none unless it is due."""
        config, number = self.config.report, step + 1
        due = number in (1, self.config.steps) or number % max(config.samples_every, 1) == 0
        if not config.samples_every or not due:
            return []
        known = secret_values(os.environ)
        return [shortened_sample(each, known) for each in choose_samples(rollouts.groups, config.samples_shown)]

    def step_ends(self, step: int, row: dict[str, float], samples: Sequence[CompletionSample] = ()) -> None:
        """Completes the step's row of metrics and hands it to ledger, sinks and console, and so the samples."""
        seconds = self.stages.take()
        row |= {f"time/{name}_s": value for name, value in seconds.items()}
        row["time/step_s"] = sum(seconds.values())
        tokens = row.get("rollout/tokens", row.get("policy/tokens", 0.0))
        self._tokens += tokens
        row["tokens/total"] = self._tokens
        if row["time/step_s"] > 0:
            row["throughput/tokens_per_s"] = tokens / row["time/step_s"]
        self.ledger.record_metrics(step, row)
        if self._sinks is not None:
            self._sinks.write(self.ledger.number(step), row)
        self.console.step(step, row)
        if samples:
            self.ledger.record_samples(step, samples)
            if self._sinks is not None:
                self._sinks.write_samples(self.ledger.number(step), samples)
            self.console.samples(step + 1, samples)

    def slow_ranks(self, found: Sequence[SlowRank]) -> None:
        """Remarks upon ranks that are persistently slower than the others, once for each."""
        for each in found:
            if (each.role, each.rank) not in self._remarked:
                self._remarked.add((each.role, each.rank))
                self.ledger.record_event("slow_rank", role=each.role, rank=each.rank, times=round(each.times, 3))
                self.console.message(f"{each}; trainer.rank_speeds: measured gives it less to do")

    def step_repeated(self, step: int) -> None:
        """Adds the time of a step that was trained again after a fault; its metrics were reported before."""
        seconds = self.stages.take()
        recovery = seconds.pop("recovery", 0.0)
        self.ledger.record_metrics(step, {"time/recovery_s": recovery, "time/again_s": sum(seconds.values())})

    def boundary_ends(self, version: int) -> None:
        """Adds the time of evaluation and checkpoint to the step before them, if this attempt did that step."""
        seconds = {f"time/{name}_s": value for name, value in self.stages.take().items()}
        if version > self._start and seconds:
            self.ledger.record_metrics(version - 1, seconds)

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        if self._sinks is not None:
            self._sinks.write(self.ledger.number(version - 1), metrics)
        self.console.evaluation(version, metrics)

    def _trackers(self) -> list[MetricSink]:
        if not self.config.tracking:
            return []
        from lockstep.report.trackers import open_trackers  # imports libraries that few runs need

        return open_trackers(self.config.tracking, self.folder, self.config.model_dump(mode="json"), package_versions())

    def finish(self, reason: str) -> None:
        """Writes summary, report and the last line of the console, which shows only the first word of `failed: why`;
        the command prints the rest."""
        from lockstep.report.html_report import write_report  # imports matplotlib, which would delay the start

        self._reason = reason
        self.verdicts.flush()
        report = write_report(self.ledger, reason) if self.config.report.html else None
        write_summary(self.ledger, reason)  # last: if the summary says `finished`, everything else is written
        incidents = incidents_summary(incidents_of(self.ledger.events()))
        self.console.finish(reason.partition(":")[0], report, incidents)

    def close(self) -> None:
        self.console.close()
        if self._sinks is not None:
            self._sinks.close(self._reason)


class _LogFile(logging.FileHandler):
    """A log file that ignores errors, such as a full disk: they must neither end the run nor hide why it ended."""

    def _open(self) -> TextIOWrapper:
        return os.fdopen(open_file(Path(self.baseFilename), os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the first record opens the file
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes
            super().close()


class _RedactingFormatter(logging.Formatter):
    """Redacts secrets, and text that looks like a secret: error messages may contain either."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__("%(asctime)s controller %(levelname).1s %(name)s: %(message)s")
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record), self._known)


@contextmanager
def controller_logging(file: Path, console: RunConsole) -> Iterator[None]:
    """Sends the log of this process to the file and its warnings to the console; the file also gets the final error."""
    make_folder(file.parent)
    to_file = _LogFile(file, delay=True, encoding="utf-8")
    known = secret_values(os.environ)
    to_file.setFormatter(_RedactingFormatter(known))
    to_console = WarningHandler(console.warning)
    # Tracebacks go to the file; the command prints a short message.
    to_console.addFilter(lambda record: record.exc_info is None)
    handlers = (to_file, to_console)
    logger = logging.getLogger("lockstep")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        raise
    except BaseException:
        log.exception("the run failed")
        raise
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
