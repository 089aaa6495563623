"""PPO beside GRPO: both recipes run, and the table has the sums and ratios of what was measured."""

import json
import subprocess
import sys

import pytest

from benchmarks.ppo_beside_grpo import WORK, learning, table
from benchmarks.runner import ROOT, environment
from benchmarks.workloads import Side, lockstep_config
from lockstep.config.loader import check_config


def line(recipe, repeat, train, logprobs=None):
    stages = {"rollout": {"engine-0": 50.0}, "train": train, "after train": {"controller": 2.0}}
    stages |= {"logprobs": logprobs} if logprobs else {}
    return {"recipe": recipe, "repeat": repeat, "steps": 2, "load": 1.5, "ms": stages}


def test_ratios_are_of_the_same_repeat_and_roles_include_all_ranks():
    lines = []
    for repeat, scale in enumerate((1.0, 2.0, 4.0)):
        lines.append(line("grpo", repeat, {"policy-0": 60.0 * scale, "policy-1": 40.0 * scale}))
        lines.append(line("ppo", repeat, {"policy-0": 100.0 * scale, "critic-0": 90 * scale}, {"critic-0": 30 * scale}))
    assert learning(lines[1], "policy", "critic") == 220
    text = "\n".join(table(lines))
    assert "| both | 440 | 2.20 (goal: at most 2.1, not met) |" in text
    assert "| train: optimizer steps | 200 (policy 200) | 380 (policy 200, critic 180) | 1.90 |" in text
    assert "| rollout: generation | 50 (engine 50) | 50 (engine 50) | 1.00 |" in text
    assert "| between stages | 2 (controller 2) | 2 (controller 2) | 1.00 |" in text


def test_both_recipes_do_the_same_work(tmp_path):
    grpo, ppo = (check_config(lockstep_config(WORK, side, tmp_path, 3), "test") for side in WORK.sides)
    assert (grpo.recipe, ppo.recipe) == ("grpo", "ppo")
    for name in ("prompts_per_step", "group_size", "token_budget", "trainer", "rollout", "reward"):
        assert getattr(grpo, name) == getattr(ppo, name), name
    assert ppo.critic.trainer.threads == ppo.trainer.threads == 1 and ppo.critic.trainer.ranks == ppo.trainer.ranks
    assert grpo.loss.kl.coefficient == ppo.loss.kl.coefficient == 0 and ppo.critic.warmup_steps == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_tiny_repeat(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "ppo", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(Side("here", "lockstep")), capture_output=True, text=True, timeout=580
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grpo, ppo = (json.loads(line) for line in (tmp_path / "ppo.jsonl").read_text().splitlines())
    assert learning(grpo, "critic") == 0 < learning(ppo, "critic")
    assert "goal: at most 2.1" in done.stdout
