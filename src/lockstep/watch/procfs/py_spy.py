"""Samples the stacks of other processes with py-spy, without their cooperation.

With `--nonblocking`, py-spy reads the memory of a process without stopping it; native stacks need a process that can be
stopped. An agent runs one py-spy at a time, with a time limit, driven by the agent's selector.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

DUMP_LIMIT_S = 5.0
"""The time limit of a dump. It takes 13 to 30 ms, with native frames up to a second, on a busy machine far longer."""
MAX_DUMP_BYTES = 4 << 20

_PACKAGE = str(Path(__file__).resolve().parents[2])
_WATCH_ROOMS = (f"{_PACKAGE}/watch/", f"{_PACKAGE}/base/")
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


@dataclass(frozen=True, slots=True)
class StackFrame:
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        """`score() at reward.py:31`."""
        name = self.function if self.function.startswith("<") else f"{self.function}()"
        return f"{name} at {PurePath(self.file).name}:{self.line}"


@dataclass(frozen=True, slots=True)
class SampledThread:
    """A thread's stack, innermost frame first."""

    native_id: int
    name: str
    frames: tuple[StackFrame, ...]
    active: bool = False
    holds_gil: bool = False


def py_spy_command(pid: int, native: bool = False) -> list[str] | None:
    """The command that prints the stacks of a process as JSON; None if py-spy is not installed. For native frames, the
    process must not be stopped already."""
    own = Path(sys.executable).with_name("py-spy")
    found = str(own) if own.exists() else shutil.which("py-spy")
    if found is None:
        return None
    return [found, "dump", "--json", "--full-filenames", "--native" if native else "--nonblocking", "--pid", str(pid)]


def parse_stacks(output: bytes) -> tuple[SampledThread, ...]:
    """The threads in py-spy's JSON output; empty when the output is invalid."""
    try:
        threads = json.loads(output)
        return tuple(_parse_thread(each) for each in threads)
    except (ValueError, TypeError, KeyError, AttributeError):
        return ()


def _parse_thread(thread: dict[str, Any]) -> SampledThread:
    frames = tuple(StackFrame(str(each["name"]), str(each["filename"]), int(each["line"])) for each in thread["frames"])
    return SampledThread(
        int(thread["os_thread_id"] or 0),
        thread["thread_name"] or "",
        frames,
        bool(thread["active"]),
        bool(thread["owns_gil"]),
    )


def main_thread(threads: Sequence[SampledThread], pid: int) -> SampledThread | None:
    """The thread whose id is the process's id; else the first one; None if there is none."""
    return next((each for each in threads if each.native_id == pid), threads[0] if threads else None)


_PYTHON_DEVICE_WAITS = ("synchronize", "wait_tensor")
"""Python functions that block the host until a device has finished: `torch.cuda.synchronize`, `Stream.synchronize`,
`Event.synchronize`, and the wait of functional collectives."""
_NATIVE_DEVICE_WAITS = re.compile(
    r"(cuda|hip)(Stream|Event|Device)Synchronize|cu(Stream|Event|Ctx)Synchronize|ncclGroupEnd|aclrtSynchronize"
    r"|c10d::\w*Work\w*::(wait|synchronize)|ProcessGroupNCCL::WorkNCCL::"
)
"""Functions of CUDA, HIP, CANN, NCCL and c10d that do the same, below `.item()`, `.cpu()` or `Work.wait()`."""
_HANDLE_WAIT = ("wait", f"{_PACKAGE}/watch/recorder/wrappers.py")
"""The recorder's frame around every `Work.wait()`."""


def waits_for_device(frames: Sequence[StackFrame]) -> bool:
    """Whether a thread is in a synchronisation with a device, which may burn a core (CUDA waits spin). Python frames
    show it where the call is a Python function, native frames everywhere."""
    python = next((frame for frame in frames if frame.file.endswith(".py")), None)
    native = itertools.takewhile(lambda frame: not frame.file.endswith(".py"), frames)
    if any(_NATIVE_DEVICE_WAITS.search(frame.function) for frame in native):
        return True
    if python is None:
        return False
    name = python.function.rpartition(".")[2]  # newer interpreters report `Stream.synchronize`
    return name in _PYTHON_DEVICE_WAITS or (name, python.file) == _HANDLE_WAIT


def user_code_line(frames: Iterable[StackFrame]) -> str:
    """The innermost line of the user's code as text; if there is none, of Lockstep's code, else of any code."""
    known = [frame for frame in frames if not frame.file.startswith("<")]
    for distance in (0, 1, 2):
        found = next((frame for frame in known if _distance(frame.file) == distance), None)
        if found is not None:
            return str(found)
    return ""


def _distance(file: str) -> int:
    """0 for the user's code, 1 for Lockstep's, 2 for libraries, the interpreter, and Lockstep's recorder and waits,
    whose frames surround every collective and every wait."""
    if file.startswith(_PACKAGE):
        return 2 if file.startswith(_WATCH_ROOMS) else 1
    parts = PurePath(file).parts
    library = {"site-packages", "dist-packages"} & set(parts) or (parts and not file.endswith(".py"))
    return 2 if library or file.startswith(_STDLIB) or _in_stdlib(parts) else 0


def _in_stdlib(parts: Sequence[str]) -> bool:
    """Whether a path is in the standard library of any interpreter, such as `.../lib/python3.12/threading.py`."""
    return any(
        before == "lib" and after.startswith("python3") for before, after in itertools.pairwise(parts)
    )  # fmt: skip


def format_stacks(threads: Sequence[SampledThread]) -> str:
    """The stacks as text, innermost frame first."""
    lines = []
    for thread in threads:
        marks = [mark for mark, applies in (("active", thread.active), ("holds the GIL", thread.holds_gil)) if applies]
        lines.append(f"thread {thread.native_id} {thread.name or '(no name)'} {' '.join(marks)}".rstrip())
        lines += [f"    {frame.function} ({frame.file}:{frame.line})" for frame in thread.frames]
    return "\n".join(lines)


def stacks_to_json(threads: Sequence[SampledThread]) -> list[dict[str, Any]]:
    return [
        {
            "thread": each.native_id, "name": each.name, "active": each.active, "holds_gil": each.holds_gil,
            "frames": [[frame.function, frame.file, frame.line] for frame in each.frames],
        }
        for each in threads
    ]  # fmt: skip


log = logging.getLogger(__name__)

StacksCallback = Callable[[tuple[SampledThread, ...]], None]
"""Receives the stacks; an empty tuple if sampling failed."""


@dataclass
class _Dump:
    pid: int
    native: bool
    callback: StacksCallback
    child: "subprocess.Popen[bytes] | None" = None
    pidfd: int = -1
    deadline: float = 0.0
    output: bytes = b""


class StackSampler:
    """Samples stacks of processes. The agent's loop calls the callback of each request exactly once."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._urgent: deque[_Dump] = deque()
        self._waiting: deque[_Dump] = deque()
        self._current: _Dump | None = None
        self.available = py_spy_command(1) is not None

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._urgent or self._waiting)

    @property
    def stopped_pid(self) -> int | None:
        """The process that py-spy stops or is about to stop, to sample its native stack."""
        return self._current.pid if self._current is not None and self._current.native else None

    def request(self, pid: int, callback: StacksCallback, native: bool = False, first: bool = False) -> None:
        """Requests the stacks of a process. Requests with `first` come before all others."""
        (self._urgent if first else self._waiting).append(_Dump(pid, native, callback))
        self._start_next()

    def tick(self) -> None:
        """Aborts a dump that takes too long."""
        dump = self._current
        if dump is not None and time.monotonic() >= dump.deadline:
            log.warning("the stacks of %d took more than %g s", dump.pid, DUMP_LIMIT_S)
            self._finish(dump, complete=False)

    def close(self) -> None:
        """Aborts the dump in progress without calling its callback. Idempotent."""
        self._urgent.clear()
        self._waiting.clear()
        if self._current is not None:
            self._current.callback = lambda threads: None
            self._finish(self._current, complete=False)

    def _start_next(self) -> None:
        while self._current is None and (self._urgent or self._waiting):
            dump = (self._urgent or self._waiting).popleft()
            argv = py_spy_command(dump.pid, dump.native)
            try:
                if argv is None:
                    raise OSError("py-spy is not installed")
                child = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError:
                dump.callback(())
                continue
            assert child.stdout is not None
            dump.child, dump.deadline = child, time.monotonic() + DUMP_LIMIT_S
            with contextlib.suppress(OSError):
                dump.pidfd = os.pidfd_open(child.pid)
            os.set_blocking(child.stdout.fileno(), False)
            self._current = dump
            self._selector.register(child.stdout, selectors.EVENT_READ, lambda mask, dump=dump: self._read_output(dump))

    def _read_output(self, dump: _Dump) -> None:
        assert dump.child is not None and dump.child.stdout is not None
        try:
            data = os.read(dump.child.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        dump.output += data
        if not data or len(dump.output) > MAX_DUMP_BYTES:
            self._finish(dump, complete=not data)

    def _finish(self, dump: _Dump, complete: bool) -> None:
        assert dump.child is not None and dump.child.stdout is not None
        self._selector.unregister(dump.child.stdout)
        dump.child.stdout.close()
        if dump.pidfd >= 0:  # the agent's loop may have reaped py-spy, so that its pid may be reused
            if not complete:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(dump.pidfd, signal.SIGKILL)
            os.close(dump.pidfd)
        dump.child.returncode = dump.child.returncode or 0  # the agent's loop reaps py-spy
        self._current = None
        dump.callback(parse_stacks(dump.output) if complete else ())
        self._start_next()
