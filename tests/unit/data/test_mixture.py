"""Mixtures of datasets: their order, samples and shares."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny_tokenizers import characters

from lockstep.config.data import TrainingDataConfig
from lockstep.data.dataset_rows import DataError
from lockstep.data.mixture import BLOCK, WeightedOrder, open_training_source
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_order import EpochOrder, random_fractions
from lockstep.data.source_factory import SourceOptions

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**40)


def weighted(sizes: list[int], weights: list[float], seed: int = 0, shuffle: bool = True) -> WeightedOrder:
    starts = np.cumsum([0, *sizes])
    rows = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    return WeightedOrder([EpochOrder(each, seed, shuffle) for each in rows], weights, seed, shuffle)


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[int], list[float], WeightedOrder]:
    sizes = draw(SIZES)
    weights = draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    return sizes, weights, weighted(sizes, weights, draw(SEEDS), draw(st.booleans()))


@settings(max_examples=60, deadline=None)
@given(orders(), st.integers(0, 3 * BLOCK), st.integers(0, 400))
def test_no_row_comes_twice_in_an_epoch_of_its_dataset_and_shares_are_kept(given_order, start, count) -> None:
    sizes, weights, order = given_order
    taken = order.take(0, start + count)
    assert len(set(taken)) == len(taken)
    found = np.searchsorted(np.cumsum(sizes), [row for _, row in taken], side="right")
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        own = [each for each, of in zip(taken, found, strict=True) if of == source]
        # A dataset begins an epoch when the epoch before has had every row.
        assert [epoch for epoch, _ in own] == [place // size for place in range(len(own))]
        assert abs(len(own) - len(taken) * weight / sum(weights)) <= 1 + len(sizes)
    again = weighted(sizes, weights, order.seed, order.shuffle)
    assert again.take(start, count) == taken[start:]  # without the positions before


@settings(max_examples=30, deadline=None)
@given(orders(), st.lists(st.integers(0, 700), max_size=6))
def test_taking_in_parts_equals_taking_at_once_from_a_mixture(given_order, parts) -> None:
    *_, order = given_order
    taken: list[tuple[int, int]] = []
    for part in parts:
        taken += order.take(len(taken), part)
    assert taken == order.take(0, sum(parts))


def test_a_weighted_order_never_changes() -> None:
    # Fixed for ever: a resumed run continues at a position of this order.
    assert weighted([3, 5], [3, 1], seed=42).take(10**6, 8) == FIXED


FIXED = [(250000, 1), (250000, 2), (250000, 0), (50000, 6), (250001, 1), (50000, 4), (250001, 0), (250001, 2)]


def test_an_order_that_is_not_shuffled_alternates() -> None:
    assert [row for _, row in weighted([4, 4], [1, 1], shuffle=False).take(0, 6)] == [0, 4, 1, 5, 2, 6]
    with pytest.raises(ValueError, match="at position -1"):
        weighted([1], [1]).take(-1, 1)


def test_random_fractions_are_uniform_and_do_not_depend_on_where_they_start() -> None:
    found = random_fractions(0, 20_000, 5, 1)
    assert found.min() >= 0 and found.max() < 1 and abs(found.mean() - 0.5) < 0.01
    assert random_fractions(500, 20, 5, 1).tolist() == found[500:520].tolist()
    assert random_fractions(0, 5, 5, 2).tolist() != found[:5].tolist()


@pytest.fixture
def mixture(tmp_path):
    def make(counts: dict[str, int], weights: list[float] | None = None, **options: Any) -> TrainingDataConfig:
        sources: list[dict[str, Any]] = []
        for index, (name, count) in enumerate(counts.items()):
            path = tmp_path / f"{name}.jsonl"
            rows = [{"prompt": f"{name}{i}", "answer": "x", f"only_{name}": i} for i in range(count)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            sources.append({"path": str(path)} | ({"weight": weights[index]} if weights else {}))
        return TrainingDataConfig.model_validate({"mixture": sources, **options})

    return make


def opened(cfg: TrainingDataConfig, kind: Any = "prompts", limit: int = 50, seed: int = 3) -> Any:
    return open_training_source(kind, cfg, characters(), seed, LengthLimit(limit), SourceOptions(answers=True))


def test_without_weights_an_epoch_has_each_row_of_all_datasets_once(mixture) -> None:
    source = opened(mixture({"a": 5, "b": 9}))
    assert len(source) == 14
    texts = sorted([*(f"a{i}" for i in range(5)), *(f"b{i}" for i in range(9))])
    for epoch in range(3):
        prompts = source.take(14 * epoch, 14)
        assert sorted(each.text for each in prompts) == texts
    in_order = opened(mixture({"a": 2, "b": 2}, shuffle=False)).take(0, 5)
    assert [each.text for each in in_order] == ["a0", "a1", "b0", "b1", "a0"]


def test_samples_of_a_mixture_have_unique_uids_and_the_columns_of_their_rows(mixture) -> None:
    source = opened(mixture({"a": 3, "b": 20}, [1, 1]))
    prompts = source.take(0, 40)
    assert len({each.uid for each in prompts}) == 40
    for each in prompts:
        again = source.usable_by_uid(each.uid)
        assert (again.text, again.row, again.uid) == (each.text, each.row, each.uid)
        assert f"only_{each.text[0]}" in each.columns and len(each.columns) == 2
    counts = source.counts(prompts)
    assert set(counts) == {"data/a", "data/b"} and sum(counts.values()) == 40 and abs(counts["data/a"] - 20) <= 3
    assert counts["data/a"] == Counter(each.text[0] for each in prompts)["a"]
    assert source.columns == ("answer", "only_a", "only_b")
    assert opened(mixture({"a": 3, "b": 20}, [1, 1])).take(17, 9)[0].uid == prompts[17].uid


def test_a_share_of_each_dataset_is_held_out(mixture) -> None:
    for weights in (None, [1.0, 3.0]):
        source = opened(mixture({"a": 10, "b": 40}, weights))
        held_out = source.hold_out(0.2)
        assert Counter(each.text[0] for each in held_out) == {"a": 2, "b": 8}
        assert Counter(each.text[0] for each in held_out[:5]) == {"a": 1, "b": 4}
        assert len({each.uid for each in held_out}) == 10 and len(source) == 40
        assert all(source.sample(each.row).text == each.text for each in held_out)
        trained = {each.text for each in source.take(0, 200)}
        assert trained.isdisjoint(each.text for each in held_out) and len(trained) == 40
    with pytest.raises(DataError, match=r"a\.jsonl: holding out 1 of 1 rows"):
        opened(mixture({"a": 1, "b": 40})).hold_out(0.1)


def test_rows_that_are_too_long_are_dropped_or_refused_with_the_field_of_their_dataset(mixture, tmp_path) -> None:
    cfg = mixture({"a": 3, "b": 12}, overlong="drop")
    source = opened(cfg, limit=2)
    assert source.dropped == 2 and len(source) == 13
    assert len({each.text for each in source.take(0, 13)}) == 13
    with pytest.raises(DataError, match=r"b\.jsonl, line 11.*data\.mixture\.1\.overlong"):
        opened(mixture({"a": 3, "b": 12}), limit=2)


def test_sources_have_the_fields_of_data_that_they_do_not_set() -> None:
    cfg = TrainingDataConfig.model_validate(
        {
            "template": "Q {prompt}",
            "limit": 5,
            "mixture": [{"path": "x/a.jsonl"}, {"path": "b", "template": "{prompt}"}],
        }
    )
    assert [(each.template, each.limit) for each in cfg.mixture] == [("Q {prompt}", 5), ("{prompt}", 5)]
    assert [each.shown_label for each in cfg.mixture] == ["a", "b"]
    assert TrainingDataConfig.model_validate(cfg.model_dump(mode="json")) == cfg  # as a resumed run reads it


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give either data.path"),
        ({"path": "a", "mixture": [{"path": "b"}]}, "give either data.path"),
        ({"mixture": [{"path": "a", "weight": 1}, {"path": "b"}]}, r"data\.mixture\.1 has no weight"),
        ({"mixture": [{"path": "x/a"}, {"path": "y/a"}]}, "have the label 'a'"),
        ({"mixture": [{"path": "a", "shuffle": False}]}, "set data.shuffle"),
        ({"mixture": [{"path": "a", "weight": 0}]}, "greater than 0"),
        ({"mixture": [{"weight": 1}]}, r"mixture\.0\.path"),
        ({"mixture": [{"path": "a", "probability": 1}]}, r"mixture\.0\.probability"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(values, message) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainingDataConfig.model_validate(values)


def test_the_labels_of_files_and_hub_datasets() -> None:
    paths = [str(Path("data") / "train.jsonl.gz"), "openai/gsm8k", "my data (2).csv", ".."]
    cfg = TrainingDataConfig.model_validate({"mixture": [{"path": path} for path in paths]})
    assert [each.shown_label for each in cfg.mixture] == ["train", "gsm8k", "my_data_2_", "data"]
