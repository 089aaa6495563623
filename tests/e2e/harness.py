"""Starts real runs as a user would, inspects them from outside, and kills them."""

import contextlib
import fcntl
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml
from forked_controller import BOUND_S, ENVIRONMENT, Forked
from safetensors.numpy import load_file

from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
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

ALPHABET = "0123456789="
LOCKSTEP = [str(Path(sys.executable).with_name("lockstep"))]
SEED = int(os.environ.get("LOCKSTEP_TEST_SEED", "0"))
"""Of everything random in these tests; `script/test --full --seed S` sets it."""


def moment(*names: object) -> random.Random:
    """Chance that is the same at every call with these names (and this seed)."""
    return random.Random("/".join(map(str, (SEED, *names))))


def task(folder: Path, rows: int = 20) -> Path:
    """A tiny model and the data of a task that is learnt in a few steps: copy a digit."""
    make_tiny(
        folder / "model", hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, max_length=32, alphabet=ALPHABET, seed=5
    )
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    numbers = [f"{(7 * n) % 100:02d}" for n in range(rows)]
    with (data / "grpo.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}=", "answer": n[0]}) + "\n" for n in numbers)
    with (data / "sft.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}=", "completion": n[0]}) + "\n" for n in numbers)
    return folder


def config(home: Path, recipe: str, **changes: Any) -> dict[str, Any]:
    """A run of eight quick steps that goes through every stage: checkpoints after steps 3, 6 and 8, evaluations
    every second step. One thread everywhere: all torch workers are then forked from one template."""
    evaluation = {"data": {"path": str(home / "data" / "grpo.jsonl"), "limit": 16}, "every": 2}
    common: dict[str, Any] = {
        "recipe": recipe,
        "name": recipe,
        "folder": str(home / "runs"),
        "seed": 3,
        "steps": 8,
        "token_budget": 256,
        "model": {"path": str(home / "model")},
        "data": {"path": str(home / "data" / f"{recipe}.jsonl")},
        "trainer": {"ranks": 2, "threads": 1, "optimizer": {"lr": 3e-3}},
        "evaluation": evaluation,
        "rollout": {"sampling": {"max_tokens": 4}, "engine": {"max_rows": 32, "threads": 1}},
        "checkpoint": {"every": 3},
        "report": {"tensorboard": False, "html": False},
    }
    if recipe == "grpo":
        # A reward that every group has signal in, so that every step moves the weights.
        common |= {"prompts_per_step": 4, "group_size": 4, "loss": {"old_logprobs": "trainer"}}
        common |= {
            "reward": {"terms": [{"kind": "exact_match"}, {"kind": "regex", "pattern": "[0-4].*", "weight": 0.5}]}
        }
    else:
        common |= {"batch_size": 16}
    return {**common, **changes}


def write(folder: Path, values: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{values['name']}.yaml"
    file.write_text(yaml.safe_dump(dict(values)))
    return file


class Ended(AssertionError):
    """The run came to its end before it was where it was waited for."""


@dataclass(frozen=True)
class Place:
    """Where the controller is: a stage ("" between two), and the step it is at or after; None before the first."""

    stage: str
    step: int | None


class Eye:
    """Looks at a beacon in a few microseconds: some stages last half a millisecond, and who looks long and often has
    used up its share of a busy machine when it matters."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._step_at: int | None = None

    def place(self) -> Place:
        return Place(self._stage(), self._step())

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
class Launched:
    """A run under way."""

    process: "subprocess.Popen[bytes] | Forked"
    folder: Path
    output: Path
    seen: set[psutil.Process] = field(default_factory=set)
    """Every process of the run that was ever seen; psutil tells them from later ones with the same pid."""
    _eye: "Eye | None" = None

    @classmethod
    def start(
        cls, folder: Path, *arguments: str, cwd: Path | None = None, cold: bool = False,
        hold: dict[str, Any] | None = None,
    ) -> "Launched":  # fmt: skip
        """`lockstep train ARGUMENTS`; `folder` is the run's. A cold start runs the installed command itself; other
        ones may hold a stage, stop when a file exists, let a trainer rank stand still, or keep completions more often,
        as `controller_fork_server.become` says."""
        output = folder.parent.parent / f"{folder.name}-{time.monotonic_ns()}.out"
        output.parent.mkdir(parents=True, exist_ok=True)
        process: subprocess.Popen[bytes] | Forked
        if not cold:
            process = Forked(["train", *arguments], output, cwd, hold)
        else:
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [*LOCKSTEP, "train", *arguments], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env=ENVIRONMENT, cwd=cwd, start_new_session=True,
                )  # fmt: skip
        launched = cls(process, folder, output)
        STARTED.append(launched)
        return launched

    @classmethod
    def resume(cls, folder: Path, *arguments: str, hold: dict[str, Any] | None = None) -> "Launched":
        return cls.start(folder, "--resume", str(folder), *arguments, hold=hold)

    def beacon(self, name: str) -> BeaconState | None:
        """What a process of the run says, or said last before it was killed."""
        try:
            run = (self.folder / "run-id").read_text().strip()
        except OSError:
            return None
        return read_beacon(run_shm_dir(run) / f"{name}.beacon") if run else None

    def place(self) -> Place | None:
        """Where the controller is, or was when it died; None before it says anything."""
        if self._eye is None:
            found = self.beacon("controller")
            if found is None or found.pid != self.process.pid:
                return None
            self._eye = Eye(found.path)
        return self._eye.place()

    def wait_for(self, stage: str, step: int | None, timeout_s: float = BOUND_S) -> Place:
        """Returns when the controller is in this stage of this step (None: of any) or, if that was missed, of a
        later one."""

        def there() -> Place | None:
            place = self.place()
            if place is None or place.stage != stage:
                return None
            late = place.step is not None and step is not None and place.step >= step
            return place if step is None or late else None

        def near() -> bool:
            place = self.place()
            return place is not None and (step or 0) <= (place.step or 0) + 1 and place.stage != "start"

        return self.wait_until(there, f"in {stage} of step {step}", near, timeout_s)

    def wait_for_file(self, folder: Path, pattern: str, timeout_s: float = BOUND_S) -> None:
        """Returns in the moment in which a file (or folder) appears."""
        self.wait_until(lambda: True if [*folder.glob(pattern)] else None, pattern, folder.exists, timeout_s)

    def wait_until(
        self, there: Callable[[], T | None], what: str, near: Callable[[], bool], timeout_s: float = BOUND_S
    ) -> T:
        """Looks all the time once it is `near`."""
        deadline, looked = time.monotonic() + timeout_s, 0.0
        while (found := there()) is None:
            far = not near()
            time.sleep(0.002 if far else 0.00005)
            if time.monotonic() - looked > 0.5:
                looked = time.monotonic()
                if far or not self.seen:
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
        self.seen.update(found)
        return found

    def kill(self) -> Place | None:
        """SIGKILL to all of it at once, as a power cut would; where the controller was."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        for process in self.seen:
            _kill(process)
        for process in self.left():
            _kill(process)
        self.process.wait(30)
        psutil.wait_procs(self.left(), timeout=30)
        assert not self.left()
        return self.place()

    def kill_controller(self) -> None:
        """SIGKILL to the controller and nobody else."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def left(self) -> list[psutil.Process]:
        """Processes of the run that live: whose command or environment names its folder, that were below it, or that
        have a beacon (the supervisor hears of the run by its standard input)."""
        found, name = [], self.folder / "run-id"
        states = read_beacons(name.read_text().strip()) if name.exists() else []
        known = {state.pid for state in states if is_alive(state.pid, state.start_ticks)}
        for process in {*psutil.process_iter(), *self.seen}:
            try:
                words = " ".join([*process.cmdline(), process.environ().get("LOCKSTEP_WORKER", "")])
                ours = process in self.seen or process.pid in known or f"{self.folder}/" in words
                if ours and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def gone(self, within_s: float) -> bool:
        """Whether nothing of the run lives any more."""
        deadline = time.monotonic() + within_s
        while self.left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def finish(self, timeout_s: float = BOUND_S) -> int:
        """Waits for the end; the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            text = self.text()
            self.kill()
            raise AssertionError(f"not finished after {timeout_s} s:\n{text}") from None

    def said(self) -> str:
        """What it printed."""
        return self.output.read_text(errors="replace")

    def text(self) -> str:
        """What it printed, and the ends of its workers' logs."""
        logs = [
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in (self.folder / "logs").glob("*.log")
        ]
        return "\n".join([self.said()[-6000:], *logs])


STARTED: list[Launched] = []
"""By this test; see `end_all`."""


def end_all() -> None:
    """After a test, however it ended: nothing of its runs goes on, and their shared memory is free."""
    while STARTED:
        launched = STARTED.pop()
        launched.members()
        if launched.process.poll() is None:
            launched.kill()
        file = launched.folder / "run-id"
        if file.exists() and not launched.left():
            shutil.rmtree(run_shm_dir(file.read_text().strip()), ignore_errors=True)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def pause(seconds: float) -> None:
    """Exactly: a sleep alone is late by as much as some stages last."""
    until = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 0.001))
    while time.perf_counter() < until:
        pass


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that is made by whoever of several test processes comes first; the others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "made"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def train(folder: Path, values: Mapping[str, Any], *arguments: str, cold: bool = False) -> Path:
    """A run from beginning to end; its folder."""
    run = Path(values["folder"]) / values["name"]
    launched = Launched.start(run, str(write(folder, values)), *arguments, cold=cold)
    assert launched.finish() == 0, launched.text()
    return run


def weights(run: Path) -> dict[str, bytes]:
    """The exported weights, bit by bit."""
    return {name: array.tobytes() for name, array in load_file(run / "export" / "model.safetensors").items()}


def prompts_used(run: Path) -> dict[str, int]:
    with Ledger.reader(run) as ledger:
        return ledger.prompts_used()
