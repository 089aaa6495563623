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

import numpy as np
import psutil
import yaml
from forked_controller import BOUND_S, ENVIRONMENT, Forked
from PIL import Image
from safetensors.numpy import load_file

from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision
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
PICTURES = "pictures-"
"""Begins the names of recipes whose data has images."""
LOCKSTEP = [str(Path(sys.executable).with_name("lockstep"))]
SEED = int(os.environ.get("LOCKSTEP_TEST_SEED", "0"))
"""The seed of these tests; `script/test --full --seed S` sets it."""


def seeded_random(*names: object) -> random.Random:
    """A random generator that depends only on the names and the seed."""
    return random.Random("/".join(map(str, (SEED, *names))))


def task(folder: Path, rows: int = 20, hidden: int = 32) -> Path:
    """Create a tiny model and the data of a task that is learnt in a few steps: copy a digit."""
    make_tiny(
        folder / "model", hidden=hidden, layers=2, heads=2, kv_heads=1, ffn=64, max_length=32, alphabet=ALPHABET, seed=5
    )
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    numbers = [f"{(7 * n) % 100:02d}" for n in range(rows)]
    with (data / "grpo.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}=", "answer": n[0]}) + "\n" for n in numbers)
    with (data / "sft.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}=", "completion": n[0]}) + "\n" for n in numbers)
    with (data / "preference.jsonl").open("w") as file:
        for n in numbers:
            row = {"prompt": f"{n}=", "chosen": n[0], "rejected": f"{9 - int(n[0])}"}
            file.write(json.dumps(row) + "\n")
    return folder


def picture_task(folder: Path, rows: int = 20) -> Path:
    """The task with pictures as files: most rows have one, some two or none, of two sizes."""
    sizes = {"hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vision_hidden": 16, "vision_heads": 2}
    make_tiny_vision(
        folder / "model", alphabet=ALPHABET, max_length=64, layers=1, vision_layers=1, vision_ffn=32, seed=5, **sizes
    )
    (folder / "data").mkdir(parents=True, exist_ok=True)
    both: dict[str, list[dict[str, Any]]] = {"grpo": [], "sft": []}
    for row in range(rows):
        digit, names = row % 10, []
        for number in range((1, 1, 2, 1, 0)[row % 5]):
            side = 16 if row % 2 else 24
            names.append(f"{row}-{number}.png")
            write_picture(folder / "data" / names[-1], seed=100 * row + number, side=side)
        common = {"prompt": f"<image>{digit}<image>=" if len(names) == 2 else f"{digit}=", "images": names}
        both["grpo"].append({**common, "answer": str(digit)})
        both["sft"].append({**common, "completion": str(digit)})
    for recipe, lines in both.items():
        (folder / "data" / f"{PICTURES}{recipe}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def write_picture(path: Path, seed: int, side: int = 16) -> None:
    """Write a square picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def config(home: Path, recipe: str, **changes: Any) -> dict[str, Any]:
    """A run of eight quick steps that goes through every stage: checkpoints after steps 3, 6 and 8, evaluations
    every second step. One thread everywhere, so that all torch workers are forked from one fork server. The data of
    `pictures-grpo` and `pictures-sft` is that of `picture_task`."""
    name, recipe = recipe, recipe.removeprefix(PICTURES)
    prompts = f"{name.removesuffix(recipe)}grpo.jsonl"
    evaluation = {"data": {"path": str(home / "data" / prompts), "limit": 16}, "every": 2}
    common: dict[str, Any] = {
        "recipe": recipe,
        "name": name,
        "folder": str(home / "runs"),
        "seed": 3,
        "steps": 8,
        "token_budget": 256,
        "model": {"path": str(home / "model")},
        "data": {"path": str(home / "data" / f"{name}.jsonl")},
        "trainer": {"ranks": 2, "threads": 1, "optimizer": {"lr": 3e-3}},
        "evaluation": evaluation,
        "rollout": {"sampling": {"max_tokens": 4}, "engine": {"max_rows": 32, "threads": 1}},
        "checkpoint": {"every": 3},
        "report": {"tensorboard": False, "html": False},
    }
    if recipe == "grpo":
        # A reward that differs within every group, so that every step changes the weights.
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
class Launched:
    """A started run."""

    process: "subprocess.Popen[bytes] | Forked"
    folder: Path
    output: Path
    known_processes: set[psutil.Process] = field(default_factory=set)
    """Every process of the run that was ever found; psutil distinguishes them from later ones with the same pid."""
    _position_reader: "PositionReader | None" = None

    @classmethod
    def start(
        cls, folder: Path, *arguments: str, cwd: Path | None = None, cold: bool = False,
        hold: dict[str, Any] | None = None,
    ) -> "Launched":  # fmt: skip
        """Start `lockstep train ARGUMENTS`; `folder` is the run's. A cold start runs the installed command itself;
        other starts may pass `hold`, the options of `controller_fork_server.become`: delay a stage, stop when a file
        exists, freeze a trainer rank, or store completions more often."""
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
        """The beacon of a process of the run, or its last state if the process was killed."""
        try:
            run = (self.folder / "run-id").read_text().strip()
        except OSError:
            return None
        return read_beacon(run_shm_dir(run) / f"{name}.beacon") if run else None

    def position(self) -> ControllerPosition | None:
        """The controller's position, or its last one if it has ended; None before it has a beacon."""
        if self._position_reader is None:
            found = self.beacon("controller")
            if found is None or found.pid != self.process.pid:
                return None
            self._position_reader = PositionReader(found.path)
        return self._position_reader.position()

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
        found, name = [], self.folder / "run-id"
        states = read_beacons(name.read_text().strip()) if name.exists() else []
        beacon_pids = {state.pid for state in states if is_alive(state.pid, state.start_ticks)}
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


STARTED: list[Launched] = []
"""The runs that this test has started; see `end_all`."""


def end_all() -> None:
    """Kill the runs of a test, however it ended, and free their shared memory."""
    while STARTED:
        launched = STARTED.pop()
        launched.members()
        if launched.process.poll() is None:
            launched.kill()
        file = launched.folder / "run-id"
        if file.exists() and not launched.remaining():
            shutil.rmtree(run_shm_dir(file.read_text().strip()), ignore_errors=True)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def pause(seconds: float) -> None:
    """Wait exactly: a sleep may be late by as much as some stages last."""
    until = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 0.001))
    while time.perf_counter() < until:
        pass


def build_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that the first of several test processes fills with `make`; the others wait for it."""
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


def train(
    folder: Path, values: Mapping[str, Any], *arguments: str, cold: bool = False, limit_s: float = BOUND_S
) -> Path:
    """Run to the end; returns the run's folder."""
    run = Path(values["folder"]) / values["name"]
    launched = Launched.start(run, str(write(folder, values)), *arguments, cold=cold)
    assert launched.finish(limit_s) == 0, launched.text()
    return run


def weights(run: Path) -> dict[str, bytes]:
    """The bytes of the exported weights."""
    return {name: array.tobytes() for name, array in load_file(run / "export" / "model.safetensors").items()}


def metric_rows(run: Path) -> list[dict[str, float]]:
    """The metrics of every step."""
    with Ledger.reader(run) as ledger:
        return [row.values for row in ledger.metrics_rows()]


def untimed_rows(run: Path) -> list[dict[str, float]]:
    """The same without times, which differ from run to run."""
    timed = ("time/", "throughput/")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in metric_rows(run)]


def prompts_used(run: Path) -> dict[str, int]:
    with Ledger.reader(run) as ledger:
        return ledger.prompts_used()
