"""Micro-batches equal those of the reference exactly, also after encoding and decoding."""

import itertools
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_packing import forest_of, plain_rows, plain_trees, trees_of
from test_mini_batches import MODES, longest, random_trees, rollouts
from turn_samples import conversations

from lockstep.cluster.rpc.codec import decode_payload, encode_payload
from lockstep.data import micro_batch
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.micro_batch import EncodedMicroBatches, MicroBatch, MiniBatch, decode_micro_batches
from lockstep.data.mini_batches import pack


def columns(row: MicroBatch[np.ndarray]) -> dict[str, np.ndarray]:
    names = ("tokens", "lengths", "parents", "sources", "targets", "index", "sequences")
    fields = {name: values for name, values in row.fields.items() if name != "weight"}
    return {name: getattr(row, name) for name in names} | fields


Ranks = list[list[MicroBatch[np.ndarray]]]


def same(made: Ranks, expected: Ranks, *, index: bool = True) -> None:
    assert [len(rank) for rank in made] == [len(rank) for rank in expected]
    for mine, other in zip(chain(*made), chain(*expected), strict=True):
        one, two = columns(mine), columns(other)
        assert set(one) == set(two)
        for name in set(one) - (set() if index else {"index"}):
            assert one[name].dtype == two[name].dtype, name
            assert one[name].tolist() == two[name].tolist(), name


@settings(max_examples=150, deadline=None)
@given(random_trees(), st.integers(1, 5), st.integers(0, 40), st.sampled_from(MODES))
def test_trees_of_any_shape_have_the_reference_rows(trees, ranks, slack, mode) -> None:
    budget = longest(trees) + slack
    same(pack(forest_of(trees), ranks, budget, mode).everything().by_rank, plain_rows(trees, ranks, budget, mode))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=5, max_size=5), min_size=1, max_size=8),
    st.integers(1, 12),
    st.integers(0, 150),
    st.sampled_from(MODES),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_groups_have_the_reference_rows(lengths, ranks, slack, mode, truncated, seed) -> None:
    random = np.random.default_rng(seed)
    data = rollouts(lengths, random.integers(1, 12, len(lengths)).tolist(), seed)
    for group in data.groups:
        for each in group.completions:
            each.finish = "length" if random.random() < 0.2 else "stop"
    advantages = random.normal(size=(len(lengths), 5, 40) if seed % 2 else (len(lengths), 5)).astype(np.float32)
    trees = plain_trees(data, advantages, truncated)
    made = forest_from_rollouts(data, advantages, truncated)
    batch = pack(made, ranks, 52 + slack, mode)
    same(batch.everything().by_rank, plain_rows(trees, ranks, 52 + slack, mode, ["engine_logprob"]))
    again = forest_of(trees_of(made))
    for name, values in vars(forest_of(trees)).items():
        for other in (made, again):
            known = getattr(other, name)
            if isinstance(values, dict):
                known = {key: each for key, each in known.items() if each.size or key in values}
                assert {key: each.tolist() for key, each in values.items()} == {k: v.tolist() for k, v in known.items()}
            else:
                assert np.array_equal(values, known), name


@settings(max_examples=40, deadline=None)
@given(conversations(), st.sampled_from(MODES), st.integers(1, 9), st.integers(0, 30))
def test_conversations_have_the_reference_rows(given, mode, ranks, slack) -> None:
    budget = max(3 + len(each.tokens) for group in given.groups for each in group.completions) + slack
    trees = forest_from_rollouts(given, np.ones((2, 4)))
    same(pack(trees, ranks, budget, mode).everything().by_rank, plain_rows(trees_of(trees), ranks, budget, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 3, 64, 300])
def test_many_groups_have_the_reference_rows(mode, ranks) -> None:
    random = np.random.default_rng(ranks)
    lengths = np.minimum(1 + random.exponential(60, (64, 8)).astype(int), 300).tolist()
    data = rollouts(lengths, random.integers(20, 120, 64).tolist())
    advantages = np.ones((64, 8), np.float32)
    made = pack(forest_from_rollouts(data, advantages), ranks, 1024, mode).everything()
    same(made.by_rank, plain_rows(plain_trees(data, advantages), ranks, 1024, mode))


def received(minibatch: MiniBatch) -> Ranks:
    """Returns the rows of every rank after encoding and decoding."""
    return [
        decode_micro_batches(decode_payload(bytearray(encode_payload(encoded)), EncodedMicroBatches))
        for encoded in minibatch.encode()
    ]


@settings(max_examples=60, deadline=None)
@given(random_trees(), st.integers(1, 5), st.integers(0, 20), st.sampled_from(MODES))
def test_encoding_round_trips(trees, ranks, slack, mode) -> None:
    minibatch = pack(forest_of(trees), ranks, longest(trees) + slack, mode).everything()
    found = received(minibatch)
    same(found, minibatch.by_rank, index=False)
    for mine, other in zip(chain(*found), chain(*minibatch.by_rank), strict=True):
        assert mine.fields["weight"].tolist() == other.fields["weight"].tolist()
        assert mine.layout().lengths == other.layout().lengths


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 40)), max_size=3), min_size=1, max_size=4))
def test_runs_give_the_same_bits_and_end_with_their_rank(runs) -> None:
    """Each rank's values, some of them in runs, one after the other."""
    floats = np.array([0.0, -0.0, np.nan, np.inf, 1e-45, 2.5, -7.0], np.float32)
    ranks = [np.concatenate([np.zeros(0, np.float32), *(np.full(n, floats[at]) for at, n in rank)]) for rank in runs]
    bounds = np.concatenate([[0], np.cumsum(list(map(len, ranks)))])
    for values, increment in ((np.concatenate(ranks).view(np.int32), 0), (np.arange(bounds[-1], dtype=np.int32), 1)):
        found = micro_batch._runs(values, increment, bounds)
        if found is not None:
            of_rank = np.split(found[0], np.cumsum(found[1])[:-1])
            back = [micro_batch._expand(each, increment) for each in of_rank]
            assert [each.tobytes() for each in back] == [
                values[begin:end].tobytes() for begin, end in itertools.pairwise(bounds)
            ]


def test_columns_that_hardly_change_are_sent_as_runs() -> None:
    data = rollouts([[60, 64, 64, 50]] * 8, [32] * 8)
    minibatch = pack(forest_from_rollouts(data, np.ones((8, 4))), 4, 1024, "forest").everything()
    encoded = minibatch.encode()
    places = [*micro_batch._COLUMNS, *encoded.shared[0]]
    assert {"sources", "sequences", "advantage"} <= {places[at] for at in encoded.shared[2]}
    whole = sum(values.nbytes for values in (minibatch.columns.tokens, *minibatch.columns.fields.values()))
    assert sum(map(len, encoded.columns)) < whole + 3 * minibatch.columns.targets.nbytes
    same(received(minibatch), minibatch.by_rank, index=False)


def test_advantages_for_fewer_tokens_than_a_completion_has_are_refused() -> None:
    with pytest.raises(ValueError, match="advantages for 2 tokens, but a completion has 3"):
        forest_from_rollouts(rollouts([[3, 2]], [5]), np.zeros((1, 2, 2)))


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="segment 0 of sample '0:1' has no tokens"):
        forest_from_rollouts(rollouts([[3], [2]], [5, 0]), np.zeros((2, 1)))
