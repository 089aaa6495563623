"""Shows on standard error how far the reading of many files is."""

import sys
import time
from types import TracebackType
from typing import Any

from lockstep.base.text import count_noun, format_duration

_QUIET_S = 1.0
"""Nothing is shown before: most jobs are read in less time."""
_LINE_S = 10.0
"""Seconds between two lines, where standard error is no terminal."""


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
        elif now - self._shown >= _LINE_S and done < files:
            self._shown = now
            took = format_duration(now - self._began)
            sys.stderr.write(f"read {done:,} of {count_noun(files, 'file')}, {size / 1e6:,.0f} MB, in {took}\n")
            sys.stderr.flush()

    def _open_bar(self, files: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("reading logs", total=files)
        self._bar.start()
