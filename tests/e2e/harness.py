"""Starts real runs as a user would, inspects them from outside, and kills them."""

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from forked_controller import ENVIRONMENT, Forked
from PIL import Image
from safetensors.numpy import load_file

from benchmarks.launched_run import BOUND_S, LaunchedRun, RunProcess
from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision

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


class Launched(LaunchedRun):
    """A run that a test has started."""

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
        process: RunProcess
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
