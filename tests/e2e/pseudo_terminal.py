"""What a command writes to a terminal."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ATTACKS = {
    "clear": "\x1b[2J", "title": "\x1b]0;owned\x07", "eight bits": "\x9b31m", "link": "\x1b]8;;http://evil\x1b\\",
    "paste": "\x1b]52;c;cm0gLXJm\x07", "answer": "\x1b[6n",
    "override": "\u202egnp.exe", "backspace": "safe\x08\x08evil",
    "markup": "[red]wet[/red] [/] [/nothing] [link=http://evil]here[/link] [bold", "return": "genuine\rforged",
}  # fmt: skip
"""Texts that would do something to a terminal, or to a library that understands markup, if they reached it."""
HOSTILE = " ".join(ATTACKS.values())
_OWN_SEQUENCES = re.compile(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]|\x1b\[\d*[AK]|\x1b\[2K|\x1b\[\?1049[lh]|\x1b\[H")
"""Styles and the cursor movements of rich."""
_ERASED = r"\n?\r(?:\x1b\[1A)?\x1b\[2K"
"""What erases a live line; when it is removed for good, rich has begun the next line."""


@dataclass(frozen=True)
class Shown:
    """What a command wrote, and how it ended."""

    text: str
    code: int

    def dangers(self) -> list[str]:
        """What would control the terminal: all but styles, lines and cursor movements of rich."""
        # Rich returns to the start of a line only before it erases the line.
        rest = _OWN_SEQUENCES.sub("", re.sub(r"\r(?:\x1b\[1A)?\x1b\[2K", "", self.text.replace("\r\n", "\n")))
        rest = re.sub(r"\r(?=$|\n)", "", rest)
        return re.findall(
            r"[^\x00-\x1f\x7f-\x9f]{0,20}[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069].{0,20}", rest
        )

    def obeyed_markup(self) -> list[str]:
        """Markup that was understood instead of shown."""
        plain = _OWN_SEQUENCES.sub("", self.text)
        joined = re.sub(r"\s+", "", plain)
        return [] if "wet" not in joined else [] if "[red]wet[/red]" in joined else [plain]

    def lines(self) -> list[str]:
        """The lines that stay on the terminal, without styles."""
        plain = re.sub(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]", "", self.text.replace("\r\n", "\n"))
        return re.sub(rf"[^\n]*{_ERASED}", "", plain).split("\n")

    def live_lines(self, after: str = "") -> list[str]:
        """The lines that were erased again, in the text after the last `after`."""
        plain = re.sub(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]", "", self.text.rpartition(after)[2] if after else self.text)
        erased = [part.rpartition("\n")[2] for part in re.split(_ERASED, plain.replace("\r\n", "\n"))[:-1]]
        return [line for line in erased if line]


def on_terminal(
    arguments: Sequence[str],
    folder: Path,
    timeout_s: float = 60.0,
    columns: int = 200,
    narrows: tuple[str, int] | None = None,
    **environment: str,
) -> Shown:
    """Runs `lockstep` with a terminal as its output and error output.

    Args:
        narrows: a text after which the user narrows the terminal's window, to this many columns.
    """
    own, other = pty.openpty()
    _resize(own, columns)
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments], cwd=folder,
        stdin=subprocess.DEVNULL, stdout=other, stderr=other,
        env={**inherited, "TERM": "xterm-256color", **environment},
        start_new_session=True,
    )  # fmt: skip
    os.close(other)
    data, until = bytearray(), time.monotonic() + timeout_s
    try:
        while time.monotonic() < until:
            if select.select([own], [], [], 0.2)[0]:
                try:
                    part = os.read(own, 1 << 16)
                except OSError:
                    break  # the last writer has closed the terminal
                data += part
            if narrows is not None and narrows[0].encode() in data:
                _resize(own, narrows[1])
                narrows = None
        return Shown(data.decode(errors="surrogateescape"), process.wait(max(1.0, until - time.monotonic())))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        os.close(own)


def _resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
