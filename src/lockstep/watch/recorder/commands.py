"""Commands from the monitoring processes to the ranks of a job: lines appended to one file in the run's shared folder.

The recorder's thread in each rank checks the size of the file about ten times a second. A run is watched if the file
exists. A rank ignores commands that were sent before the rank started.

    verdict   "text", "verdict", "freed": if a collective of the rank fails, the call raises CollectiveStalled with this
              verdict; "freed": Lockstep releases the rank, which must stop even if it is not in a collective
    free      "communicator": the rank aborts this communicator (see `abort`); null means all communicators
    dump      "folder": the rank writes the content of c10d's flight recorder to this folder as `BEACON_NAME.json`
"""

import json
import os
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base.errors import CollectiveStalled
from lockstep.base.folders import file_lock, make_run_shm_dir, open_file, run_shm_dir

COMMANDS_FILE = "orders.jsonl"
VERDICT_WAIT_S = 2.0
"""How long a rank of a watched run waits for the verdict on a collective that failed."""
VERDICT_MAX_AGE_S = 60.0
"""Older verdicts do not explain a new error."""
_BROKEN_CONNECTION = re.compile(
    r"connection (closed|reset|refused|timed out)|broken pipe|timed ?out waiting|application timeout|socket closed|"
    r"gloo/\S+\.cc:\d+\]|nccl(Remote|System|Internal|UnhandledCuda)Error|communicator was aborted|watchdog caught",
    re.IGNORECASE,
)
"""What backends say when a peer is gone or a communicator was aborted; wrong arguments are described in other words."""
MAX_LINE_BYTES = 1 << 20
"""The longest command, in bytes."""


@dataclass(frozen=True)
class RankCommand:
    """A command to the ranks whose beacons are in `names`; None means all ranks."""

    number: int
    op: str
    names: tuple[str, ...] | None
    wall: float
    body: dict[str, Any] = field(default_factory=dict)


def open_command_file(run: str) -> Path:
    """Creates the command file and returns its path. From then on the run counts as watched."""
    path = make_run_shm_dir(run) / COMMANDS_FILE
    os.close(open_file(path))
    return path


def send_command(run: str, op: str, names: Iterable[str] | None = None, **body: Any) -> int:
    """Appends a command. Returns its number, which counts from 1. Several processes may send at the same time."""
    descriptor = open_file(open_command_file(run), os.O_RDWR | os.O_APPEND)
    try:
        with file_lock(descriptor):
            number = _count_lines(descriptor) + 1
            command = {
                "n": number,
                "op": op,
                "names": None if names is None else list(names),
                "wall": time.time(),
                **body,
            }
            line = json.dumps(command).encode() + b"\n"
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"command {op!r} is {len(line)} bytes long; the limit is {MAX_LINE_BYTES}")
            os.write(descriptor, line)
            return number
    finally:
        os.close(descriptor)


def _count_lines(descriptor: int) -> int:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).count(b"\n")


class CommandInbox:
    """Reads the commands for one rank. Thread-safe."""

    def __init__(self, run: str, name: str) -> None:
        self._path = run_shm_dir(run) / COMMANDS_FILE
        self._name = name
        self._read = 0
        self.verdict: RankCommand | None = None
        """The newest verdict for this rank."""
        self.watched = False
        """Whether the command file exists."""
        self._unread: list[RankCommand] = []
        self._lock = threading.Lock()
        self._read = self._size()

    def _size(self) -> int:
        try:
            size = self._path.stat().st_size
        except OSError:
            self.watched = False
            return 0
        self.watched = True
        return size

    def take(self) -> list[RankCommand]:
        """Returns the commands for this rank since the last call, in order."""
        with self._lock:
            self._read_new()
            found, self._unread = self._unread, []
            return found

    def _read_new(self) -> None:
        size = self._size()
        if size <= self._read:
            self._read = min(self._read, size)
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            fresh = file.read(size - self._read)
        complete = fresh[: fresh.rfind(b"\n") + 1]
        self._read += len(complete)
        for command in map(_parse_command, complete.splitlines()):
            if command is not None and (command.names is None or self._name in command.names):
                self._unread.append(command)
                if command.op == "verdict":
                    self.verdict = command

    def stalled(self, after: float = 0.0) -> CollectiveStalled | None:
        """The verdict of the last minute as an exception; None if there is none, or if it is from before `after` (Unix
        seconds) and Lockstep has not released this rank because of it."""
        with self._lock:
            self._read_new()
        newest = self.verdict
        if (
            newest is None
            or time.time() - newest.wall > VERDICT_MAX_AGE_S
            or (newest.wall < after and not newest.body.get("freed"))
        ):
            return None
        return CollectiveStalled(str(newest.body.get("text", "")), newest.body.get("verdict"))

    def translate(self, error: Exception, recovered_at: float = 0.0) -> Exception:
        """If a verdict explains the error of a broken connection, returns it as an exception; else returns the error.

        In a watched run, waits up to `VERDICT_WAIT_S` for the verdict, once per error.

        Args:
            recovered_at: when this process entered the newest collective that it has completed, in Unix seconds. An
                earlier verdict is about an incident that is over, unless Lockstep has released this rank because of it.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveStalled):
            return error
        if hasattr(error, "__lockstep__") or not _BROKEN_CONNECTION.search(str(error)):
            return error
        error.__lockstep__ = True  # type: ignore[attr-defined]  # do not wait again for this error
        found = self.stalled(after=recovered_at)
        until = time.monotonic() + VERDICT_WAIT_S
        while found is None and self.watched and time.monotonic() < until:
            time.sleep(0.02)
            found = self.stalled(after=recovered_at)
        if found is None:
            return error
        found.backend_message = str(error)
        return found


def _parse_command(line: bytes) -> RankCommand | None:
    try:
        body = json.loads(line)
        names = body.pop("names")
        return RankCommand(
            int(body.pop("n")), str(body.pop("op")), None if names is None else tuple(names),
            float(body.pop("wall")), body,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
