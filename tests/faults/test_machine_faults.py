"""The faults of the machine do what they say to a real process, or say why they cannot be made here."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.machine_faults import (
    SHIFT,
    CannotInject,
    break_message,
    shift_clock,
    shifted_clock,
    slow_disk,
    use_up_memory,
)

LABEL = f"lockstep-test-{os.getpid()}"


@contextlib.contextmanager
def python(program: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that runs the program and is killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **environment}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=20)


@contextlib.contextmanager
def skipping() -> Iterator[None]:
    try:
        yield
    except CannotInject as error:
        pytest.skip(str(error))


def test_a_process_that_may_have_no_more_memory_is_killed() -> None:
    program = "import time\nkept = []\nwhile True:\n    kept.append(b'x' * (1 << 20)); time.sleep(0.1)"
    with python(program) as child, skipping():
        assert use_up_memory(child.pid, LABEL, 20.0)
        assert child.wait(10) == -signal.SIGKILL


def test_a_disk_is_slow_for_the_processes_in_the_group(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\nopen(sys.stdin.readline().strip(), 'w').write(str(os.getpid()))\nbegan = time.time()\n"
        f"with open({str(tmp_path / 'file')!r}, 'wb', buffering=0) as file:\n"
        "    file.write(os.urandom(1 << 20)); os.fsync(file.fileno())\nprint(time.time() - began)"
    )
    with skipping(), slow_disk(tmp_path, LABEL, 256 << 10) as group, python(program) as child:
        out, _ = child.communicate(f"{group / 'cgroup.procs'}\n", timeout=60)
        assert float(out) > 2.0, "1 MiB at 256 KiB per second"


def test_what_arrives_after_a_broken_message_is_noise() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = (
            f"import socket\nkept = socket.create_connection(('127.0.0.1', {port}))\nprint(1, flush=True)\ninput()"
        )
        with python(program) as child, skipping():
            assert child.stdout is not None and child.stdout.readline()
            connection, _ = server.accept()
            with connection:
                connection.settimeout(10.0)
                sent = break_message(child.pid, {port}, random.Random(1))
                assert len(connection.recv(1000)) == sent
                with pytest.raises(CannotInject, match="has no connection to"):
                    break_message(child.pid, {port + 1}, random.Random(1))


def test_the_wall_clock_jumps_and_the_monotonic_clock_does_not(tmp_path: Path) -> None:
    program = (
        "import threading, time\nwhile input():\n"
        "    begin = time.monotonic(); threading.Condition().acquire(); threading.Event().wait(0.01)\n"
        "    print(time.time(), time.monotonic(), time.monotonic() - begin, flush=True)"
    )
    file = tmp_path / "shift"
    shift_clock(file, 0)
    with skipping():
        library = shifted_clock(tmp_path)
    with python(program, LD_PRELOAD=str(library), **{SHIFT: str(file)}) as child:
        assert child.stdin is not None and child.stdout is not None
        for shift in (0, 3600, -3600):
            shift_clock(file, shift)
            child.stdin.write("go\n")
            child.stdin.flush()
            wall, monotonic, waited = map(float, child.stdout.readline().split())
            assert abs(wall - time.time() - shift) < 30 and abs(monotonic - time.monotonic()) < 30 and waited < 30
