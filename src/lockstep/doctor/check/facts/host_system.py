"""How facts about a host are read: from /sys, /proc and /dev, with commands, and from the environment.

Tests replace each of these.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.base import waits


class SourceUnavailable(OSError):
    """A required command, folder or permission is missing."""


class SourceFault(SourceUnavailable):
    """A source of facts, such as a driver, reports an error."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


CommandRunner = Callable[[Sequence[str], float], CommandResult]
"""Runs a command with a time limit; raises SourceUnavailable if it does not exist, WaitTimeout (a TimeoutError) at the
limit."""


def run_command(command: Sequence[str], bound_s: float) -> CommandResult:
    """Runs a command on this host; see `CommandRunner`."""
    if shutil.which(command[0]) is None:
        raise SourceUnavailable(f"{command[0]} is not installed")
    environment = {**os.environ, "LC_ALL": "C"}
    done = waits.run(command, why="facts about this host", timeout_s=bound_s, env=environment, notice_after_s=None)
    return CommandResult(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True, slots=True)
class HostSystem:
    """Where the facts about a host are read."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    run: CommandRunner = run_command
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def read_text(path: Path) -> str | None:
    """The stripped content of a small file in sysfs or procfs; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The integer in a file (hexadecimal if it begins with 0x); None for anything else, such as `max`."""
    text = read_text(path)
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None


def list_folder(folder: Path) -> list[Path]:
    """The sorted entries of a folder; empty if the folder does not exist."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def first_line(text: str) -> str:
    """The first non-empty line of a command's output."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no output")[:160]
