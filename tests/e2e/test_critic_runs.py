"""Where PPO's critic starts, and how it is trained before the policy is."""

from pathlib import Path
from typing import Any

import pytest
from harness import Launched, config, metric_rows, task, train, write
from safetensors.torch import load_file

pytestmark = [pytest.mark.xdist_group("critic"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("critic"))


def settings(home: Path, name: str, steps: int, critic: dict[str, Any], **changes: Any) -> dict[str, Any]:
    values = config(home, "grpo", name=name, steps=steps, evaluation=None, checkpoint={"every": 0})
    trainer = {"ranks": 1, "threads": 1, "optimizer": {"lr": 5e-3}}
    own = {
        "recipe": "ppo", "prompts_per_step": 16, "group_size": 4, "loss": {"kl": {"coefficient": 0}},
        "reward": {"terms": [{"kind": "regex", "pattern": "[0-4].*"}]},
        "trainer": {"ranks": 1, "threads": 1, "optimizer": {"lr": 3e-3}},
        "critic": {"trainer": trainer, **critic},
    }  # fmt: skip
    return {**values, **own, **changes}


def explained(run: Path) -> list[float]:
    return [row["critic/explained_variance"] for row in metric_rows(run) if "critic/explained_variance" in row]


@pytest.fixture(scope="module")
def pretrained(home: Path) -> Path:
    """A run that trains only the critic, until it explains 30 % of the variance."""
    warmup = {"warmup_steps": 30, "warmup_epochs": 6, "warmup_explained_variance": 0.3, "export": True}
    values = settings(home, "pretrained", 30, warmup)
    launched = Launched.start(home / "runs/pretrained", str(write(home, values)))
    assert launched.finish() == 0, launched.text()
    return launched.folder


def test_a_critic_is_trained_on_completions_of_the_first_policy(home: Path, pretrained: Path) -> None:
    """The variance that it explains is that of completions that it has not learnt yet."""
    rows, found = metric_rows(pretrained), explained(pretrained)
    assert len(rows) < 30 and found[0] < 0 and max(found[:-1]) < 0.3 <= found[-1]
    assert not any(name.startswith("policy/loss") for row in rows for name in row)
    assert not (pretrained / "export").exists() and (pretrained / "critic/export/model.safetensors").is_file()


def test_a_trained_critic_is_the_start_of_other_runs(home: Path, pretrained: Path) -> None:
    """Its first values are as good as the last ones of the run that it is from; of the policy nothing has changed."""
    start = {"model": {"path": str(pretrained / "critic/export")}}
    run = train(home, settings(home, "continued", 1, start))
    assert explained(run)[0] > 0.1 > 0 > explained(pretrained)[0]
    exported, first = load_file(run / "export/model.safetensors"), load_file(home / "model/model.safetensors")
    assert any(not exported[name].equal(first[name]) for name in exported), "the policy is trained at once"
