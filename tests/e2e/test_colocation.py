"""PPO whose roles share devices: whichever do, and whichever process is killed, the result is the same bit by bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Launched, build_once, config, task, write
from resume_scenarios import assert_same
from test_recovery import kill_worker, replacements
from transformers import AutoConfig, AutoModelForSequenceClassification

pytestmark = [pytest.mark.xdist_group("colocation"), pytest.mark.timeout(600)]

STEPS = 4
SETS = {
    "all": "all",
    "pairs": ["actor_ref", "critic_reward"],
    "three": [["policy", "rollout"], ["critic", "reference", "reward_model"]],
}


def settings(home: Path, name: str, **changes: Any) -> dict[str, Any]:
    """PPO with two trained roles, a reference and two reward models, each on one rank."""
    values = config(home, "grpo", name=name, steps=STEPS, evaluation=None, checkpoint={"every": 2})
    trainer = {"ranks": 1, "threads": 1, "optimizer": {"lr": 3e-3}}
    scores = {"kind": "model", "path": str(home / "value"), "threads": 1}
    own = {
        "recipe": "ppo", "prompts_per_step": 4, "group_size": 2, "minibatch_size": 4, "epochs": 2, "trainer": trainer,
        "loss": {"old_logprobs": "trainer", "kl": {"coefficient": 0.1}}, "reference": {"threads": 1},
        "critic": {"model": {"path": str(home / "value")}, "trainer": trainer, "warmup_steps": 1, "export": True},
        "reward": {"terms": [{**scores, "name": "one"}, {"kind": "exact_match"}, {**scores, "name": "two"}]},
    }  # fmt: skip
    return {**values, **own, **changes}


def make_scorer(home: Path) -> None:
    """Create the model with a score head from which critic and reward models start."""
    torch.manual_seed(2)
    shape = AutoConfig.from_pretrained(home / "model", num_labels=1)
    scorer = AutoModelForSequenceClassification.from_config(shape)
    scorer.score.weight.data.normal_(0, 0.2)
    scorer.save_pretrained(home / "value")
    for path in (home / "model").glob("*token*"):
        shutil.copy(path, home / "value")


@pytest.fixture(scope="session")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run in which no role shares a device."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "colocation"

    def make(home: Path) -> None:
        task(home)
        make_scorer(home)
        launched = Launched.start(home / "runs/apart", str(write(home, settings(home, "apart"))))
        assert launched.finish() == 0, launched.text()

    return build_once(shared / "runs", make)


def start(home: Path, folder: Path, hold: dict[str, Any] | None = None, **changes: Any) -> Launched:
    values = settings(home, "together", folder=str(folder / "runs"), **changes)
    return Launched.start(folder / "runs/together", str(write(folder, values)), hold=hold)


@pytest.mark.parametrize("sets", ["all", *(pytest.param(each, marks=pytest.mark.slow) for each in ("pairs", "three"))])
def test_shared_devices_change_no_bit(apart: Path, tmp_path: Path, sets: str) -> None:
    assert_same(start(apart, tmp_path, placement={"colocate": SETS[sets]}), apart / "runs/apart")


@pytest.mark.slow
@pytest.mark.parametrize("sets", ["all", "pairs"])
def test_killed_processes_are_replaced_in_their_turn(apart: Path, tmp_path: Path, sets: str) -> None:
    """One of each role is killed while another role of its set is on the devices."""
    hold = {"stage": "train", "seconds": 0.3, "at_end": False}
    launched = start(apart, tmp_path, hold, placement={"colocate": SETS[sets]})
    launched.wait_for("train", 1)
    kill_worker(launched, "reference-0")
    kill_worker(launched, "reward_model_2-0")
    launched.wait_for("train", 2)
    kill_worker(launched, "critic-0")
    launched.wait_for("train", 3)
    kill_worker(launched, "policy-0")
    assert_same(launched, apart / "runs/apart")
    found = set(replacements(launched.folder))
    assert {"reference-0.1", "reward_model_2-0.1", "critic-0.1", "policy-0.1"} <= found
