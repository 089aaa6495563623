"""One run of an episode, with or without its faults: it is resumed where the faults end it, and then compared."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.endurance.schedule import STEPS, Episode
from benchmarks.endurance.settings import settings
from benchmarks.endurance.watching import Accusable, Growth
from benchmarks.faults.machine_faults import SHIFT, CannotInject, shift_clock, shifted_clock, small_disk
from benchmarks.faults.ray_hosts import Hosts
from benchmarks.faults.run_faults import RunFault, Site, inject
from benchmarks.launched_run import LaunchedRun
from benchmarks.runner import ROOT
from lockstep.base.folders import run_shm_dir

INJECTED = ROOT / "benchmarks" / "faults" / "injected"
DISK = "size=192m"
START_S, STALL_S, END_S = 240.0, 300.0, 30.0
"""Limits for the start of a run, for progress after a fault, and for the end of its processes."""
Tell = Callable[[str], None]


class Broken(Exception):
    """An expectation that a run did not meet; it cannot be continued."""


class Stopped(Exception):
    """The benchmark was asked to stop."""


@dataclass
class Injected:
    """A fault that was made, or not."""

    fault: RunFault
    step: int
    at: float
    """Wall time of the run's processes."""
    names: list[str] = field(default_factory=list)
    skipped: str = ""
    back_s: float | None = None
    """From the fault to the next committed step but one."""
    resumed: bool = False
    over: float = math.inf
    """Wall time at which the run continued."""

    @property
    def accusable(self) -> Accusable:
        return Accusable(self.at, self.over, tuple(self.names))


class EpisodeRun:
    """A run of an episode: `with` starts it, and kills what is left of it."""

    def __init__(self, episode: Episode, home: Path, folder: Path, disturbed: bool, tell: Tell) -> None:
        self.episode, self.folder, self.tell, self.disturbed = episode, folder, tell, disturbed
        self.home = home
        self.faults: list[Injected] = []
        self.span_s = self.wall_s = 0.0
        self.stop_asked: Callable[[], bool] = lambda: False
        self._stack = ExitStack()
        self._lives = 0

    def __enter__(self) -> "EpisodeRun":
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _set_up(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        small = self.disturbed and self.episode.small_disk
        disk = self._stack.enter_context(small_disk(self.folder / "disk", DISK)) if small else None
        hosts = self._stack.enter_context(_hosts(self.folder)) if self.episode.variant.cluster == "hosts" else None
        runs = disk or self.folder / "runs"
        environment = {
            **os.environ, **(hosts.environment if hosts else {}), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self.site = Site(
            LaunchedRun(_NOT_STARTED, runs / "run", self.folder / "output.txt"), self.episode.chance,
            f"endurance-{os.getpid()}", self.folder, hosts, disk,
        )  # fmt: skip
        if hosts:
            self.site.run.other_shared_memory = (hosts.shared("b"),)
            environment["LOCKSTEP_BEACONS"] = str(hosts.shared("a"))
        if self.disturbed:
            environment |= self._hooks()
        self._environment = environment
        values = settings(self.episode, self.home, runs, hosts)
        self._file = self.folder / "run.yaml"
        self._file.write_text(yaml.safe_dump(values))
        self._stack.callback(self._end)

    def _hooks(self) -> dict[str, str]:
        """Environment variables that let faults into the run's processes."""
        self.site.freeze = self.folder / "freeze"
        path = os.pathsep.join(filter(None, [str(INJECTED), os.environ.get("PYTHONPATH")]))
        found = {"PYTHONPATH": path, "LOCKSTEP_TEST_TRAINER": f"gil:{self.site.freeze}"}
        if self.episode.variant.cluster == "local":
            try:
                library = shifted_clock(self.home / "clock")
            except CannotInject as error:
                self.tell(f"the clock cannot be shifted: {error}")
                return found
            self.site.clock = self.folder / "shift"
            shift_clock(self.site.clock, 0)
            found |= {"LD_PRELOAD": str(library), SHIFT: str(self.site.clock)}
        return found

    @property
    def run(self) -> Path:
        return self.site.run.folder

    def go(self) -> None:
        """Run to the end. Raises Broken where an expectation is not met."""
        began = time.monotonic()
        self._start()
        self._until(lambda: self.site.step > 0, START_S, "the first step has not begun")
        first = time.monotonic()
        with Growth(self.site.run) as growth:  # without the start, which takes as long as the steps of a small run
            for step, fault in self.episode.faults if self.disturbed else ():
                self._until(lambda step=step: self.site.step >= step, STALL_S, f"step {step} has not begun")  # type: ignore[misc]
                self._disturb(fault)
            self._until(lambda: self._ended() is not None, STALL_S, "the run has not ended", growing=True)
            self.span_s = time.monotonic() - first
        self.growth = growth.found()
        self.wall_s = time.monotonic() - began
        if self._ended() != 0:
            raise Broken(f"the run ended with exit code {self._ended()}")

    def orphans(self) -> list[str]:
        """What is left of the run some seconds after its end: processes, and its folder in shared memory."""
        if self.site.run.has_ended(END_S):
            left = []
        else:
            left = [f"process {each.pid}: {' '.join(each.cmdline())[:200]}" for each in self.site.run.remaining()]
        shared = run_shm_dir(self.site.run.run_id())
        return left + ([f"folder {shared}"] if shared.exists() else [])

    def _start(self) -> None:
        """Start the run, or resume it."""
        self._lives += 1
        arguments = [str(self._file)] if self._lives == 1 else ["--resume", str(self.run)]
        with self.site.run.output.open("ab") as output:
            self.site.run.process = subprocess.Popen(
                [sys.executable, "-c", "from lockstep.cli import app; app()", "train", *arguments],
                env=self._environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
                cwd=self.folder,
            )  # fmt: skip
        self.site.run.forget_position()

    def _disturb(self, fault: RunFault) -> None:
        """Make a fault, and wait until the run has done two steps more."""
        time.sleep(self.site.chance.uniform(0.0, 0.5))
        if self._ended():
            raise Broken(f"the run ended with exit code {self._ended()} before `{fault.name}`")
        step = self.site.step
        done = Injected(fault, step, self.site.wall_time())
        self.faults.append(done)
        if self._ended() == 0:
            done.skipped, done.over = "the run had finished", self.site.wall_time()
            return
        began = time.monotonic()
        self.site.run.members()
        if fault.target == "controller":
            done.names = self.site.everybody()
        try:
            done.names = inject(fault, self.site) or done.names
        except CannotInject as error:
            done.skipped, done.over = str(error), self.site.wall_time()
            self.tell(f"step {step}/{STEPS} {fault.name}: skipped, {error}")
            return
        if fault.may_end:
            self._resume_after(done)
        goal = min(step + 2, STEPS)
        try:
            self._until(lambda: self.site.step >= goal, STALL_S, f"no progress after `{fault.name}` in step {step}")
        finally:
            done.over = self.site.wall_time()
        done.back_s = round(time.monotonic() - began, 3)
        self.tell(f"step {step}/{STEPS} {fault.name} ({', '.join(done.names[:2]) or 'machine'}): {done.back_s:.1f} s")

    def _resume_after(self, done: Injected) -> None:
        """Wait for the end of a run that may end because of the fault; remove the fault, and resume."""
        if done.fault.target == "controller":
            self.site.run.process.wait(30)
            if self.episode.orphan_grace_s == 0 and not self.site.run.has_ended(END_S):
                raise Broken(f"workers outlive a killed controller: {self.orphans()}")
        else:
            done.names = self.site.everybody()
            end = time.monotonic() + 60.0
            while self._ended() is None and time.monotonic() < end:
                self._pause()
            for each in (self.site.disk or self.folder).glob("ballast"):
                each.unlink()
        if self._ended() is None or (self._ended() == 0 and done.fault.target != "controller"):
            return  # it did without the disk
        if done.fault.target != "controller" and not self._says_why():
            raise Broken(f"the run ended with exit code {self._ended()} and does not say that the disk is full")
        done.resumed = True
        self._start()

    def _says_why(self) -> bool:
        text = self.site.run.output.read_text(errors="replace")[-8000:]
        return any(words in " ".join(text.split()) for words in ("make room", "No space left", "disk is full"))

    def _until(self, there: Callable[[], bool], within_s: float, what: str, growing: bool = False) -> None:
        """Wait; with `growing`, the limit begins anew with every step."""
        end, step = time.monotonic() + within_s, self.site.step
        while not there():
            if self._ended() is not None:
                if there():
                    return
                raise Broken(f"the run ended with exit code {self._ended()}, and {what}")
            if growing and self.site.step != step:
                end, step = time.monotonic() + within_s, self.site.step
            if time.monotonic() > end:
                raise Broken(f"after {within_s:g} s {what}")
            self._pause()

    def _pause(self) -> None:
        if self.stop_asked():
            raise Stopped
        time.sleep(0.02)

    def _ended(self) -> int | None:
        return self.site.run.process.poll()

    def _end(self) -> None:
        """Kill what is left, and free its shared memory."""
        run = self.site.run
        if run.process is _NOT_STARTED:
            return
        run.members()
        if run.process.poll() is None or run.remaining():
            run.kill()
        if run.run_id():
            shutil.rmtree(run_shm_dir(run.run_id()), ignore_errors=True)


class _NotStarted:
    pid, returncode = 0, None

    def poll(self) -> int | None:
        return 0

    def wait(self, timeout: float) -> int:
        return 0

    def send_signal(self, number: int) -> None:
        raise ProcessLookupError(signal.Signals(number).name)


_NOT_STARTED: Any = _NotStarted()


@contextmanager
def _hosts(folder: Path) -> Iterator[Hosts]:
    """Two hosts of a Ray cluster. This process reads the beacons of host a."""
    hosts, before = Hosts(folder), os.environ.get("LOCKSTEP_BEACONS")
    try:
        hosts.connect()
        hosts.start_ray(cpus=8)
        hosts.meet()
        os.environ["LOCKSTEP_BEACONS"] = str(hosts.shared("a"))
        yield hosts
    finally:
        os.environ.pop("LOCKSTEP_BEACONS", None)
        if before is not None:
            os.environ["LOCKSTEP_BEACONS"] = before
        hosts.close()
