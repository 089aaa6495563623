"""Faults of the machine below a run: a disk that is full or slow, memory that is used up, a message that arrives
broken, a clock that jumps. Each raises CannotInject where this machine does not allow it; most need root."""

import ctypes
import errno
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
PIDFD_GETFD = 438
SHIFT = "SHIFTED_CLOCK"
"""Environment variable: a file with the seconds by which `shifted_clock.c` shifts the clock of a process."""


class CannotInject(Exception):
    """The fault cannot be made on this machine, or found nothing to act on; says why."""


@contextmanager
def small_disk(point: Path, options: str) -> Iterator[Path]:
    """A file system in memory, mounted at a new folder with these options, such as `size=1m`."""
    point.mkdir(parents=True)
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "lockstep-test", str(point)],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except FileNotFoundError:
        raise CannotInject("there is no mount command") from None
    if done.returncode != 0:
        raise CannotInject(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True, timeout=20)


def fill(folder: Path, free_bytes: int) -> Path:
    """Fill the disk except for `free_bytes`, and return the file that does it."""
    ballast = folder / "ballast"
    state = os.statvfs(folder)
    ballast.write_bytes(b"x" * max(0, state.f_bavail * state.f_frsize - free_bytes))
    return ballast


@contextmanager
def cgroup(controller: str, name: str) -> Iterator[Path]:
    """A control group (v1) of a controller such as `memory`. Processes that are in it at the end leave it."""
    folder = CGROUPS / controller / name
    try:
        folder.mkdir()
    except OSError as error:
        raise CannotInject(f"cannot make a cgroup of {controller}: {error.strerror}") from None
    try:
        yield folder
    finally:
        with suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (folder.parent / "cgroup.procs").write_text(pid)
        end = time.monotonic() + 10.0
        while folder.exists():
            with suppress(OSError):  # a killed process is in it until it is gone
                folder.rmdir()
            if time.monotonic() > end:
                break
            time.sleep(0.05)


def use_up_memory(pid: int, name: str, within_s: float) -> bool:
    """Allow the process no more memory, so that the kernel kills it at its next allocation; whether that happened."""
    process = psutil.Process(pid)
    with cgroup("memory", name) as group:
        (group / "memory.limit_in_bytes").write_text(str(64 << 10))
        (group / "cgroup.procs").write_text(str(pid))
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.02)
    return False


@contextmanager
def slow_disk(folder: Path, name: str, bytes_per_s: int) -> Iterator[Path]:
    """A cgroup whose processes read and write the folder's disk slowly; a process enters it by its `cgroup.procs`."""
    device = folder.stat().st_dev
    with cgroup("blkio", name) as group:
        for way in ("read", "write"):
            try:
                limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
                (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
            except OSError as error:
                raise CannotInject(f"the disk of {folder} cannot be throttled: {error.strerror}") from None
        yield group


def break_message(pid: int, ports: set[int], chance: random.Random) -> int:
    """Write random bytes into a connection of the process to one of these ports; returns their number. What arrives
    next there is broken, as by a faulty network card behind the check of TCP."""
    found = [
        each.fd
        for each in psutil.Process(pid).net_connections("tcp")
        if each.status == psutil.CONN_ESTABLISHED and each.raddr and each.raddr.port in ports
    ]
    if not found:
        raise CannotInject(f"process {pid} has no connection to {sorted(ports)}")
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        fd = libc.syscall(PIDFD_GETFD, pidfd, chance.choice(found), 0)
        if fd < 0:
            raise CannotInject(f"cannot get a socket of another process: {errno.errorcode[ctypes.get_errno()]}")
    finally:
        os.close(pidfd)
    noise = chance.randbytes(chance.randrange(8, 64))
    with socket.socket(fileno=fd) as connection:
        return connection.send(noise)


@cache
def shifted_clock(folder: Path) -> Path:
    """Compile the library that shifts the clock of processes which preload it."""
    compiler, library = shutil.which("cc"), folder / "shifted_clock.so"
    if compiler is None:
        raise CannotInject("there is no C compiler, which builds the library that shifts the clock")
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60)
    return library


def shift_clock(file: Path, seconds: int) -> None:
    """Set the clocks of all processes that preload the library with this file."""
    draft = seconds.to_bytes(8, "little", signed=True)
    if not file.exists():
        file.write_bytes(draft)
        return
    with file.open("r+b", buffering=0) as opened:
        opened.write(draft)
