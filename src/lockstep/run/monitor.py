"""What a person sees of a run, while it goes on and afterwards: console, metrics, summary, report."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.ledger.ledger import Ledger
from lockstep.report.activity import beacon_activity
from lockstep.report.console import Console
from lockstep.report.incidents import in_words, incidents_of
from lockstep.report.sinks import Sink, Sinks, open_sinks
from lockstep.report.summary import versions, write_summary
from lockstep.run.awaited import awaited
from lockstep.run.stages import Stages
from lockstep.run.stalls import Stalls
from lockstep.watch import beacon

STARTING = ("start", "recovery")
"""Stages in which processes start, and whoever is awaited is told at once."""


class Monitor:
    """Tells the console and the metric sinks what happens. Everything it shows is in the ledger as well."""

    def __init__(self, config: SFTConfig | GRPOConfig, folder: Path, ledger: Ledger, run_id: str) -> None:
        self.config, self.folder, self.ledger = config, folder, ledger
        self.stages = Stages()
        self.console = Console(
            config.name,
            folder,
            config.steps,
            quiet=not config.report.console,
            activity=lambda: beacon_activity(run_id),
        )
        self.stalls = Stalls(self.console, ledger)
        self.doing: Callable[[str], str] = lambda name: ""
        """What a worker of that name does."""
        self._sinks: Sinks | None = None
        self._reason = "failed"
        self._tokens = 0.0
        self._start = 0

    def begin(self, version: int) -> None:
        """The run begins with `version` steps done; later rows of an earlier attempt are superseded."""
        rows = self.ledger.metrics_rows()
        self._start = version
        self._tokens = max((row.values.get("tokens/total", 0.0) for row in rows if row.step < version), default=0.0)
        self._sinks = open_sinks(
            self.folder,
            tensorboard=self.config.report.tensorboard,
            resume_after=version - 1 if rows else None,
            others=self._trackers(),
        )
        self.stages.take()
        self.console.start(version)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of the current step: timed, and shown while it lasts."""
        with self.stages(name):
            self.console.stage(name)
            try:
                with awaited(self.console.awaits, self.doing) if name in STARTING else nullcontext():
                    yield
            finally:
                self.console.stage("")
        self.stalls.flush()

    def step_begins(self, step: int) -> None:
        beacon.current().progress("step", step, self.config.steps)

    def step_ends(self, step: int, row: dict[str, float]) -> None:
        """Completes the step's row of metrics and hands it to ledger, sinks and console."""
        seconds = self.stages.take()
        row |= {f"time/{name}_s": value for name, value in seconds.items()}
        row["time/step_s"] = sum(seconds.values())
        tokens = row.get("rollout/tokens", row.get("policy/tokens", 0.0))
        self._tokens += tokens
        row["tokens/total"] = self._tokens
        if row["time/step_s"] > 0:
            row["throughput/tokens_per_s"] = tokens / row["time/step_s"]
        self.ledger.metrics(step, row)
        if self._sinks is not None:
            self._sinks.write(step, row)
        self.console.step(step, row)

    def step_again(self, step: int) -> None:
        """A step that was told of is trained again after a fault: the same metrics, and more time."""
        seconds = self.stages.take()
        recovery = seconds.pop("recovery", 0.0)
        self.ledger.metrics(step, {"time/recovery_s": recovery, "time/again_s": sum(seconds.values())})

    def boundary_ends(self, version: int) -> None:
        """Adds what evaluation and checkpoint took to the step before them, which is not for a resumed run to say of
        the step that it goes on from."""
        seconds = {f"time/{name}_s": value for name, value in self.stages.take().items()}
        if version > self._start and seconds:
            self.ledger.metrics(version - 1, seconds)

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        if self._sinks is not None:
            self._sinks.write(version - 1, metrics)
        self.console.evaluation(version, metrics)

    def _trackers(self) -> list[Sink]:
        if not self.config.tracking:
            return []
        from lockstep.report.trackers import open_trackers  # brings what few runs need

        return open_trackers(self.config.tracking, self.folder, self.config.model_dump(mode="json"), versions())

    def finish(self, reason: str) -> None:
        """Writes summary and report, and the last line. Of `failed: why` that shows the first word: whoever started
        the run tells the rest."""
        from lockstep.report.html import write_report  # brings matplotlib, which no start should wait for

        self._reason = reason
        self.stalls.flush()
        report = write_report(self.ledger, reason) if self.config.report.html else None
        write_summary(self.ledger, reason)  # last: a run whose summary says that it is finished has nothing left to do
        incidents = in_words(incidents_of(self.ledger.events()))
        self.console.finish(reason.partition(":")[0], report, incidents)

    def close(self) -> None:
        self.console.close()
        if self._sinks is not None:
            self._sinks.close(self._reason)
