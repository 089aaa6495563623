"""Bounded waits. All blocking waits of the package use this module.

Every helper except `sleep` takes the target of the wait, the reason and the bounds. While the wait lasts, the beacon of
the process (a file in shared memory, see `watch.beacon`) shows them to other processes. When a bound is reached, the
error names target and reason. At least one of two bounds is required: `timeout_s` limits the whole wait; `stall_s`
limits the time without progress of the target, and starts again whenever the value of `progress()` changes. So a wait
that is bounded by `stall_s` alone lasts as long as there is progress.

    result = waits.future(pending, waits_for="reward-0", why="scores of step 7", stall_s=60, progress=completed_calls)
"""

import asyncio
import concurrent.futures
import contextlib
import os
import queue as queues
import select
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, Unpack, cast

from lockstep.base.wait_state import NOT_READY, SLEEP, NoticeHandler, NotReady, WaitBounds, track_wait, wait_for

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


def poll(
    check: Callable[[], T | None],
    *,
    kind: str,
    waits_for: str,
    why: str,
    every_s: float = 0.02,
    wake: threading.Event | None = None,
    **bounds: Unpack[WaitBounds],
) -> T:
    """Calls `check` every `every_s` until it returns something other than None, and returns that. Setting `wake` makes
    the next call happen immediately; it is cleared before each call."""

    def attempt(seconds: float) -> T | NotReady:
        if wake is not None:
            wake.clear()
        answer = check()
        if answer is not None:
            return answer
        pause = min(every_s, seconds)
        if wake is not None:
            wake.wait(pause)
        else:
            time.sleep(pause)
        return NOT_READY

    return wait_for(kind, waits_for, why, attempt, bounds)


class _GetQueue(Protocol[T_co]):
    def get(self, block: bool = ..., timeout: float | None = ...) -> T_co: ...


class _PutQueue(Protocol[T_contra]):
    def put(self, item: T_contra, block: bool = ..., timeout: float | None = ...) -> None: ...


def queue_get(queue: _GetQueue[T], *, waits_for: str, why: str, **bounds: Unpack[WaitBounds]) -> T:
    """Waits for the next item of a `queue.Queue`, `queue.SimpleQueue` or `multiprocessing.Queue`."""

    def attempt(seconds: float) -> T | NotReady:
        try:
            return queue.get(True, seconds)
        except queues.Empty:
            return NOT_READY

    return wait_for("queue.get", waits_for, why, attempt, bounds)


def queue_put(queue: _PutQueue[T], item: T, *, waits_for: str, why: str, **bounds: Unpack[WaitBounds]) -> None:
    """Puts an item into a bounded queue; waits until there is room."""

    def attempt(seconds: float) -> NotReady | None:
        try:
            queue.put(item, True, seconds)
        except queues.Full:
            return NOT_READY
        return None

    wait_for("queue.put", waits_for, why, attempt, bounds)


class _Event(Protocol):
    def wait(self, timeout: float | None = ...) -> bool: ...


def event(ev: _Event, *, waits_for: str, why: str, **bounds: Unpack[WaitBounds]) -> None:
    """Waits until a threading or multiprocessing Event is set."""

    def attempt(seconds: float) -> NotReady | None:
        return None if ev.wait(seconds) else NOT_READY

    wait_for("event", waits_for, why, attempt, bounds)


def condition(
    cond: threading.Condition,
    predicate: Callable[[], T | None],
    *,
    waits_for: str,
    why: str,
    **bounds: Unpack[WaitBounds],
) -> T:
    """Waits until `predicate()` is neither None nor False. The caller holds the lock of the condition."""

    def attempt(seconds: float) -> T | NotReady:
        answer = predicate()
        if answer is None or answer is False:
            cond.wait(seconds)
            answer = predicate()
        return NOT_READY if answer is None or answer is False else answer

    return wait_for("condition", waits_for, why, attempt, bounds)


def future(fut: "concurrent.futures.Future[T]", *, waits_for: str, why: str, **bounds: Unpack[WaitBounds]) -> T:
    """Waits for a concurrent future. Returns its result, or raises its exception."""

    def attempt(seconds: float) -> T | NotReady:
        concurrent.futures.wait([fut], seconds)
        return fut.result(0) if fut.done() else NOT_READY

    return wait_for("future", waits_for, why, attempt, bounds)


def run_in_thread(call: Callable[[], T], name: str) -> "concurrent.futures.Future[T]":
    """Starts a call that has no bound of its own in a daemon thread; `future` waits for the result within the caller's
    bound. The thread is left behind if the bound is reached."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def make() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed over to whoever waits
            answer.set_exception(error)

    try:
        threading.Thread(target=make, name=name, daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down and starts no threads any more
        make()
    return answer


_CANCEL_S = 5.0
"""Seconds that a cancelled coroutine gets for its cleanup."""


def coroutine(body: Coroutine[Any, Any, T], *, kind: str, waits_for: str, why: str, **bounds: Unpack[WaitBounds]) -> T:
    """Runs a coroutine in a new event loop, and cancels it when a bound is reached. Returns the coroutine's result or
    raises its exception."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(body)

        def attempt(seconds: float) -> T | NotReady:
            loop.run_until_complete(asyncio.wait({task}, timeout=seconds))
            return task.result() if task.done() else NOT_READY

        try:
            return wait_for(kind, waits_for, why, attempt, bounds)
        finally:
            if task.cancel():
                loop.run_until_complete(asyncio.wait({task}, timeout=_CANCEL_S))


class _Joinable(Protocol):
    def join(self, timeout: float | None = ...) -> None: ...
    def is_alive(self) -> bool: ...


def join(task: _Joinable, *, waits_for: str, why: str, **bounds: Unpack[WaitBounds]) -> None:
    """Waits for the end of a thread or a multiprocessing process."""

    def attempt(seconds: float) -> NotReady | None:
        task.join(seconds)
        return NOT_READY if task.is_alive() else None

    wait_for("join", waits_for, why, attempt, bounds)


def sleep(seconds: float, why: str) -> None:
    """Sleeps. The beacon shows the sleep like a wait."""
    with track_wait(SLEEP, "the clock", why, seconds):
        time.sleep(seconds)


def process(popen: "subprocess.Popen[Any]", *, waits_for: str, why: str, **bounds: Unpack[WaitBounds]) -> int:
    """Waits for a child process. Returns its exit code, or minus the signal's number if a signal ended it."""

    def attempt(seconds: float) -> int | NotReady:
        try:
            return popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return NOT_READY

    return wait_for("process", waits_for, why, attempt, bounds)


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    why: str,
    timeout_s: float,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    check: bool = False,
    on_notice: NoticeHandler | None = None,
    notice_after_s: float | None = 10.0,
) -> "subprocess.CompletedProcess[str]":
    """Runs a command and returns its exit code, stdout and stderr as text.

    When the bound is reached or the caller is interrupted, the command's process group is killed. With `check`, raises
    subprocess.CalledProcessError if the exit code is not 0."""
    waits_for = os.fspath(argv[0])
    popen = subprocess.Popen(
        argv, cwd=cwd, env=env, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    text = stdin

    def attempt(seconds: float) -> tuple[str, str] | NotReady:
        nonlocal text
        stdin_text, text = text, None  # communicate() remembers its input between calls
        try:
            return popen.communicate(stdin_text, seconds)
        except subprocess.TimeoutExpired:
            return NOT_READY

    bounds: WaitBounds = {"timeout_s": timeout_s, "on_notice": on_notice, "notice_after_s": notice_after_s}
    try:
        out, err = wait_for("process", waits_for, why, attempt, bounds)
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


def work(work: Any, *, communicator: str, operation: str, why: str, **bounds: Unpack[WaitBounds]) -> None:
    """Waits for a torch `Work`, a collective issued with `async_op=True`. None, which torch returns to ranks outside
    the group, counts as completed. Raises the error with which the collective failed.

    It polls `is_completed()` instead of blocking in the backend, so that signals are handled meanwhile, and a reached
    bound does not tear down an NCCL communicator."""
    if work is None:
        return
    handle = cast(_Work, work)
    started = time.monotonic()

    def attempt(seconds: float) -> NotReady | None:
        until = time.monotonic() + seconds
        while not handle.is_completed():
            now = time.monotonic()
            if now >= until:
                return NOT_READY
            # Sleep for 5% of the time waited so far (the shortest sleep takes about 60 us), so that completion is
            # noticed at most 5% late. A busy loop would take CPU time from the other ranks on this host.
            time.sleep(min(max((now - started) / 20, 1e-5), 5e-3, until - now))
        handle.wait()
        return None

    wait_for("collective", communicator, f"{operation}: {why}", attempt, bounds)


class _Store(Protocol):
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...


def store_get(
    store: _Store, key: str, *, waits_for: str, why: str, every_s: float = 0.02, **bounds: Unpack[WaitBounds]
) -> bytes:
    """Waits until a key of a torch Store is set; returns its value."""

    def attempt(seconds: float) -> bytes | NotReady:
        if store.check([key]):
            return store.get(key)
        time.sleep(min(every_s, seconds))
        return NOT_READY

    return wait_for("store", waits_for, why, attempt, bounds)


def file(path: Path, *, waits_for: str, why: str, every_s: float = 0.02, **bounds: Unpack[WaitBounds]) -> Path:
    """Waits until a path exists."""

    def attempt(seconds: float) -> Path | NotReady:
        if path.exists():
            return path
        time.sleep(min(every_s, seconds))
        return NOT_READY

    return wait_for("file", waits_for, why, attempt, bounds)


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def _poll_ready(source: int | _HasFileno, mask: int, seconds: float) -> bool:
    watched = select.poll()
    watched.register(source, mask)
    return bool(watched.poll(max(0, round(seconds * 1000))))


def readable(source: int | _HasFileno, *, waits_for: str, why: str, **bounds: Unpack[WaitBounds]) -> None:
    """Waits until a socket or descriptor is readable, or was closed by its peer."""

    def attempt(seconds: float) -> NotReady | None:
        return None if _poll_ready(source, select.POLLIN, seconds) else NOT_READY

    wait_for("read", waits_for, why, attempt, bounds)


def writable(source: int | _HasFileno, *, waits_for: str, why: str, **bounds: Unpack[WaitBounds]) -> None:
    """Waits until a socket or descriptor is writable."""

    def attempt(seconds: float) -> NotReady | None:
        return None if _poll_ready(source, select.POLLOUT, seconds) else NOT_READY

    wait_for("write", waits_for, why, attempt, bounds)
