"""How facts are read from a host: the roots of its file systems, a command runner and the environment. Tests pass
their own.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.base import waits


class SourceUnavailable(OSError):
    """Something that is needed for a look is not there: a command, a folder, a right. Says what, in words."""


class SourceFault(SourceUnavailable):
    """Something is there and says itself that it is not well: its words."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    code: int
    out: str
    err: str


CommandRunner = Callable[[Sequence[str], float], CommandResult]
"""Runs a command for at most so many seconds; Unavailable where there is none of that name, WaitTimeout (a
TimeoutError) at the bound."""


def run_command(command: Sequence[str], bound_s: float) -> CommandResult:
    """The Runner of this host."""
    if shutil.which(command[0]) is None:
        raise SourceUnavailable(f"there is no {command[0]} here")
    environment = {**os.environ, "LC_ALL": "C"}
    done = waits.run(command, why="a look at this host", timeout_s=bound_s, env=environment, notice_after_s=None)
    return CommandResult(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True, slots=True)
class HostSystem:
    """One host as it is looked at."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    run: CommandRunner = run_command
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def read_text(path: Path) -> str | None:
    """A small file of sysfs or procfs, stripped; None where it is not there or does not answer."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The whole number that a file holds, hexadecimal with 0x; None for anything else, such as `max`."""
    text = read_text(path)
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None


def list_folder(folder: Path) -> list[Path]:
    """What is in a folder, by name; nothing where it is not there."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def first_line(text: str) -> str:
    """Of what a command printed, its first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "it says nothing")[:160]
