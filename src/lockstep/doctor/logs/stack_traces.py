"""Parses Python tracebacks in logs, and stacks of live processes as py-spy and faulthandler print them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lockstep.doctor.logs.line_origin import UNKNOWN_ORIGIN, LineOrigin
from lockstep.doctor.logs.log_lines import RETRIES

TRACEBACK_START = "Traceback (most recent call last)"
UNHANDLED_TASK = "Unhandled error (suppress with"
"""How Ray reports an exception of a task whose result the driver does not wait for."""
TRACEBACK_STARTS = (TRACEBACK_START, "error raised in its creation task", UNHANDLED_TASK)
"""Starts of a traceback. Ray omits the usual one when it reports an exception of a constructor or a task."""
EXCEPTION_MARKS = ("error: ", "exception: ")
"""Texts that the last line of a traceback contains, in lower case."""
_LONE_EXCEPTION = re.compile(
    r"\s?(?:Uncaught (?P<uncaught>[A-Z]\w*)|(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)))"
    r": (?P<message>\S.*)$"
)
_TRACEBACK_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+?)\s*$')
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Failure|Dead|Full|Empty"
    r"|[a-z]\w*)(?:\([\w.]+\))?|(?:[a-z_]\w*\.)+(?:error|timeout))(?::\s?(?P<message>.*))?$"
)
_CHAIN = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_RAY_ERROR = re.compile(
    r"^(?:ray\.exceptions\.)?"
    r"(?:RayTaskError|\w*Actor\w*Error: The actor died because of an error raised in its creation task)"
    r".*?\(pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\w.:]+))?"
)
"""The line with which Ray introduces the traceback of a remote task."""
_RAY_TASK = re.compile(r"ray::\S+ \(pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\w.:]+))?")
LIBRARY_FILE = re.compile(
    r"site-packages/|dist-packages/|lib/python3|<frozen |/bin/|torch/distributed|<string>|/ray/_private/"
)
TIMEOUT_MESSAGE = re.compile(
    r"Timed out waiting \d+ms|[Ww]atchdog caught collective|collective operation timeout|Application timeout caused"
    r"|wait timeout after|timed out in (?:send|recv)|monitoredBarrier|[Tt]imeout(?:Error)?.{0,40}(?:barrier|collective)"
)
PEER_LOST_MESSAGE = re.compile(
    r"(?i)connection (?:closed|reset|refused) by|connection reset|remote(?: |_)?(?:peer|process|error)|broken pipe"
    r"|ncclRemoteError|NCCL communicator was aborted|socket ?timeout|read error \[|socket closed|Connection was likely"
    r"|connectFullMesh|failed to connect, willRetry="
)
_WRAPPER_EXCEPTIONS = re.compile(
    r"ChildFailedError|RayTaskError|RayActorError|ActorDiedError|EngineDead|EngineGenerateError|ProcessExitedException"
    r"|ProcessRaisedException|CalledProcessError|SystemExit|KeyboardInterrupt|SignalException|TaskCancelled"
    r"|Engine core initialization|[Ee]ngine ?[Cc]ore.{0,40} died|Dist(?:Network|Store|Backend)Error"
    r"|Rendezvous\w+Error|BrokenProcessPool"
    r"|CancelledError|GetTimeoutError|RPC call to \w+ timed out"
    r"|NCCL (?:error|communicator)|cancelled|worker process|Child process|terminated with"
)
"""Exceptions that only report another failure."""
_TROUBLE_WORDS = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL|[A-Z]\w*Error|failed|Killed|killed|[Aa]borted|crashed|OOM|out of memory|marked dead"
    r"|core dumped)\b"
    r"|^\[[^\]]{10,40} [EF] \d+ \d+\]|\[[EF]\d{4} \d\d:\d\d:\d\d|\berror:"
)
_NO_TROUBLE = re.compile(
    r"(?i)\b(?:0|no|zero) (?:\w+ )?(?:errors?|fail(?:ed|ures?)|aborted|crashed|killed)\b"
    r"|\b(?:errors?|fail(?:ed|ures?)|aborted|crashed|killed)\b\W{0,2}[=:] ?0\b"
    rf"|(?-i:{RETRIES})|\b(?:Task)?CancelledError\b|\bSystemExit: 0$"
    r"|^(?:\[(?:rank|default)\d+\]:)?\[I\d{4} .*"
)
"""A count of no errors, an exit as intended, or a line that a C++ library logs as information."""
_MAX_LINES = 200
_MESSAGE_LINES = 16
"""Maximum number of lines of a message."""


@dataclass(frozen=True, slots=True)
class TraceFrame:
    file: str
    line: int
    function: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.source}"


@dataclass(frozen=True, slots=True)
class Traceback:
    """An exception with its frames.

    Attributes:
        type: The type as printed, with its module if the module is printed.
        number: The line of the file that names the exception.
        first: The line on which the traceback begins.
        chained: Whether another exception was raised from this one or while it was handled.
    """

    type: str
    message: str
    frames: tuple[TraceFrame, ...]
    number: int
    first: int
    text: str
    chained: bool = False
    ip: str = ""
    """The address of the node on which a remote task raised the exception."""
    pid: int | None = None
    """The process of that task."""
    logged: bool = False
    """Whether a logger printed it, or Ray for a task that nobody waits for: neither ends the process. False if its
    lines name a process, since later lines may be those of another one."""

    @property
    def is_last_line_only(self) -> bool:
        """Whether only the last line of the traceback was printed."""
        return self.first == self.number and not self.frames

    @property
    def user_frame(self) -> TraceFrame | None:
        """The innermost frame outside libraries; if there is none, the innermost frame."""
        for each in reversed(self.frames):
            if not LIBRARY_FILE.search(each.file):
                return each
        return self.frames[-1] if self.frames else None

    @property
    def where(self) -> str:
        """The user frame as text."""
        frame = self.user_frame
        return "" if frame is None else f"{frame.function}() at {frame.file.rsplit('/', 1)[-1]}:{frame.line}"


def is_graceful(found: Traceback) -> bool:
    """Whether an exception ends a task or process as intended: exit code 0, or the cancellation of a task."""
    kind = found.type.rsplit(".", 1)[-1]
    return kind == "CancelledError" or (kind == "SystemExit" and found.message.strip() in ("", "0", "None"))


def names_trouble(text: str) -> bool:
    """Whether a line names an error, a kill or an abort, and does not count none."""
    return _TROUBLE_WORDS.search(_NO_TROUBLE.sub("", text)) is not None


def is_primary(found: Traceback) -> bool:
    """Whether an exception is a failure itself and does not only report another one.

    A `TimeoutError` without a message in vLLM only means that a worker did not answer.
    """
    if not found.message and found.type == "TimeoutError" and found.frames and "/vllm/" in found.frames[-1].file:
        return False
    return not is_secondary(f"{found.type}: {found.message}")


def is_secondary(message: str) -> bool:
    """Whether a message reports an ended wait, a lost peer, or another failure."""
    return bool(
        TIMEOUT_MESSAGE.search(message) or PEER_LOST_MESSAGE.search(message) or _WRAPPER_EXCEPTIONS.search(message)
    )


def parse_lone_exception(number: int, text: str) -> Traceback | None:
    """Parses the last line of a traceback whose other lines are missing; None if the line names no exception."""
    found = _LONE_EXCEPTION.match(text)
    if found is None:
        return None
    kind = found["type"] or found["uncaught"]
    return Traceback(kind, found["message"].rstrip(), (), number, number, text.strip())


def escaped_traceback(number: int, line: str) -> list[tuple[int, str]]:
    """Returns the lines of a traceback that a value of a structured record holds; empty if there is none."""
    at = line.find(TRACEBACK_START)
    if at < 0 or "\\n" not in line[at:]:
        return []
    value = _END_OF_VALUE.split(line[at:], maxsplit=1)[0]
    text = value.replace("\\n", "\n").replace('\\"', '"').replace("\\t", "\t")
    return [(number, each) for each in text.split("\n")]


def parse_traceback(numbered: Sequence[tuple[int, str]]) -> Traceback | None:
    """Parses a traceback; None if no exception follows its start.

    Args:
        numbered: Line numbers and texts, without prefixes, of the lines of one origin. The first contains one of
            `TRACEBACK_STARTS`.
    """
    frames: list[TraceFrame] = []
    ray_error: Traceback | None = None
    task = _RAY_TASK.search(numbered[0][1])
    lines = iter(range(1, min(len(numbered), _MAX_LINES)))
    indent = len(numbered[0][1]) - len(numbered[0][1].lstrip())
    for at in lines:
        number, line = numbered[at]
        found = _TRACEBACK_FRAME.match(line)
        if found:
            source = (
                numbered[at + 1][1].strip()
                if at + 1 < len(numbered) and not _TRACEBACK_FRAME.match(numbered[at + 1][1])
                else ""
            )
            frames.append(TraceFrame(found["file"], int(found["line"]), found["function"], source))
            continue
        body = line[indent:] if not line[:indent].strip() else line
        if not body.strip() or body.startswith((" ", "\t")) or (not frames and at > 3):
            continue
        error = _EXCEPTION.match(body.rstrip())
        if error is None:
            if frames:
                return ray_error
            continue
        message = _message(error["message"] or "", numbered, at + 1, indent)
        remote = _RAY_ERROR.match(body)
        if remote:
            frames.clear()
            address = (remote["ip"] or "").rstrip(",")
            ray_error = Traceback(
                error["type"],
                error["message"] or "",
                (),
                number,
                numbered[0][0],
                line.strip(),
                ip=address,
                pid=int(remote["pid"]),
            )
            continue
        chained = any(_CHAIN.search(each) for _, each in numbered[at + 1 : at + 4])
        address = ray_error.ip if ray_error else (task["ip"] or "").rstrip(",") if task else ""
        pid = ray_error.pid if ray_error else int(task["pid"]) if task else None
        return Traceback(
            error["type"], message, tuple(frames), number, numbered[0][0], line.strip(), chained, address, pid
        )
    return ray_error


def _message(first: str, numbered: Sequence[tuple[int, str]], at: int, indent: int) -> str:
    """Returns the message, which ends before an empty line, another traceback or a chained exception."""
    lines = [first]
    for _, line in numbered[at : at + _MESSAGE_LINES]:
        if not line.strip() or TRACEBACK_START in line or _CHAIN.search(line) or _TRACEBACK_FRAME.match(line):
            break
        lines.append(line[indent:].rstrip())
    return "\n".join(lines)


_END_OF_VALUE = re.compile(r"(?<!\\)[\"'](?=[,}\]\s]|$)")
_PYSPY_PROCESS = re.compile(r"^Process (?P<pid>\d+)(?:: (?P<command>.*))?")
_THREAD_HEADER = re.compile(
    r"^(?:Current thread|Thread) (?P<id>0x[0-9a-f]+|\d+)(?: \((?P<state>[\w+]+)\))?(?::? \"(?P<name>[^\"]*)\")?"
)
_PYSPY_ERROR = re.compile(r"^Error: (?:Failed to|Permission|.*[Oo]peration not permitted|.*timed out)")
_PYSPY_FRAME = re.compile(r"^ {2,}(?P<function>\S.*?) \((?P<file>[^():]+):(?P<line>\d+)\)$")
_FAULTHANDLER_FRAME = re.compile(r'^ {2}File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)$')


UNREADABLE = "unreadable"
"""State of a process whose stack could not be read, because it is in the kernel or belongs to another user."""


@dataclass(frozen=True, slots=True)
class LoggedStack:
    """The stack of a thread, outermost frame first.

    Attributes:
        number: The line of the file that names the thread.
    """

    origin: LineOrigin
    pid: int | None
    thread: str
    state: str
    frames: tuple[TraceFrame, ...]
    file: str
    number: int
    text: str

    @property
    def is_main_thread(self) -> bool:
        return self.thread in ("MainThread", "")


def parse_stacks(lines: Iterator[tuple[int, str]], origin: LineOrigin, file: str) -> Iterator[LoggedStack]:
    """Yields all stacks of a file."""
    pid: int | None = None
    stack: LoggedStack | None = None
    frames: list[TraceFrame] = []
    for number, line in lines:
        process, thread = _PYSPY_PROCESS.match(line), _THREAD_HEADER.match(line)
        if (process or thread) and stack is not None:
            yield replace(stack, frames=tuple(reversed(frames)))
            stack, frames = None, []
        if process:
            pid = int(process["pid"])
        elif thread:
            stack = LoggedStack(
                origin or UNKNOWN_ORIGIN, pid, thread["name"] or "", thread["state"] or "", (), file, number, line
            )
        elif pid is not None and stack is None and _PYSPY_ERROR.match(line):
            yield LoggedStack(origin or UNKNOWN_ORIGIN, pid, "", UNREADABLE, (), file, number, line)
        elif stack is not None:
            found = _PYSPY_FRAME.match(line) or _FAULTHANDLER_FRAME.match(line)
            if found:
                frames.append(TraceFrame(found["file"], int(found["line"]), found["function"]))
    if stack is not None:
        yield replace(stack, frames=tuple(reversed(frames)))
