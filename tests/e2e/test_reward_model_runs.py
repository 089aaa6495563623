"""Reward models: runs follow an independent loop on any number of ranks, survive kills, and transformers gives equal
scores."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ALPHABET, Launched, config, metric_rows, train, untimed_rows, weights, write
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny

pytestmark = [pytest.mark.xdist_group("reward-model"), pytest.mark.timeout(400)]

STEPS, PAIRS = 4, 6
EVERYTHING = {"use_margin": True, "center_rewards_coefficient": 0.01, "label_smoothing": 0.1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny language model, a reward model of transformers made from it, and pairs."""
    home = tmp_path_factory.mktemp("reward")
    make_tiny(
        home / "model", hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, max_length=32, alphabet=ALPHABET, seed=5
    )
    torch.manual_seed(1)
    scorer = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(scorer.score.weight, std=0.2)
    scorer.save_pretrained(home / "scorer")
    AutoTokenizer.from_pretrained(home / "model").save_pretrained(home / "scorer")
    (home / "data").mkdir()
    with (home / "data/reward.jsonl").open("w") as file:
        for n in range(STEPS * PAIRS):
            number = f"{(7919 * n) % 10 ** (2 + n % 4):02d}1"
            row = {"prompt": f"{number}=", "chosen": number, "rejected": number[::-1] + "0" * (n % 3)}
            file.write(json.dumps(row | {"margin": 0.1 * (n % 4)}) + "\n")
    return home


def settings(home: Path, name: str, **changes: Any) -> dict[str, Any]:
    values = config(home, "reward", name=name, steps=STEPS, evaluation=None, batch_size=PAIRS)
    del values["rollout"]
    values.pop("reward", None)
    values["model"] = {"path": str(home / "scorer")}
    values["data"] = {"path": str(home / "data/reward.jsonl"), "shuffle": False}
    values["trainer"] = {"ranks": 1, "threads": 1, "max_grad_norm": None, "optimizer": {"lr": 3e-3}}
    for key, value in changes.items():
        values[key] = {**values[key], **value} if key == "trainer" else value
    return values


def data(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "data/reward.jsonl").read_text().splitlines()]


def score(model: Any, tokenizer: Any, text: str) -> Tensor:
    """The score of a text that ends with the end-of-sequence token, by transformers."""
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return model(torch.tensor([tokens])).logits[0, 0]


def plain_loop(home: Path, margin: float, centering: float, smoothing: float) -> list[dict[str, float]]:
    """The same training, written with transformers and a loop over pairs: Ouyang et al. 2022, eq. 1."""
    model = AutoModelForSequenceClassification.from_pretrained(home / "scorer", dtype=torch.float32)
    tokenizer, found = AutoTokenizer.from_pretrained(home / "scorer"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(STEPS):
        terms, gaps = [], []
        for pair in data(home)[step * PAIRS : (step + 1) * PAIRS]:
            better, worse = (score(model, tokenizer, pair["prompt"] + pair[side]) for side in ("chosen", "rejected"))
            gaps.append(float((better - worse).detach()))
            excess = better - worse - margin * pair["margin"]
            likelihood = (1 - smoothing) * logsigmoid(excess) + smoothing * logsigmoid(-excess)
            terms.append(-likelihood + centering * (better + worse) ** 2)
        loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy, mean = sum(gap > 0 for gap in gaps) / PAIRS, sum(gaps) / PAIRS
        found.append({"policy/loss": loss.item(), "policy/accuracy": accuracy, "policy/margin": mean})
    return found


@pytest.mark.parametrize("loss", [pytest.param({}, marks=pytest.mark.slow), EVERYTHING], ids=["plain", "everything"])
def test_four_steps_follow_a_plain_loop(home: Path, loss: dict[str, Any]) -> None:
    on = bool(loss)
    expected = plain_loop(home, float(on), 0.01 * on, 0.1 * on)
    rows = metric_rows(train(home, settings(home, f"plain-{on}", loss=loss)))
    assert len(rows) == len(expected) == STEPS
    for row, values in zip(rows, expected, strict=True):
        assert {name: row[name] for name in values} == pytest.approx(values, rel=2e-5, abs=1e-6)
    assert expected[-1]["policy/loss"] < expected[0]["policy/loss"]


@pytest.mark.parametrize(("ranks", "budget"), [pytest.param(2, 64, marks=pytest.mark.slow), (3, 17)])
def test_results_depend_on_neither_ranks_nor_rows(home: Path, ranks: int, budget: int) -> None:
    """Also where the completions of a pair are in different rows."""
    run = home / "runs/plain-True"
    if not (run / "export").exists():
        train(home, settings(home, "plain-True", loss=EVERYTHING))
    alone = metric_rows(run)
    changes = {"loss": EVERYTHING, "token_budget": budget, "trainer": {"ranks": ranks}}
    rows = metric_rows(train(home, settings(home, f"ranks-{ranks}", **changes)))
    assert any("time/scores_s" in row for row in rows) == (budget == 17)
    for name in ("loss", "accuracy", "margin", "chosen_reward", "mean_reward", "std_reward", "grad_norm", "tokens"):
        found = [row[f"policy/{name}"] for row in rows]
        assert found == pytest.approx([row[f"policy/{name}"] for row in alone], rel=1e-5, abs=1e-6), name


def test_transformers_gives_equal_scores(home: Path) -> None:
    """From a language model whose tokenizer pads with the end-of-sequence token."""
    model = home / "padded-with-eos"
    source = AutoTokenizer.from_pretrained(home / "model")
    source.add_special_tokens({"unk_token": source.pad_token})
    source.pad_token = source.eos_token
    for path in (home / "model").iterdir():
        model.mkdir(exist_ok=True)
        (model / path.name).write_bytes(path.read_bytes())
    source.save_pretrained(model)
    held_out = {"data": {"path": str(home / "data/reward.jsonl")}, "every": 2}
    run = train(home, settings(home, "from-lm", model={"path": str(model)}, validation=held_out))
    with Ledger.reader(run) as ledger:
        evaluations = {row.step + 1: row.metrics for row in ledger.evaluations()}
    assert sorted(evaluations) == [0, 2, 4] and evaluations[4]["eval/loss"] < evaluations[0]["eval/loss"]
    assert "has no score head, so a new one is trained" in (run / "logs/controller.log").read_text()
    scorer = AutoModelForSequenceClassification.from_pretrained(run / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    assert tokenizer.pad_token_id == scorer.config.pad_token_id != tokenizer.eos_token_id
    with torch.no_grad():
        found = {
            side: torch.stack([score(scorer, tokenizer, pair["prompt"] + pair[side]) for pair in data(home)])
            for side in ("chosen", "rejected")
        }
    last = evaluations[4]
    assert last["eval/chosen_reward"] == pytest.approx(found["chosen"].mean().item(), abs=1e-5)
    assert last["eval/accuracy"] == pytest.approx((found["chosen"] > found["rejected"]).double().mean().item())
    both = torch.cat(list(found.values()))
    expected = (both.mean().item(), both.std(correction=0).item())
    assert (scorer.config.mean, scorer.config.std) == pytest.approx(expected, abs=1e-5)
    texts = [pair["prompt"] + pair["chosen"] + tokenizer.eos_token for pair in data(home)]
    padded = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        torch.testing.assert_close(scorer(**padded).logits[:, 0], found["chosen"], rtol=0, atol=1e-5)
    done = CliRunner().invoke(app, ["export", str(run), str(home / "exported"), "--step", "3"])
    assert done.exit_code == 0, done.output
    earlier = json.loads((home / "exported/config.json").read_text())
    assert earlier["mean"] == pytest.approx(metric_rows(run)[2]["policy/mean_reward"]), "measured after the evaluation"
    assert earlier["architectures"] == ["Qwen2ForSequenceClassification"]
    again = metric_rows(train(home, settings(home, "continued", model={"path": str(run / "export")}, steps=1)))
    assert again[0]["policy/chosen_reward"] == pytest.approx(found["chosen"][:PAIRS].mean().item(), abs=1e-5)
    assert "has no score head" not in (home / "runs/continued/logs/controller.log").read_text()
    refused = CliRunner().invoke(app, ["generate", str(run), "12="])
    assert refused.exit_code and "scores texts and generates none" in refused.output


def evaluated(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["eval", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_eval_gives_the_numbers_of_the_run_and_of_transformers(home: Path, tmp_path: Path) -> None:
    pairs = str(home / "data/reward.jsonl")
    validation = {"data": {"path": pairs}, "samples": 10, "every": 2}
    model = {"path": str(home / "scorer"), "adapter": {"kind": "lora", "r": 4}}
    run = train(home, settings(home, "evaluated", loss=EVERYTHING, model=model, validation=validation))
    with Ledger.reader(run) as ledger:
        expected = {row.step + 1: row.metrics for row in ledger.evaluations()}
    for place, options in ((run, []), (run / "export", []), (run / "adapter", []), (run, ["--step", "3"])):
        found = evaluated(str(place), *options)
        assert found["pairs"] == 10 and set(found["metrics"]) == set(expected[4])
        if options:
            assert found["steps"] == 3 and found["metrics"] != pytest.approx(expected[4])
        else:
            assert found["metrics"] == pytest.approx(expected[4], rel=1e-5, abs=1e-6)
    outside = tmp_path / "export"
    shutil.copytree(run / "export", outside)
    output = tmp_path / "scores.jsonl"
    found = evaluated(str(outside), "--dataset", pairs, "--limit", "7", "--output", str(output))
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    scorer = AutoModelForSequenceClassification.from_pretrained(outside, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(outside)
    assert [row["row"] for row in rows] == list(range(7)) and found["pairs"] == 7
    with torch.no_grad():
        for row, pair in zip(rows, data(home), strict=False):
            for side in ("chosen", "rejected"):
                assert row[f"{side}_score"] == pytest.approx(
                    score(scorer, tokenizer, pair["prompt"] + pair[side]).item(), abs=1e-5
                )
    scores = [row[f"{side}_score"] for row in rows for side in ("chosen", "rejected")]
    mean = sum(scores) / len(scores)
    assert found["metrics"]["eval/mean_reward"] == pytest.approx(mean)
    assert found["metrics"]["eval/std_reward"] == pytest.approx(
        (sum((each - mean) ** 2 for each in scores) / 14) ** 0.5
    )
    assert found["metrics"]["eval/accuracy"] == sum(a["chosen_score"] > a["rejected_score"] for a in rows) / 7


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "has no validation data: give --dataset, or --config with some"),
        (["--dataset", "PAIRS", "--temperature", "0.5"], "scores pairs and generates nothing: leave out"),
        (["--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--dataset", "TEXTS"], "chosen"),
        (["--dataset", "PAIRS", "loss.use_margins=true"], "use_margin"),
    ],
)
def test_eval_refuses_what_a_reward_model_cannot_do(home: Path, arguments: list[str], problem: str) -> None:
    (home / "texts.jsonl").write_text('{"text": "12=21"}\n')
    places = {"PAIRS": str(home / "data/reward.jsonl"), "TEXTS": str(home / "texts.jsonl")}
    done = CliRunner().invoke(app, ["eval", str(home / "scorer"), *(places.get(each, each) for each in arguments)])
    assert done.exit_code == 2 and problem in " ".join(done.output.split()), done.output


@pytest.mark.slow
def test_an_adapter_is_trained_with_its_head(home: Path) -> None:
    adapter = {"path": str(home / "scorer"), "adapter": {"kind": "lora", "r": 4}}
    run = train(home, settings(home, "adapter", model=adapter, trainer={"ranks": 2}))
    rows, whole = metric_rows(run), metric_rows(train(home, settings(home, "no-adapter")))
    assert rows[0]["policy/loss"] == pytest.approx(whole[0]["policy/loss"], rel=1e-6), "nothing is learned yet"
    assert rows[-1]["policy/loss"] < rows[0]["policy/loss"]
    base = AutoModelForSequenceClassification.from_pretrained(home / "scorer", num_labels=1, dtype=torch.float32)
    merged = AutoModelForSequenceClassification.from_pretrained(run / "export", dtype=torch.float32)
    assert not torch.equal(merged.score.weight, base.score.weight)
    adapted = PeftModel.from_pretrained(base, run / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    with torch.no_grad():
        texts = [pair["prompt"] + pair["chosen"] for pair in data(home)[:4]]
        found = torch.stack([score(adapted.eval(), tokenizer, text) for text in texts])
        expected = torch.stack([score(merged, tokenizer, text) for text in texts])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget", [pytest.param(64, marks=pytest.mark.slow), 17], ids=["one pass", "divided pairs"])
def test_a_score_that_is_not_finite_ends_the_run_with_the_same_error(home: Path, budget: int) -> None:
    model = home / "overflowing"
    shutil.copytree(home / "scorer", model, dirs_exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    tensors["score.weight"][0, 0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    trainer = {"ranks": 2, "threads": 1, "optimizer": {"lr": 3e-3}}
    values = settings(home, f"nan-{budget}", model={"path": str(model)}, token_budget=budget, trainer=trainer)
    launched = Launched.start(home / f"runs/nan-{budget}", str(write(home, values)))
    assert launched.finish() == 1
    said = " ".join(launched.text().split())
    assert "NonFinite: loss of optimizer step 1 is not finite (rank 0 micro-batch 0, rank 1 micro-batch 0)" in said
    assert f"resume with: lockstep train --resume {home}/runs/nan-{budget}" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["train", *(pytest.param(each, marks=pytest.mark.slow) for each in ("pack", "scores", "checkpoint"))]
)
def test_a_killed_run_resumes_bit_by_bit(home: Path, tmp_path: Path, stage: str) -> None:
    changes: dict[str, Any] = {"folder": str(tmp_path / "runs"), "checkpoint": {"every": 1}, "trainer": {"ranks": 2}}
    values = settings(home, "whole", token_budget=17 if stage == "scores" else 64, **changes)
    whole = train(tmp_path, values)
    launched = Launched.start(
        tmp_path / "runs/killed",
        str(write(tmp_path, {**values, "name": "killed"})),
        hold={"stage": stage, "seconds": 0.3},
    )
    launched.wait_for(stage, 2)
    launched.kill()
    resumed = Launched.resume(tmp_path / "runs/killed")
    assert resumed.finish() == 0, resumed.text()
    assert weights(tmp_path / "runs/killed") == weights(whole)
    assert untimed_rows(tmp_path / "runs/killed") == untimed_rows(whole)
