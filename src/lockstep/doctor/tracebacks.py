"""Python tracebacks put together from the lines of one speaker, among those of others."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

START = "Traceback (most recent call last)"
STARTS = (START, "error raised in its creation task", "Unhandled error (suppress with")
"""Ray leaves the first of them out where it tells what a constructor or a task raised."""
LAST = ("error: ", "exception: ")
"""Texts of the last line of a traceback, in lower case."""
_ALONE = re.compile(
    r"\s?(?:Uncaught (?P<uncaught>[A-Z]\w*)|(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)))"
    r": (?P<message>\S.*)$"
)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+?)\s*$')
_ERROR = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Failure|Dead|Full|Empty"
    r"|[a-z]\w*)(?:\([\w.]+\))?)(?::\s?(?P<message>.*))?$"
)
_CHAIN = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_REMOTE = re.compile(
    r"^(?:ray\.exceptions\.)?"
    r"(?:RayTaskError|\w*Actor\w*Error: The actor died because of an error raised in its creation task)"
    r".*?\(pid=\d+(?:, ip=(?P<ip>[\w.:]+))?"
)
"""The traceback of the remote task follows."""
_TASK = re.compile(r"ray::\S+ \(pid=\d+(?:, ip=(?P<ip>[\w.:]+))?")
LIBRARY = re.compile(
    r"site-packages/|dist-packages/|lib/python3|<frozen |/bin/|torch/distributed|<string>|/ray/_private/"
)
TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms|[Ww]atchdog caught collective|collective operation timeout|Application timeout caused"
    r"|wait timeout after|timed out in (?:send|recv)|monitoredBarrier|[Tt]imeout(?:Error)?.{0,40}(?:barrier|collective)"
)
LOST = re.compile(
    r"(?i)connection (?:closed|reset|refused) by|connection reset|remote(?: |_)?(?:peer|process|error)|broken pipe"
    r"|ncclRemoteError|NCCL communicator was aborted|socket ?timeout|read error \[|socket closed|Connection was likely"
    r"|connectFullMesh"
)
_WRAPPERS = re.compile(
    r"ChildFailedError|RayTaskError|RayActorError|ActorDiedError|EngineDead|EngineGenerateError|ProcessExitedException"
    r"|ProcessRaisedException|CalledProcessError|SystemExit|KeyboardInterrupt|SignalException|TaskCancelled"
    r"|Engine core initialization|[Ee]ngine ?[Cc]ore.{0,40} died|Dist(?:Network|Store|Backend)Error"
    r"|Rendezvous\w+Error|BrokenProcessPool"
    r"|CancelledError|GetTimeoutError|RPC call to \w+ timed out"
    r"|NCCL (?:error|communicator)|cancelled|worker process|Child process|terminated with"
)
"""Exceptions that tell of another failure."""
_MOST = 200
_MESSAGE = 16
"""Lines of a message."""


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.source}"


@dataclass(frozen=True, slots=True)
class Traceback:
    """An exception with its way there.

    Attributes:
        type: As printed, with its module where that is printed.
        number: The line of the file that names the exception.
        first: The line that the traceback begins on.
        chained: Another exception led to this one or followed from it; the first of a chain is the cause.
    """

    type: str
    message: str
    frames: tuple[Frame, ...]
    number: int
    first: int
    text: str
    chained: bool = False
    ip: str = ""
    """Of the node that a remote task raised it on."""

    @property
    def alone(self) -> bool:
        """Only its last line is there."""
        return self.first == self.number

    @property
    def user(self) -> Frame | None:
        """The innermost frame that is no library's; else the innermost."""
        for each in reversed(self.frames):
            if not LIBRARY.search(each.file):
                return each
        return self.frames[-1] if self.frames else None

    @property
    def where(self) -> str:
        frame = self.user
        return "" if frame is None else f"{frame.function}() at {frame.file.rsplit('/', 1)[-1]}:{frame.line}"


def own(found: Traceback) -> bool:
    """Whether it tells of a failure of its own. An engine's `TimeoutError` without a word says only that a worker did
    not answer."""
    if not found.message and found.type == "TimeoutError" and found.frames and "/vllm/" in found.frames[-1].file:
        return False
    return not of_others(f"{found.type}: {found.message}")


def of_others(message: str) -> bool:
    """It tells of a wait that ended, a peer that left, or another failure."""
    return bool(TIMED_OUT.search(message) or LOST.search(message) or _WRAPPERS.search(message))


def alone(number: int, said: str) -> Traceback | None:
    """The last line of a traceback of which the rest was left out; None where a line is none."""
    found = _ALONE.match(said)
    if found is None:
        return None
    kind = found["type"] or found["uncaught"]
    return Traceback(kind, found["message"].rstrip(), (), number, number, said.strip())


def assemble(said: Sequence[tuple[int, str]]) -> Traceback | None:
    """From the lines of one speaker, the first of them one of `STARTS`; None where no exception follows.

    Args:
        said: Number and what is said, prefixes taken off.
    """
    frames: list[Frame] = []
    held: Traceback | None = None
    task = _TASK.search(said[0][1])
    lines = iter(range(1, min(len(said), _MOST)))
    indent = len(said[0][1]) - len(said[0][1].lstrip())
    for at in lines:
        number, line = said[at]
        found = _FRAME.match(line)
        if found:
            source = said[at + 1][1].strip() if at + 1 < len(said) and not _FRAME.match(said[at + 1][1]) else ""
            frames.append(Frame(found["file"], int(found["line"]), found["function"], source))
            continue
        body = line[indent:] if not line[:indent].strip() else line
        if not body.strip() or body.startswith((" ", "\t")) or (not frames and at > 3):
            continue
        error = _ERROR.match(body.rstrip())
        if error is None:
            if frames:
                return held
            continue
        message = _message(error["message"] or "", said, at + 1, indent)
        remote = _REMOTE.match(body)
        if remote:
            frames.clear()
            address = (remote["ip"] or "").rstrip(",")
            held = Traceback(error["type"], error["message"] or "", (), number, said[0][0], line.strip(), ip=address)
            continue
        chained = any(_CHAIN.search(each) for _, each in said[at + 1 : at + 4])
        address = held.ip if held else (task["ip"] or "").rstrip(",") if task else ""
        return Traceback(error["type"], message, tuple(frames), number, said[0][0], line.strip(), chained, address)
    return held


def _message(first: str, said: Sequence[tuple[int, str]], at: int, indent: int) -> str:
    """A message goes on until an empty line, another traceback or a prompt of another kind."""
    lines = [first]
    for _, line in said[at : at + _MESSAGE]:
        if not line.strip() or START in line or _CHAIN.search(line) or _FRAME.match(line):
            break
        lines.append(line[indent:].rstrip())
    return "\n".join(lines)


def of_speaker(
    following: Iterable[tuple[int, str]], speaker: Callable[[str], tuple[object, int]], first: tuple[int, str]
) -> list[tuple[int, str]]:
    """The lines from the first on which the same one says, their prefixes taken off as far as the first's went."""
    own, at = speaker(first[1])
    said = [(first[0], first[1][at:])]
    for number, line in following:
        other, begin = speaker(line)
        if other == own:
            said.append((number, line[begin:]))
        elif not own and begin:
            break
        if len(said) > _MOST:
            break
    return said
