"""The long suite of resuming: kills, interruptions and deaths at many moments (`script/test --full`)."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import config, pause, prompts_used, seeded_random, train, weights
from resume_scenarios import (
    GONE_S,
    RECIPES,
    STAGES,
    STEPS,
    InterruptedRun,
    Reference,
    References,
    assert_close,
    metrics,
    step_of,
)

from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize(("recipe", "stage"), [(recipe, stage) for recipe in RECIPES for stage in STAGES[recipe]])
def test_killed_at_a_random_moment(reference: References, tmp_path: Path, recipe: str, stage: str, number: int) -> None:
    interrupted, chance = (
        InterruptedRun(reference(recipe), tmp_path, recipe),
        seeded_random("random", recipe, stage, number),
    )
    interrupted.kill(stage, step_of(stage, chance), chance.random())
    interrupted.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_again_while_it_resumes(reference: References, tmp_path: Path, recipe: str) -> None:
    interrupted, chance = InterruptedRun(reference(recipe), tmp_path, recipe), seeded_random("resuming", recipe)
    interrupted.kill_at("run-id")
    interrupted.kill("train", 4, chance.random())
    for _ in range(3):
        interrupted.kill("start", None, chance.random())
    interrupted.kill("export", None, chance.random())
    interrupted.kill("start", None, chance.random())
    interrupted.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "file",
    [
        "ledger.sqlite",
        "run-id",
        "cluster/agent.json",
        "logs/policy-0.log",
        "steps/00000001.arrow",
        "steps/00000005.arrow",
        "checkpoints/00000003.tmp-1-*",
        "checkpoints/00000003.tmp-1-*/checkpoint.json",
        "checkpoints/00000006",
        "export.tmp-export",
        "export",
        "summary.json",
    ],
)
def test_killed_when_a_file_appears(reference: References, tmp_path: Path, file: str) -> None:
    """The run is killed between two related writes."""
    interrupted = InterruptedRun(reference("grpo"), tmp_path, "grpo")
    interrupted.kill_at(file)
    interrupted.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["start", "rollout", "train", "checkpoint", "export"])
def test_only_the_controller_is_killed(reference: References, tmp_path: Path, stage: str) -> None:
    interrupted, chance = InterruptedRun(reference("grpo"), tmp_path, "grpo"), seeded_random("controller", stage)
    launched = interrupted.launch()
    launched.wait_for(stage, step_of(stage, chance))
    pause(chance.random() * interrupted.reference.seconds(stage))
    launched.members()
    launched.kill_controller()
    if chance.random() < 0.5:
        assert launched.has_ended(GONE_S), [process.cmdline() for process in launched.remaining()]
    interrupted.check_state(launched, launched.position())
    interrupted.finish()  # in half of the cases while workers of the earlier attempt still end
    assert launched.has_ended(GONE_S)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["start", "rollout", "ledger", "train", "checkpoint", "export"])
def test_two_ctrl_c_at_a_random_moment(reference: References, tmp_path: Path, stage: str) -> None:
    interrupted, chance = InterruptedRun(reference("grpo"), tmp_path, "grpo"), seeded_random("ctrl-c", stage)
    launched = interrupted.launch()
    launched.wait_for(stage, step_of(stage, chance))
    for _ in range(2):
        pause(chance.random() * interrupted.reference.seconds(stage) / 2)
        launched.process.send_signal(signal.SIGINT)
    assert launched.finish(60) in (130, 0), launched.text()  # 0: it was in its last step
    assert launched.has_ended(1.0)
    interrupted.check_state(launched, None)
    assert not any(run_shm_dir(run_id).exists() for run_id in interrupted.run_ids)
    interrupted.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["policy-1", "engine-0", "scorer-0", "agent"])
def test_one_process_is_killed(reference: References, tmp_path: Path, victim: str) -> None:
    """The process is replaced (with the agent also all its workers), and the run ends with the same result."""
    interrupted = InterruptedRun(reference("grpo"), tmp_path, "grpo")
    launched = interrupted.launch()
    launched.wait_for("train", 4)
    found = launched.beacon(victim)
    assert found is not None
    os.kill(found.pid, signal.SIGKILL)
    code = launched.finish()
    assert launched.has_ended(1.0)
    interrupted.check_state(launched, None)
    assert code == 0, launched.text()
    interrupted.compare()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "before", "after"), [("sft", 1, 2), ("grpo", 2, 1), ("grpo", 2, 3)])
def test_other_ranks(reference: References, tmp_path: Path, recipe: str, before: int, after: int) -> None:
    trainer = {"ranks": before, "threads": 1, "optimizer": {"lr": 3e-3}}
    interrupted = InterruptedRun(reference(recipe), tmp_path, recipe, trainer=trainer)
    interrupted.kill("train", 4, 0.5)
    launched = interrupted.launch(f"trainer.ranks={after}")
    assert launched.finish() == 0, launched.text()
    assert prompts_used(interrupted.run) == prompts_used(interrupted.reference.run)
    assert_close(interrupted.run, interrupted.reference.run)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_with_every_option_on(reference: References, tmp_path: Path) -> None:
    """With a reference model (which remains the initial model), several updates per step, a schedule that depends on
    their number, and the ratio from the engine's log-probabilities."""
    home, chance = reference("grpo").home, seeded_random("options")
    changes: dict[str, Any] = {
        "loss": {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01, "aggregation": "seq-mean-token-mean"},
        "advantage": {"kind": "rloo"},
        "epochs": 2,
        "minibatch_size": 8,
        "trainer": {
            "ranks": 2,
            "threads": 1,
            "reshard_after_forward": False,
            "activation_checkpointing": True,
            "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
            "schedule": {"kind": "cosine", "warmup_steps": 4, "final": 0.1},
        },
    }
    whole = train(tmp_path / "whole", config(home, "grpo", folder=str(tmp_path / "whole"), **changes))
    interrupted = InterruptedRun(Reference(home, whole), tmp_path / "life", "grpo", **changes)
    interrupted.kill("train", 2, chance.random())
    interrupted.kill("logprobs", 4, chance.random())
    interrupted.kill("train", 6, chance.random())
    interrupted.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_finished_run_is_made_longer(reference: References, tmp_path: Path, recipe: str) -> None:
    """The result is that of a run that was this long from the beginning."""
    interrupted = InterruptedRun(reference(recipe), tmp_path, recipe, steps=5)
    assert interrupted.launch().finish() == 0
    launched = interrupted.launch(f"steps={STEPS}")
    assert launched.finish() == 0, launched.text()
    assert weights(interrupted.run) == weights(interrupted.reference.run)
    assert metrics(interrupted.run) == metrics(interrupted.reference.run)
    with Ledger.reader(interrupted.run) as ledger:
        assert [row.step + 1 for row in ledger.evaluations()] == [0, 2, 4, 5, 6, 8]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_completions_of_an_unfinished_step_are_kept(reference: References, tmp_path: Path) -> None:
    """Completions stored during a rollout are not generated again, however often the run is killed. Every completion is
    stored at once, so that the test does not depend on the duration of the rollout."""
    prompts, group, step = 24, 16, 1
    rollout = {"sampling": {"max_tokens": 16, "ignore_eos": True}, "engine": {"max_rows": 8, "threads": 1}}
    checkpoint = {"every": 0, "export": False}
    changes = {"steps": 3, "prompts_per_step": prompts, "group_size": group, "evaluation": None}
    interrupted = InterruptedRun(reference("grpo"), tmp_path, "grpo", rollout=rollout, checkpoint=checkpoint, **changes)
    partial = interrupted.run / "steps" / f"{step + 1:08d}.partial"
    kept: dict[str, tuple[bytes, bytes]] = {}
    for _ in range(3):
        size = partial.stat().st_size if partial.exists() else 0

        def grown(size: int = size) -> bool | None:
            return True if partial.exists() and partial.stat().st_size > size else None

        launched = interrupted.launch(hold={"keep_every_s": 0.0})
        launched.wait_until(grown, "that completions are kept", lambda: False)
        launched.kill()
        with Ledger.reader(interrupted.run) as ledger:
            stored = ledger.kept_completions(step)
            found = {each.request: (each.tokens.tobytes(), each.logprobs.tobytes()) for each in stored}
        assert kept.items() < found.items(), "more completions than before, and none changed"
        kept = found
    assert len(kept) < prompts * group
    launched = interrupted.launch()
    assert launched.finish() == 0, launched.text()
    with Ledger.reader(interrupted.run) as ledger:
        rollouts, used = ledger.rollouts(step), ledger.prompts_used()
        (row,) = [row for row in ledger.metrics_rows() if row.step == step]
    assert rollouts is not None
    made = {
        each.request: (each.tokens.tobytes(), each.logprobs.tobytes())
        for g in rollouts.groups
        for each in g.completions
    }
    assert kept.items() <= made.items()
    assert row.values["rollout/generated"] == prompts * group - len(kept)
    assert sorted(used.values()) == sorted(prompts * [0, 1, 2])
