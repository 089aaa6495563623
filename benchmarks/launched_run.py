"""A run that was started as a user would: finds its processes from outside, waits for stages, and kills it."""

import contextlib
import mmap
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from lockstep.base.folders import run_shm_dir
from lockstep.watch.beacon.beacon_records import (
    COUNTER_STRUCT,
    COUNTERS_AT,
    MAX_COUNTERS,
    STAGE_AT,
    STAGE_STRUCT,
    BeaconState,
)
from lockstep.watch.beacon.reader import read_beacon, read_beacons
from lockstep.watch.procfs.processes import is_alive

T = TypeVar("T")
BOUND_S = 150.0
"""Time limit for every wait, on a machine that is busy with other work."""


class RunProcess(Protocol):
    """The needed part of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int) -> None: ...


class Ended(AssertionError):
    """The run ended before it reached the awaited position."""


@dataclass(frozen=True)
class ControllerPosition:
    """The controller's stage ("" between two stages), and its current or last step (None before the first)."""

    stage: str
    step: int | None


class PositionReader:
    """Reads the position from a beacon in a few microseconds: some stages last half a millisecond, and frequent slow
    reads would use up this process's share of a busy machine."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._step_at: int | None = None

    def position(self) -> ControllerPosition:
        return ControllerPosition(self._stage(), self._step())

    def _stage(self) -> str:
        while True:
            front, _, name, back = STAGE_STRUCT.unpack_from(self._memory, STAGE_AT)
            if front == back:
                return str(name.rstrip(b"\0").decode())

    def _step(self) -> int | None:
        if self._step_at is None:
            slots = (COUNTERS_AT + 96 * i for i in range(MAX_COUNTERS))
            named = (at for at in slots if COUNTER_STRUCT.unpack_from(self._memory, at)[4].rstrip(b"\0") == b"step")
            self._step_at = next(named, None)
        if self._step_at is None:
            return None
        return int(COUNTER_STRUCT.unpack_from(self._memory, self._step_at)[1])


@dataclass
class LaunchedRun:
    """A started run."""

    process: RunProcess
    folder: Path
    output: Path
    known_processes: set[psutil.Process] = field(default_factory=set)
    """Every process of the run that was ever found; psutil distinguishes them from later ones with the same pid."""
    other_shared_memory: tuple[Path, ...] = ()
    """Where hosts beside this one, on the same machine, have the beacons of runs."""
    _position_reader: "PositionReader | None" = None

    def run_id(self) -> str:
        """Empty before the run has one."""
        try:
            return (self.folder / "run-id").read_text().strip()
        except OSError:
            return ""

    def beacon(self, name: str) -> BeaconState | None:
        """The beacon of a process of the run, or its last state if the process was killed."""
        run = self.run_id()
        return read_beacon(run_shm_dir(run) / f"{name}.beacon") if run else None

    def beacons(self) -> list[BeaconState]:
        """The beacons of all living processes of the run, on all hosts of this machine."""
        run = self.run_id()
        if not run:
            return []
        paths = [path for root in self.other_shared_memory for path in sorted((root / run).glob("*.beacon"))]
        states = [*read_beacons(run), *(state for state in map(read_beacon, paths) if state is not None)]
        return [state for state in states if is_alive(state.pid, state.start_ticks)]

    def position(self) -> ControllerPosition | None:
        """The controller's position, or its last one if it has ended; None before it has a beacon."""
        if self._position_reader is None:
            found = self.beacon("controller")
            if found is None or found.pid != self.process.pid:
                return None
            self._position_reader = PositionReader(found.path)
        return self._position_reader.position()

    def forget_position(self) -> None:
        """Another controller runs the run now."""
        self._position_reader = None

    def wait_for(self, stage: str, step: int | None, timeout_s: float = BOUND_S) -> ControllerPosition:
        """Wait until the controller is in this stage of this step (None: any step) or, if that was missed, of a later
        one."""

        def there() -> ControllerPosition | None:
            position = self.position()
            if position is None or position.stage != stage:
                return None
            late = position.step is not None and step is not None and position.step >= step
            return position if step is None or late else None

        def near() -> bool:
            position = self.position()
            return position is not None and (step or 0) <= (position.step or 0) + 1 and position.stage != "start"

        return self.wait_until(there, f"in {stage} of step {step}", near, timeout_s)

    def wait_for_file(self, folder: Path, pattern: str, timeout_s: float = BOUND_S) -> None:
        """Wait until a file (or folder) appears."""
        self.wait_until(lambda: True if [*folder.glob(pattern)] else None, pattern, folder.exists, timeout_s)

    def wait_until(
        self, there: Callable[[], T | None], what: str, near: Callable[[], bool], timeout_s: float = BOUND_S
    ) -> T:
        """Wait until `there` returns a value; checks without pause once `near` is true."""
        deadline, looked = time.monotonic() + timeout_s, 0.0
        while (found := there()) is None:
            far = not near()
            time.sleep(0.002 if far else 0.00005)
            if time.monotonic() - looked > 0.5:
                looked = time.monotonic()
                if far or not self.known_processes:
                    self.members()
                if self.process.poll() is not None:
                    raise Ended(f"never {what}; the run ended with {self.process.returncode}:\n{self.text()}")
                if looked > deadline:
                    raise AssertionError(f"never {what}:\n{self.text()}")
        return found

    def members(self) -> list[psutil.Process]:
        """The controller and every process below it."""
        try:
            controller = psutil.Process(self.process.pid)
            found = [controller, *controller.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self.known_processes.update(found)
        return found

    def kill(self) -> ControllerPosition | None:
        """Kill all processes of the run at once, as a power failure would; returns the controller's last position."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        for process in self.known_processes:
            _kill(process)
        for process in self.remaining():
            _kill(process)
        self.process.wait(30)
        psutil.wait_procs(self.remaining(), timeout=30)
        assert not self.remaining()
        return self.position()

    def kill_controller(self) -> None:
        """Send SIGKILL to the controller only."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def remaining(self) -> list[psutil.Process]:
        """Living processes of the run: those whose command or environment names its folder, that were its descendants,
        or that have a beacon (the supervisor gets the folder by its standard input)."""
        found, beacon_pids = [], {state.pid for state in self.beacons()}
        for process in {*psutil.process_iter(), *self.known_processes}:
            try:
                words = " ".join([*process.cmdline(), process.environ().get("LOCKSTEP_WORKER", "")])
                ours = process in self.known_processes or process.pid in beacon_pids or f"{self.folder}/" in words
                if ours and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def has_ended(self, within_s: float) -> bool:
        """Whether all processes of the run end within that time."""
        deadline = time.monotonic() + within_s
        while self.remaining():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def finish(self, timeout_s: float = BOUND_S) -> int:
        """Wait for the end of the run; returns the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            text = self.text()
            self.kill()
            raise AssertionError(f"not finished after {timeout_s} s:\n{text}") from None

    def printed(self) -> str:
        """The run's output."""
        return self.output.read_text(errors="replace")

    def text(self) -> str:
        """The run's output, and the ends of its workers' logs."""
        logs = [
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in (self.folder / "logs").glob("*.log")
        ]
        return "\n".join([self.printed()[-6000:], *logs])


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
