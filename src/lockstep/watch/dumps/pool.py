"""Reading many dumps at once, in processes that may die of them."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lockstep
from lockstep.watch.dumps.files import Found
from lockstep.watch.dumps.trace import Trace
from lockstep.watch.dumps.worker import HEADER, unpack

MEMORY_BYTES = 2 << 30
"""Address space of a reader. A dump of 20,000 entries takes some 100 MiB."""
_AHEAD = 2
"""Files given to a reader at a time, so that it never waits for the next."""
_START_S = 60.0
_END_S = 10.0
_FILE_S, _PER_BYTE_S = 60.0, 1 / 500_000
"""How long reading a file may take; a usual one takes hundredths of a second."""


@dataclass(slots=True)
class Bad:
    """A file that could not be read, and why."""

    why: str


@dataclass(eq=False)
class _Reader:
    process: "subprocess.Popen[bytes]"
    deadline: float
    full: bool
    ready: bool = False
    files: deque[Found] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)


Calls = dict[int, tuple[str, str, str]]
"""By signature: operation, shapes, dtype."""


def read_all(
    files: Sequence[Found], calls: Calls, *, full: bool = False, readers: int | None = None, memory: int = MEMORY_BYTES,
    file_s: float = _FILE_S,
) -> Iterator[tuple[Found, Trace | Bad]]:  # fmt: skip
    """Read dumps, each as it is done, in no order; `calls` is filled with what they called. With `full`
    every call is there by itself, else the older ones as digests of blocks.

    A reader that dies of a file, or is not done with it in time, is replaced, and the file is `Bad`.

    Raises:
        RuntimeError: Readers do not start.
    """
    todo = deque(files)
    count = min(readers or len(os.sched_getaffinity(0)), len(todo), 16)
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        running: set[_Reader] = set()
        stack.callback(lambda: [_stop(reader) for reader in running])

        def start() -> None:
            reader = _start(memory, full)
            running.add(reader)
            selector.register(_stdout(reader), selectors.EVENT_READ, reader)

        def drop(reader: _Reader) -> str:
            selector.unregister(_stdout(reader))
            running.discard(reader)
            how = ": not done in time" if reader.deadline < time.monotonic() else ""
            return how + _stop(reader, 0.0 if how else _END_S)

        for _ in range(count):
            start()
        left = len(todo)
        while left:
            wait = max(0.0, min(60.0, *(reader.deadline - time.monotonic() for reader in running)))
            done = [key.data for key, _ in selector.select(wait)]
            late = [reader for reader in running - set(done) if reader.deadline < time.monotonic()]
            for reader in done:
                alive = _receive(reader)
                for result in _answers(reader, calls):
                    left -= 1
                    yield result
                _feed(reader, todo, file_s)
                if alive:
                    continue
                late.append(reader)
            for reader in late:
                how = drop(reader)
                if not reader.ready:
                    raise RuntimeError(f"a reader of dumps did not start{how}")
                if reader.files:
                    left -= 1
                    yield reader.files.popleft(), Bad(f"cannot be read{how}")
                todo.extendleft(reversed(reader.files))
                if left > sum(len(other.files) for other in running):
                    start()
            for reader in running:
                if reader.ready:
                    _feed(reader, todo, file_s)


def _start(memory: int, full: bool) -> _Reader:
    # Without site-packages and with nothing of the folder that the command was given in: the reader needs the standard
    # library and this package.
    environment = {**os.environ, "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-S", "-P", "-m", "lockstep.watch.dumps.worker", str(memory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    return _Reader(process, time.monotonic() + _START_S, full)


def _stdout(reader: _Reader) -> int:
    assert reader.process.stdout is not None
    return reader.process.stdout.fileno()


def _feed(reader: _Reader, todo: deque[Found], file_s: float) -> None:
    """Give it files and set its deadline."""
    assert reader.process.stdin is not None
    if not reader.ready:
        return
    while todo and len(reader.files) < _AHEAD:
        reader.files.append(todo.popleft())
        wanted = [str(reader.files[-1].path.absolute()), reader.full]
        with contextlib.suppress(BrokenPipeError):  # its end is seen when reading
            reader.process.stdin.write(json.dumps(wanted).encode() + b"\n")
            reader.process.stdin.flush()
    size = reader.files[0].size if reader.files else 0
    reader.deadline = time.monotonic() + file_s + size * _PER_BYTE_S if reader.files else float("inf")


def _receive(reader: _Reader) -> bool:
    """Take what is there; False at the end."""
    data = os.read(_stdout(reader), 1 << 20)
    reader.received += data
    return bool(data)


def _answers(reader: _Reader, calls: Calls) -> Iterator[tuple[Found, Trace | Bad]]:
    """The whole answers in what was received."""
    received = reader.received
    while len(received) >= HEADER.size:
        text_size, blob_size = HEADER.unpack_from(received)
        end = HEADER.size + text_size + blob_size
        if len(received) < end:
            return
        about = json.loads(received[HEADER.size : HEADER.size + text_size])
        blob = bytes(received[HEADER.size + text_size : end])
        del received[:end]
        if "ready" in about:
            reader.ready = True
        elif "error" in about:
            yield reader.files.popleft(), Bad(about["error"])
        else:
            calls.update((int(signature), tuple(call)) for signature, call in about.pop("calls"))
            yield reader.files.popleft(), unpack(about, blob)


def _stop(reader: _Reader, patience: float = 0.0) -> str:
    """End a reader, one that is about to end by itself after so many seconds; how it ended."""
    process = reader.process
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
    if process.returncode is None:
        process.kill()
    try:
        _, errors = process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        return ", and cannot be ended"
    lines = errors.decode(errors="replace").strip().splitlines()
    return f" (exit code {process.returncode})" + (f": {lines[-1][:300]}" if lines else "")
