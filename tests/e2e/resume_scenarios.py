"""Runs that are stopped and resumed, with checks after every stop and at their end."""

import hashlib
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from harness import (
    PICTURES,
    Launched,
    config,
    metric_rows,
    pause,
    picture_task,
    prompts_used,
    task,
    train,
    weights,
    write,
)
from safetensors.numpy import load_file

from benchmarks.launched_run import ControllerPosition, Ended
from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger
from lockstep.train.checkpoints.checkpoint_files import read_manifest

STEPS, EVERY, CHECKPOINTS = 8, 2, (3, 6, 8)
"""The values of `harness.config`."""
COMPLETIONS = 16
"""Completions of a step, and of an evaluation."""
COMMIT = "commit"
"""Not a stage: the moment after `train` in which the step is committed."""
STAGES = {
    "grpo": ("start", "rollout", "reward", "ledger", "pack", "logprobs", "train", COMMIT, "publish", "evaluate",
             "checkpoint", "export"),
    "sft": ("start", "pack", "train", COMMIT, "evaluate", "checkpoint", "export"),
    "preference": ("start", "pack", "logprobs", "train", COMMIT, "evaluate", "checkpoint", "export"),
}  # fmt: skip
RECIPES = tuple(STAGES)
ONCE = ("rollout", "reward", "ledger")
"""Stages that have nothing to do in a step whose rollouts are durable, so they are too short to be observed."""
HOLD_S = 0.02
"""Shorter stages are delayed by this much, at their beginning or their end with equal probability: on a busy machine
they would be missed."""
GONE_S = 10.0
"""Within this time all processes of a run end whose controller was killed."""


@dataclass(frozen=True)
class Reference:
    """An undisturbed run, and the folder of its model and data."""

    home: Path
    run: Path

    def seconds(self, stage: str) -> float:
        """The typical duration of the stage."""
        if stage in ("start", COMMIT, "export"):
            return {"start": 4.0, COMMIT: 0.005, "export": 0.1}[stage]
        with Ledger.reader(self.run) as ledger:
            found = [row.values.get(f"time/{stage}_s", 0.0) for row in ledger.metrics_rows()]
        return float(np.median([value for value in found if value > 0]))


References = Callable[[str], Reference]


def make_reference(home: Path, recipe: str) -> None:
    """Make the reference run; that of GRPO, which goes through all stages, with the installed command."""
    (picture_task if recipe.startswith(PICTURES) else task)(home)
    run = train(home, config(home, recipe), cold=recipe == "grpo")
    with Ledger.reader(run) as ledger:
        assert [row.step + 1 for row in ledger.checkpoints()][-2:] == list(CHECKPOINTS[-2:])
        assert [row.step + 1 for row in ledger.evaluations()] == list(range(0, STEPS + 1, EVERY))
    before, after = load_file(home / "model" / "model.safetensors"), load_file(run / "export" / "model.safetensors")
    learns = {name for name in after if np.abs(after[name] - before[name]).max() > 1e-4}
    if recipe.startswith(PICTURES):  # a small tower has parameters that no picture needs
        parts = ("visual.blocks", "visual.merger", "language_model")
        assert all(any(part in name for name in learns) for part in parts), "all parts of the reference learn"
    else:
        assert learns == after.keys(), "the reference learns"


class InterruptedRun:
    """A run that is started, stopped and resumed until it is finished, and checked after every stop."""

    def __init__(self, reference: Reference, folder: Path, recipe: str, **changes: Any) -> None:
        self.reference, self.recipe = reference, recipe
        values = config(reference.home, recipe, folder=str(folder / "runs"), **changes)
        self.file, self.run = write(folder, values), folder / "runs" / values["name"]
        self.digests: dict[int, str] = {}
        """sha256 of every step file that was ever durable."""
        self.run_ids: set[str] = set()
        """Run ids under which its processes had shared memory."""
        self.kept = False
        """Whether some completions of an unfinished step survived a kill: the engine batches the others differently."""
        self.stops: list[ControllerPosition | None] = []
        self.on_disk: set[int] = set()
        """Steps with a file at the last stop, including those that the index does not list yet."""

    def launch(self, *arguments: str, hold: dict[str, Any] | None = None) -> Launched:
        if self.run.exists():
            return Launched.resume(self.run, *arguments, hold=hold)
        return Launched.start(self.run, str(self.file), *arguments, hold=hold)

    def kill(self, stage: str, step: int | None, fraction: float) -> None:
        """Kill the run after a fraction of the stage's duration. If the stage was over by then, try again in the next
        step, earlier. The run is checked after every kill."""
        missed = []
        held, seconds = {"stage": stage, "seconds": HOLD_S, "at_end": fraction > 0.5}, self.reference.seconds(stage)
        brief = stage != COMMIT and seconds < HOLD_S
        for _ in range(4):
            launched = self.launch(hold=held if brief else None)
            try:
                _await(launched, stage, step)
            except Ended:
                self.missed(launched)
                continue
            pause(fraction * max(seconds, HOLD_S if brief else 0.0))
            position = self.stopped(launched)
            if position is not None and position.stage == ("" if stage == COMMIT else stage):
                return
            missed.append(position)
            fraction /= 3
            if stage in ONCE and step is not None:
                step += 1
            if step == STEPS:
                step = STEPS - 1
                self.forget()
        pytest.fail(f"never hit {stage} of step {step}: {missed}")

    def kill_at(self, file: str) -> ControllerPosition | None:
        """Kill the run as soon as a file of the run (a pattern) has appeared."""
        launched = self.launch(hold={"file": str(self.run / file)})
        launched.wait_for_file(self.run, file)
        return self.stopped(launched)

    def missed(self, launched: Launched) -> None:
        """The machine was too busy to kill in time: the run has finished, so start anew."""
        assert launched.process.returncode == 0, launched.text()
        self.compare()
        self.forget()

    def stopped(self, launched: Launched) -> ControllerPosition | None:
        position = launched.kill()
        self.stops.append(position)
        self.check_state(launched, position)
        return position

    def check_state(self, launched: Launched, position: ControllerPosition | None) -> None:
        """Check what must hold after every stop."""
        if not self.run.exists():
            return
        self._note_run_id()
        known, self.on_disk = self.on_disk | set(self.digests), self._steps_on_disk()
        with Ledger.reader(self.run) as ledger:
            durable, used, rows = ledger.collected_steps(), ledger.prompts_used(), ledger.checkpoints()
            removed = {step for step in durable if ledger.stored_step(step) is None}
            partial = len(ledger.kept_completions(len(durable)))
        assert durable == list(range(len(durable)))
        if self.recipe.endswith("grpo"):
            assert used.items() <= prompts_used(self.reference.run).items()
            assert set(used.values()) == set(durable)
        for row in rows:
            assert read_manifest(row.path)["files"], "files that the ledger names are complete"
        for step in set(durable) - removed:
            digest = hashlib.sha256((self.run / "steps" / f"{step + 1:08d}.arrow").read_bytes()).hexdigest()
            assert self.digests.setdefault(step, digest) == digest, f"step {step} was generated again"
        self.kept |= 0 < partial < COMPLETIONS
        self._generated(launched, position, known)

    def _steps_on_disk(self) -> set[int]:
        return {int(path.stem) - 1 for path in (self.run / "steps").glob("[0-9]*.arrow")}

    def forget(self) -> None:
        """Start anew, without the history of earlier stops."""
        shutil.rmtree(self.run)
        self.digests, self.on_disk, self.kept = {}, set(), False

    def _note_run_id(self) -> None:
        name = self.run / "run-id"
        if name.exists():
            self.run_ids.add(name.read_text().strip())

    def _generated(self, launched: Launched, position: ControllerPosition | None, known: set[int]) -> None:
        """Compare the engine's counters with the missing completions: nothing is generated twice."""
        engine, settled = launched.beacon("engine-0"), ("pack", "logprobs", "train", "publish", "checkpoint", "export")
        if engine is None or position is None or position.stage not in settled:
            return
        with sqlite3.connect(self.run / "ledger.sqlite") as index:
            (generation,) = index.execute("SELECT cast(value AS int) FROM meta WHERE key = 'generation'").fetchone()
            steps = {step for (step,) in index.execute("SELECT step FROM steps WHERE generation = ?", (generation,))}
            (evaluations,) = index.execute(
                "SELECT count(*) FROM evaluations WHERE generation = ?", (generation,)
            ).fetchone()
        counter = engine.counters.get("completions")
        assert (counter.value if counter else 0) == COMPLETIONS * (len(steps - known) + evaluations)

    def finish(self) -> None:
        """Resume the run for the last time, and compare it with the reference."""
        launched = self.launch()
        assert launched.finish() == 0, launched.text()
        self._note_run_id()
        assert launched.has_ended(1.0), [process.cmdline() for process in launched.remaining()]
        self.compare()

    def compare(self) -> None:
        """Compare the finished run with the reference."""
        print(f"{self.recipe}: stopped at {self.stops}")
        assert prompts_used(self.run) == prompts_used(self.reference.run)
        left = [path.name for path in self.run.rglob("*") if ".tmp" in path.name or path.suffix == ".partial"]
        assert left == []
        assert [run_id for run_id in self.run_ids if run_shm_dir(run_id).exists()] == []
        if self.kept:
            return  # log-probabilities may differ in the last bits, and so may the weights
        assert weights(self.run) == weights(self.reference.run)
        assert metrics(self.run) == metrics(self.reference.run)
        assert evaluations(self.run) == evaluations(self.reference.run)
        kept = [{path.name for path in (run / "checkpoints").iterdir()} for run in (self.run, self.reference.run)]
        assert kept[0] == kept[1]


def _await(launched: Launched, stage: str, step: int | None) -> None:
    if stage != COMMIT:
        launched.wait_for(stage, step)
        return
    launched.wait_for("train", step)
    launched.wait_until(
        lambda: True if launched.position() != ControllerPosition("train", step) else None, COMMIT, lambda: True
    )


def newest(run: Path) -> int:
    """Steps in the newest checkpoint."""
    with Ledger.reader(run) as ledger:
        row = ledger.newest_checkpoint()
    return 0 if row is None else row.step + 1


def tree(folder: Path) -> dict[str, str]:
    """Digests of all files, without SQLite's temporary files, which readers create as well."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(("-shm", "-wal")))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def metrics(run: Path, steps: int = STEPS) -> list[dict[str, float]]:
    """The rows of metrics, without durations, of a run that has done so many steps."""
    with Ledger.reader(run) as ledger:
        rows = ledger.metrics_rows()
    assert [row.step for row in rows] == list(range(steps))
    timed = ("time/", "throughput/", "rollout/generated")
    return [{name: value for name, value in row.values.items() if not name.startswith(timed)} for row in rows]


def evaluations(run: Path) -> list[tuple[int, dict[str, float]]]:
    with Ledger.reader(run) as ledger:
        return [(row.step, row.metrics) for row in ledger.evaluations()]


def step_of(stage: str, chance: Random) -> int | None:
    """A random step in which the stage has something to do."""
    match stage:
        case "start" | "export":
            return None
        case "evaluate":
            return chance.choice([version - 1 for version in range(EVERY, STEPS + 1, EVERY)])
        case "checkpoint":
            return chance.choice([version - 1 for version in CHECKPOINTS])
    return chance.randrange(STEPS - 1)


def assert_close(run: Path, other: Path) -> None:
    """Check that weights agree up to the effect of another order of additions, relative to each tensor's norm."""
    found, expected = (load_file(each / "export" / "model.safetensors") for each in (run, other))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float(np.linalg.norm(found[name] - tensor) / np.linalg.norm(tensor))
        # The gradient of a key's bias cancels in the softmax; the remaining rounding error is scaled up by Adam.
        assert error < (1e-3 if name.endswith("k_proj.bias") else 1e-5), name


def learned(run: Path) -> list[dict[str, float]]:
    """What every step measured of rewards and models, without times."""
    kept = ("policy/", "critic/", "reward/", "rewards/", "pairs/", "chosen/", "logps/")
    return [
        {name: value for name, value in row.items() if name.startswith(kept) and not name.endswith("/train_s")}
        for row in metric_rows(run)
    ]


def assert_equal_runs(run: Path, other: Path) -> None:
    """Check that the exported models, with a critic both, and what was measured of two runs are the same."""
    rows = learned(other)
    for folder in ("export", "critic/export") if "critic/loss" in rows[0] else ("export",):
        name = Path(folder) / "model.safetensors"
        assert (run / name).read_bytes() == (other / name).read_bytes(), folder
    assert learned(run) == rows


def assert_same(launched: Launched, whole: Path) -> None:
    """Check that the run ended by itself, with the models and metrics of the undisturbed run."""
    assert launched.finish() == 0, launched.text()
    assert_equal_runs(launched.folder, whole)
