"""The loss on held-out documents, and runs that end when it does not improve any more."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Launched, config, task, train, weights, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.xdist_group("validation"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = task(tmp_path_factory.mktemp("validation"))
    rows = [{"prompt": f"{n:02d}=", "completion": f"{n % 10}{n // 10}"} for n in range(7, 40, 3)]
    (home / "data" / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def sft(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    return config(folder, "sft", name=name, evaluation=None, rollout={}, **changes)


def reference_loss(model_folder: Path, data: Path) -> float:
    """The mean over all learned tokens, by transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    total, count = 0.0, 0
    for line in data.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([prompt + answer])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            total += float(model(ids, labels=labels).loss) * len(answer)
        count += len(answer)
    return total / count


@pytest.fixture(scope="module")
def validated(folder: Path) -> Path:
    held = folder / "data" / "held.jsonl"
    values = sft(folder, "validated", validation={"data": {"path": str(held)}, "every": 2})
    return train(folder, values)


def test_the_loss_is_that_of_transformers(folder: Path, validated: Path) -> None:
    held = folder / "data" / "held.jsonl"
    with Ledger.reader(validated) as ledger:
        found = {row.step + 1: row.metrics for row in ledger.evaluations()}
    assert list(found) == [0, 2, 4, 6, 8]
    for version, model in ((0, folder / "model"), (8, validated / "export")):
        assert found[version]["eval/loss"] == pytest.approx(reference_loss(model, held), rel=1e-5)
        assert found[version]["eval/perplexity"] == pytest.approx(math.exp(found[version]["eval/loss"]))
    assert found[8]["eval/loss"] < found[0]["eval/loss"]


def test_no_engine_is_started_and_the_best_checkpoint_is_kept(validated: Path) -> None:
    assert not list((validated / "logs").glob("engine-*"))
    with Ledger.reader(validated) as ledger:
        rated = {row.step + 1: row.metric for row in ledger.checkpoints()}
        losses = {row.step + 1: row.metrics["eval/loss"] for row in ledger.evaluations()}
    best = min((version for version in losses if version), key=lambda version: losses[version])
    assert rated[best] == -losses[best]


def test_a_share_of_the_data_is_held_out(folder: Path) -> None:
    run = train(folder, sft(folder, "share", steps=2, validation={"fraction": 0.25}))
    with Ledger.reader(run) as ledger:
        assert [row.step + 1 for row in ledger.evaluations()] == [0, 2]
        (start,) = [event for event in ledger.events() if event.kind == "start"]
    rows = len((folder / "data" / "sft.jsonl").read_text().splitlines())
    assert start.fields["rows"] == rows - round(rows / 4)


def test_a_run_that_does_not_improve_ends_early_and_well(folder: Path) -> None:
    held = {"data": {"path": str(folder / "data" / "held.jsonl")}, "every": 1}
    still = {"ranks": 2, "threads": 1, "optimizer": {"lr": 1e-30}}
    values = sft(folder, "still", validation=held, trainer=still, early_stopping={"patience": 2})
    run = train(folder, values)
    summary = json.loads((run / "summary.json").read_text())
    reason = summary["stopped_early"]
    assert reason.startswith("eval/loss has not improved in 2 evaluations (best ") and "after step 0" in reason
    assert summary["exit_reason"] == "finished" and summary["steps"] == {"done": 2, "wanted": 8}
    assert summary["checkpoint"].endswith("00000002") and (run / "export" / "model.safetensors").is_file()
    again = Launched.start(run, "--resume", str(run))
    assert again.finish() == 0 and "It stopped early: eval/loss has not improved" in again.text()
    more = Launched.start(run, "--resume", str(run), "early_stopping.patience=3")
    assert more.finish() == 0 and "stopped early: eval/loss has not improved in 3 evaluations" in more.text()
    assert json.loads((run / "summary.json").read_text())["steps"]["done"] == 3


@pytest.mark.slow
def test_a_killed_run_ends_early_at_the_same_step_with_the_same_weights(folder: Path) -> None:
    """The loss on data that contradicts the training data grows after the first steps."""
    rows = [{"prompt": f"{n:02d}=", "completion": "=="} for n in range(20)]
    (folder / "data" / "contrary.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = {"data": {"path": str(folder / "data" / "contrary.jsonl")}, "every": 1}
    changes = {"validation": held, "early_stopping": {"patience": 2}, "checkpoint": {"every": 1}, "steps": 30}
    whole = train(folder, sft(folder, "whole", **changes))
    done = json.loads((whole / "summary.json").read_text())["steps"]["done"]
    assert 2 <= done < 30
    values = sft(folder, "killed", **changes)
    run = Path(values["folder"]) / "killed"
    launched = Launched.start(run, str(write(folder, values)))
    launched.wait_for("train", 1)
    launched.kill()
    resumed = Launched.start(run, "--resume", str(run))
    assert resumed.finish() == 0, resumed.text()
    assert json.loads((run / "summary.json").read_text())["steps"]["done"] == done
    assert weights(run) == weights(whole)
