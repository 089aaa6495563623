"""Determines why a process ended, from the kernel's counters and log and from the last exception in the process's log.

Causes are failure classes (`host_oom`, `storage_fault`, ...), or "" if there is no proof.
"""

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.base.folders import run_shm_dir, write_atomically
from lockstep.watch.diagnosis.failure_classes import class_of_own_error

TAIL_BYTES = 64 << 10
END_REQUEST_S = 60.0
"""How long a job that was asked to end may take. torchrun kills ranks that have not ended 30 s after SIGTERM."""
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OOM_KILL = re.compile(
    rb"(?:Out of memory|out of memory|oom-kill|oom_reaper).*?\b(?:Killed process|pid=|reaped process) ?(\d+)"
)
_EXCEPTION_LINE = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (?P<text>.*))?$")


@dataclass(frozen=True, slots=True)
class ExitCause:
    """Why a process ended."""

    cause: str = ""
    error: str = ""
    """The last exception of the process, or a description of the signal."""


def record_end_request(run: str) -> None:
    """Records that the whole job is asked to end, before it gets the signal. Signal handlers may call it."""
    with contextlib.suppress(OSError):
        write_atomically(_end_request_file(run), str(time.monotonic_ns()).encode())


def end_was_requested(run: str) -> bool:
    """Whether the job was asked to end within the last `END_REQUEST_S`, so that ends of processes are no failures."""
    try:
        at_ns = int(_end_request_file(run).read_bytes())
    except (OSError, ValueError):
        return False
    return time.monotonic_ns() - at_ns <= END_REQUEST_S * 1e9


def _end_request_file(run: str) -> Path:
    return run_shm_dir(run) / "end-requested"


def oom_kill_count(pid: int | str = "self") -> int | None:
    """How many processes in the cgroup of this process the kernel has killed for lack of memory; None if unknown."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            count = _read_field(_cgroup_folder(_CGROUP_ROOT / "memory", path), "memory.oom_control", "oom_kill")
        elif controllers == "":
            count = _read_field(_cgroup_folder(_CGROUP_ROOT, path), "memory.events", "oom_kill")
        else:
            continue
        if count is not None:
            return count
    return None


def _cgroup_folder(root: Path, path: str) -> Path:
    """The folder of a cgroup. In a container, the container's cgroup may be mounted as the root."""
    inside = root / path.lstrip("/")
    return inside if inside.is_dir() else root


def _read_field(folder: Path, file: str, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / file).read_text().splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == name:
                return int(words[1])
    return None


def was_oom_killed(pid: int) -> bool | None:
    """Whether the kernel's log contains that it killed this process for lack of memory; None if the log cannot be
    read."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found = False
    try:
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # the record was overwritten meanwhile: continue with the next
                continue
            match = _OOM_KILL.search(record)
            found = found or (match is not None and int(match[1]) == pid)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return found


def read_tail(log: Path, limit: int = TAIL_BYTES) -> str:
    """The end of a log; "" if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""


def last_exception(text: str) -> str:
    """The last exception in a log: the line after the frames of the last traceback; "" if there is no traceback."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.strip().endswith("Traceback (most recent call last):")]
    if not starts:
        return ""
    for line in lines[starts[-1] + 1 :]:
        bare = line.strip()
        if line[:1] not in ("", " ", "\t") and (match := _EXCEPTION_LINE.match(bare)):
            return bare if match["text"] is None or len(bare) < 500 else bare[:500]
    return ""


def explain_exit(code: int | None, log_text: str, oom: bool | None, on_purpose: bool) -> ExitCause:
    """Determines why a process ended.

    Args:
        code: the exit code, or minus the signal's number; None if unknown.
        oom: whether the kernel killed a process for lack of memory; None if unknown.
        on_purpose: whether Lockstep ended the process.
    """
    if code == 0:
        return ExitCause()
    if oom and code in (-signal.SIGKILL, None):
        return ExitCause("host_oom", "killed by the kernel: out of memory")
    error = last_exception(log_text)
    if error:
        return ExitCause(class_of_own_error(error), error)
    if code is None or code > 0 or on_purpose:
        return ExitCause()
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if -code in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        return ExitCause("external_kill", f"ended by {name} from outside")
    if -code == signal.SIGKILL:
        known = "" if oom is None else "; not for lack of memory"
        return ExitCause("external_kill" if oom is False else "", f"killed by {name}{known}")
    return ExitCause("", f"ended by {name}")
