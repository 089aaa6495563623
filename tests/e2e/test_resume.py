"""Rule 4: a run that is killed at any moment goes on, and ends as if nothing had happened.

One reference run per recipe goes through without an interruption. Others are killed, interrupted and resumed, and must
end with the same exported weights, bit by bit, the same metrics, and each prompt used once. `test_resume_long.py` does
it at many more moments.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from harness import config, moment, train, weights
from resume_scenarios import GONE_S, STEPS, Life, References, assert_close, newest, tree
from safetensors.numpy import load_file

from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger

# --- kills


@pytest.mark.timeout(600)
def test_grpo_killed_in_one_stage_after_the_other(reference: References, tmp_path: Path) -> None:
    life, chance = Life(reference("grpo"), tmp_path, "grpo"), moment("chain", "grpo")
    life.kill("start", None, chance.random())
    life.kill("rollout", 0, chance.random())
    life.kill("ledger", 1, chance.random())
    life.kill_at("steps/00000002.arrow")
    life.kill("train", 3, chance.random())
    life.kill("publish", 4, chance.random())
    life.kill("checkpoint", 5, chance.random())
    life.kill("export", None, chance.random())
    life.finish()


@pytest.mark.timeout(600)
def test_sft_killed_in_one_stage_after_the_other(reference: References, tmp_path: Path) -> None:
    life, chance = Life(reference("sft"), tmp_path, "sft"), moment("chain", "sft")
    life.kill("train", 1, chance.random())
    life.kill_at("checkpoints/00000003")
    with Ledger.reader(life.run) as ledger:
        assert 2 not in [row.step for row in ledger.checkpoints()], "complete, and the ledger does not know it yet"
    life.kill("evaluate", 5, chance.random())
    life.kill("export", None, chance.random())
    life.finish()


# --- interruptions that are not kills


@pytest.mark.timeout(600)
def test_ctrl_c_finishes_the_step(reference: References, tmp_path: Path) -> None:
    life = Life(reference("grpo"), tmp_path, "grpo")
    launched = life.launch()
    place = launched.wait_for("logprobs", 4)
    assert place.step is not None
    os.killpg(launched.process.pid, signal.SIGINT)  # as a terminal does
    assert launched.finish(30) == 130, launched.text()
    assert launched.gone(1.0)
    done = newest(life.run)
    assert done in (place.step + 1, place.step + 2), "this step, or the next one where the signal came between two"
    assert f"--resume {life.run}" in launched.said()
    summary = json.loads((life.run / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps"]["done"]) == ("interrupted", done)
    life.look(launched, None)
    life.finish()
    with Ledger.reader(life.run) as ledger:
        assert [row.generation for row in ledger.commits()] == [1] * done + [2] * (STEPS - done), "no step done twice"

    before = tree(life.run)
    again = life.launch()
    assert again.finish() == 0
    assert f"is finished: {STEPS} of {STEPS} steps" in again.said()
    refused = life.launch("seed=4", "trainer.optimizer.lr=0.1")
    assert refused.finish() == 2
    assert "seed: 3 -> 4" in refused.said() and "trainer.optimizer.lr: 0.003 -> 0.1" in refused.said()
    assert tree(life.run) == before


@pytest.mark.timeout(600)
def test_a_scheduler_that_wants_the_machine_while_the_run_starts(reference: References, tmp_path: Path) -> None:
    """It sends one SIGTERM, and kills what has not ended soon after."""
    life = Life(reference("sft"), tmp_path, "sft")
    launched = life.launch(hold={"stage": "start", "seconds": 120.0, "at_end": False})
    launched.wait_for("start", None)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.finish(60) == 130, launched.text()
    assert launched.gone(1.0)
    assert life.launch().finish() == 0
    life.compare()


@pytest.mark.timeout(600)
def test_two_ctrl_c_and_a_controller_that_is_killed(reference: References, tmp_path: Path) -> None:
    life = Life(reference("grpo"), tmp_path, "grpo")
    launched = life.launch()
    launched.wait_for("train", 2)
    for _ in range(2):
        launched.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    began = time.monotonic()
    assert launched.finish(30) == 130, launched.text()
    assert time.monotonic() - began < GONE_S
    assert launched.gone(1.0), "it stops its workers before it ends"
    life.look(launched, None)
    assert newest(life.run) == 0, "it did not wait for a checkpoint"
    life.places.clear()  # the shared memory of a run that ended by itself is gone, not left to the next one
    life._note_place()
    assert not any(run_shm_dir(place).exists() for place in life.places)

    launched = life.launch()
    launched.wait_for("train", 4)
    launched.members()
    launched.kill_controller()
    assert launched.gone(GONE_S), [process.cmdline() for process in launched.left()]
    life.look(launched, launched.place())
    assert not any(run_shm_dir(place).exists() for place in life.places), "the agent cleans up"

    launched = life.launch()
    launched.wait_for("start", None)
    second = life.launch()
    assert second.finish() == 2
    assert f"is being run by process {launched.process.pid}" in second.said()
    assert launched.finish() == 0, launched.text()
    life.compare()


@pytest.mark.timeout(600)
def test_resume_on_another_number_of_ranks(reference: References, tmp_path: Path) -> None:
    life = Life(reference("sft"), tmp_path, "sft")
    launched = life.launch()
    launched.wait_for("train", 3)
    launched.process.send_signal(signal.SIGTERM)  # as a scheduler does
    assert launched.finish(30) == 130, launched.text()
    assert 0 < newest(life.run) < STEPS
    launched = life.launch("trainer.ranks=1")
    assert launched.finish() == 0, launched.text()
    assert "trainer.ranks: 2 -> 1" in launched.said() and "not bitwise" in launched.said()
    assert_close(life.run, life.reference.run)
    with Ledger.reader(life.run) as ledger:
        assert ledger.config()["trainer"]["ranks"] == 1
        (change,) = [event for event in ledger.events() if event.kind == "config_changed"]
    assert change.fields == {"changes": ["trainer.ranks: 2 -> 1"]}


def test_equal_rewards_do_not_move_the_weights(reference: References, tmp_path: Path) -> None:
    home = reference("grpo").home
    changes = {"steps": 3, "evaluation": None, "reward": {"terms": [{"kind": "regex", "pattern": ".*"}]}}
    run = train(tmp_path, config(home, "grpo", name="equal", folder=str(tmp_path / "runs"), **changes))
    with Ledger.reader(run) as ledger:
        assert [row.values["reward/mean"] for row in ledger.metrics_rows()] == [1.0] * 3
        assert [row.values["rollout/groups_without_signal"] for row in ledger.metrics_rows()] == [1.0] * 3
    start = {name: array.tobytes() for name, array in load_file(home / "model" / "model.safetensors").items()}
    assert weights(run) == start
