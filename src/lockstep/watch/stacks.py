"""Stacks of other processes, by py-spy: without their help and without stopping them.

`--nonblocking` reads the memory of a running, blocked or SIGSTOPped process; the others need it to be stoppable.
"""

import itertools
import json
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

LIMIT_S = 5.0
"""A dump takes 13 to 30 ms, one with native frames below a second; on a busy machine many times that."""
MAX_BYTES = 4 << 20

_OURS = str(Path(__file__).resolve().parents[1])
_WATCH = str(Path(__file__).resolve().parent)
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


@dataclass(frozen=True, slots=True)
class Frame:
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        """`score() at reward.py:31`."""
        name = self.function if self.function.startswith("<") else f"{self.function}()"
        return f"{name} at {PurePath(self.file).name}:{self.line}"


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread's stack, innermost frame first."""

    native_id: int
    name: str
    frames: tuple[Frame, ...]
    active: bool = False
    holds_gil: bool = False


def command(pid: int, native: bool = False) -> list[str] | None:
    """What to run for the stacks of a process as JSON; None where py-spy is not installed. Native frames need a
    process that can be stopped for a moment: not one that is stopped already."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        return None
    return [found, "dump", "--json", "--full-filenames", "--native" if native else "--nonblocking", "--pid", str(pid)]


def parse(output: bytes) -> tuple[Thread, ...]:
    """The threads of py-spy's JSON; empty for what is none."""
    try:
        told = json.loads(output)
        return tuple(_thread(each) for each in told)
    except (ValueError, TypeError, KeyError, AttributeError):
        return ()


def _thread(told: dict[str, Any]) -> Thread:
    frames = tuple(Frame(str(each["name"]), str(each["filename"]), int(each["line"])) for each in told["frames"])
    return Thread(
        int(told["os_thread_id"] or 0), told["thread_name"] or "", frames, bool(told["active"]), bool(told["owns_gil"])
    )


def main_thread(threads: Sequence[Thread], pid: int) -> Thread | None:
    """The thread whose id is the process's; the one with frames where none is."""
    return next((each for each in threads if each.native_id == pid), threads[0] if threads else None)


def where(frames: Iterable[Frame]) -> str:
    """The innermost line of the user's own code, in words; where there is none, of Lockstep's, then of anybody's."""
    known = [frame for frame in frames if not frame.file.startswith("<")]
    for wanted in (0, 1, 2):
        found = next((frame for frame in known if _distance(frame.file) == wanted), None)
        if found is not None:
            return str(found)
    return ""


def _distance(file: str) -> int:
    """0 for the user's code, 1 for Lockstep's, 2 for libraries, the interpreter's own and what only looks on: the
    recorder's frames stand around every collective, those of waits around every wait."""
    if file.startswith(_OURS):
        return 2 if file.startswith(_WATCH) else 1
    parts = PurePath(file).parts
    library = {"site-packages", "dist-packages"} & set(parts) or (parts and not file.endswith(".py"))
    return 2 if library or file.startswith(_STDLIB) or _in_stdlib(parts) else 0


def _in_stdlib(parts: Sequence[str]) -> bool:
    """Of another interpreter than ours: `.../lib/python3.12/threading.py`."""
    return any(
        before == "lib" and after.startswith("python3") for before, after in itertools.pairwise(parts)
    )  # fmt: skip


def text(threads: Sequence[Thread]) -> str:
    """Stacks as a person reads them, innermost frame first."""
    lines = []
    for thread in threads:
        marks = [mark for mark, is_so in (("active", thread.active), ("holds the GIL", thread.holds_gil)) if is_so]
        lines.append(f"thread {thread.native_id} {thread.name or '(no name)'} {' '.join(marks)}".rstrip())
        lines += [f"    {frame.function} ({frame.file}:{frame.line})" for frame in thread.frames]
    return "\n".join(lines)


def to_json(threads: Sequence[Thread]) -> list[dict[str, Any]]:
    return [
        {
            "thread": each.native_id, "name": each.name, "active": each.active, "holds_gil": each.holds_gil,
            "frames": [[frame.function, frame.file, frame.line] for frame in each.frames],
        }
        for each in threads
    ]  # fmt: skip
