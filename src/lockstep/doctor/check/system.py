"""Where facts are read: roots of file systems, a way to run commands, the environment. Tests hand in their own."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.watch import waits


class Unavailable(OSError):
    """Something that is needed for a look is not there: a command, a folder, a right. Says what, in words."""


class Fault(Unavailable):
    """Something is there and says itself that it is not well: its words."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str


Runner = Callable[[Sequence[str], float], Ran]
"""Runs a command for at most so many seconds; Unavailable where there is none of that name, WaitTimeout (a
TimeoutError) at the bound."""


def run_command(command: Sequence[str], bound_s: float) -> Ran:
    """The Runner of this host."""
    if shutil.which(command[0]) is None:
        raise Unavailable(f"there is no {command[0]} here")
    environment = {**os.environ, "LC_ALL": "C"}
    done = waits.run(command, why="a look at this host", timeout_s=bound_s, env=environment, notice_after_s=None)
    return Ran(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True, slots=True)
class System:
    """One host as it is looked at."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    run: Runner = run_command
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def text_of(path: Path) -> str | None:
    """A small file of sysfs or procfs, stripped; None where it is not there or does not answer."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def number_of(path: Path) -> int | None:
    """The whole number that a file holds, hexadecimal with 0x; None for anything else, such as `max`."""
    text = text_of(path)
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None


def entries(folder: Path) -> list[Path]:
    """What is in a folder, by name; nothing where it is not there."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def first_line(text: str) -> str:
    """Of what a command printed, its first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "it says nothing")[:160]
