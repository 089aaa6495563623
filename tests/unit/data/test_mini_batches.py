"""Packing yields the same targets with the same values, whatever the trees, ranks, budget and mode."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_packing import Tree, forest_of

from lockstep.config.algorithm import CrossEntropy, PPOClip
from lockstep.data.forest import Forest, Segment
from lockstep.data.forest_builder import forest_from_documents, forest_from_rollouts
from lockstep.data.micro_batch import MicroBatch, MiniBatch
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.data.packing import TokenBudgetExceeded
from lockstep.data.samples import Completion, Document, Group, Prompt, Rollouts

MODES = ("forest", "block", "single")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def rollouts(lengths: list[list[int]], prompts: list[int], seed: int = 0) -> Rollouts:
    random = np.random.default_rng(seed)
    groups = []
    for g, (row, size) in enumerate(zip(lengths, prompts, strict=True)):
        completions = [
            Completion(
                request=f"{g}/{k}",
                tokens=random.integers(5, 1000, n).astype(np.int32),
                logprobs=random.normal(size=n).astype(np.float32),
                versions=np.zeros(n, np.int32),
                finish="stop",
                text="",
            )
            for k, n in enumerate(row)
        ]
        prompt = Prompt(f"0:{g}", g, random.integers(5, 1000, size).astype(np.int32), "")
        groups.append(Group(prompt, completions))
    return Rollouts(0, 0, groups)


@st.composite
def random_trees(draw: st.DrawFn) -> list[Tree]:
    """Trees of any shape: each target segment belongs to the sequences of the leaves below it."""
    trees, number = [], 0
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    for t in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 6))
        parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, count)]
        below: list[list[int]] = [[] for _ in range(count)]
        for leaf in (i for i in range(count) if i not in parents):
            at = leaf
            while at >= 0:
                below[at].append(number)
                at = parents[at]
            number += 1
        segments = []
        for i, parent in enumerate(parents):
            n = draw(st.integers(1, 7))
            mask = random.random(n) < draw(st.sampled_from([0.0, 0.6, 1.0]))
            if parent < 0:
                mask[0] = False
            shape = (len(below[i]), n)
            fields = {"advantage": random.normal(size=shape).astype(np.float32)}
            tokens = random.integers(1, 1000, n).astype(np.int32)
            segments.append(Segment(tokens, parent, mask, fields, tuple(below[i])))
        trees.append(Tree(segments, f"tree {t}"))
    return trees


def longest(trees: list[Tree]) -> int:
    return max(
        sum(tree.segments[i].tokens.size for i in tree.path(leaf))
        for tree in trees
        for leaf in range(len(tree.segments))
    )


def rows(minibatch: MiniBatch) -> list[MicroBatch[np.ndarray]]:
    return [row for rank in minibatch.by_rank for row in rank]


def context(row: MicroBatch[np.ndarray], source: int) -> tuple[int, ...]:
    """Returns all tokens to which the source attends, including itself, in the order of positions."""
    mask, positions = row.layout().mask()[source].numpy(), row.layout().positions().numpy()
    seen = np.flatnonzero(mask)
    assert sorted(positions[seen]) == list(range(len(seen)))
    return tuple(row.tokens[seen[np.argsort(positions[seen])]].tolist())


def observed(minibatch: MiniBatch) -> list[tuple[object, ...]]:
    """Returns every target with its context and all values of its loss."""
    found = []
    for row in rows(minibatch):
        for i in range(len(row.index)):
            if row.index[i] >= 0:
                values = tuple(float(row.fields[name][i]) for name in sorted(row.fields))
                key = (int(row.index[i]), int(row.sequences[i]), int(row.targets[i]))
                found.append((*key, context(row, int(row.sources[i])), values))
    return sorted(found)


def expected(trees: list[Tree]) -> list[tuple[int, int, tuple[int, ...], float]]:
    """Returns (sequence, token, context, advantage) of every target, from the paths of the trees."""
    found = []
    for tree in trees:
        for s, segment in enumerate(tree.segments):
            before = [token for i in tree.path(s)[:-1] for token in tree.segments[i].tokens.tolist()]
            for term, sequence in enumerate(segment.sequences):
                for offset in np.flatnonzero(segment.loss_mask):
                    seen = tuple(before + segment.tokens[:offset].tolist())
                    value = float(np.atleast_2d(segment.fields["advantage"])[term, offset])
                    found.append((sequence, int(segment.tokens[offset]), seen, value))
    return sorted(found)


@settings(max_examples=120, deadline=None)
@given(random_trees(), st.integers(1, 4), st.integers(0, 40), st.sampled_from(MODES))
def test_every_target_appears_once_with_its_own_context(trees, ranks, slack, mode) -> None:
    budget = longest(trees) + slack
    minibatch = pack(forest_of(trees), ranks, budget, mode).everything()
    seen = observed(minibatch)
    assert [entry[0] for entry in seen] == list(range(len(seen)))
    assert sorted((s, token, ctx, values[0]) for _, s, token, ctx, values in seen) == expected(trees)
    assert minibatch.targets == len(seen)
    assert len(minibatch.by_rank) == ranks
    assert {len(rank) for rank in minibatch.by_rank} == {minibatch.microbatches}
    assert all(row.tokens.size == row.lengths.sum() <= budget for row in rows(minibatch))


@settings(max_examples=60, deadline=None)
@given(random_trees(), st.integers(1, 4), st.integers(0, 40))
def test_modes_differ_in_layout_only(trees, ranks, slack) -> None:
    budget = longest(trees) + slack
    outcomes = [observed(pack(forest_of(trees), ranks, budget, mode).everything()) for mode in MODES]
    assert outcomes[0] == outcomes[1] == outcomes[2]


@settings(max_examples=60, deadline=None)
@given(random_trees(), st.integers(1, 3), st.sampled_from(AGGREGATIONS), st.sampled_from(MODES))
def test_weighted_sum_is_the_aggregated_loss(trees, ranks, aggregation, mode) -> None:
    batch = pack(forest_of(trees), ranks, longest(trees) + 9, mode)
    loss = PPOClip(aggregation=aggregation, norm_length=11)
    (minibatch,) = batch.minibatches(1, None, loss)
    per_target = np.random.default_rng(0).normal(size=max(1, batch.targets))
    total = sum(float(per_target[row.index] @ row.fields["weight"]) for row in rows(minibatch) if row.index[0] >= 0)
    by_sequence = [per_target[: batch.targets][batch.sequences == s] for s in np.unique(batch.sequences)]
    reference = 0.0
    if by_sequence:
        reference = {
            "token-mean": np.concatenate(by_sequence).mean(),
            "seq-mean-token-mean": np.mean([values.mean() for values in by_sequence]),
            "seq-mean-token-sum": np.mean([values.sum() for values in by_sequence]),
            "seq-mean-token-sum-norm": np.mean([values.sum() / 11 for values in by_sequence]),
        }[aggregation]
    assert total == pytest.approx(reference, rel=1e-5, abs=1e-6)
    assert minibatch.sequences == len(by_sequence)


@settings(max_examples=40, deadline=None)
@given(random_trees(), st.integers(1, 4), st.sampled_from(MODES))
def test_mask_of_a_row_follows_the_paths(trees, ranks, mode) -> None:
    for row in rows(pack(forest_of(trees), ranks, longest(trees) + 15, mode).everything()):
        owner = np.repeat(np.arange(len(row.lengths)), row.lengths)
        above = [{s} for s in range(len(row.lengths))]
        for s, parent in enumerate(row.parents):
            if parent >= 0:
                above[s] |= above[parent]
        brute = [
            [q >= k and owner[k] in above[owner[q]] for k in range(row.tokens.size)] for q in range(row.tokens.size)
        ]
        assert np.array_equal(row.layout().mask().numpy(), np.array(brute))


@settings(max_examples=25, deadline=None)
@given(random_trees(), st.integers(1, 3), st.integers(0, 5))
def test_packing_is_deterministic(trees, ranks, seed) -> None:
    def flat() -> list[list[object]]:
        size = max(tree.samples for tree in trees)
        loss = PPOClip(aggregation="seq-mean-token-mean")
        try:
            made = list(pack(forest_of(trees), ranks, longest(trees) + 5).minibatches(2, 2 * size, loss, seed=seed))
        except ValueError:
            return []
        return [
            [row.tokens.tolist(), row.index.tolist(), row.fields["weight"].tolist()] for m in made for row in rows(m)
        ]

    assert flat() == flat()


def test_prompt_is_shared_and_the_last_prompt_token_predicts_every_first_token() -> None:
    batch = pack(forest_from_rollouts(rollouts([[3, 2]], [4]), [[1.0, -1.0]]), ranks=1, token_budget=100)
    (row,) = rows(batch.everything())
    assert row.lengths.tolist() == [4, 3, 2]
    assert row.parents.tolist() == [-1, 0, 0]
    assert row.sources.tolist() == [3, 4, 5, 3, 7]
    assert row.targets.tolist() == row.tokens[4:].tolist()
    assert row.fields["advantage"].tolist() == [1, 1, 1, -1, -1]
    assert row.sequences.tolist() == [0, 0, 0, 1, 1]


def test_block_repeats_the_prompt_in_one_segment_per_sample() -> None:
    data = rollouts([[3, 2]], [4])
    (row,) = rows(pack(forest_from_rollouts(data, [[1.0, -1.0]]), 1, 100, "block").everything())
    assert sorted(row.lengths.tolist()) == [6, 7]
    assert row.parents.tolist() == [-1, -1]
    assert row.tokens[:4].tolist() == data.groups[0].prompt.tokens.tolist()
    single = pack(forest_from_rollouts(data, [[1.0, -1.0]]), 1, 100, "single").everything()
    assert sorted(row.lengths.tolist() for row in rows(single)) == [[6], [7]]


def test_tree_over_the_budget_is_cut_and_its_prompt_repeated() -> None:
    trees = forest_from_rollouts(rollouts([[10] * 8], [6]), np.ones((1, 8)))
    minibatch = pack(trees, ranks=1, token_budget=30).everything()
    assert minibatch.microbatches == 4
    assert all(row.lengths.tolist() == [6, 10, 10] for row in rows(minibatch))
    assert sorted(np.concatenate([row.index for row in rows(minibatch)])) == list(range(80))


def test_a_group_is_divided_rather_than_leaving_a_rank_idle() -> None:
    trees = forest_from_rollouts(rollouts([[100] * 8], [50]), np.ones((1, 8)))
    minibatch = pack(trees, ranks=2, token_budget=4096).everything()
    assert [[row.tokens.size for row in rank] for rank in minibatch.by_rank] == [[450], [450]]


def test_sequence_over_the_budget_is_refused_by_name() -> None:
    with pytest.raises(
        TokenBudgetExceeded, match=r"sample '0:1' is a sequence of 24 tokens, but token_budget is 20"
    ) as error:
        pack(forest_from_rollouts(rollouts([[5, 5], [4, 20]], [4, 4]), np.ones((2, 2))), 1, 20)
    assert (error.value.sample, error.value.tokens, error.value.budget) == ("0:1", 24, 20)


def test_ranks_without_work_get_one_token_of_weight_zero() -> None:
    document = Document("0:0", 0, np.arange(1, 6, dtype=np.int32), np.array([0, 1, 1, 1, 1], bool))
    minibatch = pack(forest_from_documents([document]), ranks=3, token_budget=16).everything()
    assert [len(rank) for rank in minibatch.by_rank] == [1, 1, 1]
    for row in (minibatch.by_rank[1][0], minibatch.by_rank[2][0]):
        assert (row.tokens.tolist(), row.lengths.tolist(), row.parents.tolist()) == ([0], [1], [-1])
        assert (row.sources.tolist(), row.targets.tolist(), row.index.tolist()) == ([0], [0], [-1])
        assert row.fields["weight"].tolist() == [0] and row.sequences.tolist() == [-1]
    assert (minibatch.targets, minibatch.sequences) == (4, 1)


def test_step_without_any_target_still_has_its_micro_batch() -> None:
    minibatch = pack(forest_from_rollouts(rollouts([[0, 0]], [3]), np.zeros((1, 2))), 2, 16).everything()
    assert [[row.index.tolist() for row in rank] for rank in minibatch.by_rank] == [[[-1]], [[-1]]]
    assert (minibatch.targets, minibatch.sequences) == (0, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_ranks_are_balanced_by_cost(mode, ranks) -> None:
    random = np.random.default_rng(3)
    lengths = np.minimum(1 + random.exponential(60, (64, 8)).astype(int), 300)
    trees = forest_from_rollouts(rollouts(lengths.tolist(), random.integers(20, 120, 64).tolist()), np.ones((64, 8)))
    minibatch = pack(trees, ranks, 2048, mode).everything()
    tokens = [sum(row.tokens.size for row in rank) for rank in minibatch.by_rank]
    assert max(tokens) <= 1.1 * np.mean(tokens)
    if mode != "single":
        assert minibatch.microbatches <= math.ceil(sum(tokens) / (ranks * 2048)) + 1


def test_minibatches_are_whole_groups_each_once_per_epoch_in_changing_order() -> None:
    batch = pack(forest_from_rollouts(rollouts([[3] * 4] * 6, [5] * 6), np.ones((6, 4))), 2, 64)
    made = list(batch.minibatches(3, 8, CrossEntropy(), seed=1))
    assert len(made) == 9
    orders = []
    for epoch in range(3):
        groups = [np.unique(np.concatenate([r.sequences for r in rows(m)])) for m in made[3 * epoch : 3 * epoch + 3]]
        groups = [sorted({int(s) // 4 for s in seq if s >= 0}) for seq in groups]
        assert sorted(g for pair in groups for g in pair) == list(range(6))
        orders.append(str(groups))
    assert len(set(orders)) > 1
    for minibatch in made:
        assert (minibatch.targets, minibatch.sequences) == (24, 8)
        assert sum(float(row.fields["weight"].sum()) for row in rows(minibatch)) == pytest.approx(1)
    other = [sorted(rows(m)[0].index) for m in batch.minibatches(3, 8, seed=2)]
    assert other != [sorted(rows(m)[0].index) for m in made]


def test_one_minibatch_of_all_keeps_its_order_in_every_epoch() -> None:
    batch = pack(forest_from_rollouts(rollouts([[3] * 4] * 6, [5] * 6), np.ones((6, 4))), 2, 64)
    first, second = (observed(m) for m in batch.minibatches(2, None, seed=1))
    assert first == second


def test_groups_with_an_empty_completion_count_all_completions() -> None:
    batch = pack(forest_from_rollouts(rollouts([[3, 0], [0, 2], [1, 0], [0, 4]], [2] * 4), np.ones((4, 2))), 1, 64)
    assert [m.sequences for m in batch.minibatches(1, 4)] == [2, 2]


@pytest.mark.parametrize("size", [3, 6, 2])
def test_minibatch_that_would_split_a_group_is_refused(size) -> None:
    batch = pack(forest_from_rollouts(rollouts([[3] * 4] * 6, [5] * 6), np.ones((6, 4))), 2, 64)
    with pytest.raises(ValueError, match=f"minibatch_size is {size}.*multiple of 4"):
        next(batch.minibatches(1, size))


@settings(max_examples=30, deadline=None)
@given(random_trees(), st.integers(1, 3), st.sampled_from(MODES))
def test_computed_fields_land_on_their_targets(trees, ranks, mode) -> None:
    batch = pack(forest_of(trees), ranks, longest(trees) + 8, mode)
    everything = batch.everything()
    values = [[row.index.astype(np.float32) * 2 + 1 for row in rank] for rank in everything.by_rank]
    batch.set_field("old_logprob", everything, values)
    for minibatch in batch.minibatches(2):
        for row in rows(minibatch):
            wanted = np.where(row.index >= 0, row.index * 2 + 1, 0)
            assert row.fields["old_logprob"].tolist() == wanted.tolist()


def test_field_set_for_a_part_of_the_targets_only_is_refused() -> None:
    batch = pack(forest_from_rollouts(rollouts([[3] * 2] * 4, [5] * 4), np.ones((4, 2))), 1, 64)
    first = next(batch.minibatches(1, 4))
    batch.set_field("old_logprob", first, [[np.ones(row.index.size, np.float32) for row in r] for r in first.by_rank])
    with pytest.raises(ValueError, match="'old_logprob' is set for 12 of 24 targets"):
        batch.everything()
    with pytest.raises(ValueError, match="rank 0, micro-batch 0 has shape"):
        batch.set_field("old_logprob", first, [[np.ones(1, np.float32) for _ in r] for r in first.by_rank])
    with pytest.raises(ValueError, match="values of 2 ranks, expected 1"):
        batch.set_field("old_logprob", first, [[], []])


def test_norm_length_falls_back_to_max_tokens_and_is_never_guessed() -> None:
    batch = pack(forest_from_rollouts(rollouts([[3, 1]], [5]), np.ones((1, 2))), 1, 64)
    loss = PPOClip(aggregation="seq-mean-token-sum-norm")
    (minibatch,) = batch.minibatches(1, None, loss, max_tokens=10)
    assert rows(minibatch)[0].fields["weight"] == pytest.approx(np.full(4, 1 / 20))
    with pytest.raises(ValueError, match="norm_length"):
        next(batch.minibatches(1, None, loss))


def test_weights_by_hand() -> None:
    batch = pack(forest_from_rollouts(rollouts([[3, 1]], [5])), 1, 64)
    expected = {
        "token-mean": [0.25] * 4,
        "seq-mean-token-mean": [1 / 6] * 3 + [1 / 2],
        "seq-mean-token-sum": [0.5] * 4,
        "seq-mean-token-sum-norm": [0.1] * 4,
    }
    for aggregation, weights in expected.items():
        (minibatch,) = batch.minibatches(1, None, PPOClip(aggregation=aggregation, norm_length=5))
        row = rows(minibatch)[0]
        assert row.fields["weight"][np.argsort(row.index)] == pytest.approx(weights)


def test_weights_cannot_be_set() -> None:
    batch = pack(forest_from_rollouts(rollouts([[3, 1]], [5])), 1, 64)
    everything = batch.everything()
    with pytest.raises(ValueError, match="follow from the aggregation"):
        batch.set_field("weight", everything, [[np.ones(4, np.float32)]])


def test_advantages_per_token() -> None:
    values = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    batch = pack(forest_from_rollouts(rollouts([[3, 2]], [5]), values), 1, 64)
    assert batch.fields["advantage"].tolist() == [0, 1, 2, 3, 4]


def test_bad_rollouts_are_refused() -> None:
    data = rollouts([[2, 2], [2, 2]], [3, 3])
    with pytest.raises(ValueError, match=r"shape \(2, 3\), expected \[2 groups, 2 completions\]"):
        forest_from_rollouts(data, np.ones((2, 3)))
    with pytest.raises(ValueError, match="'0:1' are not finite"):
        forest_from_rollouts(data, [[0, 0], [np.nan, 0]])
    data.groups[1].completions.pop()
    with pytest.raises(ValueError, match="'0:1' has 1 completions, expected 2"):
        forest_from_rollouts(data, np.ones((2, 2)))
    data = rollouts([[2, 2]], [3])
    data.groups[0].completions[1].logprobs = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="'0/1' has 1 log-probabilities for 2 tokens"):
        forest_from_rollouts(data, np.ones((1, 2)))


def test_bad_trees_are_refused() -> None:
    two, mask = np.array([1, 2], np.int32), np.ones(2, bool)
    with pytest.raises(ValueError, match="has its first token as a target"):
        Forest.of([[Segment(two, -1, mask, {}, 0)]], "x")
    with pytest.raises(ValueError, match="has no tokens"):
        Forest.of([[Segment(two[:0])]], "x")
    with pytest.raises(ValueError, match="parent 0, expected -1 or an earlier"):
        Forest.of([[Segment(two, 0)]], "x")
    with pytest.raises(ValueError, match="both have sequence 3"):
        pack(Forest.of([[Segment(two), Segment(two, 0, mask, {}, 3)] for _ in "xy"], "xy"), 1, 9)
    with pytest.raises(ValueError, match="is not one path"):
        pack(Forest.of([[Segment(two), Segment(two, 0, mask, {}, 3), Segment(two, 0, mask, {}, 3)]], "x"), 1, 9)
    with pytest.raises(ValueError, match="no field 'advantage'"):
        values = {"advantage": np.ones(2, np.float32)}
        Forest.of([[Segment(two), Segment(two, 0, mask, values, 0), Segment(two, 0, mask, {}, 1)]], "x")
    with pytest.raises(ValueError, match="mode is 'rows'"):
        TrainingBatch(Forest.of([], []), 1, 9, "rows")  # type: ignore[arg-type]
