"""PPO's critic: where it starts, how it is trained before the policy is, and what it learns from conversations, from
completions of older weights and beside an adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Launched, config, metric_rows, task, train, write
from safetensors.torch import load_file
from test_environment_runs import WORLD
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.data.samples import Completion, Group
from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.xdist_group("critic"), pytest.mark.timeout(400)]

GAMMA, LAM, CLIP, LR = 0.95, 0.9, 0.05, 5e-3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a reward model with the same tokens, an environment, and the data of a task."""
    home = task(tmp_path_factory.mktemp("critic"))
    (home / "world.py").write_text(WORLD)
    torch.manual_seed(1)
    scorer = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1, dtype=torch.float32)
    scorer.score.weight.data.normal_(0, 0.2)
    scorer.save_pretrained(home / "scorer")
    AutoTokenizer.from_pretrained(home / "model").save_pretrained(home / "scorer")
    return home


def settings(home: Path, name: str, steps: int, critic: dict[str, Any], **changes: Any) -> dict[str, Any]:
    values = config(home, "grpo", name=name, steps=steps, evaluation=None, checkpoint={"every": 0})
    trainer = {"ranks": 1, "threads": 1, "max_grad_norm": None, "optimizer": {"lr": LR}}
    own = {
        "recipe": "ppo", "prompts_per_step": 16, "group_size": 1, "loss": {"kl": {"coefficient": 0}},
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
    return train(home, settings(home, "pretrained", 30, warmup, group_size=4))


def test_a_critic_is_trained_on_completions_of_the_first_policy(pretrained: Path) -> None:
    """The variance that it explains is that of completions that it has not learnt yet."""
    rows, found = metric_rows(pretrained), explained(pretrained)
    assert len(rows) < 30 and found[0] < 0 and max(found[:-1]) < 0.3 <= found[-1]
    assert not any(name.startswith("policy/loss") for row in rows for name in row)
    assert not (pretrained / "export").exists() and (pretrained / "critic/export/model.safetensors").is_file()


def test_a_trained_critic_is_the_start_of_other_runs(home: Path, pretrained: Path) -> None:
    """Its first values are about as good as the last ones of the run that it is from."""
    start = {"model": {"path": str(pretrained / "critic/export")}}
    run = train(home, settings(home, "continued", 1, start, group_size=4))
    assert explained(run)[0] > 0.1 > 0 > explained(pretrained)[0]
    exported, first = load_file(run / "export/model.safetensors"), load_file(home / "model/model.safetensors")
    assert any(not exported[name].equal(first[name]) for name in exported), "the policy is trained at once"


class CriticLoop:
    """A critic's training, written with transformers and loops over completions and tokens. It gets the tokens and
    their rewards from the run. Without KL penalties it does not depend on the policy."""

    def __init__(self, home: Path, run: Path) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(
            home / "scorer", num_labels=1, dtype=torch.float32
        )
        with Ledger.reader(run) as ledger:
            stored = [ledger.rollouts(step) for step in range(ledger.steps_done())]
        self.steps = [each.groups for each in stored if each is not None]

    def values(self, group: Group, completion: Completion) -> tuple[Tensor, Tensor]:
        """The values of the states before each token of the policy, and after the last one."""
        prompt = len(group.prompt.tokens)
        tokens = torch.tensor([[*group.prompt.tokens.tolist(), *completion.tokens.tolist()]])
        every = self.model.score(self.model.model(tokens).last_hidden_state[0])[:, 0]
        places = range(len(completion.tokens)) if completion.mask is None else completion.mask.nonzero()[0]
        own = [prompt + int(place) for place in places]
        return every[[place - 1 for place in own]], every[own[-1]]

    def target(self, reward: float, values: list[float], last: float) -> Tensor:
        """What it learns of a completion: GAE over the policy's tokens, plus the values."""
        found, after, following = [], 0.0, last
        for value in reversed(values):
            after = reward + GAMMA * following - value + GAMMA * LAM * after
            found.insert(0, after + value)
            reward, following = 0.0, value
        return torch.tensor(found)

    def learn(self, bootstrap: bool) -> list[float]:
        """Returns the loss of each step, which has one update."""
        optimizer, losses = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0), []
        for groups in self.steps:
            total, count = torch.zeros(()), 0
            for group in groups:
                assert group.rewards is not None
                for completion, reward in zip(group.completions, group.rewards, strict=True):
                    values, last = self.values(group, completion)
                    after = last.item() if bootstrap and completion.finish == "length" else 0.0
                    target = self.target(float(reward), values.tolist(), after)
                    total, count = total + ((values - target) ** 2 / 2).sum(), count + values.numel()
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            losses.append((total / count).item())
        return losses

    def completions(self) -> list[tuple[int, Completion]]:
        """Those of all steps, each with its step."""
        return [
            (step, each) for step, groups in enumerate(self.steps) for group in groups for each in group.completions
        ]


def assert_follows(home: Path, run: Path, bootstrap: bool = False) -> CriticLoop:
    """Check that the run's critic is that of the plain loop."""
    loop = CriticLoop(home, run)
    assert [row["critic/loss"] for row in metric_rows(run)] == pytest.approx(loop.learn(bootstrap), rel=1e-5)
    exported, trained = load_file(run / "critic/export/model.safetensors"), loop.model.state_dict()
    first = load_file(home / "scorer/model.safetensors")
    for name in exported.keys() - {f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(2)}:
        # By norm: AdamW makes steps of any gradient, also where it is zero but for rounding (as of all key biases).
        error, change = (exported[name] - trained[name]).norm(), (exported[name] - first[name]).norm()
        assert error < 0.01 * change, (name, error, change)
    return loop


FOLLOWED: dict[str, Any] = {"advantage": {"gamma": GAMMA, "lam": LAM}, "group_size": 2, "prompts_per_step": 8}
FROM_SCORER = {"model": "reward_model", "export": True}


@pytest.mark.slow
def test_a_critic_starts_from_the_reward_model(home: Path) -> None:
    """Its first values are the reward model's scores of the beginnings of the completions."""
    terms = [{"kind": "exact_match"}, {"kind": "model", "path": str(home / "scorer"), "threads": 1}]
    run = train(home, settings(home, "scored", 2, FROM_SCORER, reward={"terms": terms}, **FOLLOWED))
    loop = CriticLoop(home, run)
    values = torch.cat([loop.values(group, each)[0] for group in loop.steps[0] for each in group.completions])
    assert metric_rows(run)[0]["critic/value_mean"] == pytest.approx(values.mean().item(), abs=1e-5)
    assert_follows(home, run)


@pytest.mark.slow
@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_critic_learns_from_conversations(home: Path, bootstrap: bool) -> None:
    """Tokens of the environment are neither states nor steps of time, and conversations that were cut have a value
    after their last token if `bootstrap`."""
    rollout = {
        "sampling": {"max_tokens": 14, "stop": list("02468")},
        "engine": {"max_rows": 32, "threads": 1},
        "environment": {"path": f"{home}/world.py:Echo", "max_turn_tokens": 4},
    }
    terms = [{"kind": "environment"}, {"kind": "regex", "pattern": "[0-4].*", "weight": 0.5}]
    critic = {"model": {"path": str(home / "scorer")}, "export": True}
    changes = {"rollout": rollout, "reward": {"terms": terms}, "bootstrap_truncated": bootstrap}
    run = train(home, settings(home, f"conversations-{bootstrap}", 3, critic, **changes, **FOLLOWED))
    found = [each for _, each in assert_follows(home, run, bootstrap).completions()]
    assert {each.finish for each in found} == {"stop", "length"}
    turns = {each.episode.turns for each in found if each.episode is not None and each.finish == "length"}
    assert turns == {1, 2} and any(each.mask is not None and not each.mask.all() for each in found)


@pytest.mark.slow
def test_a_critic_learns_from_completions_of_older_weights(home: Path) -> None:
    """Its targets follow from its values as it is now, whatever the age of the tokens."""
    rollout = {
        "sampling": {"max_tokens": 16, "ignore_eos": True}, "engine": {"max_rows": 8, "threads": 1}, "max_staleness": 1
    }  # fmt: skip
    critic = {"model": {"path": str(home / "scorer")}, "export": True}
    loss = {"old_logprobs": "engine", "kl": {"coefficient": 0}}
    run = train(home, settings(home, "stale", 5, critic, rollout=rollout, loss=loss, **FOLLOWED))
    ages = {step - int(version) for step, each in assert_follows(home, run).completions() for version in each.versions}
    assert ages == {0, 1}
    assert max(row["rollout/staleness_max"] for row in metric_rows(run)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("start", ["policy", "reward_model"])
def test_the_critic_of_a_policy_with_an_adapter_has_one_of_its_own(home: Path, start: str) -> None:
    """The exported critic is its first model plus B A alpha / r, with a trained head; nothing else has changed."""
    terms = [{"kind": "regex", "pattern": "[0-4].*"}, {"kind": "model", "path": str(home / "scorer"), "threads": 1}]
    model = {"path": str(home / "model"), "adapter": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}}
    values = settings(home, f"adapter-{start}", 3, {"model": start, "export": True}, **FOLLOWED)
    run = train(home, {**values, "model": model, "reward": {"terms": terms}})
    first = load_file(home / ("model" if start == "policy" else "scorer") / "model.safetensors")
    for folder, head in (("", None), ("critic/", "score.weight")):
        merged = load_file(run / folder / "export/model.safetensors")
        adapter = load_file(run / folder / "adapter/adapter_model.safetensors")
        for name, weight in merged.items():
            if name == head:
                assert start == "policy" or not weight.equal(first[name]), "the head is trained beside the adapter"
            elif "q_proj.weight" in name:
                a, b = (adapter[f"base_model.model.{name.removesuffix('weight')}lora_{each}.weight"] for each in "AB")
                assert b.abs().max() > 0
                torch.testing.assert_close(weight, first[name] + 2.0 * (b @ a), rtol=1e-5, atol=1e-6)
            else:
                assert weight.equal(first[name]), name


@pytest.mark.slow
def test_a_run_from_another_begins_with_the_first_coefficient_and_a_warmup(home: Path) -> None:
    """The critic goes on where it was."""
    changes: dict[str, Any] = {
        "loss": {"kl": {"coefficient": 0.1}}, "kl_controller": {"target": 0.001, "horizon": 40}, **FOLLOWED
    }  # fmt: skip
    values = settings(home, "parent", 4, {"warmup_steps": 1, "export": True}, **changes)
    parent = train(home, values)
    adapted = [row["reward/kl_coefficient"] for row in metric_rows(parent)]
    assert adapted[:2] == [0.1, 0.1] and adapted[2] != adapted[3] != 0.1
    child = home / "runs/child"
    launched = Launched.start(child, str(write(home, {**values, "name": "child"})), "--from", f"{parent}@4")
    assert launched.finish() == 0, launched.text()
    rows = metric_rows(child)
    assert [row["reward/kl_coefficient"] for row in rows][:2] == [0.1, 0.1]
    assert [row["critic/warmup"] for row in rows] == [1, 0, 0, 0] and "policy/loss" not in rows[0]
    assert rows[0]["critic/explained_variance"] > metric_rows(parent)[0]["critic/explained_variance"]
