"""The terminal as Lockstep writes to it: texts from outside cannot control it."""

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from lockstep.base.text import terminal_safe


class SafeConsole(Console):
    """A console that drops the control characters in texts, whatever they are a part of: a log's line, the name of a
    host, a model's answer. Its own styles and cursor movements are not texts, and pass.

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

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            # Without a mark, because the widths of columns are those of texts whose control characters take no room.
            yield Segment(text if control else terminal_safe(text, mark=""), style, control)
