"""Runs on pairs: they follow an independent training loop, on any number of ranks, and survive kills bit by bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ALPHABET, Launched, config, metric_rows, train, untimed_rows, weights, write
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.models.tiny_model import make_tiny

pytestmark = [pytest.mark.xdist_group("preference"), pytest.mark.timeout(400)]

STEPS, PAIRS = 4, 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and pairs: the digits of a number in their order, or reversed."""
    home = tmp_path_factory.mktemp("preference")
    make_tiny(
        home / "model", hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, max_length=32, alphabet=ALPHABET, seed=5
    )
    (home / "data").mkdir()
    with (home / "data/preference.jsonl").open("w") as file:
        for n in range(STEPS * PAIRS):
            number = f"{(7919 * n) % 10 ** (2 + n % 4):02d}1"
            row = {"prompt": f"{number}=", "chosen": number, "rejected": number[::-1] + "0" * (n % 3)}
            file.write(json.dumps(row) + "\n")
    return home


def settings(home: Path, name: str, **changes: Any) -> dict[str, Any]:
    values = config(home, "preference", name=name, steps=STEPS, evaluation=None, batch_size=PAIRS)
    del values["rollout"]
    values["data"] = {"path": str(home / "data/preference.jsonl"), "shuffle": False}
    values["trainer"] = {"ranks": 1, "threads": 1, "max_grad_norm": None, "optimizer": {"lr": 3e-3}}
    for key, value in changes.items():
        values[key] = {**values[key], **value} if key == "trainer" else value
    return values


class PlainLoop:
    """The same training, written with transformers and a loop over completions."""

    def __init__(self, home: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(home / "model")
        self.policy = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
        self.reference = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
        self.pairs = [json.loads(line) for line in (home / "data/preference.jsonl").read_text().splitlines()]

    def completion(self, model: Any, prompt: str, text: str) -> tuple[Tensor, Tensor]:
        """The log-probabilities of the prompt's tokens but the first, and of the completion's."""
        begin = self.tokenizer(prompt)["input_ids"]
        tokens = torch.tensor([begin + self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id]])
        logprobs = torch.log_softmax(model(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
        return logprobs[: len(begin) - 1], logprobs[len(begin) - 1 :]

    def losses(self, name: str) -> list[float]:
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=3e-3, weight_decay=0.0)
        found = []
        for step in range(STEPS):
            loss = self.loss(name, self.pairs[step * PAIRS : (step + 1) * PAIRS])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def loss(self, name: str, pairs: list[dict[str, str]]) -> Tensor:
        terms, learned = [], []
        for pair in pairs:
            prompt = pair["prompt"]
            before, chosen = self.completion(self.policy, prompt, pair["chosen"])
            _, rejected = self.completion(self.policy, prompt, pair["rejected"])
            learned += [before, chosen]
            with torch.no_grad():
                of_chosen, of_rejected = (
                    self.completion(self.reference, prompt, pair[side])[1].sum() for side in ("chosen", "rejected")
                )
            if name == "sigmoid":
                terms.append(-logsigmoid(0.1 * (chosen.sum() - of_chosen - rejected.sum() + of_rejected)))
                continue
            better, worse = chosen.mean(), rejected.mean()
            if name == "simpo":
                terms.append(-logsigmoid(0.1 * (better - worse) - 0.5))
            else:
                odds = better - worse - torch.log1p(-better.exp()) + torch.log1p(-worse.exp())
                terms.append(-0.1 * logsigmoid(odds))
        return torch.stack(terms).mean() - (torch.cat(learned).mean() if name == "orpo" else 0.0)


@pytest.mark.parametrize("name", ["sigmoid", pytest.param("simpo", marks=pytest.mark.slow), "orpo"])
def test_four_steps_follow_a_plain_loop(home: Path, name: str) -> None:
    expected = PlainLoop(home).losses(name)
    run = train(home, settings(home, f"plain-{name}", loss={"type": name}))
    found = [row["policy/loss"] for row in metric_rows(run)]
    assert found == pytest.approx(expected, rel=2e-5)
    assert expected[-1] < expected[0]


class MovingLoop(PlainLoop):
    """DPO with WPO's weights, and a reference that takes 60 % of the policy's weights after every second step."""

    def losses(self, name: str) -> list[float]:
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=3e-3, weight_decay=0.0)
        found = []
        for step in range(STEPS):
            pairs = self.pairs[step * PAIRS : (step + 1) * PAIRS]
            weights = torch.tensor([self.weight(pair) for pair in pairs])
            loss = (torch.stack([self.loss(name, [pair]) for pair in pairs]) * weights).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 2:
                with torch.no_grad():
                    for old, new in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
                        old.copy_(0.4 * old + 0.6 * new)
            found.append(loss.item())
        return found

    @torch.no_grad()
    def weight(self, pair: dict[str, str]) -> float:
        begin, total = self.tokenizer(pair["prompt"])["input_ids"], 0.0
        for side in ("chosen", "rejected"):
            tokens = torch.tensor([begin + self.tokenizer(pair[side])["input_ids"] + [self.tokenizer.eos_token_id]])
            every = torch.softmax(self.policy(tokens).logits[0, len(begin) - 1 : -1], -1)
            taken = every.gather(1, tokens[0, len(begin) :, None])[:, 0]
            total += (taken.log() - every.square().sum(-1).log()).mean().item()
        return float(torch.tensor(total).exp())


MOVING = {"use_weighting": True, "sync_ref_model": True, "ref_model_sync_steps": 2}


def test_weighted_pairs_and_a_moving_reference_follow_a_plain_loop(home: Path) -> None:
    expected = MovingLoop(home).losses("sigmoid")
    run = train(home, settings(home, "moving", loss={"type": "sigmoid", **MOVING}, trainer={"ranks": 2}))
    assert [row["policy/loss"] for row in metric_rows(run)] == pytest.approx(expected, rel=2e-5)
    assert abs(expected[2] - expected[0]) > 1e-3, "something is learned"


def test_the_prompts_of_pairs_can_be_completed_and_the_card_names_dpo(home: Path) -> None:
    run = str(train(home, settings(home, "used", steps=1)))
    done = CliRunner().invoke(
        app, ["generate", run, "--dataset", "train", "--limit", "2", "--max-tokens", "4", "--json"]
    )
    assert done.exit_code == 0, done.output
    prompts = [json.loads(line)["prompt"] for line in done.stdout.splitlines()]
    pairs = (home / "data/preference.jsonl").read_text().splitlines()[:2]
    assert prompts == [json.loads(line)["prompt"] for line in pairs]
    card = CliRunner().invoke(app, ["push", run, "mira/pairs", "--dry-run"])
    assert card.exit_code == 0 and "after 1 step of DPO" in card.stdout, card.output
    assert "| pairs or labelled completions per step | 6 |" in card.stdout and str(home) not in card.stdout


@pytest.mark.slow
@pytest.mark.parametrize("other", ["aot", "ipo"])
def test_results_depend_on_neither_ranks_nor_rows(home: Path, other: str) -> None:
    """Also those of a loss that compares completions of other pairs, which takes two passes; without it, rows of 16
    tokens take two and others one."""
    loss = {"type": ["sigmoid", other, "sft"], "weights": [1.0, 0.5, 0.1]}
    alone = metric_rows(train(home, settings(home, f"{other}-one-rank", loss=loss)))
    for ranks, budget in ((2, 64), (3, 16)):
        changes = {"loss": loss, "token_budget": budget, "trainer": {"ranks": ranks}}
        rows = metric_rows(train(home, settings(home, f"{other}-ranks-{ranks}", **changes)))
        for name in ("policy/loss", "rewards/margins", "logps/chosen", f"loss/{other}", "policy/grad_norm"):
            assert [row[name] for row in rows] == pytest.approx([row[name] for row in alone], rel=1e-5), name


@pytest.mark.slow
def test_a_reference_of_its_own_and_an_adapter_give_the_same(home: Path) -> None:
    inside = metric_rows(train(home, settings(home, "inside")))
    apart = metric_rows(train(home, settings(home, "apart", reference={"threads": 1})))
    assert [row["policy/loss"] for row in apart] == [row["policy/loss"] for row in inside]
    adapter = {"path": str(home / "model"), "adapter": {"kind": "lora", "r": 4}}
    changed = metric_rows(train(home, settings(home, "adapter", model=adapter)))
    assert changed[0]["policy/loss"] == pytest.approx(inside[0]["policy/loss"], rel=1e-6), "nothing is learned yet"
    assert changed[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert changed[-1]["policy/loss"] < changed[0]["policy/loss"]


def test_kto_learns_from_labels_on_any_number_of_ranks(home: Path) -> None:
    with (home / "data/labelled.jsonl").open("w") as file:
        for n, line in enumerate((home / "data/preference.jsonl").read_text().splitlines()):
            pair, desirable = json.loads(line), n % 2 == 0
            completion = pair["chosen" if desirable else "rejected"]
            file.write(json.dumps({"prompt": pair["prompt"], "completion": completion, "label": desirable}) + "\n")
    data = {"path": str(home / "data/labelled.jsonl"), "shuffle": False}
    common: dict[str, Any] = {"data": data, "loss": {"type": "kto"}}
    alone = metric_rows(train(home, settings(home, "kto", **common)))
    changes = {"token_budget": 32, "trainer": {"ranks": 2}, "reference": {"threads": 1}}
    split = metric_rows(train(home, settings(home, "kto-split", **common, **changes)))
    for name in ("policy/loss", "rewards/margins", "policy/kl", "policy/grad_norm"):
        assert [row[name] for row in split] == pytest.approx([row[name] for row in alone], rel=1e-5, abs=1e-6), name
    assert alone[0]["policy/loss"] == pytest.approx(0.5, abs=1e-6), "the policy is the reference"
    assert alone[-1]["rewards/margins"] > alone[0]["rewards/margins"]


@pytest.mark.slow
def test_a_moving_reference_survives_a_kill(home: Path, tmp_path: Path) -> None:
    """Its weights at the kill are neither those of the model nor those of the policy."""
    changes: dict[str, Any] = {"loss": {"type": "sigmoid", **MOVING}, "trainer": {"ranks": 2}}
    values = settings(home, "whole", folder=str(tmp_path / "runs"), checkpoint={"every": 1}, **changes)
    whole = train(tmp_path, values)
    file = write(tmp_path, {**values, "name": "killed"})
    launched = Launched.start(tmp_path / "runs/killed", str(file), hold={"stage": "train", "seconds": 0.3})
    launched.wait_for("train", 3)
    launched.kill()
    resumed = Launched.resume(tmp_path / "runs/killed")
    assert resumed.finish() == 0, resumed.text()
    assert weights(tmp_path / "runs/killed") == weights(whole)
    assert untimed_rows(tmp_path / "runs/killed") == untimed_rows(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["logprobs", *(pytest.param(each, marks=pytest.mark.slow) for each in ("train", "checkpoint"))]
)
def test_a_killed_run_resumes_bit_by_bit(home: Path, tmp_path: Path, stage: str) -> None:
    values = settings(home, "whole", folder=str(tmp_path / "runs"), checkpoint={"every": 1}, trainer={"ranks": 2})
    whole = train(tmp_path, values)
    file = write(tmp_path, {**values, "name": "killed"})
    hold = {"stage": stage, "seconds": 0.3}
    launched = Launched.start(tmp_path / "runs/killed", str(file), hold=hold)
    launched.wait_for(stage, 2)
    launched.kill()
    resumed = Launched.resume(tmp_path / "runs/killed")
    assert resumed.finish() == 0, resumed.text()
    assert weights(tmp_path / "runs/killed") == weights(whole)
    assert untimed_rows(tmp_path / "runs/killed") == untimed_rows(whole)
