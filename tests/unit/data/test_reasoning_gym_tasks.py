"""Procedural tasks as data."""

import builtins
from typing import Any

import pytest

from lockstep.config.data import DatasetConfig, ProceduralTask
from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.data import datasets
from lockstep.data.dataset_rows import DataError
from lockstep.data.datasets import TASK_COLUMN, load_rows, task_score
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_sources import DocumentSource, PromptSource
from lockstep.models.tiny_model import TinyModel, char_tokenizer

gym = pytest.importorskip("reasoning_gym")


def data(name: str = "chain_sum", **task: Any) -> DatasetConfig:
    return DatasetConfig(path=name, kind="reasoning_gym", task=ProceduralTask(**task))


@pytest.mark.parametrize("name", ["chain_sum", "simple_equations", "countdown", "spell_backward", "knights_knaves"])
def test_rows_and_scores_are_those_of_reasoning_gym(name: str) -> None:
    rows = load_rows(data(name, size=5, seed=3))
    source = gym.create_dataset(name, size=5, seed=3)
    assert len(rows) == 5
    for index in (4, 0):
        row, entry = rows[index], source[index]
        assert (row["question"], row["answer"]) == (entry["question"], entry["answer"])
        for said in (entry["answer"], "nonsense", ""):
            assert task_score(row[TASK_COLUMN], said) == source.score_answer(said, entry)


def test_arguments_reach_the_task() -> None:
    rows = load_rows(data(size=50, arguments={"max_terms": 2, "max_digits": 1}))
    assert all(len(rows[n]["question"].split(":")[1].split()) == 4 for n in range(50))


def test_prompts_come_in_an_order_that_is_kept() -> None:
    tokenizer = char_tokenizer(TinyModel())
    cfg = data(size=7, seed=5)
    source = PromptSource(load_rows(cfg), cfg, tokenizer, 1, LengthLimit(200), answers=True)
    first = source.take(0, 10)
    again = PromptSource(load_rows(cfg), cfg, tokenizer, 1, LengthLimit(200)).take(8, 2)
    assert [p.uid for p in first[8:]] == [p.uid for p in again] and first[8].text == again[0].text
    assert first[0].answer == first[0].columns["answer"]


def test_answers_are_learned_by_supervision() -> None:
    tokenizer = char_tokenizer(TinyModel())
    cfg = data(size=7, seed=5)
    (document,) = DocumentSource(load_rows(cfg), cfg, tokenizer, 1, LengthLimit(200)).take(0, 1)
    learned = tokenizer.decode(document.tokens[document.loss_mask])
    assert learned == load_rows(cfg)[document.row]["answer"] + "<eos>"


@pytest.mark.parametrize(
    "cfg, words",
    [
        (data("chain_sums"), "reasoning-gym has no such task. Did you mean 'chain_sum'"),
        (data("zzzzzz"), "There are "),
        (data(arguments={"max_term": 2}), "no argument 'max_term'. Did you mean 'max_terms'"),
        (data(arguments={"min_terms": 0}), "does not accept its arguments: min_terms must be positive"),
    ],
)
def test_unknown_tasks_and_arguments_are_refused(cfg: DatasetConfig, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_rows(cfg)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("reasoning_gym"):
            raise ModuleNotFoundError("No module named 'reasoning_gym'")
        return real(name, *rest)

    datasets._make_task.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"reasoning-gym cannot be imported.*lockstep-rl\[tasks\]"):
        load_rows(data())


def config(**changes: Any) -> dict[str, Any]:
    return {
        "recipe": "grpo",
        "name": "x",
        "steps": 1,
        "model": {"path": "m"},
        "data": {"path": "chain_sum", "kind": "reasoning_gym", "task": {"seed": 10, "size": 100}},
        "reward": {"terms": [{"kind": "task"}]},
        **changes,
    }


def held_out(seed: int, **task: Any) -> dict[str, Any]:
    return {"data": {"path": "chain_sum", "kind": "reasoning_gym", "task": {"seed": seed, "size": 50, **task}}}


def test_held_out_rows_are_not_those_of_the_data() -> None:
    for seed in (0, 60, 109):
        with pytest.raises(ConfigError, match=r"evaluation.data.task.seed to 110"):
            check_config(config(evaluation=held_out(seed if seed else 9)), "test")
    check_config(config(evaluation=held_out(110)), "test")
    check_config(config(evaluation=held_out(60, arguments={"max_terms": 3})), "test")


def test_the_scorer_of_tasks_is_for_tasks() -> None:
    with pytest.raises(ConfigError, match=r"data.kind is auto, not reasoning_gym"):
        check_config(config(data={"path": "d.jsonl"}), "test")
    with pytest.raises(ConfigError, match="task belongs to kind: reasoning_gym"):
        check_config(config(data={"path": "d.jsonl", "task": {}}), "test")
