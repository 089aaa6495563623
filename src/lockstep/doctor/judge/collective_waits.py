"""Finds the collective in which each rank waited, from tracebacks, watchdog lines, and stacks of live processes."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.logs.parsed_log import ParsedLog
from lockstep.doctor.logs.stack_traces import (
    LIBRARY_FILE,
    PEER_LOST_MESSAGE,
    TIMEOUT_MESSAGE,
    LoggedStack,
    Traceback,
    TraceFrame,
)
from lockstep.doctor.logs.timestamps import DAY_S, TimestampParser

_OPERATION_NAMES = (
    ("reduce_scatter", re.compile(r"reduce_?scatter")), ("allreduce", re.compile(r"all_?reduce")),
    ("allgather", re.compile(r"all_?gather")), ("alltoall", re.compile(r"all_?to_?all")),
    ("broadcast", re.compile(r"broadcast|_bcast|_sync_module_states|_sync_params")),
    ("barrier", re.compile(r"(?:^|_)barrier$|wait_for_everyone")), ("gather", re.compile(r"^gather")),
    ("scatter", re.compile(r"^scatter")), ("reduce", re.compile(r"^reduce$")),
    ("send", re.compile(r"^i?send(?:_object_list)?$")), ("recv", re.compile(r"^i?recv(?:_object_list)?$")),
)  # fmt: skip
"""How operations and the functions that run them are spelled."""
_BACKWARD = re.compile(r"run_backward|^backward$")
_IMPLYING_FUNCTIONS = (
    ("allreduce", _BACKWARD),
    ("allgather", re.compile(r"^unshard$|wait_for_unshard|_pre_forward_unshard")),
)  # fmt: skip
"""Functions that run a collective without naming it."""
_COLLECTIVE_NAMES = (*_OPERATION_NAMES, *_IMPLYING_FUNCTIONS)
_COMMON_NAMES = ("send", "recv", "reduce", "gather", "scatter", "broadcast")
_COMMUNICATION_FILE = re.compile(r"torch|distributed|deepspeed|collective|comm|nccl")
"""A function with one of `_COMMON_NAMES` counts as a collective only if the path of its file matches this pattern:
`http.client` has a `send` too."""
_COLLECTIVE_CALL = re.compile(r"\b(?:dist|distributed|collective|c10d|group|comm|pg)\.(\w+)\(")
"""A collective call in source text."""


_ACTIVITY_CLASSES = (
    (
        "uneven_data",
        re.compile(
            r"(?i)\bexhausted\b|StopIteration|\b(?:ran out of|no more) (?:data|batches|samples|inputs)"
            r"|\b(?:leaving|left|finished|done with|end of) (?:the |its |my )?(?:train(?:ing)? |data )?"
            r"(?:loop|epoch|data ?set|batches|shard)|\ball (?:batches|samples|rows) (?:done|processed|consumed)"
            r"|\bwaiting for (?:the )?(?:others|other ranks|peers|remaining ranks)"
            r"|\b(?:training|epoch \d+) (?:is )?(?:done|finished|complete)"
        ),
    ),
    (
        "checkpoint_timeout",
        re.compile(
            r"(?i)(?:\b|_)(?:save|saving|write|writing|wrote|consolidat\w*|checkpoint\w*|serializ\w*|export\w*)(?:\b|_)"
        ),
    ),
    (
        "slow_rank_preprocess",
        re.compile(
            r"(?i)(?:next|get|read|load)_(?:sample|example|item|row)|__getitem__|tokeniz|tokenis|preprocess|\bmap\b|filter"
            r"|download|compil|building|loading|load_|packing|cache|prepar|index|decompress|shuffl|warm|fetch|autotun|jit"
        ),
    ),
    ("slow_collective_timeout", re.compile(r"(?i)generat|rollout|sampl|eval|decod|scor|reward")),
)
"""Failure classes, each with a pattern for what a rank does while its peers wait for it; the first match counts."""
_METRIC = re.compile(r"(?<![\w./-])[\w./-]{1,80}=-?\d[\d.e+-]{0,40}(?![\w%/])")
"""A metric with its value: `failed_samples=0` does not say that the rank samples."""


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """A rank waiting in a collective.

    Attributes:
        path: The frames outside libraries, outermost first; empty if only the watchdog reported the wait.
        timed_out: Whether the timeout of this rank ended the wait.
        peer_lost: Whether the wait ended because a peer disconnected. If both are false, the rank still waits.
        in_backward: Whether the backward pass issued the collective.
        file, line, text: The log line that shows the wait.
    """

    rank: int | None
    operation: str
    path: tuple[TraceFrame, ...] = ()
    timed_out: bool = False
    peer_lost: bool = False
    seq: int | None = None
    numel: int | None = None
    started: float | None = None
    file: str = ""
    line: int = 0
    text: str = ""
    in_backward: bool = False

    @property
    def innermost_frame(self) -> tuple[str, str, int]:
        """File, function and line of the innermost frame outside libraries."""
        if not self.path:
            return "", "", 0
        last = self.path[-1]
        return last.file.rsplit("/", 1)[-1], last.function, last.line

    @property
    def where(self) -> str:
        """Returns the innermost frame outside libraries as text; "" if there is none."""
        file, function, line = self.innermost_frame
        return f"{function}() at {file}:{line}" if file else ""


def collective_of_frames(frames: Iterable[TraceFrame]) -> str:
    """Finds the collective in a stack, from the innermost frame outwards; "" if no frame names one.

    A stack that blocks in `backward()` is counted as the gradient all-reduce of DistributedDataParallel.
    """
    for frame in reversed(list(frames)):
        called = _COLLECTIVE_CALL.search(frame.source)
        for name, pattern in _COLLECTIVE_NAMES:
            if called and pattern.search(called[1]):
                return name
            if pattern.search(frame.function) and (name not in _COMMON_NAMES or _COMMUNICATION_FILE.search(frame.file)):
                return name
    return ""


def wait_of_traceback(rank: int | None, found: Traceback, log: ParsedLog) -> CollectiveWait | None:
    """Returns the wait that an exception ended; None if no collective raised the exception."""
    message = f"{found.type}: {found.message}"
    timed_out, peer_lost = bool(TIMEOUT_MESSAGE.search(message)), bool(PEER_LOST_MESSAGE.search(message))
    if not (timed_out or peer_lost):
        return None
    return CollectiveWait(
        rank, collective_of_frames(found.frames), user_frames(found.frames), timed_out,
        peer_lost=peer_lost and not timed_out, file=log.name, line=found.number, text=found.text,
        in_backward=any(_BACKWARD.search(each.function) for each in found.frames),
    )  # fmt: skip


def user_frames(frames: Sequence[TraceFrame]) -> tuple[TraceFrame, ...]:
    """Returns the frames outside libraries; if there are none, those outside torch."""
    outside = tuple(each for each in frames if not LIBRARY_FILE.search(each.file))
    return outside or tuple(each for each in frames if "torch/" not in each.file)


def waits_by_rank(history: JobHistory) -> Mapping[int, CollectiveWait]:
    """Returns the first wait of each rank that ended in an exception, supplemented with the watchdog's reports."""
    found: dict[int, CollectiveWait] = {}
    for each in _waits_of_tracebacks(history):
        if each.rank is not None and each.rank not in found:
            found[each.rank] = each
    _add_watchdog_reports(history, found)
    return found


def _add_watchdog_reports(history: JobHistory, found: dict[int, CollectiveWait]) -> None:
    """Adds the watchdogs' reports about ranks that timed out.

    A report without a timestamp has that of an earlier line, which does not tell when the wait began.
    """
    for timeout in history.timeouts:
        rank, match, ran = timeout.rank, timeout.match, timeout.ran_ms
        if rank is None:
            continue
        known = found.get(rank)
        dated = match.when is not None and TimestampParser(day=DAY_S).read(match.text) is not None
        started = match.when - ran / 1000 if dated and match.when is not None and ran is not None else None
        if known is None:
            named = "" if timeout.seq is None and timeout.operation in ("send", "recv") else timeout.operation
            found[rank] = CollectiveWait(
                rank, normalize_collective(named), timed_out=True, seq=timeout.seq, numel=timeout.numel,
                started=started, file=match.file, line=match.line, text=match.text,
            )  # fmt: skip
        else:
            found[rank] = replace(
                known, seq=timeout.seq if known.seq is None else known.seq,
                numel=timeout.numel if known.numel is None else known.numel,
                started=started if known.started is None else known.started,
                timed_out=True, peer_lost=False, operation=known.operation or normalize_collective(timeout.operation),
            )  # fmt: skip


def _waits_of_tracebacks(history: JobHistory) -> Iterator[CollectiveWait]:
    for origin, _, traceback, log in history.tracebacks:
        found = wait_of_traceback(origin.rank, traceback, log)
        if found is not None and (found.operation or found.path):
            yield found


def count_collectives(history: JobHistory) -> Counter[str]:
    """Counts the collectives in all tracebacks."""
    names = (collective_of_frames(traceback.frames) for _, _, traceback, _ in history.tracebacks)
    return Counter(name for name in names if name)


def normalize_collective(text: str) -> str:
    """Returns the common spelling of an operation: `_ALLGATHER_BASE`, `all_reduce` -> `allgather`, `allreduce`."""
    low = text.lower().strip("_")
    for name, pattern in _OPERATION_NAMES:
        if pattern.search(low):
            return name
    return low


def main_stack_by_rank(history: JobHistory) -> Mapping[int, LoggedStack]:
    """Returns the stack of the main thread of each rank for which the logs contain one."""
    found: dict[int, LoggedStack] = {}
    for log in history.logs:
        for stack in log.stacks:
            rank = stack.origin.rank
            if rank is None and stack.pid is not None:
                rank = history.rank_of_pid.get(stack.pid)
            if rank is not None and stack.is_main_thread:
                found.setdefault(rank, stack)
    return found


def class_of_activity(text: str) -> str | None:
    """Returns the failure class suggested by function names or by a log line of a rank."""
    text = _METRIC.sub("", text)
    return next((cls for cls, pattern in _ACTIVITY_CLASSES if pattern.search(text)), None)
