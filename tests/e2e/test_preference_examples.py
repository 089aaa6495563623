"""The examples of preferences learn, with every seed: DPO, KTO and a reward model from noisy labels, ORPO from a base
model."""

import json
from pathlib import Path

import pytest
from harness import train
from sort_examples import example, prepare_sorting

from lockstep.ledger.ledger import Ledger

pytestmark = [
    pytest.mark.slow, pytest.mark.xdist_group("preference examples"), pytest.mark.timeout(1200),
]  # fmt: skip

TARGETS = {"dpo": 0.9, "kto": 0.9, "orpo": 0.65}
"""Exact match on held-out prompts, sampled at temperature 1."""
SEEDS = (11, 12, 13)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, the model of the README's first command, and the one that sft_sort.yaml makes of it."""
    return prepare_sorting(tmp_path_factory.mktemp("examples"), "sft_sort")


def test_one_label_in_ten_is_wrong(home: Path) -> None:
    folder = home / "runs/sort-data"
    pairs, labelled = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("pairs", "labelled")
    )
    right = [row["chosen"] == "".join(sorted(row["prompt"][:-1])) for row in pairs]
    assert 0.89 < sum(right) / len(right) < 0.91
    ascending = [row["completion"] == "".join(sorted(row["prompt"][:-1])) for row in labelled]
    agree = [row["label"] == each for row, each in zip(labelled, ascending, strict=True)]
    assert 0.88 < sum(agree) / len(agree) < 0.92, "palindromes are sorted both ways"
    assert 0.48 < sum(ascending) / len(ascending) < 0.53


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TARGETS)
def test_an_example_learns(home: Path, name: str, seed: int) -> None:
    run = train(home, example(f"{name}_sort", home, seed=seed, name=f"{name}-{seed}"))
    summary = json.loads((run / "summary.json").read_text())
    start = 0.1 if name == "orpo" else 0.6
    with Ledger.reader(run) as ledger:
        curve = [row.metrics["eval/exact_match"] for row in ledger.evaluations()]
        margins = [row.values["rewards/margins"] for row in ledger.metrics_rows() if "rewards/margins" in row.values]
    assert curve[0] < start and summary["eval/exact_match"]["final"] >= TARGETS[name], curve
    assert sum(margins[-20:]) / 20 > margins[0], "the better side has become likelier than the worse one"
    page = (run / "report.html").read_text()
    assert "Exact match" in page and "Implicit reward" in page


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reward_model_learns(home: Path, seed: int) -> None:
    run = train(home, example("reward_sort", home, seed=seed, name=f"reward-{seed}"))
    with Ledger.reader(run) as ledger:
        accuracies = [row.metrics["eval/accuracy"] for row in ledger.evaluations()]
        trained = [row.values["policy/accuracy"] for row in ledger.metrics_rows()]
    assert accuracies[0] < 0.8 and accuracies[-1] > 0.9, accuracies
    assert 0.8 < sum(trained[-20:]) / 20 < 0.97, "one label in ten of the training data is wrong"
