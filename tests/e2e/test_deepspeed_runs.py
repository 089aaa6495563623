"""Whole runs with the DeepSpeed trainer on two gloo ranks: losses are those of FSDP2, and a killed run resumes."""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import PICTURES, Launched, config, metric_rows, picture_task, prompts_used, task, train, weights, write

NEEDS_DEEPSPEED = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed"),
]
pytestmark = [*NEEDS_DEEPSPEED, pytest.mark.timeout(600)]
STAGES = (1, 2, 3)
STEPS = 10
OPTIMIZER = {"lr": 1e-3, "eps": 1e-5}
"""A larger eps: else AdamW turns gradients that are only rounding errors into full updates."""


def trainer(stage: int | None) -> dict[str, Any]:
    """The settings of a trainer: FSDP2's for None, else DeepSpeed's at a stage."""
    common = {"ranks": 2, "threads": 1, "optimizer": OPTIMIZER}
    if stage is None:
        return common
    return {**common, "kind": "deepspeed", "deepspeed": {"zero_optimization": {"stage": stage}}}


def run_values(home: Path, recipe: str, stage: int | None) -> dict[str, Any]:
    """A run without evaluations."""
    name = f"{recipe}-{'fsdp2' if stage is None else stage}"
    base = "grpo" if recipe == "ppo" else recipe
    values = config(home, base, name=name, steps=STEPS, evaluation=None, trainer=trainer(stage))
    if recipe == "ppo":
        del values["group_size"], values["loss"]
        values |= {"recipe": "ppo", "critic": {"trainer": trainer(stage)}}
    return values


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int | None], list[float]]:
    home = task(tmp_path_factory.mktemp("deepspeed"))

    @functools.cache
    def of(recipe: str, stage: int | None) -> list[float]:
        rows = metric_rows(train(home, run_values(home, recipe, stage)))
        return [row[name] for row in rows for name in sorted(row) if name.endswith("/loss")]

    return of


@pytest.mark.parametrize(
    ("recipe", "stage"),
    [
        pytest.param(recipe, stage, marks=[] if recipe == "sft" else [pytest.mark.slow])
        for recipe in ("sft", "preference", "grpo", "ppo")
        for stage in STAGES
    ],
)
def test_losses_are_those_of_fsdp2(recipe: str, stage: int, losses: Callable[[str, int | None], list[float]]) -> None:
    expected = losses(recipe, None)
    assert len(expected) >= STEPS
    assert losses(recipe, stage) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "stage"), [*(("grpo", stage) for stage in STAGES), (f"{PICTURES}grpo", 2), (f"{PICTURES}grpo", 3)]
)
def test_a_killed_run_resumes_with_equal_weights(recipe: str, stage: int, tmp_path: Path) -> None:
    home = (picture_task if recipe.startswith(PICTURES) else task)(tmp_path)

    def start(name: str, hold: dict[str, Any] | None = None) -> Launched:
        values = {**run_values(home, recipe, stage), "name": name, "steps": 4, "checkpoint": {"every": 2}}
        return Launched.start(home / "runs" / name, str(write(home, values)), hold=hold)

    undisturbed = start("undisturbed")
    assert undisturbed.finish() == 0, undisturbed.text()
    killed = start("killed", {"stage": "train", "seconds": 0.3, "at_end": False})
    killed.wait_for("train", 3)
    killed.kill()
    killed = Launched.resume(killed.folder)
    assert killed.finish() == 0, killed.text()
    assert prompts_used(killed.folder) == prompts_used(undisturbed.folder)
    assert weights(killed.folder) == weights(undisturbed.folder)
