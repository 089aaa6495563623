"""The one way to wait.

Every helper says what kind of wait it is, on whom, why, and how long; publishes that in the process's beacon while
it lasts; and ends with an error that says the same when its bound is reached. There are two bounds, at least one
of which is given: `timeout_s`, and `stall_s`, after which the one waited for must have shown progress: whenever
the value of `progress()` changes, the stall clock starts again. So a long wait that moves is never cut, and a
short limit needs no tuning (rule 2 of DESIGN.md: progress, not patience).

    result = waits.future(pending, whom="reward-0", why="scores of step 7", stall_s=60, progress=worker.moves)
"""

import concurrent.futures
import contextlib
import logging
import os
import queue as queues
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast

from lockstep.watch import beacon

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

log = logging.getLogger(__name__)

_SLICE_S = 0.25
"""A blocking call is made in slices of this length where somebody must look at progress or notices meanwhile."""


class WaitTimeout(TimeoutError):
    """A wait reached its bound. Fields: kind, whom, why, waited_s."""

    def __init__(self, kind: str, whom: str, why: str, waited_s: float) -> None:
        super().__init__(f"waited {waited_s:.1f} s for {whom} ({kind}): {why}")
        self.kind, self.whom, self.why, self.waited_s = kind, whom, why, waited_s


class Stalled(WaitTimeout):
    """The one waited for made no progress for `stall_s`."""

    def __init__(self, kind: str, whom: str, why: str, waited_s: float, stall_s: float) -> None:
        super().__init__(kind, whom, why, waited_s)
        self.stall_s = stall_s
        self.args = (f"no progress of {whom} for {stall_s:.1f} s ({kind}, waited {waited_s:.1f} s): {why}",)


@dataclass(frozen=True, slots=True)
class WaitState:
    """A wait as a notice describes it."""

    kind: str
    whom: str
    why: str
    waited_s: float
    stalled_s: float
    """Since when the progress value did not change; equals waited_s where nobody reports progress."""
    progress: object = None

    def __str__(self) -> str:
        return f"waiting for {self.whom} ({self.kind}) since {self.waited_s:.0f} s: {self.why}"


OnNotice = Callable[[WaitState], None]


def log_notice(state: WaitState) -> None:
    """The notice of a wait nobody gave another for: a warning in the log."""
    log.warning("%s", state)


class _Stack(threading.local):
    """The waits this thread is in, outermost first, and the beacon slot that shows the innermost."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.slot: int | None = None
        self.beacon: beacon.Beacon | None = None
        self.pid = os.getpid()


_stack = _Stack()


def _show(stack: _Stack) -> None:
    """Brings the thread's slot up to date with its innermost wait."""
    here = beacon.current()
    if stack.beacon is not here:  # opened, replaced or forked meanwhile
        stack.beacon, stack.slot = here, None
    if not stack.waits:
        if stack.slot is not None:
            here.free_wait_slot(stack.slot)
            stack.slot = None
        return
    if stack.slot is None:
        stack.slot = here.take_wait_slot()
    if stack.slot is not None:
        here.write_wait(stack.slot, stack.waits[-1].record())


class Wait:
    """A wait under way. `moved(value)` tells it what the one waited for has reached; `check()` holds the bounds."""

    def __init__(self, kind: str, whom: str, why: str, timeout_s: float | None, stall_s: float | None) -> None:
        self.kind, self.whom, self.why, self.timeout_s, self.stall_s = kind, whom, why, timeout_s, stall_s
        self.since_ns = self.moved_ns = time.monotonic_ns()
        self.progress: object = None
        self._thread = threading.current_thread()

    def waited_s(self) -> float:
        return (time.monotonic_ns() - self.since_ns) / 1e9

    def stalled_s(self) -> float:
        return (time.monotonic_ns() - self.moved_ns) / 1e9

    def moved(self, value: object) -> bool:
        """Notes the progress of the one waited for; a value unlike the last one restarts the stall clock."""
        if value == self.progress:
            return False
        self.progress, self.moved_ns = value, time.monotonic_ns()
        _show(_stack)
        return True

    def remaining(self) -> float | None:
        """Seconds until the nearer bound as things stand, at least 0; None without a bound."""
        bounds = []
        if self.timeout_s is not None:
            bounds.append(self.timeout_s - self.waited_s())
        if self.stall_s is not None:
            bounds.append(self.stall_s - self.stalled_s())
        return max(0.0, min(bounds)) if bounds else None

    def check(self) -> None:
        """Raises WaitTimeout or Stalled when a bound is reached."""
        waited, stalled = self.waited_s(), self.stalled_s()
        if self.stall_s is not None and stalled >= self.stall_s:
            raise Stalled(self.kind, self.whom, self.why, waited, self.stall_s)
        if self.timeout_s is not None and waited >= self.timeout_s:
            raise WaitTimeout(self.kind, self.whom, self.why, waited)

    def state(self) -> WaitState:
        return WaitState(self.kind, self.whom, self.why, self.waited_s(), self.stalled_s(), self.progress)

    def record(self) -> beacon.WaitRecord:
        left = None if self.timeout_s is None else self.since_ns + int(self.timeout_s * 1e9)
        if self.stall_s is not None:
            stalls = self.moved_ns + int(self.stall_s * 1e9)
            left = stalls if left is None else min(left, stalls)
        thread = self._thread
        return beacon.WaitRecord(
            self.kind, self.whom, self.why, self.since_ns, left, self.moved_ns, thread.native_id or 0, thread.name
        )


@contextlib.contextmanager
def waiting(
    kind: str, whom: str, why: str, timeout_s: float | None = None, stall_s: float | None = None
) -> Iterator[Wait]:
    """Publishes a wait around code that blocks in its own way, for instance a loop that calls `Wait.check()`."""
    wait = Wait(kind, whom, why, timeout_s, stall_s)
    if _stack.pid != os.getpid():  # the parent's waits are not ours
        _stack.waits, _stack.slot, _stack.pid = [], None, os.getpid()
    _stack.waits.append(wait)
    _show(_stack)
    try:
        yield wait
    finally:
        _stack.waits.remove(wait)
        _show(_stack)


class _Nothing:
    """The answer of an attempt that has to go on waiting."""


_NOTHING = _Nothing()


class Bounds(TypedDict, total=False):
    """What every helper takes; at least one of the first two."""

    timeout_s: float | None
    """The wait ends with WaitTimeout after this long, whatever happens."""
    stall_s: float | None
    """The wait ends with Stalled when `progress()` has not changed for this long."""
    progress: Callable[[], object] | None
    """Cheap; called about four times a second."""
    on_notice: Callable[["WaitState"], None] | None
    """Told of a wait without progress, first after `notice_after_s`, then at doubling times; None: `log_notice`."""
    notice_after_s: float | None
    """10 s unless given; None for a wait that is idle by nature, which nobody is told of."""


def _wait(kind: str, whom: str, why: str, attempt: Callable[[float], T | _Nothing], bounds: Bounds) -> T:
    """Calls `attempt(seconds it may block)` until it answers: at least once, and once more at the bound."""
    timeout_s, stall_s, progress = bounds.get("timeout_s"), bounds.get("stall_s"), bounds.get("progress")
    notice_after_s, on_notice = bounds.get("notice_after_s", 10.0), bounds.get("on_notice") or log_notice
    if timeout_s is None and stall_s is None:
        raise ValueError(f"the wait for {whom} ({why}) has no bound: give timeout_s or stall_s")
    notice_at = notice_after_s
    with waiting(kind, whom, why, timeout_s, stall_s) as wait:
        while True:
            left = wait.remaining() or 0.0
            answer = attempt(left if progress is None and notice_at is None else min(left, _SLICE_S))
            if not isinstance(answer, _Nothing):
                return answer
            if progress is not None and wait.moved(progress()):
                notice_at = notice_after_s
            if left <= 0:
                wait.check()
            if notice_at is not None and wait.stalled_s() >= notice_at:
                on_notice(wait.state())
                notice_at = 2 * wait.stalled_s()


def poll(
    check: Callable[[], T | None], *, kind: str, whom: str, why: str, every_s: float = 0.02, **bounds: Unpack[Bounds]
) -> T:
    """Calls `check` every `every_s` until it returns something else than None, and returns that."""

    def attempt(seconds: float) -> T | _Nothing:
        answer = check()
        if answer is not None:
            return answer
        time.sleep(min(every_s, seconds))
        return _NOTHING

    return _wait(kind, whom, why, attempt, bounds)


class _Gets(Protocol[T_co]):
    def get(self, block: bool = ..., timeout: float | None = ...) -> T_co: ...


class _Puts(Protocol[T_contra]):
    def put(self, item: T_contra, block: bool = ..., timeout: float | None = ...) -> None: ...


def queue_get(queue: _Gets[T], *, whom: str, why: str, **bounds: Unpack[Bounds]) -> T:
    """The next item of a `queue.Queue`, `queue.SimpleQueue` or `multiprocessing.Queue`."""

    def attempt(seconds: float) -> T | _Nothing:
        try:
            return queue.get(True, seconds)
        except queues.Empty:
            return _NOTHING

    return _wait("queue.get", whom, why, attempt, bounds)


def queue_put(queue: _Puts[T], item: T, *, whom: str, why: str, **bounds: Unpack[Bounds]) -> None:
    """Puts an item into a bounded queue, waiting for room."""

    def attempt(seconds: float) -> _Nothing | None:
        try:
            queue.put(item, True, seconds)
        except queues.Full:
            return _NOTHING
        return None

    _wait("queue.put", whom, why, attempt, bounds)


class _Event(Protocol):
    def wait(self, timeout: float | None = ...) -> bool: ...


def event(ev: _Event, *, whom: str, why: str, **bounds: Unpack[Bounds]) -> None:
    """Waits until a threading or multiprocessing Event is set."""

    def attempt(seconds: float) -> _Nothing | None:
        return None if ev.wait(seconds) else _NOTHING

    _wait("event", whom, why, attempt, bounds)


def condition(
    cond: threading.Condition, predicate: Callable[[], T | None], *, whom: str, why: str, **bounds: Unpack[Bounds]
) -> T:
    """Waits, with the condition's lock held by the caller, until `predicate()` is neither None nor False."""

    def attempt(seconds: float) -> T | _Nothing:
        answer = predicate()
        if answer is None or answer is False:
            cond.wait(seconds)
            answer = predicate()
        return _NOTHING if answer is None or answer is False else answer

    return _wait("condition", whom, why, attempt, bounds)


def future(fut: "concurrent.futures.Future[T]", *, whom: str, why: str, **bounds: Unpack[Bounds]) -> T:
    """The result of a concurrent future, or the exception it ended with."""

    def attempt(seconds: float) -> T | _Nothing:
        concurrent.futures.wait([fut], seconds)
        return fut.result(0) if fut.done() else _NOTHING

    return _wait("future", whom, why, attempt, bounds)


class _Joins(Protocol):
    def join(self, timeout: float | None = ...) -> None: ...
    def is_alive(self) -> bool: ...


def join(task: _Joins, *, whom: str, why: str, **bounds: Unpack[Bounds]) -> None:
    """Waits for the end of a thread or a multiprocessing process."""

    def attempt(seconds: float) -> _Nothing | None:
        task.join(seconds)
        return _NOTHING if task.is_alive() else None

    _wait("join", whom, why, attempt, bounds)


def sleep(seconds: float, why: str) -> None:
    """Sleeps; bounded by nature, published all the same."""
    with waiting("sleep", "the clock", why, seconds):
        time.sleep(seconds)


def process(popen: "subprocess.Popen[Any]", *, whom: str, why: str, **bounds: Unpack[Bounds]) -> int:
    """Waits for a child process; returns its exit code (minus the signal's number when it was killed)."""

    def attempt(seconds: float) -> int | _Nothing:
        try:
            return popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return _NOTHING

    return _wait("process", whom, why, attempt, bounds)


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    why: str,
    timeout_s: float,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    check: bool = False,
    on_notice: OnNotice | None = None,
    notice_after_s: float | None = 10.0,
) -> "subprocess.CompletedProcess[str]":
    """Runs a command and returns its exit code, stdout and stderr as text.

    At the bound, or when the caller is interrupted, the command and what it started (its process group) are killed.
    Raises subprocess.CalledProcessError with `check` when the exit code is not 0."""
    whom = os.fspath(argv[0])
    popen = subprocess.Popen(
        argv, cwd=cwd, env=env, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    text = stdin

    def attempt(seconds: float) -> tuple[str, str] | _Nothing:
        nonlocal text
        given, text = text, None  # communicate remembers its input between calls
        try:
            return popen.communicate(given, seconds)
        except subprocess.TimeoutExpired:
            return _NOTHING

    bounds: Bounds = {"timeout_s": timeout_s, "on_notice": on_notice, "notice_after_s": notice_after_s}
    try:
        out, err = _wait("process", whom, why, attempt, bounds)
    finally:
        if popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, 9)
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.communicate(timeout=5)
    done = subprocess.CompletedProcess([os.fspath(word) for word in argv], popen.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Work(Protocol):
    def is_completed(self) -> bool: ...
    def wait(self) -> bool: ...


def work(work: Any, *, communicator: str, operation: str, why: str, **bounds: Unpack[Bounds]) -> None:
    """Waits for a torch `Work` (a collective issued with `async_op=True`; None, for a rank outside, is done).

    It asks `is_completed()` instead of blocking in the backend, so that signals are served meanwhile, and a bound
    that is reached does not tear down an NCCL communicator. Raises what the collective failed with."""
    if work is None:
        return
    handle = cast(_Work, work)
    started = time.monotonic()

    def attempt(seconds: float) -> _Nothing | None:
        until = time.monotonic() + seconds
        while not handle.is_completed():
            now = time.monotonic()
            if now >= until:
                return _NOTHING
            # In proportion: at most 5% late after the first 60 us, which the shortest sleep takes. Spinning instead
            # would take the CPU from the very rank that is waited for.
            time.sleep(min(max((now - started) / 20, 1e-5), 5e-3, until - now))
        handle.wait()
        return None

    _wait("collective", communicator, f"{operation}: {why}", attempt, bounds)


class _Store(Protocol):
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...


def store_get(
    store: _Store, key: str, *, whom: str, why: str, every_s: float = 0.02, **bounds: Unpack[Bounds]
) -> bytes:
    """The value of a key of a torch Store, once somebody has set it."""

    def attempt(seconds: float) -> bytes | _Nothing:
        if store.check([key]):
            return store.get(key)
        time.sleep(min(every_s, seconds))
        return _NOTHING

    return _wait("store", whom, why, attempt, bounds)


def file(path: Path, *, whom: str, why: str, every_s: float = 0.02, **bounds: Unpack[Bounds]) -> Path:
    """Waits until a path exists."""

    def attempt(seconds: float) -> Path | _Nothing:
        if path.exists():
            return path
        time.sleep(min(every_s, seconds))
        return _NOTHING

    return _wait("file", whom, why, attempt, bounds)


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def _ready(source: int | _HasFileno, mask: int, seconds: float) -> bool:
    watched = select.poll()
    watched.register(source, mask)
    return bool(watched.poll(max(0, round(seconds * 1000))))


def readable(source: int | _HasFileno, *, whom: str, why: str, **bounds: Unpack[Bounds]) -> None:
    """Waits until a socket or descriptor has something to read (or was closed by its peer)."""

    def attempt(seconds: float) -> _Nothing | None:
        return None if _ready(source, select.POLLIN, seconds) else _NOTHING

    _wait("read", whom, why, attempt, bounds)


def writable(source: int | _HasFileno, *, whom: str, why: str, **bounds: Unpack[Bounds]) -> None:
    """Waits until a socket or descriptor takes more."""

    def attempt(seconds: float) -> _Nothing | None:
        return None if _ready(source, select.POLLOUT, seconds) else _NOTHING

    _wait("write", whom, why, attempt, bounds)
