"""The terminal as Lockstep writes to it: texts from outside cannot control it."""

import os
from collections.abc import Iterable, Iterator
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from lockstep.base.text import terminal_safe

FILE_WIDTH = 100_000
"""Characters in a line of a file or pipe: more than any line has, so that none is wrapped."""


class SafeConsole(Console):
    """A console that drops the control characters in texts, whatever they are a part of: a log's line, the name of a
    host, a model's answer. Its own styles and cursor movements are not texts, and pass. Lines are wrapped only on a
    terminal, or if the environment has `COLUMNS`: in files and pipes, addresses and paths stay whole, and the spaces
    that fill up a table's last column are left out.

    Args:
        file: where to write; standard output when absent.
        stderr: write to standard error.
        soft_wrap: leave the wrapping of long lines to the terminal.
        force_terminal: whether `file` is a terminal; found out when absent.
    """

    def __init__(
        self,
        file: IO[str] | None = None,
        *,
        stderr: bool = False,
        soft_wrap: bool = False,
        force_terminal: bool | None = None,
    ) -> None:
        super().__init__(file=file, stderr=stderr, soft_wrap=soft_wrap, force_terminal=force_terminal, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = FILE_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        safe = (
            # Without a mark, because the widths of columns are those of texts whose control characters take no room.
            Segment(text if control else terminal_safe(text, mark=""), style, control)
            for text, style, control in super().render(renderable, options)
        )
        return safe if self.is_terminal else _without_line_padding(safe)


def _without_line_padding(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yields the segments without the spaces at the ends of their lines."""
    spaces: list[Segment] = []
    for segment in segments:
        *whole, last = segment.text.split("\n")
        text = "".join(f"{line.rstrip(' ')}\n" for line in whole) + last
        if text.startswith("\n"):
            spaces.clear()
        shown = text.rstrip(" ")
        if shown or segment.control:
            yield from spaces
            spaces.clear()
            yield Segment(shown, segment.style, segment.control)
        if shown != text:
            spaces.append(Segment(text[len(shown) :], segment.style))
    yield from spaces
