"""Stacks of live processes as py-spy and faulthandler print them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.doctor.prefixes import NOBODY, Who
from lockstep.doctor.tracebacks import Frame

_PROCESS = re.compile(r"^Process (?P<pid>\d+)(?:: (?P<command>.*))?")
_THREAD = re.compile(
    r"^(?:Current thread|Thread) (?P<id>0x[0-9a-f]+|\d+)(?: \((?P<state>[\w+]+)\))?(?::? \"(?P<name>[^\"]*)\")?"
)
_REFUSED = re.compile(r"^Error: (?:Failed to|Permission|.*[Oo]peration not permitted|.*timed out)")
_FRAME = re.compile(r"^ {2,}(?P<function>\S.*?) \((?P<file>[^():]+):(?P<line>\d+)\)$")
_DUMPED = re.compile(r'^ {2}File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)$')


UNREADABLE = "unreadable"
"""The state of a process that could not be stopped to look at: it sits in the kernel, or belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A thread; its frames, the outermost first.

    Attributes:
        number: The line of the file that names the thread.
    """

    who: Who
    pid: int | None
    thread: str
    state: str
    frames: tuple[Frame, ...]
    file: str
    number: int
    text: str

    @property
    def main(self) -> bool:
        return self.thread in ("MainThread", "")


def read(lines: Iterator[tuple[int, str]], who: Who, file: str) -> Iterator[Stack]:
    """All stacks of a file."""
    pid: int | None = None
    stack: Stack | None = None
    frames: list[Frame] = []
    for number, line in lines:
        process, thread = _PROCESS.match(line), _THREAD.match(line)
        if (process or thread) and stack is not None:
            yield replace(stack, frames=tuple(reversed(frames)))
            stack, frames = None, []
        if process:
            pid = int(process["pid"])
        elif thread:
            stack = Stack(who or NOBODY, pid, thread["name"] or "", thread["state"] or "", (), file, number, line)
        elif pid is not None and stack is None and _REFUSED.match(line):
            yield Stack(who or NOBODY, pid, "", UNREADABLE, (), file, number, line)
        elif stack is not None:
            found = _FRAME.match(line) or _DUMPED.match(line)
            if found:
                frames.append(Frame(found["file"], int(found["line"]), found["function"]))
    if stack is not None:
        yield replace(stack, frames=tuple(reversed(frames)))
