"""Prints the progress of a run: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from rich.live import Live
from rich.markup import escape
from rich.text import Text

from lockstep.base.text import count_noun, format_duration
from lockstep.ledger.sqlite_index import CompletionSample
from lockstep.report.command_events import LINE_S, WAIT_S
from lockstep.report.completion_samples import sample_text
from lockstep.report.safe_console import SafeConsole
from lockstep.watch.beacon import beacon_table
from lockstep.watch.beacon.beacon_table import CounterRow, ProcessRow

_BARS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 16
_BAR_FROM_WIDTH = 60
"""Narrower terminals show no bar: its place is for words."""

SAMPLE_CHARS = 240
"""The most characters of each text of a sample."""


@dataclass(frozen=True, slots=True)
class StageActivity:
    """Progress within a stage. It is read from beacons, so that it is updated while the controller waits."""

    done: int = 0
    total: int | None = None
    unit: str = ""
    waiting: str = ""
    """What the controller waits for, why and for how long; empty if it does not wait."""


class RunConsole(Protocol):
    """Where a run reports what it does: as text (`LiveConsole`) or as JSON (`JsonConsole`)."""

    def start(self, first: int = 0) -> None: ...
    def stage(self, name: str) -> None: ...
    def show_wait(self, text: str) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluation(self, done: int, metrics: Mapping[str, float]) -> None: ...
    def samples(self, done: int, samples: Sequence[CompletionSample]) -> None: ...
    def message(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
    def finish(self, reason: str, report: Path | None = None, incidents: str = "") -> None: ...
    def close(self) -> None: ...


class LiveConsole:
    """The console of a run. Only the controller's thread calls it; rich's refresh thread only reads its state.

    Args:
        quiet: print only warnings and the last line.
        lines_every: on a terminal, where a live line shows each step: the number of steps between lines that stay.
        lines_every_s: elsewhere: the fewest seconds between the lines of two steps. The first and the last step have
            a line in any case.
        activity: called at every refresh of the live line (4 per second).
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        steps: int,
        *,
        quiet: bool = False,
        lines_every: int = 10,
        lines_every_s: float = LINE_S,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        activity: Callable[[], StageActivity] | None = None,
    ) -> None:
        self._rich = SafeConsole(stream or sys.stderr, force_terminal=terminal)
        self._name, self._folder, self._steps, self._quiet = name, folder, steps, quiet
        self._lines_every, self._lines_every_s = lines_every, lines_every_s
        self._has_live_line = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._activity = activity
        self._live: Live | None = None
        self._stage, self._stage_began, self._began = "", time.monotonic(), time.monotonic()
        self._done, self._first = 0, 0
        self._metrics: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=40)
        self._evaluated: list[tuple[int, float]] = []
        self._reported = StageActivity()
        self._wait = ""
        self._report_after_s = WAIT_S
        self._printed, self._printed_at = -1, 0.0
        """The number of steps in the last line of a step, and when it was printed."""
        self._began_steps = False

    def __enter__(self) -> "LiveConsole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, first: int = 0) -> None:
        """Begins the run, with `first` steps already done."""
        self._done = self._first = first
        self._began = time.monotonic()
        self._began_steps = True
        if self._quiet:
            return
        where = f", after step {first} of {self._steps}" if first else ""
        self._print(f"[bold]{escape(self._name)}[/] in {escape(str(self._folder))}{where}")
        self._open()

    def stage(self, name: str) -> None:
        """Begins a stage of the step; "" between stages."""
        self._stage, self._stage_began, self._reported = name, time.monotonic(), StageActivity()
        self._wait, self._report_after_s = "", WAIT_S

    def show_wait(self, text: str) -> None:
        """Shows what the run waits for, "" if nothing: one refreshed line on a terminal, rare lines elsewhere.

        Thread-safe; may be called before `start`.
        """
        self._wait = text
        since_s = time.monotonic() - self._stage_began
        if self._quiet or not text:
            return
        if self._has_live_line:
            self._open()
        elif since_s >= self._report_after_s:
            self._report_after_s = 2 * since_s
            self._print(f"[dim]{escape(self._stage)} waits for {escape(text)}[/]")

    def progress(self, done: int, total: int | None = None, unit: str = "", waiting: str = "") -> None:
        """Sets the progress within the stage, if there is no `activity` callback."""
        self._reported = StageActivity(done, total, unit, waiting)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ends a step (counted from 0)."""
        self._done = step + 1
        self._metrics = dict(metrics)
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if not self._quiet and self._line_is_due():
            self._print_step()

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Prints an evaluation of the weights after `done` steps."""
        if "eval/exact_match" in metrics:
            self._evaluated.append((done, metrics["eval/exact_match"]))
        if not self._quiet:
            # The values of reward terms do not fit into a line; they are in the metrics.
            by_name = {name.removeprefix("eval/"): value for name, value in metrics.items()}
            shown = "  ".join(f"{name} {format_number(value)}" for name, value in by_name.items() if "/" not in name)
            self._print(f"[cyan]evaluation[/] after step {done}: {escape(shown)}")

    def samples(self, done: int, samples: Sequence[CompletionSample]) -> None:
        """Prints completions of step `done`, shortened to some lines."""
        if self._quiet:
            return
        self._print(f"[cyan]samples[/] of step {done}")
        for sample in samples:
            self._rich.print(sample_text(sample, SAMPLE_CHARS), soft_wrap=True)

    def message(self, text: str) -> None:
        """Prints information once."""
        if not self._quiet:
            self._print(escape(text))

    def warning(self, text: str) -> None:
        """Prints a warning, in quiet mode too."""
        self._print(f"[yellow]{escape(text)}[/]")

    def finish(self, reason: str, report: Path | None = None, incidents: str = "") -> None:
        """Prints the last line: how the run ended, its incidents, and where its files are."""
        self.close()
        if not self._quiet and self._first < self._done != self._printed:
            self._print_step()
        exact = ""
        if self._evaluated:
            first = f"{format_number(self._evaluated[0][1])} → " if len(self._evaluated) > 1 else ""
            exact = f", exact match {first}{format_number(self._evaluated[-1][1])}"
        incident_text = f", {incidents}" if incidents else ""
        colour = {"finished": "green", "failed": "red"}.get(reason, "yellow")
        where = f", report: {report}" if report is not None else ""
        self._print(
            f"[bold {colour}]{escape(reason)}[/] after {self._done} of {count_noun(self._steps, 'step')} in "
            f"{format_duration(time.monotonic() - self._began)}{exact}{incident_text}; "
            f"run: {escape(str(self._folder))}{escape(where)}"
        )

    def close(self) -> None:
        """Removes the live line from the terminal. Idempotent."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _open(self) -> None:
        if self._live is None and self._has_live_line:
            self._live = Live(
                get_renderable=self.render,
                console=self._rich,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()

    def render(self) -> Text:
        """The live line, cut at the width of the terminal: steps, time left, the stage, what the run waits for, and
        the newest metrics."""
        activity = self._activity() if self._activity is not None else self._reported
        parts = list[Text]()
        if self._began_steps:
            head = Text(f"step {self._done}/{self._steps}", style="bold")
            if self._rich.width >= _BAR_FROM_WIDTH:
                head.append(" ").append_text(self._bar())
            parts.append(head.append(f" {self._remaining()}", style="not bold dim"))
        if self._stage:
            parts.append(self._stage_text(activity))
        if waiting := self._wait or activity.waiting:
            parts.append(Text(f"waits for {waiting}", style="yellow"))
        if self._metrics or self._evaluated:
            parts.append(self._numbers())
        line = Text("  ").join(parts)
        line.plain = " ".join(line.plain.splitlines())  # a name may have line breaks
        line.truncate(self._rich.width, overflow="ellipsis")
        return line

    def _print(self, markup: str) -> None:
        self._rich.print(markup, soft_wrap=True)

    def _line_is_due(self) -> bool:
        if self._done in (self._first + 1, self._steps):
            return True
        if self._has_live_line:
            return self._done % self._lines_every == 0
        return time.monotonic() - self._printed_at >= self._lines_every_s

    def _print_step(self) -> None:
        self._printed, self._printed_at = self._done, time.monotonic()
        if self._live is not None:
            self._live.refresh()  # rich repeats the live line as it was
        self._print(escape(self._line()))

    def _bar(self) -> Text:
        full = _BAR_CELLS * self._done // max(self._steps, 1)
        return Text("━" * full, style="green").append("─" * (_BAR_CELLS - full), style="dim")

    def _numbers(self) -> Text:
        text = Text()
        evaluated = [(f"exact match after step {done}", format_number(exact)) for done, exact in self._evaluated[-1:]]
        for label, value in [*self._shown(), *evaluated]:
            text.append(f"{label} ", style="dim")
            text.append(f"{value}  ", style="bold")
        if len(self._rewards) > 1:
            text.append(sparkline(list(self._rewards)), style="green")
        return text

    def _shown(self) -> list[tuple[str, str]]:
        found = []
        for label, name in (
            ("reward", "reward/mean"), ("loss", "policy/loss"), ("kl", "policy/kl"), ("entropy", "policy/entropy"),
            ("length", "rollout/length_mean"), ("accuracy", "rewards/accuracies"), ("margin", "rewards/margins"),
            ("accuracy", "policy/accuracy"), ("margin", "policy/margin"),
        ):  # fmt: skip
            if label == "loss" and self._metrics.get("policy/tokens") == 0:
                found.append(("nothing learned:", "no group has completions with different rewards"))
            elif name in self._metrics:
                found.append((label, format_number(self._metrics[name])))
        if "throughput/tokens_per_s" in self._metrics:
            found.append(("tokens/s", f"{self._metrics['throughput/tokens_per_s']:,.0f}"))
        return found

    def _stage_text(self, activity: StageActivity) -> Text:
        known = activity.total is not None and activity.total > 0
        progress = f" {activity.done:,}/{activity.total:,} {activity.unit}" if known else f" {activity.done or ''}"
        since = format_duration(time.monotonic() - self._stage_began)
        return Text(self._stage, style="cyan").append(f"{progress.rstrip()} {since}", style="dim")

    def _line(self) -> str:
        """Formats a step as one plain line, for logs."""
        shown = "  ".join(f"{label} {value}" for label, value in self._shown())
        stages = " ".join(
            f"{name.removeprefix('time/').removesuffix('_s')} {format_duration(value)}"
            for name, value in self._metrics.items()
            if name.startswith("time/") and name != "time/step_s" and value > 0
        )
        return f"step {self._done}/{self._steps}  {shown}{f'  [{stages}]' if stages else ''}"

    def _remaining(self) -> str:
        elapsed = time.monotonic() - self._began
        done = self._done - self._first
        remaining = f", about {format_duration(elapsed / done * (self._steps - self._done))} left" if done > 0 else ""
        return f"{format_duration(elapsed)}{remaining if self._done < self._steps else ''}"


def sparkline(values: list[float]) -> str:
    """Draws values as bars of eight heights; leaves a gap for a value that is not finite."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if value in finite else " " for value in values)


def format_number(value: float) -> str:
    """Formats a number with about three significant figures: 0.512, 12.3, 1,204, 3.2e-06."""
    if value != value or abs(value) == float("inf"):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.1e}"


_SHOW_WAIT_S = 2.0


def beacon_activity(run: str, controller: str = "controller") -> StageActivity:
    """Reads the latest progress in the stage, summed over the processes of its role, and the controller's wait."""
    return stage_activity(beacon_table.process_rows(beacon_table.take_snapshot(run)), controller)


def stage_activity(rows: list[ProcessRow], controller: str = "controller") -> StageActivity:
    """Computes `beacon_activity` from the table's rows. `controller` is the role that waits for all others."""
    waiting = ""
    for row in rows:
        if row.role == controller and row.waits and row.waits[0].stalled_s >= _SHOW_WAIT_S:
            wait = row.waits[0]
            waiting = f"{wait.waits_for} ({wait.kind}) for {format_duration(wait.since_s)}: {wait.why}"
    # What has not moved since the stage began belongs to an earlier one.
    stage_s = max((row.stage_s for row in rows if row.role == controller), default=float("inf"))
    in_progress = [
        (counter.still_s, row.role, counter)
        for row in rows
        if row.alive and row.role != controller
        for counter in row.counters
        if counter.total is not None and 0 < counter.value < counter.total and counter.still_s <= stage_s
    ]
    if not in_progress:
        return StageActivity(waiting=waiting)
    _, role, latest = min(in_progress, key=lambda entry: entry[0])
    same = [one for row in rows if row.role == role and row.alive for one in row.counters if one.name == latest.name]
    return StageActivity(sum(one.value for one in same), _sum_totals(same), latest.name, waiting)


def _sum_totals(counters: list[CounterRow]) -> int | None:
    totals = [counter.total for counter in counters if counter.total is not None]
    return sum(totals) if len(totals) == len(counters) else None
