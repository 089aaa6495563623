"""Long activities of healthy processes without progress of a counter. Each takes about the given seconds and ends by
itself. Standard library only: workers without torch and reward functions use the same ones."""

import gc
import hashlib
import http.client
import json
import mmap
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

QUOTA = "SOAK_QUOTA"
"""Environment variable: the folder of a cgroup with little CPU, if there is one."""
THROTTLE = "SOAK_THROTTLE"
"""Environment variable: the folder of a cgroup with a slow disk, if there is one."""
JUDGE = "SOAK_JUDGE"
"""Environment variable: `host:port` of a slow judge, see `http_judge.py`."""
SHORT = 0.6
"""An idle activity takes this share of the threshold for inactivity."""


def compute(seconds: float) -> None:
    """Compute in Python on one core, with the GIL held, always in the same line."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number = sum(range(20_000))
    assert number


def compute_native(seconds: float) -> None:
    """Call C functions that release the GIL, one after the other."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha256", b"secret", b"salt", 300_000)


def other_thread(seconds: float) -> None:
    """The main thread waits for another thread that works."""
    worker = threading.Thread(target=compute, args=(seconds,))
    worker.start()
    worker.join()


def subprocess_judge(seconds: float) -> None:
    """A child process works."""
    code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: sum(range(20000))"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)


def many_children(seconds: float) -> None:
    """Start child processes that live for milliseconds, one after the other, like compilers, checkers and shells."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        subprocess.run(["/bin/sh", "-c", "for i in 1 2 3 4 5 6 7 8; do /bin/true; done"], check=True)
        time.sleep(0.03)


def reads_slowly(seconds: float) -> None:
    """Read a file in pieces, as from a slow file system."""
    end = time.monotonic() + seconds
    with Path(sys.executable).open("rb", buffering=0) as file:
        while time.monotonic() < end:
            if not file.read(64 << 10):
                file.seek(0)
            time.sleep(0.25)


def child_reads(seconds: float) -> None:
    """Read a file in pieces in a child process."""
    subprocess.run([sys.executable, "-S", __file__, "reads_slowly", str(seconds)], check=True)


def slow_disk(seconds: float) -> None:
    """Write a checkpoint at once, then wait in one long fsync. A cgroup throttles the disk, if there is one."""
    with tempfile.NamedTemporaryFile(dir=os.environ.get("SOAK_DISK"), buffering=0) as file, _within(THROTTLE):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            file.write(os.urandom(1 << 20) * 8)
            os.fsync(file.fileno())
            file.seek(0)


def slow_disk_of_a_child(seconds: float) -> None:
    """Write in a child process, as libraries that save checkpoints do."""
    subprocess.run([sys.executable, "-S", __file__, "slow_disk", str(seconds)], check=True)


def direct_reads(seconds: float) -> None:
    """Read a mapped file that is not in the page cache: bytes arrive by page faults, not by read calls."""
    size = 64 << 20
    with tempfile.NamedTemporaryFile(dir=os.environ.get("SOAK_DISK")) as file:
        file.truncate(size)
        file.seek(0)
        file.write(os.urandom(1 << 20) * 64)
        file.flush()
        os.fsync(file.fileno())
        with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as memory, _within(THROTTLE):
            memory.madvise(mmap.MADV_RANDOM)
            end, chance = time.monotonic() + seconds, random.Random(1)
            while time.monotonic() < end:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for _ in range(16):
                    memory[chance.randrange(size)]
                memory.madvise(mmap.MADV_DONTNEED)


def starved(seconds: float) -> None:
    """Work at the lowest priority: on a loaded machine the process hardly gets a core."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    try:
        compute(seconds)
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)


def throttled(seconds: float) -> None:
    """Work with a small share of a core."""
    with _within(QUOTA):
        compute(seconds)


def collects_garbage(seconds: float) -> None:
    """Collect garbage for long: no Python code runs meanwhile."""
    end = time.monotonic() + seconds
    kept = [[number] for number in range(400_000)]
    while time.monotonic() < end:
        gc.collect()
    del kept


def imports(seconds: float) -> None:
    """Start interpreters that import half of the standard library, again and again."""
    names = "asyncio, email, http.server, xml.dom.minidom, unittest, multiprocessing, sqlite3, ssl, ctypes, decimal"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        subprocess.run([sys.executable, "-c", f"import {names}"], check=True)


def still_for_a_while(seconds: float) -> None:
    """Do nothing, for less than the threshold."""
    time.sleep(SHORT * seconds / 3.2)


def judge_that_streams(seconds: float) -> None:
    """Receive an answer over a socket, some bytes at a time."""
    _ask(f"/drip/{seconds}", seconds)


def silent_in_parts(seconds: float) -> None:
    """Alternate between doing nothing for less than the threshold and working a little."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(SHORT * seconds / 3.2)
        compute(0.3)


def _ask(path: str, seconds: float) -> None:
    host, _, port = os.environ[JUDGE].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30 + 4 * seconds)
    connection.request("POST", path, json.dumps({"prompt": "?"}))
    connection.getresponse().read()
    connection.close()


@contextmanager
def _within(name: str) -> Iterator[None]:
    """Move this process into a cgroup (v1) and back; do nothing if there is none."""
    folder = os.environ.get(name)
    if folder is None:
        yield
        return
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        Path(folder).with_name("cgroup.procs").write_text(str(os.getpid()))


ACTS: dict[str, Callable[[float], None]] = {
    act.__name__: act
    for act in (
        compute, compute_native, other_thread, subprocess_judge, many_children, reads_slowly, child_reads, slow_disk,
        slow_disk_of_a_child, direct_reads, starved, throttled, collects_garbage, imports, still_for_a_while,
        judge_that_streams, silent_in_parts,
    )
}  # fmt: skip


def perform(name: str, seconds: float, record: Path | None) -> None:
    """Perform an activity; write a line to `record` at its beginning and its end."""
    who = f"{os.getpid()}"
    _note(record, {"pid": who, "act": name, "begins": time.time()})
    began = time.monotonic()
    ACTS[name](seconds)
    _note(record, {"pid": who, "act": name, "ends": time.time(), "took_s": round(time.monotonic() - began, 3)})


def _note(record: Path | None, line: dict[str, object]) -> None:
    if record is not None:
        with record.open("a") as file:
            file.write(json.dumps({**line, "host": socket.gethostname()}) + "\n")


if __name__ == "__main__":
    ACTS[sys.argv[1]](float(sys.argv[2]))
