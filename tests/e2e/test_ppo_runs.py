"""Runs of PPO: they follow an independent training loop, on any number of ranks, and survive kills bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Launched, config, metric_rows, seeded_random, task, train, write
from resume_scenarios import assert_same
from safetensors.torch import load_file
from sort_examples import example, prepare_sorting
from test_recovery import kill_worker, replacements
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lockstep.data.sample_order import permutation
from lockstep.data.samples import Completion, Group
from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.xdist_group("ppo"), pytest.mark.timeout(400)]

STEPS, WARMUP, EPOCHS, MINIBATCH, GROUP, PROMPTS = 4, 1, 2, 4, 2, 4
GAMMA, LAM, KL, VALUE_CLIP, CLIP, DUAL_CLIP = 0.95, 0.9, 0.1, 0.02, 0.1, 1.5
LR, CRITIC_LR = 3e-3, 5e-3
ALPHA = 0.6
VAPO = {
    "advantage": {"gamma": GAMMA, "length_adaptive_alpha": ALPHA, "lam_critic": 0.97},
    "bootstrap_truncated": True,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a critic with a head of its own, a reward model, and the data of a task."""
    home = task(tmp_path_factory.mktemp("ppo"))
    torch.manual_seed(2)
    shape = AutoConfig.from_pretrained(home / "model", num_labels=1)
    critic = AutoModelForSequenceClassification.from_config(shape)
    critic.score.weight.data.normal_(0, 0.2)
    critic.save_pretrained(home / "value")
    scorer = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1, dtype=torch.float32)
    scorer.score.weight.data.normal_(0, 0.2)
    scorer.save_pretrained(home / "scorer")
    AutoTokenizer.from_pretrained(home / "model").save_pretrained(home / "scorer")
    return home


def settings(home: Path, name: str, **changes: Any) -> dict[str, Any]:
    values = config(home, "grpo", name=name, steps=STEPS, evaluation=None, checkpoint={"every": 0})
    loss = {
        "old_logprobs": "trainer", "clip_low": CLIP, "clip_high": CLIP, "dual_clip": DUAL_CLIP,
        "kl": {"coefficient": KL},
    }  # fmt: skip
    own = {
        "recipe": "ppo", "prompts_per_step": PROMPTS, "group_size": GROUP, "minibatch_size": MINIBATCH,
        "epochs": EPOCHS, "advantage": {"gamma": GAMMA, "lam": LAM}, "loss": loss,
        "trainer": {"ranks": 1, "threads": 1, "max_grad_norm": None, "optimizer": {"lr": LR}},
        "critic": {
            "model": {"path": str(home / "value")}, "loss": {"clip": VALUE_CLIP}, "warmup_steps": WARMUP,
            "trainer": {"ranks": 1, "threads": 1, "max_grad_norm": None, "optimizer": {"lr": CRITIC_LR}},
            "export": True,
        },
    }  # fmt: skip
    return {**values, **own, **changes}


class PlainLoop:
    """The same training, written with transformers and loops over completions and tokens. It gets the sampled tokens
    and their rewards from the run."""

    def __init__(self, home: Path, run: Path, vapo: bool, minibatch: int = MINIBATCH) -> None:
        self.vapo, self.groups_at_once = vapo, minibatch // GROUP
        self.policy = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
        self.reference = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
        self.critic = AutoModelForSequenceClassification.from_pretrained(
            home / "value", num_labels=1, dtype=torch.float32
        )
        with Ledger.reader(run) as ledger:
            stored = [ledger.rollouts(step) for step in range(STEPS)]
        self.groups = [each.groups for each in stored if each is not None]

    def logprobs(self, model: Any, group: Group, completion: Completion) -> Tensor:
        tokens = torch.tensor([[*group.prompt.tokens.tolist(), *completion.tokens.tolist()]])
        every = torch.log_softmax(model(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
        return every[len(group.prompt.tokens) - 1 :]

    def values(self, group: Group, completion: Completion) -> Tensor:
        """The values of the states before each token and after the last one."""
        tokens = torch.tensor([[*group.prompt.tokens.tolist(), *completion.tokens.tolist()]])
        hidden = self.critic.model(tokens).last_hidden_state[0]
        return self.critic.score(hidden)[len(group.prompt.tokens) - 1 :, 0]

    def learn(self, seed: int) -> list[dict[str, float]]:
        of_policy = torch.optim.AdamW(self.policy.parameters(), lr=LR, weight_decay=0.0)
        of_critic = torch.optim.AdamW(self.critic.parameters(), lr=CRITIC_LR, weight_decay=0.0)
        rows = []
        for step, groups in enumerate(self.groups):
            samples = [self.sample(group, k, step < WARMUP) for group in groups for k in range(GROUP)]
            every = torch.cat([each["advantage"] for each in samples])
            mean, deviation = every.mean(), every.std()
            row: dict[str, list[float]] = {"policy/loss": [], "critic/loss": [], "policy/clip_fraction": []}
            for epoch in range(EPOCHS):
                order = permutation(PROMPTS, seed * 1_000_003 + step, epoch).tolist()
                for begin in range(0, PROMPTS, self.groups_at_once):
                    together = order[begin : begin + self.groups_at_once]
                    chosen = [samples[g * GROUP + k] for g in together for k in range(GROUP)]
                    count = sum(each["old"].numel() for each in chosen)
                    value_loss = torch.stack([self.value_loss(each) for each in chosen]).sum() / count
                    self.update(of_critic, value_loss)
                    row["critic/loss"].append(value_loss.item())
                    if step < WARMUP:
                        continue
                    losses = [self.policy_loss(each, mean, deviation) for each in chosen]
                    policy_loss = torch.stack([loss for loss, _ in losses]).sum() / count
                    self.update(of_policy, policy_loss)
                    row["policy/loss"].append(policy_loss.item())
                    row["policy/clip_fraction"].append(sum(clipped for _, clipped in losses) / count)
            rows.append({name: sum(each) / len(each) for name, each in row.items() if each})
        return rows

    @torch.no_grad()
    def sample(self, group: Group, number: int, warmup: bool) -> dict[str, Any]:
        """What is known of a completion before the first update of its step. In the warm-up the critic learns the
        discounted sums of rewards, without clipping."""
        completion = group.completions[number]
        assert group.rewards is not None
        old = self.logprobs(self.policy, group, completion)
        divergence = old - self.logprobs(self.reference, group, completion)
        values = self.values(group, completion)
        rewards = [-KL * each.item() for each in divergence]
        rewards[-1] += min(max(float(group.rewards[number]), -10.0), 10.0)
        if not self.vapo or completion.finish != "length":
            values[-1] = 0.0
        lam = max(0.0, 1 - 1 / (ALPHA * old.numel())) if self.vapo else LAM
        advantage = self.advantages(rewards, values.tolist(), lam)
        returns = self.advantages(rewards, values.tolist(), 0.97 if self.vapo else LAM) + values[:-1]
        if warmup:
            rewards.append(values[-1].item())
            returns = torch.tensor(
                [sum(GAMMA**k * each for k, each in enumerate(rewards[t:])) for t in range(len(rewards) - 1)]
            )
        found = {"old": old, "value": values[:-1], "advantage": advantage, "return": returns}
        found["clip"] = torch.tensor(float("inf") if warmup else VALUE_CLIP)
        return {**found, "group": group, "completion": completion}

    @staticmethod
    def advantages(rewards: list[float], values: list[float], lam: float) -> Tensor:
        found, after = [], 0.0
        for t in reversed(range(len(rewards))):
            after = rewards[t] + GAMMA * values[t + 1] - values[t] + GAMMA * lam * after
            found.insert(0, after)
        return torch.tensor(found)

    def value_loss(self, sample: dict[str, Any]) -> Tensor:
        values, total = self.values(sample["group"], sample["completion"])[:-1], torch.zeros(())
        for value, old, target in zip(values, sample["value"], sample["return"], strict=True):
            near = old + torch.clamp(value - old, -sample["clip"], sample["clip"])
            total = total + 0.5 * torch.max((value - target) ** 2, (near - target) ** 2)
        return total

    def policy_loss(self, sample: dict[str, Any], mean: Tensor, deviation: Tensor) -> tuple[Tensor, float]:
        new, total, clipped = self.logprobs(self.policy, sample["group"], sample["completion"]), torch.zeros(()), 0.0
        for logprob, old, raw in zip(new, sample["old"], sample["advantage"], strict=True):
            advantage, ratio = (raw - mean) / deviation, torch.exp(logprob - old)
            inside = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
            objective = torch.min(ratio * advantage, inside * advantage)
            clipped += float(inside * advantage < ratio * advantage)
            if advantage < 0:
                objective = torch.max(objective, DUAL_CLIP * advantage)
            total = total - objective
        return total, clipped

    @staticmethod
    def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def alone(home: Path) -> Path:
    """A run on one rank of each role, with VAPO's settings."""
    return train(home, settings(home, "alone", **VAPO))


@pytest.mark.parametrize(
    ("vapo", "minibatch"),
    [(True, MINIBATCH), *(pytest.param(False, size, marks=pytest.mark.slow) for size in (MINIBATCH, PROMPTS * GROUP))],
)
def test_four_steps_follow_a_plain_loop(home: Path, alone: Path, vapo: bool, minibatch: int) -> None:
    """With `vapo`, the critic has a lambda of its own, each completion one by its length, and those that were cut off
    count the value after their last token. With one mini-batch in a step, the critic's first update of the step
    continues the forward pass that gave the values."""
    values = settings(home, f"plain-{minibatch}", minibatch_size=minibatch)
    run = alone if vapo else train(home, values)
    loop, rows = PlainLoop(home, run, vapo, minibatch), metric_rows(run)
    ends = {each.finish for groups in loop.groups for group in groups for each in group.completions}
    assert ends == {"stop", "length"}
    for found, expected in zip(rows, loop.learn(values["seed"]), strict=True):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert "policy/loss" not in rows[0], "the policy waits for the critic"
    assert rows[0]["critic/clip_fraction"] == 0 and any(row["critic/clip_fraction"] for row in rows[1:])
    assert any(row["policy/clip_fraction"] for row in rows[1:])
    for folder, model in (("export", loop.policy), ("critic/export", loop.critic)):
        exported, trained = load_file(run / folder / "model.safetensors"), model.state_dict()
        for name in exported.keys() - {f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(2)}:
            # The gradient of a key's bias is zero but for rounding, which AdamW makes steps of.
            torch.testing.assert_close(exported[name], trained[name], rtol=1e-5, atol=2e-5, msg=f"{folder} {name}")


@pytest.mark.parametrize(
    ("of_policy", "of_critic", "budget"), [(2, 2, 32), pytest.param(1, 3, 16, marks=pytest.mark.slow)]
)
def test_results_depend_on_neither_ranks_nor_rows(
    home: Path, alone: Path, of_policy: int, of_critic: int, budget: int
) -> None:
    values = settings(home, f"ranks-{budget}", token_budget=budget, **VAPO)
    values["trainer"] = {**values["trainer"], "ranks": of_policy}
    values["critic"]["trainer"] = {**values["critic"]["trainer"], "ranks": of_critic}
    rows = metric_rows(train(home, values))
    for name in ("policy/loss", "critic/loss", "critic/grad_norm", "critic/explained_variance", "reward/kl"):
        found, expected = ([row[name] for row in each if name in row] for each in (rows, metric_rows(alone)))
        assert found == pytest.approx(expected, rel=5e-5, abs=1e-6), name


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """An undisturbed run with a coefficient that adapts, on two ranks of the policy and one of the critic, the
    reference and the reward model each."""
    run = train(home, disturbed(home, "whole"))
    coefficients = [row["reward/kl_coefficient"] for row in metric_rows(run)]
    assert coefficients[: WARMUP + 1] == [KL] * (WARMUP + 1) and len(set(coefficients)) == STEPS - WARMUP
    return run


def disturbed(home: Path, name: str, **changes: Any) -> dict[str, Any]:
    values = settings(home, name, kl_controller={"target": 0.01, "horizon": 40}, checkpoint={"every": 2}, **changes)
    model = {"kind": "model", "path": str(home / "scorer"), "threads": 1}
    reward = {"terms": [*values["reward"]["terms"], model]}
    roles = {"reference": {"threads": 1}, "trainer": {**values["trainer"], "ranks": 2}}
    return {**values, **roles, "reward": reward}


def start(home: Path, tmp_path: Path, hold: dict[str, Any], **changes: Any) -> Launched:
    values = disturbed(home, "ppo", folder=str(tmp_path / "runs"), **changes)
    return Launched.start(tmp_path / "runs/ppo", str(write(tmp_path, values)), hold=hold)


@pytest.mark.slow
def test_processes_of_each_role_and_then_the_run_are_killed(home: Path, whole: Path, tmp_path: Path) -> None:
    """The whole run is killed while both roles are trained in the step after a checkpoint."""
    launched = start(home, tmp_path, {"stage": "train", "seconds": 0.2, "at_end": False})
    launched.wait_for("train", 1)
    kill_worker(launched, "critic-0")
    kill_worker(launched, "engine-0")
    launched.wait_for("train", 2)
    kill_worker(launched, "policy-1")
    launched.wait_for("train", 3)
    assert {"critic-0.1", "engine-0.1", "policy-0.1", "policy-1.1"} <= set(replacements(launched.folder))
    launched.kill()
    assert_same(Launched.resume(tmp_path / "runs/ppo"), whole)


@pytest.mark.slow
def test_a_killed_critic_that_had_kept_its_values_continues_bit_by_bit(home: Path, tmp_path: Path) -> None:
    """As in a run in which no forward pass is kept and nothing is killed."""
    values = settings(home, "kept", minibatch_size=None, token_budget=64, checkpoint={"every": 2})
    values["critic"]["kept_microbatches"] = 0
    undisturbed = train(home, values)
    values["critic"]["kept_microbatches"] = 2
    run = tmp_path / "runs/kept"
    held = {"stage": "train", "seconds": 0.2, "at_end": False}
    path = write(tmp_path, {**values, "folder": str(tmp_path / "runs")})
    launched = Launched.start(run, str(path), hold=held)
    launched.wait_for("train", 1)  # the critic has computed the values of the step
    kill_worker(launched, "critic-0")
    launched.wait_for("train", 2)
    kill_worker(launched, "policy-0")
    launched.wait_for("train", 3)
    launched.kill()
    assert_same(Launched.resume(run), undisturbed)


@pytest.fixture(scope="module")
def sorting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and the model with which the example begins."""
    return prepare_sorting(tmp_path_factory.mktemp("sorting"), "sft_sort")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_the_example_learns(sorting: Path, seed: int) -> None:
    values = example("ppo_sort", sorting, seed=seed, name=f"ppo-{seed}")
    run = sorting / "runs" / values["name"]
    launched = Launched.start(run, str(write(sorting, values)))
    assert launched.finish(timeout_s=900) == 0, launched.text()
    with Ledger.reader(run) as ledger:
        curve = [row.metrics["eval/exact_match"] for row in ledger.evaluations()]
    assert curve[0] < 0.4 and curve[-1] > 0.95, curve
    explained = [row["critic/explained_variance"] for row in metric_rows(run) if "critic/explained_variance" in row]
    assert sum(explained[40:120]) / 80 > 0 > explained[0], "the critic has learnt"


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["policy-0", "critic-0", "engine-0", "reference-0", "reward_model-0", ""])
@pytest.mark.parametrize("stage", ["rollout", "reward", "ledger", "logprobs", "train", "copy", "publish", "checkpoint"])
def test_any_process_is_killed_in_any_stage(home: Path, whole: Path, tmp_path: Path, stage: str, worker: str) -> None:
    """Without a worker, the whole run is killed and resumed."""
    chance = seeded_random("ppo", stage, worker)
    hold = {"stage": stage, "seconds": 0.2, "at_end": chance.random() < 0.5}
    copies = chance.random() < 0.5 or stage == "copy"
    launched = start(home, tmp_path, hold, recovery={"memory_copy": copies})
    launched.wait_for(stage, chance.randrange(1, STEPS))
    if worker:
        kill_worker(launched, worker, seconds=chance.choice((0.0, 0.3)))
    else:
        launched.kill()
        launched = Launched.resume(tmp_path / "runs/ppo")
    assert_same(launched, whole)
