"""Runs that learn from chosen completions of the policy: they follow an independent training loop, on any number of
ranks, and survive kills bit by bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Launched, config, metric_rows, seeded_random, task, train, write
from resume_scenarios import assert_same, learned
from safetensors.torch import load_file
from sort_examples import example, prepare_sorting
from test_environment_runs import WORLD
from test_recovery import kill_worker, replacements
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from lockstep.data.sample_order import permutation
from lockstep.data.samples import Completion, Group
from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.xdist_group("online"), pytest.mark.timeout(400)]

STEPS, EPOCHS, MINIBATCH, GROUP, PROMPTS, BETA, LR = 4, 2, 6, 3, 4, 0.3, 3e-3
RECIPES = ("online_dpo", "rejection_sampling")
OWN: dict[str, dict[str, Any]] = {
    "online_dpo": {"loss": {"type": "sigmoid", "beta": BETA}},
    "rejection_sampling": {"best_k": 2, "min_reward": 0.5, "loss": {}},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = task(tmp_path_factory.mktemp("online"))
    (home / "world.py").write_text(WORLD)
    return home


def settings(home: Path, recipe: str, name: str, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """Of the four groups of a step, two are in each optimizer step. The temperature is not that of training."""
    values = config(home, "grpo", name=name, steps=STEPS, evaluation=None, checkpoint={"every": 0})
    values["rollout"]["sampling"]["temperature"] = 0.8
    own = {
        "recipe": recipe, "prompts_per_step": PROMPTS, "group_size": GROUP, "minibatch_size": MINIBATCH,
        "epochs": EPOCHS, "trainer": {"ranks": ranks, "threads": 1, "max_grad_norm": None, "optimizer": {"lr": LR}},
    }  # fmt: skip
    return {**values, **own, **OWN[recipe], **changes}


class PlainLoop:
    """The same training, written with transformers and loops over groups and completions. It gets the sampled tokens
    and their rewards from the run."""

    def __init__(self, home: Path, run: Path) -> None:
        self.policy = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
        self.reference = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LR, weight_decay=0.0)
        with Ledger.reader(run) as ledger:
            stored = [ledger.rollouts(step) for step in range(STEPS)]
        self.steps = [each.groups for each in stored if each is not None]
        self.left_out = 0
        """Groups from which nothing is learned."""

    @staticmethod
    def logprobs(model: Any, group: Group, completion: Completion) -> Tensor:
        tokens = torch.tensor([[*group.prompt.tokens.tolist(), *completion.tokens.tolist()]])
        every = torch.log_softmax(model(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
        return every[len(group.prompt.tokens) - 1 :]

    def learn(self, recipe: str, seed: int) -> list[dict[str, float]]:
        """Returns the means over the optimizer steps of each step."""
        loss_of = self.dpo_loss if recipe == "online_dpo" else self.best_of_n_loss
        rows = []
        for step, groups in enumerate(self.steps):
            row: dict[str, list[float]] = {}
            for epoch in range(EPOCHS):
                order = permutation(PROMPTS, seed * 1_000_003 + step, epoch).tolist()
                for begin in range(0, PROMPTS, MINIBATCH // GROUP):
                    metrics = self.update(loss_of, [groups[g] for g in order[begin : begin + MINIBATCH // GROUP]])
                    for name, value in metrics.items():
                        row.setdefault(name, []).append(value)
            rows.append({name: sum(each) / len(each) for name, each in row.items()})
        return rows

    def update(self, loss_of: Any, groups: list[Group]) -> dict[str, float]:
        found = loss_of(groups)
        if found is None:
            return {}
        loss, metrics = found
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in self.policy.parameters() if each.grad is not None])
        self.optimizer.step()
        return {"policy/loss": loss.item(), "policy/grad_norm": norm.item(), **metrics}

    def dpo_loss(self, groups: list[Group]) -> tuple[Tensor, dict[str, float]] | None:
        """`OnlineDPOTrainer.training_step` of TRL with `loss_type="sigmoid"`, on pairs whose rewards differ."""
        logits, margins = [], []
        for group in groups:
            assert group.rewards is not None
            rewards = group.rewards.tolist()
            best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
            if rewards[best] == rewards[worst]:
                self.left_out += 1
                continue
            chosen, rejected = group.completions[best], group.completions[worst]
            pi_logratios = (
                self.logprobs(self.policy, group, chosen).sum() - self.logprobs(self.policy, group, rejected).sum()
            )
            with torch.no_grad():
                ref_logratios = (
                    self.logprobs(self.reference, group, chosen).sum()
                    - self.logprobs(self.reference, group, rejected).sum()
                )
            logits.append(pi_logratios - ref_logratios)
            margins.append(BETA * logits[-1].item())
        if not logits:
            return None
        losses = -logsigmoid(BETA * torch.stack(logits))
        accuracy = sum(margin > 0 for margin in margins) / len(margins)
        return losses.mean(), {"rewards/margins": sum(margins) / len(margins), "rewards/accuracies": accuracy}

    def best_of_n_loss(self, groups: list[Group]) -> tuple[Tensor, dict[str, float]] | None:
        """The mean negative log-likelihood of the tokens of the two best completions of each group."""
        logprobs = []
        for group in groups:
            assert group.rewards is not None
            rewards = group.rewards.tolist()
            best = sorted(range(GROUP), key=lambda number: -rewards[number])[:2]
            good = [group.completions[number] for number in best if rewards[number] >= 0.5]
            self.left_out += not good
            logprobs += [self.logprobs(self.policy, group, completion) for completion in good]
        return (-torch.cat(logprobs).mean(), {}) if logprobs else None


@pytest.mark.parametrize("recipe", RECIPES)
def test_four_steps_follow_a_plain_loop(home: Path, recipe: str) -> None:
    values = settings(home, recipe, f"plain-{recipe}")
    run = train(home, values)
    loop, rows = PlainLoop(home, run), metric_rows(run)
    for found, expected in zip(rows, loop.learn(recipe, values["seed"]), strict=True):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert loop.left_out, "some groups have no signal"
    exported, trained = load_file(run / "export/model.safetensors"), loop.policy.state_dict()
    for name in exported.keys() - {f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(2)}:
        # The gradient of a key's bias is zero but for rounding, which AdamW makes steps of.
        torch.testing.assert_close(exported[name], trained[name], rtol=1e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("recipe", "ranks", "budget", "packing"),
    [
        pytest.param("online_dpo", 2, 256, "auto", marks=pytest.mark.slow),
        ("online_dpo", 2, 8, "auto"),
        pytest.param("online_dpo", 1, 256, "single", marks=pytest.mark.slow),
        pytest.param("rejection_sampling", 2, 16, "auto", marks=pytest.mark.slow),
    ],
)
def test_results_depend_on_neither_ranks_nor_rows(
    home: Path, recipe: str, ranks: int, budget: int, packing: str
) -> None:
    """In rows of 8 tokens the two completions of a pair are in different ones."""
    alone = home / "runs" / f"plain-{recipe}"
    if not (alone / "export").exists():
        train(home, settings(home, recipe, f"plain-{recipe}"))
    model = {"path": str(home / "model"), "packing": packing}
    name = f"{recipe}-{ranks}-{budget}-{packing}"
    run = train(home, settings(home, recipe, name, ranks, token_budget=budget, model=model))
    for name in ("policy/loss", "policy/grad_norm", "rewards/margins", "pairs/count", "chosen/count"):
        found, expected = ([row[name] for row in each if name in row] for each in map(metric_rows, (run, alone)))
        assert found == pytest.approx(expected, rel=5e-5, abs=1e-6), name


@pytest.mark.slow
def test_the_reference_has_processes_of_its_own(home: Path) -> None:
    alone = train(home, settings(home, "online_dpo", "with-policy"))
    apart = train(home, settings(home, "online_dpo", "apart", reference={"ranks": 1}))
    assert learned(apart) == learned(alone)


@pytest.mark.parametrize("recipe", [pytest.param("online_dpo", marks=pytest.mark.slow), "rejection_sampling"])
def test_a_step_from_which_nothing_is_learned_changes_nothing(home: Path, recipe: str) -> None:
    """Neither weights nor the optimizer: with momentum, a gradient of zero would not do."""
    reward = {"terms": [{"kind": "regex", "pattern": "(?s).*"}]}
    changes: dict[str, Any] = {"best_k": 1, "min_reward": 2.0} if recipe == "rejection_sampling" else {}
    run = train(home, settings(home, recipe, f"nothing-{recipe}", 2, reward=reward, steps=2, **changes))
    begun, ended = load_file(home / "model/model.safetensors"), load_file(run / "export/model.safetensors")
    assert all(torch.equal(ended[name], begun[name]) for name in ended)
    for row in metric_rows(run):
        assert "policy/loss" not in row and row.get("pairs/count", row.get("chosen/count")) == 0.0
        assert row["reward/mean"] == 1.0


@pytest.mark.parametrize("recipe", ["online_dpo", pytest.param("rejection_sampling", marks=pytest.mark.slow)])
def test_conversations_that_are_sampled_ahead(home: Path, recipe: str) -> None:
    """What the environment writes is not learned. Steps are generated while the one before is trained."""
    values = settings(home, recipe, f"turns-{recipe}", 2, group_size=4, minibatch_size=None, epochs=1, steps=3)
    values["rollout"] = {
        "sampling": {"max_tokens": 14, "stop": list("02468")}, "engine": {"max_rows": 32, "threads": 1},
        "environment": {"max_turn_tokens": 4, "path": f"{home}/world.py:Echo", "branches": [2]}, "max_staleness": 1,
    }  # fmt: skip
    values["reward"] = {"terms": [{"kind": "environment"}, {"kind": "regex", "pattern": "[0-4].*", "weight": 0.5}]}
    values |= {"min_reward": None} if recipe == "rejection_sampling" else {}
    run = train(home, values)
    rows = metric_rows(run)
    assert max(row["rollout/staleness_max"] for row in rows) == 1.0
    with Ledger.reader(run) as ledger:
        stored = [ledger.rollouts(step) for step in range(3)]
    learned, written = [], 0
    for rollouts in stored:
        assert rollouts is not None
        count = 0
        for group in rollouts.groups:
            assert group.rewards is not None
            order = np.argsort(-group.rewards, kind="stable").tolist()
            worst = int(group.rewards.argmin())
            sides = order[:2] if recipe == "rejection_sampling" else [order[0], worst]
            differ = group.rewards[order[0]] > group.rewards[worst]
            if differ or recipe == "rejection_sampling":
                count += sum(group.completions[k].generated for k in sides)
                written += sum(group.completions[k].tokens.size - group.completions[k].generated for k in sides)
        learned.append(count)
    assert [row.get("policy/tokens", 0) for row in rows] == learned and all(learned) and written


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[str, Path]:
    """Undisturbed runs on two ranks."""
    return {recipe: train(home, disturbed(home, recipe, f"whole-{recipe}")) for recipe in RECIPES}


def disturbed(home: Path, recipe: str, name: str, **changes: Any) -> dict[str, Any]:
    return settings(home, recipe, name, 2, checkpoint={"every": 2}, **changes)


def start(home: Path, tmp_path: Path, recipe: str, hold: dict[str, Any], **changes: Any) -> Launched:
    values = disturbed(home, recipe, "run", folder=str(tmp_path / "runs"), **changes)
    return Launched.start(tmp_path / "runs/run", str(write(tmp_path, values)), hold=hold)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_processes_and_then_the_run_are_killed(home: Path, whole: dict[str, Path], tmp_path: Path, recipe: str) -> None:
    """The whole run is killed while it trains the step after a checkpoint."""
    launched = start(home, tmp_path, recipe, {"stage": "train", "seconds": 0.2, "at_end": False})
    launched.wait_for("train", 1)
    kill_worker(launched, "engine-0")
    launched.wait_for("train", 2)
    kill_worker(launched, "policy-1")
    launched.wait_for("train", 3)
    assert {"engine-0.1", "policy-0.1", "policy-1.1"} <= set(replacements(launched.folder))
    launched.kill()
    assert_same(Launched.resume(tmp_path / "runs/run"), whole[recipe])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("worker", ["policy-0", "engine-0", ""])
@pytest.mark.parametrize("stage", ["rollout", "ledger", "train", "copy", "publish", "checkpoint"])
def test_any_process_is_killed_in_any_stage(
    home: Path, whole: dict[str, Path], tmp_path: Path, stage: str, worker: str, recipe: str
) -> None:
    """Without a worker, the whole run is killed and resumed."""
    chance = seeded_random("online", recipe, stage, worker)
    hold = {"stage": stage, "seconds": 0.2, "at_end": chance.random() < 0.5}
    launched = start(home, tmp_path, recipe, hold, recovery={"memory_copy": stage == "copy" or chance.random() < 0.5})
    launched.wait_for(stage, chance.randrange(1, STEPS))
    if worker:
        kill_worker(launched, worker, seconds=chance.choice((0.0, 0.3)))
    else:
        launched.kill()
        launched = Launched.resume(tmp_path / "runs/run")
    assert_same(launched, whole[recipe])


@pytest.fixture(scope="module")
def sorting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and the model with which the examples begin."""
    return prepare_sorting(tmp_path_factory.mktemp("sorting"), "sft_sort")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_examples_learn(sorting: Path, recipe: str, seed: int) -> None:
    values = example(f"{recipe}_sort", sorting, seed=seed, name=f"{recipe}-{seed}")
    run = sorting / "runs" / values["name"]
    launched = Launched.start(run, str(write(sorting, values)))
    assert launched.finish(timeout_s=900) == 0, launched.text()
    with Ledger.reader(run) as ledger:
        curve = [row.metrics["eval/exact_match"] for row in ledger.evaluations()]
    assert curve[0] < 0.4 and curve[-1] > 0.93, curve
