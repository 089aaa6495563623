"""Runs whose rewards come from a reward model with another tokenizer than the policy's: transformers gives equal
scores, and the result depends neither on the number of its ranks nor on kills."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Launched, build_once, config, metric_rows, task, train, untimed_rows, weights, write
from sort_examples import example, prepare_sorting
from test_recovery import kill_worker, recoveries, replacements
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.data.samples import Completion, Prompt
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny

pytestmark = [pytest.mark.xdist_group("reward-model-terms"), pytest.mark.timeout(400)]

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}\n{% endfor %}"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and a reward model whose tokens have other ids, and whose config has the mean and std of its scores."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "reward-terms"

    def make(home: Path) -> None:
        task(home)
        shape: dict[str, Any] = {"hidden": 24, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 48, "max_length": 64}
        make_tiny(home / "other", **shape, alphabet="=\n9876543210", seed=8)
        torch.manual_seed(1)
        scorer = AutoModelForSequenceClassification.from_pretrained(home / "other", num_labels=1, dtype=torch.float32)
        torch.nn.init.normal_(scorer.score.weight, std=0.2)
        scorer.config.mean, scorer.config.std = 0.25, 0.5
        scorer.save_pretrained(home / "scorer")
        tokenizer = AutoTokenizer.from_pretrained(home / "other")
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(home / "scorer")

    return build_once(shared / "models", make)


def settings(home: Path, folder: Path, name: str, terms: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    values = config(home, "grpo", name=name, folder=str(folder / "runs"), steps=3, token_budget=32, evaluation=None)
    terms = [
        {"path": str(home / "scorer"), "threads": 1, **each} if each["kind"] == "model" else each for each in terms
    ]
    return {**values, "reward": {"terms": terms}, "checkpoint": {"every": 2}, **changes}


def scored(run: Path, term: str) -> Iterator[tuple[Prompt, Completion, float]]:
    """All completions of a run with the value of a term."""
    with Ledger.reader(run) as ledger:
        for step in range(ledger.steps_done()):
            stored = ledger.stored_step(step)
            assert stored is not None
            for group in stored.rollouts.groups:
                for completion, value in zip(group.completions, group.breakdown[term], strict=True):
                    yield group.prompt, completion, float(value)


def transformers_score(home: Path, text: str, longest: int = 99) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(home / "scorer", num_labels=1, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(home / "scorer")(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        return float(model(torch.tensor([tokens[-longest:]])).logits[0, 0])


def test_transformers_gives_equal_scores(home: Path, tmp_path: Path) -> None:
    """Of a text and of a conversation, as they are and normalised, whole and cut; with other terms beside."""
    terms = [
        {"kind": "model", "name": "rm"},
        {"kind": "exact_match"},
        {"kind": "model", "name": "chat", "chat": True, "end": "template", "normalize": True, "weight": 0.5},
        {"kind": "model", "name": "short", "max_length": 4, "ranks": 2},
    ]
    run = train(tmp_path, settings(home, tmp_path, "equal", terms, steps=1))
    for prompt, completion, value in scored(run, "rm"):
        assert value == pytest.approx(transformers_score(home, f"{prompt.text}{completion.text}<eos>"), abs=1e-5)
    for prompt, completion, value in scored(run, "chat"):
        text = f"{prompt.text}<eos>\n{completion.text}<eos>\n"
        assert value == pytest.approx((transformers_score(home, text) - 0.25) / 0.5, abs=2e-5)
    cut = 0
    for prompt, completion, value in scored(run, "short"):
        text = f"{prompt.text}{completion.text}<eos>"
        cut += len(text) - len("<eos>") + 1 > 4
        assert value == pytest.approx(transformers_score(home, text, longest=4), abs=1e-5)
    row = metric_rows(run)[0]
    assert row["reward/short/truncated"] == pytest.approx(cut / 16) and cut
    assert row["reward/rm/truncated"] == 0.0 and {"reward/rm/std", "reward/chat/score"} <= row.keys()
    total = row["reward/rm/mean"] + row["reward/exact_match/mean"] + 0.5 * row["reward/chat/mean"]
    assert row["reward/mean"] == pytest.approx(total + row["reward/short/mean"], abs=1e-5)


@pytest.mark.slow
def test_ranks_and_kills_do_not_change_the_result(home: Path, tmp_path: Path) -> None:
    """Alone, the term needs no scorer process. One of two ranks is killed while it is idle."""
    alone = train(tmp_path, settings(home, tmp_path, "one", [{"kind": "model"}]))
    values = settings(home, tmp_path, "killed", [{"kind": "model", "ranks": 2}])
    run = tmp_path / "runs/killed"
    launched = Launched.start(
        run, str(write(tmp_path, values)), hold={"stage": "rollout", "seconds": 0.3, "at_end": True}
    )
    launched.wait_for("rollout", 1)
    kill_worker(launched, "reward_model-1")
    assert launched.finish() == 0, launched.text()
    assert not launched.beacon("scorer-0")
    assert weights(run) == weights(alone)
    assert untimed_rows(run) == untimed_rows(alone)
    assert replacements(run) == ["reward_model-0.1", "reward_model-1.1"]
    assert [each["role"] for each in recoveries(run)] == ["reward_model"]


SEEDS = (11, 12, 13)


@pytest.fixture(scope="module")
def sorting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of sft_sort.yaml and reward_sort.yaml."""
    return prepare_sorting(tmp_path_factory.mktemp("sorting"), "sft_sort", "reward_sort")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_the_example_learns_to_sort_from_a_reward_model(sorting: Path, recipe: str, seed: int) -> None:
    values = example(f"{recipe}_reward_model", sorting, name=f"{recipe}-{seed}", seed=seed)
    run = sorting / "runs" / values["name"]
    launched = Launched.start(run, str(write(sorting, values)))
    assert launched.finish(timeout_s=900) == 0, launched.text()
    with Ledger.reader(run) as ledger:
        accuracies = [row.metrics["eval/exact_match"] for row in ledger.evaluations()]
    assert accuracies[0] < 0.5 and accuracies[-1] > 0.95, accuracies
