"""Starts real runs as a user would, looks at them from outside, and kills them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from safetensors.numpy import load_file

from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny import make_tiny
from lockstep.watch.beacon import BeaconState, read_beacons

ALPHABET = "0123456789="
LOCKSTEP = [str(Path(sys.executable).with_name("lockstep"))]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def task(folder: Path, rows: int = 64) -> Path:
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


def config(folder: Path, recipe: str, **changes: Any) -> dict[str, Any]:
    """A run of a few quick steps that goes through every stage."""
    evaluation = {"data": {"path": str(folder / "data" / "grpo.jsonl"), "limit": 16}, "every": 2}
    common: dict[str, Any] = {
        "recipe": recipe,
        "name": recipe,
        "folder": str(folder / "runs"),
        "seed": 3,
        "steps": 6,
        "token_budget": 256,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "data" / f"{recipe}.jsonl")},
        "trainer": {"ranks": 2, "optimizer": {"lr": 3e-3}},
        "evaluation": evaluation,
        "rollout": {"sampling": {"max_tokens": 4}, "engine": {"max_rows": 32}},
        "checkpoint": {"every": 3},
    }
    if recipe == "grpo":
        # A reward that every group has signal in, so that every step moves the weights.
        common |= {"prompts_per_step": 4, "group_size": 4, "loss": {"old_logprobs": "trainer"}}
        common |= {"reward": {"terms": [{"kind": "exact_match"}, {"kind": "regex", "pattern": "[0-4].*", "weight": 0.5}]}}
    else:
        common |= {"batch_size": 16}
    return {**common, **changes}


def write(folder: Path, values: Mapping[str, Any]) -> Path:
    file = folder / f"{values['name']}.yaml"
    file.write_text(yaml.safe_dump(dict(values)))
    return file


@dataclass
class Launched:
    """A run under way."""

    process: subprocess.Popen[bytes]
    folder: Path
    output: Path

    @classmethod
    def start(cls, folder: Path, *arguments: str, cwd: Path | None = None) -> "Launched":
        """`lockstep train ARGUMENTS`; `folder` is the run's."""
        output = folder.parent.parent / f"{folder.name}-{time.monotonic_ns()}.out"
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*LOCKSTEP, "train", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd=cwd,
                start_new_session=True,
            )
        return cls(process, folder, output)

    def controller(self) -> BeaconState | None:
        """What the controller says it does; None before it says anything."""
        try:
            run = (self.folder / "run-id").read_text().strip()
        except OSError:
            return None
        found = [state for state in read_beacons(run) if state.name == "controller"]
        return found[0] if found and found[0].pid == self.process.pid else None

    def wait_for(self, stage: str, step: int, timeout_s: float = 120) -> BeaconState:
        """Returns when the controller is in this stage of this step (or past the step, if that was missed)."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended with {self.process.returncode}:\n{self.text()}")
            state = self.controller()
            if state is not None and "step" in state.counters:
                now = state.counters["step"].value
                if (now == step and state.stage == stage) or now > step:
                    return state
            time.sleep(0.0005)
        raise AssertionError(f"never in {stage} of step {step}:\n{self.text()}")

    def members(self) -> list[psutil.Process]:
        """The controller and every process below it."""
        try:
            controller = psutil.Process(self.process.pid)
            return [controller, *controller.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """SIGKILL to all of it at once, as a power cut would."""
        members = self.members()
        for member in members:
            try:
                member.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)
        psutil.wait_procs(members, timeout=30)

    def finish(self, timeout_s: float = 150) -> int:
        """Waits for the end; the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            text = self.text()
            self.kill()
            raise AssertionError(f"not finished after {timeout_s} s:\n{text}") from None

    def text(self) -> str:
        """What it printed, and the ends of its workers' logs."""
        logs = [
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in (self.folder / "logs").glob("*.log")
        ]
        return "\n".join([self.output.read_text(errors="replace")[-6000:], *logs])


def train(folder: Path, values: Mapping[str, Any], *arguments: str) -> Path:
    """A run from beginning to end; its folder."""
    run = Path(values["folder"]) / values["name"]
    launched = Launched.start(run, str(write(folder, values)), *arguments)
    assert launched.finish() == 0, launched.text()
    return run


def weights(run: Path) -> dict[str, bytes]:
    """The exported weights, bit by bit."""
    return {name: array.tobytes() for name, array in load_file(run / "export" / "model.safetensors").items()}


def prompts_used(run: Path) -> dict[str, int]:
    with Ledger.reader(run) as ledger:
        return ledger.prompts_used()
