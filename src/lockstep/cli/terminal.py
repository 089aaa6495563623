"""What the commands share: exit codes, results on the terminal, the progress of reading, and the check for optional
dependencies.

| code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed |
| 2 | refused before anything started: config, data, placement, run folder |
| 3 | done in part: `lockstep convert` lists what is left |
| 130 | ended by Ctrl-C; the run can be resumed |
"""

import sys
import time
from importlib.util import find_spec
from types import TracebackType
from typing import Annotated, Any

import typer

from lockstep.base.text import count_noun, format_duration
from lockstep.report.command_events import LINE_S, TERMINAL, CommandEvents, LogFormat

FAILED, REFUSED, PARTIAL, INTERRUPTED = 1, 2, 3, 130

_TRAIN = (
    "torch", "transformers", "datasets", "pyarrow", "safetensors", "tokenizers", "accelerate", "peft",
    "huggingface_hub", "httpx", "matplotlib", "tensorboard",
)  # fmt: skip
_MODULES = {
    "train": _TRAIN,
    "ray": (*_TRAIN, "ray"),
    "serve": (*_TRAIN, "fastapi", "uvicorn"),
    "dashboard": ("fastapi", "uvicorn", "pyarrow"),
}
"""The modules that each extra of the distribution installs."""

_QUIET_S = 1.0
"""Nothing is shown before: most jobs are read in less time."""

LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format", help="Progress, notes and errors as text, or as one JSON object per line (docs/console.md)."
    ),
]


def print_text(text: str) -> None:
    """Prints a result on standard output, as it is except for control characters: names and texts in it may come from
    others. JSON, which has none, is printed with `typer.echo`."""
    from lockstep.report.safe_console import SafeConsole

    SafeConsole(soft_wrap=True).print(text, markup=False)


def require_extra(extra: str, command: str, events: CommandEvents = TERMINAL) -> None:
    """Exits with a hint to install an extra of the distribution if one of its modules is missing.

    Args:
        command: the command that needs the extra, as the user types it.
    """
    missing = next((name for name in _MODULES[extra] if find_spec(name) is None), None)
    if missing is not None:
        text = f"{command} needs {missing}, which is not installed: pip install 'lockstep-rl[{extra}]'"
        events.refuse(ModuleNotFoundError(text))
        raise typer.Exit(REFUSED)


class ReadingProgress:
    """A context manager that is called with (files read, files, bytes read).

    A terminal gets a bar, which disappears at the end. A file or pipe gets a line every ten seconds.
    """

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "ReadingProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, files: int, size: int) -> None:
        now = time.monotonic()
        if sys.stderr.isatty():
            if self._bar is None and now - self._began >= _QUIET_S and done < files:
                self._open_bar(files)
            if self._bar is not None:
                self._bar.update(self._task, completed=done, description=f"reading logs, {size / 1e6:,.0f} MB")
        elif now - self._shown >= LINE_S and done < files:
            self._shown = now
            took = format_duration(now - self._began)
            sys.stderr.write(f"read {done:,} of {count_noun(files, 'file')}, {size / 1e6:,.0f} MB, in {took}\n")
            sys.stderr.flush()

    def _open_bar(self, files: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from lockstep.report.safe_console import SafeConsole

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=SafeConsole(stderr=True), transient=True)
        self._task = self._bar.add_task("reading logs", total=files)
        self._bar.start()
