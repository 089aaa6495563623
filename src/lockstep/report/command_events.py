"""What a command reports on standard error: as text for people, or as one JSON object per line for programs that
collect logs (docs/console.md)."""

import json
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from lockstep.base.secrets import redact_text, secret_values
from lockstep.base.text import count_noun, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lockstep.config.run_config import ReportConfig
    from lockstep.ledger.sqlite_index import CompletionSample
    from lockstep.report.live_console import RunConsole, StageActivity

LINE_S = 10.0
"""Without a terminal: the fewest seconds between two lines about the progress of the same thing."""
WAIT_S = 2.0
"""Without a terminal: the wait of a stage is reported after so many seconds, then at doubling intervals."""


class LogFormat(StrEnum):
    """How a command reports on standard error what it does."""

    text = "text"
    json = "json"


@dataclass(frozen=True, slots=True)
class CommandEvent:
    """Something that a command reports, in both forms."""

    name: str
    """One of those in docs/console.md."""
    message: str
    """What its text says."""
    text: "RenderableType | None"
    """What a terminal shows: markup of rich, or a table; None if the command prints it elsewhere."""
    level: str = "info"
    fields: Mapping[str, object] = field(default_factory=dict)
    """The other keys of the JSON object; those that are None are left out."""


class CommandEvents(ABC):
    """Where a command reports what it does. Any thread may report."""

    log_format: ClassVar[LogFormat]

    @abstractmethod
    def report(self, event: CommandEvent) -> None:
        """Reports an event at once."""

    @abstractmethod
    def open_run_console(
        self, name: str, folder: Path, steps: int, settings: "ReportConfig", activity: "Callable[[], StageActivity]"
    ) -> "RunConsole":
        """The console of a run.

        Args:
            activity: what the run does now, for a line that is refreshed.
        """

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """A function that shows what is waited for: every ten seconds, if it is called often."""
        began = reported_at = time.monotonic()

        def show_rarely(text: str) -> None:
            nonlocal reported_at
            now = time.monotonic()
            if now - reported_at >= LINE_S:
                reported_at = now
                self.progress(f"{text or 'working'}, {format_duration(now - began)} so far")

        yield show_rarely

    def progress(self, text: str) -> None:
        """Reports what the command does now, for people who would otherwise see nothing for seconds."""
        self.report(CommandEvent("progress", text, f"[dim]{shown_text(text)}[/]"))

    def note(self, text: str) -> None:
        """Reports what people should know before they rely on the result."""
        self.report(CommandEvent("note", text, f"[yellow]note[/] {shown_text(text)}"))

    def warning(self, text: str) -> None:
        """Reports what went wrong and does not end the command."""
        self.report(CommandEvent("warning", text, f"[yellow]{shown_text(text)}[/]", "warning"))

    def refuse(self, error: Exception) -> None:
        """Reports why nothing was started, one problem of a config per line."""
        from lockstep.config.errors import ConfigError

        problems = error.problems if isinstance(error, ConfigError) else ()
        lines = [f"[bold red]refused[/] {shown_text(error.source if isinstance(error, ConfigError) else str(error))}"]
        for problem in problems:
            at = f"[bold]{shown_text(problem.field)}[/]: " if problem.field else ""
            hint = f" [dim]({shown_text(problem.hint)})[/]" if problem.hint else ""
            lines.append(f"  {at}{shown_text(problem.message)}{hint}")
        rows = [{"field": each.field, "message": each.message, "hint": each.hint} for each in problems]
        self.report(CommandEvent("refused", str(error), "\n".join(lines), "error", {"problems": rows or None}))


def shown_text(text: str) -> str:
    """The text as rich's markup, with secrets hidden: messages quote addresses, settings and answers of servers."""
    from rich.markup import escape

    return escape(redact_text(text, secret_values(os.environ)))


class TextEvents(CommandEvents):
    """Prints the text of events on standard error."""

    log_format = LogFormat.text

    def report(self, event: CommandEvent) -> None:
        """Prints an event. Long lines of text are wrapped by the terminal, tables are fitted to its width."""
        from lockstep.report.safe_console import SafeConsole

        if event.text is not None:
            SafeConsole(stderr=True, soft_wrap=isinstance(event.text, str)).print(event.text)

    def open_run_console(
        self, name: str, folder: Path, steps: int, settings: "ReportConfig", activity: "Callable[[], StageActivity]"
    ) -> "RunConsole":
        """A live line on a terminal, plain lines elsewhere."""
        from lockstep.report.live_console import LiveConsole

        return LiveConsole(
            name, folder, steps, quiet=not settings.console, lines_every=settings.lines_every,
            lines_every_s=settings.lines_every_s, activity=activity,
        )  # fmt: skip

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """A function that shows what is waited for: on the last line of a terminal, elsewhere every ten seconds."""
        from lockstep.report.safe_console import SafeConsole

        console = SafeConsole(stderr=True, soft_wrap=True)
        if not console.is_terminal or console.is_dumb_terminal:
            with super().status() as show:
                yield show
            return
        with console.status("starting") as line:
            yield lambda text: line.update(shown_text(text or "working"))


TERMINAL = TextEvents()
"""For commands that only write text."""


class JsonEvents(CommandEvents):
    """Writes events, one JSON object per line.

    Args:
        process: the process that writes: `controller`, or the command.
        stream: where to write; standard error when absent.
    """

    log_format = LogFormat.json

    def __init__(self, process: str, stream: TextIO | None = None) -> None:
        self._process, self._stream, self._lock = process, stream, threading.Lock()
        self._known = secret_values(os.environ)

    def report(self, event: CommandEvent) -> None:
        """Writes an event."""
        self.write(event.name, event.message, event.level, **event.fields)

    def open_run_console(
        self, name: str, folder: Path, steps: int, settings: "ReportConfig", activity: "Callable[[], StageActivity]"
    ) -> "RunConsole":
        """Writes what a run does as events; no line is refreshed, so that `activity` is not needed."""
        return JsonConsole(self, name, folder, steps, quiet=not settings.console)

    def write(self, event: str, message: str, level: str = "info", **fields: object) -> None:
        """Writes an object. Secrets are hidden, numbers that are not finite are null, and all but ASCII is escaped, so
        that a text cannot control a terminal.

        Args:
            event: its name, one of those in docs/console.md.
            message: what a text line would say.
            fields: its other keys; those that are None are left out.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        row: dict[str, object] = {"time": now, "level": level, "process": self._process, "event": event}
        row["message"] = message.strip()
        row.update((name, value) for name, value in fields.items() if value is not None)
        line = json.dumps(self._plain(row), allow_nan=False)
        with self._lock:
            stream = self._stream or sys.stderr
            stream.write(line + "\n")
            stream.flush()

    def _plain(self, value: object) -> Any:
        match value:
            case str():
                return redact_text(str(value), self._known)
            case bool() | int() | None:
                return value
            case float():
                return value if math.isfinite(value) else None
            case Mapping():
                return {redact_text(str(key), self._known): self._plain(inner) for key, inner in value.items()}
            case list() | tuple():
                return [self._plain(inner) for inner in value]
        if hasattr(value, "tolist"):  # a number or an array of numpy or torch
            return self._plain(value.tolist())
        return redact_text(str(value), self._known)


def open_events(log_format: LogFormat, process: str) -> CommandEvents:
    """Where a command reports.

    Args:
        process: what the events name as the process that writes them.
    """
    return JsonEvents(process) if log_format is LogFormat.json else TERMINAL


class JsonConsole:
    """The console of a run as a log of events: a `RunConsole`. `quiet` writes only warnings and the last event."""

    def __init__(self, events: JsonEvents, name: str, folder: Path, steps: int, *, quiet: bool = False) -> None:
        self._events, self._name, self._folder, self._steps, self._quiet = events, name, folder, steps, quiet
        self._done = self._first = 0
        self._began = self._stage_began = time.monotonic()
        self._stage, self._report_after_s = "", WAIT_S

    def _write(self, event: str, message: str, level: str = "info", **fields: object) -> None:
        if not self._quiet or level != "info":
            self._events.write(event, message, level, **{"step": self._done, **fields})

    def start(self, first: int = 0) -> None:
        """Begins the run, with `first` steps already done."""
        self._done = self._first = first
        self._began = time.monotonic()
        where = f", after step {first} of {self._steps}" if first else ""
        self._write(
            "started", f"{self._name} in {self._folder}{where}", steps=self._steps, name=self._name, run=self._folder
        )

    def stage(self, name: str) -> None:
        """Begins a stage of the step; "" between stages."""
        self._stage, self._stage_began, self._report_after_s = name, time.monotonic(), WAIT_S

    def show_wait(self, text: str) -> None:
        """Reports what the run waits for, at doubling intervals. Thread-safe; may be called before `start`."""
        seconds = time.monotonic() - self._stage_began
        if text and seconds >= self._report_after_s:
            self._report_after_s = 2 * seconds
            message = f"{self._stage} waits for {text}"
            self._write("wait", message, stage=self._stage, seconds=round(seconds, 3))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ends a step (counted from 0)."""
        self._done = step + 1
        per_step = (time.monotonic() - self._began) / max(self._done - self._first, 1)
        left = round(per_step * (self._steps - self._done), 3)
        message = f"step {self._done}/{self._steps}"
        self._write("step", message, steps=self._steps, seconds_left=left, metrics=metrics)

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Reports an evaluation of the weights after `done` steps."""
        self._write("evaluation", f"evaluation after step {done}", step=done, metrics=metrics)

    def samples(self, done: int, samples: "Sequence[CompletionSample]") -> None:
        """Reports completions of step `done`."""
        from lockstep.report.completion_samples import sample_record

        self._write("samples", f"samples of step {done}", step=done, samples=[sample_record(each) for each in samples])

    def message(self, text: str) -> None:
        """Reports information once."""
        self._write("information", text)

    def warning(self, text: str) -> None:
        """Reports a warning, in quiet mode too."""
        self._write("warning", text, "warning")

    def finish(self, reason: str, report: Path | None = None, incidents: str = "") -> None:
        """The last event: how the run ended, its incidents, and where its files are."""
        seconds = time.monotonic() - self._began
        steps = count_noun(self._steps, "step")
        self._events.write(
            "finished", f"{reason} after {self._done} of {steps} in {format_duration(seconds)}",
            {"finished": "info", "failed": "error"}.get(reason, "warning"), step=self._done, steps=self._steps,
            reason=reason, seconds=round(seconds, 3), run=self._folder, report=report, incidents=incidents or None,
        )  # fmt: skip

    def close(self) -> None:
        """Does nothing: every event is written at once."""
