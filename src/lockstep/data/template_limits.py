"""Renders chat templates within limits. A template comes with a model and is a program: it may loop, recurse, or
multiply a text until the memory is full.

The first conversation is rendered in a forked process with limits of the kernel, which hold for every operation. Later
ones are rendered in this process, and a thread stops those that take too long or too much; it can do that between two
operations of the template.
"""

import ctypes
import math
import multiprocessing
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.base import waits
from lockstep.base.wait_state import Stalled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

T = TypeVar("T")

MAX_CPU_S = 10.0
"""CPU time for one conversation, which usually takes less than a millisecond."""
MAX_GROWTH_BYTES = 1 << 30
MAX_TEXT_CHARS = 8 << 20
"""Limit of a text that is tokenized. Tokens and their offsets take about a hundred times as much memory."""
_IDLE_S = 10.0
"""A forked process that uses no CPU for this long is stuck for another reason than its template."""
_LOCK_S = 10.0
_WATCH_EVERY_S = 0.25
_WATCH_IDLE_S = 30.0
"""The watching thread ends after this long without a conversation."""
_MEMORY, _RECURSION, _LENGTH = 81, 82, 83
"""Exit codes of the forked process."""
_PROBLEMS = {
    _MEMORY: f"needs more than {MAX_GROWTH_BYTES >> 30} GiB of memory for it",
    _RECURSION: "calls itself without end",
    _LENGTH: f"makes a text of more than {MAX_TEXT_CHARS:,} characters of it",
    -signal.SIGXCPU: f"takes more than {MAX_CPU_S:g} s of CPU time for it",
}


class TemplateLimitReached(ValueError):
    """The chat template of a model needs more time or memory for a conversation than any useful one."""

    remedy_sentence = "Set model.chat_template to another one: this one may loop."

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"the chat template of {model} {problem}. {self.remedy_sentence}")
        self.model, self.problem = model, problem


class _Stopped(Exception):
    """Raised by the watching thread in the one that renders."""

    problem = ""


class _TooSlow(_Stopped):
    problem = _PROBLEMS[-signal.SIGXCPU]


class _TooLarge(_Stopped):
    problem = _PROBLEMS[_MEMORY]


def render_chat(tokenizer: "Tokenizer", messages: list[Any], **options: Any) -> str:
    """The text of `tokenizer.apply_chat_template(messages, tokenize=False, **options)`. Raises TemplateLimitReached,
    and what the template raises."""

    def render() -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    return render_within_limits(render, tokenizer)


def render_within_limits(render: Callable[[], T], tokenizer: "Tokenizer") -> T:
    """The result of a call that renders a conversation by the tokenizer's template. Raises TemplateLimitReached, and
    what the call raises."""
    model, template = str(tokenizer.name_or_path), str(tokenizer.chat_template)
    if template not in _tried:
        problem = try_in_child(render)
        if problem is not None:
            raise TemplateLimitReached(model, problem)
        _tried.add(template)
    try:
        result = _watch.run(render)
    except _Stopped as stopped:
        problem = stopped.problem
    except RecursionError:
        problem = _PROBLEMS[_RECURSION]
    except MemoryError:
        problem = _PROBLEMS[_MEMORY]
    else:
        if not isinstance(result, str) or len(result) <= MAX_TEXT_CHARS:
            return result
        problem = _PROBLEMS[_LENGTH]
    raise TemplateLimitReached(model, problem)


_tried: set[str] = set()
"""Templates that have rendered a conversation within the limits in a process of their own."""


def try_in_child(render: Callable[[], object]) -> str | None:
    """What is wrong with a call, found out in a forked process with limits; None if it stays within them. What it
    raises otherwise is not looked at."""
    child = multiprocessing.get_context("fork").Process(target=_render_and_exit, args=(render,), daemon=True)
    with warnings.catch_warnings():
        # The child starts no thread, and takes no lock that a thread of this process may hold, but for an import's:
        # then it is idle until its time is over, and nothing is said about the template.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    try:
        waits.join(
            child, waits_for=f"pid {child.pid}", why="trying the chat template", stall_s=_IDLE_S,
            progress=lambda: _cpu_ticks(child.pid), notice_after_s=None,
        )  # fmt: skip
    except Stalled:
        return None
    finally:
        child.kill()
        waits.join(child, waits_for=f"pid {child.pid}", why="a killed process ends", timeout_s=MAX_CPU_S)
    return _PROBLEMS.get(child.exitcode or 0)


def _render_and_exit(render: Callable[[], object]) -> None:
    code = 0
    try:
        signal.set_wakeup_fd(-1)
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(name, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(MAX_CPU_S), math.ceil(MAX_CPU_S) + 5))
        limit = _memory_bytes(_SIZE) + MAX_GROWTH_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        text = render()
        code = _LENGTH if isinstance(text, str) and len(text) > MAX_TEXT_CHARS else 0
    except MemoryError:
        code = _MEMORY
    except RecursionError:
        code = _RECURSION
    finally:
        os._exit(code)


def _cpu_ticks(pid: int | None) -> int:
    """CPU time of a child, in ticks of the clock; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


_SIZE, _RESIDENT = 0, 1


def _memory_bytes(column: int) -> int:
    """Bytes of this process: its address space, or what is resident of it."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


@dataclass(slots=True)
class _Rendering:
    """A conversation that is being rendered: the thread, and the CPU time and memory when it was first seen."""

    clock: int
    cpu_s: float | None = None
    resident: int = 0
    stop: type[_Stopped] | None = None
    """What was raised in the thread."""


class _TemplateWatch:
    """A thread that raises `_Stopped` in threads that render for too long, or while this process grows too much."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, _Rendering] = {}
        self._thread: threading.Thread | None = None
        self._idle_since = 0.0

    def run(self, render: Callable[[], T]) -> T:
        """The call's result. Raises _Stopped, and what the call raises."""
        thread = threading.get_ident()
        stopped: _Stopped | None = None
        self._begin(thread)
        try:
            result = render()
        except _Stopped as error:
            stopped = error
        finally:
            while True:
                try:
                    self._end(thread)
                    break
                except _Stopped as error:  # it came after the rendering, or a second one came
                    stopped = error
        if stopped is not None:
            raise stopped
        return result

    def _begin(self, thread: int) -> None:
        with self._lock:
            self._running[thread] = _Rendering(time.pthread_getcpuclockid(thread))
            if self._thread is None or not self._thread.is_alive():
                self._idle_since = time.monotonic()
                self._thread = threading.Thread(target=self._watch, name="chat template limits", daemon=True)
                self._thread.start()

    def _end(self, thread: int) -> None:
        """After it no `_Stopped` arrives any more. It may be interrupted by one, and is called again then; if it had
        just taken the lock, nobody gives it back."""
        self._lock.acquire(timeout=_LOCK_S)
        try:
            ended = self._running.pop(thread, None)
            if ended is not None and ended.stop is not None:
                # One that is still on its way is replaced by this one, which arrives here. To take it back instead
                # would leave the interpreter's flag for it set: CPython 3.11 then never leaves a function that is
                # called while a debugger or profiler traces.
                _raise_in_thread(thread, ended.stop)
        finally:
            self._lock.release()

    def _watch(self) -> None:
        while True:
            waits.sleep(_WATCH_EVERY_S, "watching chat templates")
            with self._lock:
                for thread, rendering in self._running.items():
                    self._look(thread, rendering)
                if self._running:
                    self._idle_since = time.monotonic()
                elif time.monotonic() - self._idle_since > _WATCH_IDLE_S:
                    self._thread = None
                    return

    def _look(self, thread: int, rendering: _Rendering) -> None:
        """Stops a rendering that is over its limits. The thread exists: it has to take the lock to leave."""
        cpu_s, resident = time.clock_gettime(rendering.clock), _memory_bytes(_RESIDENT)
        if rendering.cpu_s is None:
            rendering.cpu_s, rendering.resident = cpu_s, resident
        elif cpu_s - rendering.cpu_s > MAX_CPU_S:
            rendering.stop = _TooSlow
        elif resident - rendering.resident > MAX_GROWTH_BYTES:
            rendering.stop = _TooLarge
        if rendering.stop is not None:  # each time, as one that is raised in a destructor is ignored
            _raise_in_thread(thread, rendering.stop)


def _raise_in_thread(thread: int, error: type[_Stopped]) -> None:
    """Raises an error in a thread before its next operation in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


_watch = _TemplateWatch()
