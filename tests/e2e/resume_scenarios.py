"""Runs that are stopped and resumed, and what must hold after every stop and at their end."""

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
from harness import Ended, Launched, Place, config, pause, prompts_used, task, train, weights, write
from safetensors.numpy import load_file

from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger
from lockstep.train.checkpoint import read_manifest

STEPS, EVERY, CHECKPOINTS = 8, 2, (3, 6, 8)
"""Of every run here, as `harness.config` has them."""
COMPLETIONS = 16
"""Of a step, and of an evaluation."""
COMMIT = "commit"
"""Not a stage: the moment after `train` in which the step is committed."""
STAGES = {
    "grpo": ("start", "rollout", "reward", "ledger", "pack", "logprobs", "train", COMMIT, "publish", "evaluate",
             "checkpoint", "export"),
    "sft": ("start", "pack", "train", COMMIT, "evaluate", "checkpoint", "export"),
}  # fmt: skip
RECIPES = tuple(STAGES)
ONCE = ("rollout", "reward", "ledger")
"""Stages that have nothing to do in a step whose rollouts are durable: they are over before anybody could look."""
HOLD_S = 0.02
"""A stage that is quicker is held for so long, half of the times at its begin and half at its end: on a busy machine
nobody looks in time."""
GONE_S = 10.0
"""Within which nothing of a run lives any more whose controller was killed."""


@dataclass(frozen=True)
class Reference:
    """A run that nothing disturbed, and where its model and data are."""

    home: Path
    run: Path

    def seconds(self, stage: str) -> float:
        """What the stage takes, typically."""
        if stage in ("start", COMMIT, "export"):
            return {"start": 4.0, COMMIT: 0.005, "export": 0.1}[stage]
        with Ledger.reader(self.run) as ledger:
            found = [row.values.get(f"time/{stage}_s", 0.0) for row in ledger.metrics_rows()]
        return float(np.median([value for value in found if value > 0]))


References = Callable[[str], Reference]


def make_reference(home: Path, recipe: str) -> None:
    """The run itself, by the installed command."""
    task(home)
    run = train(home, config(home, recipe), cold=True)
    with Ledger.reader(run) as ledger:
        assert [row.step + 1 for row in ledger.checkpoints()][-2:] == list(CHECKPOINTS[-2:])
        assert [row.step + 1 for row in ledger.evaluations()] == list(range(0, STEPS + 1, EVERY))
    before, after = load_file(home / "model" / "model.safetensors"), load_file(run / "export" / "model.safetensors")
    assert all(np.abs(after[name] - before[name]).max() > 1e-4 for name in after), "the reference learns"


class Life:
    """A run that is started, stopped and resumed until it is finished, and looked at after every stop."""

    def __init__(self, reference: Reference, folder: Path, recipe: str, **changes: Any) -> None:
        self.reference, self.recipe = reference, recipe
        values = config(reference.home, recipe, folder=str(folder / "runs"), **changes)
        self.file, self.run = write(folder, values), folder / "runs" / values["name"]
        self.digests: dict[int, str] = {}
        """sha256 of every step file that was ever durable."""
        self.places: set[str] = set()
        """Ids under which its processes had shared memory."""
        self.kept = False
        """Whether some completions of an unfinished step outlived a kill: the engine batches the rest otherwise."""
        self.stops: list[Place | None] = []
        self.on_disk: set[int] = set()
        """Steps with a file at the last stop, those included that the index does not know yet."""

    def launch(self, *arguments: str, hold: dict[str, Any] | None = None) -> Launched:
        if self.run.exists():
            return Launched.resume(self.run, *arguments, hold=hold)
        return Launched.start(self.run, str(self.file), *arguments, hold=hold)

    def kill(self, stage: str, step: int | None, fraction: float) -> None:
        """Kills everything a fraction of the stage's time into it. Where the stage was over by then, once more: the
        next one, and earlier. All places where it died are looked at."""
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
            place = self.stopped(launched)
            if place is not None and place.stage == ("" if stage == COMMIT else stage):
                return
            missed.append(place)
            fraction /= 3
            if stage in ONCE and step is not None:
                step += 1
            if step == STEPS:
                step = STEPS - 1
                self.forget()
        pytest.fail(f"never hit {stage} of step {step}: {missed}")

    def kill_at(self, file: str) -> Place | None:
        """Kills everything when a file of the run (a pattern) has appeared and nothing has happened to it yet."""
        launched = self.launch(hold={"file": str(self.run / file)})
        launched.wait_for_file(self.run, file)
        return self.stopped(launched)

    def missed(self, launched: Launched) -> None:
        """This machine was too busy to look in time: that was a life without a kill, and another one begins."""
        assert launched.process.returncode == 0, launched.text()
        self.compare()
        self.forget()

    def stopped(self, launched: Launched) -> Place | None:
        place = launched.kill()
        self.stops.append(place)
        self.look(launched, place)
        return place

    def look(self, launched: Launched, place: Place | None) -> None:
        """What holds after every stop, wherever it came."""
        if not self.run.exists():
            return
        self._note_place()
        known, self.on_disk = self.on_disk | set(self.digests), self._steps_on_disk()
        with Ledger.reader(self.run) as ledger:
            durable, used, rows = ledger.collected_steps(), ledger.prompts_used(), ledger.checkpoints()
            removed = {step for step in durable if ledger.stored(step) is None}
            partial = len(ledger.kept(len(durable)))
        assert durable == list(range(len(durable)))
        if self.recipe == "grpo":
            assert used.items() <= prompts_used(self.reference.run).items()
            assert set(used.values()) == set(durable)
        for row in rows:
            assert read_manifest(row.path)["files"], "what the ledger names is complete"
        for step in set(durable) - removed:
            digest = hashlib.sha256((self.run / "steps" / f"{step:08d}.arrow").read_bytes()).hexdigest()
            assert self.digests.setdefault(step, digest) == digest, f"step {step} was made anew"
        self.kept |= 0 < partial < COMPLETIONS
        self._generated(launched, place, known)

    def _steps_on_disk(self) -> set[int]:
        return {int(path.stem) for path in (self.run / "steps").glob("[0-9]*.arrow")}

    def forget(self) -> None:
        """Begins anew."""
        shutil.rmtree(self.run)
        self.digests, self.on_disk, self.kept = {}, set(), False

    def _note_place(self) -> None:
        name = self.run / "run-id"
        if name.exists():
            self.places.add(name.read_text().strip())

    def _generated(self, launched: Launched, place: Place | None, known: set[int]) -> None:
        """Holds what the engine says it did against what was not there before: nothing is generated twice."""
        engine, settled = launched.beacon("engine-0"), ("pack", "logprobs", "train", "publish", "checkpoint", "export")
        if engine is None or place is None or place.stage not in settled:
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
        """Resumes it for the last time, and compares."""
        launched = self.launch()
        assert launched.finish() == 0, launched.text()
        self._note_place()
        assert launched.gone(1.0), [process.cmdline() for process in launched.left()]
        self.compare()

    def compare(self) -> None:
        """Holds the finished run against the reference."""
        print(f"{self.recipe}: stopped at {self.stops}")
        assert prompts_used(self.run) == prompts_used(self.reference.run)
        left = [path.name for path in self.run.rglob("*") if ".tmp" in path.name or path.suffix == ".partial"]
        assert left == []
        assert [place for place in self.places if run_shm_dir(place).exists()] == []
        if self.kept:
            return  # bits of the log-probabilities may differ, and so may what follows from them
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
    launched.wait_until(lambda: True if launched.place() != Place("train", step) else None, COMMIT, lambda: True)


def newest(run: Path) -> int:
    """Steps in the newest checkpoint."""
    with Ledger.reader(run) as ledger:
        row = ledger.newest_checkpoint()
    return 0 if row is None else row.step + 1


def tree(folder: Path) -> dict[str, str]:
    """Digests of all files; SQLite's scratch files, which readers make too, are left out."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(("-shm", "-wal")))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def metrics(run: Path) -> list[dict[str, float]]:
    """The rows of metrics, without what is about time."""
    with Ledger.reader(run) as ledger:
        rows = ledger.metrics_rows()
    assert [row.step for row in rows] == list(range(STEPS))
    timed = ("time/", "throughput/", "rollout/generated")
    return [{name: value for name, value in row.values.items() if not name.startswith(timed)} for row in rows]


def evaluations(run: Path) -> list[tuple[int, dict[str, float]]]:
    with Ledger.reader(run) as ledger:
        return [(row.step, row.metrics) for row in ledger.evaluations()]


def step_of(stage: str, chance: Random) -> int | None:
    """A step in which there is something to do in the stage."""
    match stage:
        case "start" | "export":
            return None
        case "evaluate":
            return chance.choice([version - 1 for version in range(EVERY, STEPS + 1, EVERY)])
        case "checkpoint":
            return chance.choice([version - 1 for version in CHECKPOINTS])
    return chance.randrange(STEPS - 1)


def assert_close(run: Path, other: Path) -> None:
    """Relative to each tensor's norm: what another order of additions may do to a few optimizer steps."""
    found, expected = (load_file(each / "export" / "model.safetensors") for each in (run, other))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float(np.linalg.norm(found[name] - tensor) / np.linalg.norm(tensor))
        # The gradient of a key's bias cancels in the softmax; what is left of it is rounding, which Adam scales up.
        assert error < (1e-3 if name.endswith("k_proj.bias") else 1e-5), name
