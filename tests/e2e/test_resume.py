"""A run that is killed at any moment can be resumed, and ends with the same result.

One reference run per recipe is not interrupted. Others are killed, interrupted and resumed, and must end with bitwise
the same exported weights, the same metrics, and every prompt used once. `test_resume_long.py` tests many more moments.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import config, seeded_random, train, weights
from resume_scenarios import CHECKPOINTS, GONE_S, STEPS, InterruptedRun, References, assert_close, metrics, newest, tree
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger

# --- kills


@pytest.mark.timeout(600)
def test_grpo_killed_while_it_trains_and_while_it_exports(reference: References, tmp_path: Path) -> None:
    interrupted, chance = InterruptedRun(reference("grpo"), tmp_path, "grpo"), seeded_random("chain", "grpo")
    interrupted.kill("train", 4, chance.random())
    interrupted.kill("export", None, chance.random())
    interrupted.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grpo_killed_in_one_stage_after_the_other(reference: References, tmp_path: Path) -> None:
    interrupted, chance = InterruptedRun(reference("grpo"), tmp_path, "grpo"), seeded_random("chain", "grpo")
    interrupted.kill("start", None, chance.random())
    interrupted.kill("rollout", 0, chance.random())
    interrupted.kill("ledger", 1, chance.random())
    interrupted.kill_at("steps/00000003.arrow")
    interrupted.kill("train", 3, chance.random())
    interrupted.kill("publish", 4, chance.random())
    interrupted.kill("checkpoint", 5, chance.random())
    interrupted.kill("export", None, chance.random())
    interrupted.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sft_killed_in_one_stage_after_the_other(reference: References, tmp_path: Path) -> None:
    interrupted, chance = InterruptedRun(reference("sft"), tmp_path, "sft"), seeded_random("chain", "sft")
    interrupted.kill("train", 1, chance.random())
    interrupted.kill_at("checkpoints/00000003")
    with Ledger.reader(interrupted.run) as ledger:
        assert 2 not in [row.step for row in ledger.checkpoints()], (
            "the checkpoint is complete, and not in the ledger yet"
        )
    interrupted.kill("evaluate", 5, chance.random())
    interrupted.kill("export", None, chance.random())
    interrupted.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_is_finished_after_fewer_steps(reference: References, tmp_path: Path) -> None:
    """Its steps are those of a run that goes on. Fewer steps than are done, or another schedule, are refused."""
    interrupted = InterruptedRun(reference("sft"), tmp_path, "sft")
    interrupted.kill("train", STEPS - 3, 0.5)
    refused = interrupted.launch("steps=2")
    assert refused.finish() == 2 and "--from RUN@2" in " ".join(refused.text().split()), refused.text()

    shorter = interrupted.launch(f"steps={STEPS - 2}")
    assert shorter.finish() == 0, shorter.text()
    assert metrics(interrupted.run, STEPS - 2) == metrics(interrupted.reference.run)[: STEPS - 2]
    assert (interrupted.run / "export" / "model.safetensors").is_file()
    with Ledger.reader(interrupted.run) as ledger:
        assert ledger.steps_done() == STEPS - 2 == ledger.checkpoints()[-1].step + 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["sft", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_not_trained_on(reference: References, tmp_path: Path, recipe: str) -> None:
    """One byte of the newest checkpoint changes on disk: the run resumes from the one before. All are complete when the
    model is exported."""
    interrupted = InterruptedRun(reference(recipe), tmp_path, recipe)
    interrupted.kill("export", None, 0.5)
    with Ledger.reader(interrupted.run) as ledger:
        before, newest_path = (row.path for row in ledger.checkpoints()[-2:])
    file = newest_path / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    launched = interrupted.launch()
    assert launched.finish() == 0, launched.text()
    text = " ".join(launched.text().split())
    assert "has another digest than when written" in text and f"resuming from {before} instead" in text
    interrupted.compare()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checkpoints_are_exported_without_the_run(reference: References, tmp_path: Path) -> None:
    """The last checkpoint has the weights of the run's own export, any other one different ones; the model loads."""
    made = reference("sft")

    def export(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lockstep", "export", str(made.run), *arguments]
        return subprocess.run(command, cwd=made.home, capture_output=True, text=True, timeout=120)

    last, earlier = tmp_path / "last", tmp_path / "earlier"
    assert export(str(last)).returncode == 0
    done = export(str(earlier), "--step", str(CHECKPOINTS[-2]))
    assert done.returncode == 0 and f"after {CHECKPOINTS[-2]} steps" in done.stdout, done.stderr
    own = load_file(made.run / "export" / "model.safetensors")
    found, other = (load_file(folder / "model.safetensors") for folder in (last, earlier))
    assert all((found[name] == own[name]).all() for name in own) and found.keys() == own.keys()
    assert any((other[name] != own[name]).any() for name in own)
    AutoModelForCausalLM.from_pretrained(last)
    again = export(str(last))
    assert again.returncode == 2 and "exists: name a new folder" in again.stderr


# --- interruptions that are not kills


@pytest.mark.timeout(600)
def test_ctrl_c_finishes_the_step(reference: References, tmp_path: Path) -> None:
    interrupted = InterruptedRun(reference("grpo"), tmp_path, "grpo")
    launched = interrupted.launch()
    position = launched.wait_for("logprobs", 4)
    assert position.step is not None
    os.killpg(launched.process.pid, signal.SIGINT)  # as a terminal does
    assert launched.finish(30) == 130, launched.text()
    assert launched.has_ended(1.0)
    done = newest(interrupted.run)
    assert done in (position.step + 1, position.step + 2), (
        "this step, or the next one if the signal arrived between two steps"
    )
    assert f"--resume {interrupted.run}" in launched.printed()
    summary = json.loads((interrupted.run / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps"]["done"]) == ("interrupted", done)
    interrupted.check_state(launched, None)
    interrupted.finish()
    with Ledger.reader(interrupted.run) as ledger:
        assert [row.generation for row in ledger.commits()] == [1] * done + [2] * (STEPS - done), (
            "no step was done twice"
        )

    before = tree(interrupted.run)
    again = interrupted.launch()
    assert again.finish() == 0
    assert f"is finished: {STEPS} of {STEPS} steps" in again.printed()
    refused = interrupted.launch("seed=4", "trainer.optimizer.lr=0.1")
    assert refused.finish() == 2
    assert "seed: 3 -> 4" in refused.printed() and "trainer.optimizer.lr: 0.003 -> 0.1" in refused.printed()
    assert tree(interrupted.run) == before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_scheduler_that_wants_the_machine_while_the_run_starts(reference: References, tmp_path: Path) -> None:
    """A scheduler sends one SIGTERM, and soon kills the remaining processes."""
    interrupted = InterruptedRun(reference("sft"), tmp_path, "sft")
    launched = interrupted.launch(hold={"stage": "start", "seconds": 120.0, "at_end": False})
    launched.wait_for("start", None)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.finish(60) == 130, launched.text()
    assert launched.has_ended(1.0)
    assert interrupted.launch().finish() == 0
    interrupted.compare()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ctrl_c_and_a_controller_that_is_killed(reference: References, tmp_path: Path) -> None:
    interrupted = InterruptedRun(reference("grpo"), tmp_path, "grpo")
    launched = interrupted.launch()
    launched.wait_for("train", 2)
    for _ in range(2):
        launched.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    began = time.monotonic()
    assert launched.finish(30) == 130, launched.text()
    assert time.monotonic() - began < GONE_S
    assert launched.has_ended(1.0), "it stops its workers before it ends"
    interrupted.check_state(launched, None)
    assert newest(interrupted.run) == 0, "it did not wait for a checkpoint"
    interrupted.run_ids.clear()  # a run that ended by itself has removed its shared memory
    interrupted._note_run_id()
    assert not any(run_shm_dir(run_id).exists() for run_id in interrupted.run_ids)

    launched = interrupted.launch()
    launched.wait_for("train", 4)
    launched.members()
    launched.kill_controller()
    assert launched.has_ended(GONE_S), [process.cmdline() for process in launched.remaining()]
    interrupted.check_state(launched, launched.position())
    assert not any(run_shm_dir(run_id).exists() for run_id in interrupted.run_ids), "the agent cleans up"

    launched = interrupted.launch()
    launched.wait_for("start", None)
    second = interrupted.launch()
    assert second.finish() == 2
    assert f"is being run by process {launched.process.pid}" in second.printed()
    assert launched.finish() == 0, launched.text()
    interrupted.compare()


@pytest.mark.timeout(600)
def test_resume_on_another_number_of_ranks(reference: References, tmp_path: Path) -> None:
    interrupted = InterruptedRun(reference("sft"), tmp_path, "sft")
    launched = interrupted.launch()
    launched.wait_for("train", 3)
    launched.process.send_signal(signal.SIGTERM)  # as a scheduler does
    assert launched.finish(30) == 130, launched.text()
    assert 0 < newest(interrupted.run) < STEPS
    launched = interrupted.launch("trainer.ranks=1")
    assert launched.finish() == 0, launched.text()
    assert "trainer.ranks: 2 -> 1" in launched.printed() and "not bitwise" in launched.printed()
    assert_close(interrupted.run, interrupted.reference.run)
    with Ledger.reader(interrupted.run) as ledger:
        assert ledger.config()["trainer"]["ranks"] == 1
        (change,) = [event for event in ledger.events() if event.kind == "config_changed"]
    assert change.fields == {"changes": ["trainer.ranks: 2 -> 1"]}


@pytest.mark.slow
def test_equal_rewards_do_not_move_the_weights(reference: References, tmp_path: Path) -> None:
    home = reference("grpo").home
    changes = {"steps": 3, "evaluation": None, "reward": {"terms": [{"kind": "regex", "pattern": ".*"}]}}
    run = train(tmp_path, config(home, "grpo", name="equal", folder=str(tmp_path / "runs"), **changes))
    with Ledger.reader(run) as ledger:
        assert [row.values["reward/mean"] for row in ledger.metrics_rows()] == [1.0] * 3
        assert [row.values["rollout/groups_without_signal"] for row in ledger.metrics_rows()] == [1.0] * 3
    start = {name: array.tobytes() for name, array in load_file(home / "model" / "model.safetensors").items()}
    assert weights(run) == start
