"""Groups without any advantage are in no row if that does not change the gradient, but count in denominators."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mini_batches import rollouts, rows

from lockstep.config.algorithm import CISPO, GSPO, CrossEntropy, KLPenalty, PPOClip
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.micro_batch import MiniBatch
from lockstep.data.mini_batches import TrainingBatch, pack

ALONE = (PPOClip(), GSPO(), CISPO(), PPOClip(kl=KLPenalty(coefficient=0.1, where="reward")))
NOT_ALONE = (PPOClip(kl=KLPenalty(coefficient=0.1)), PPOClip(entropy_coefficient=0.01), CrossEntropy())
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def batch(signal: list[bool], ranks: int = 1, budget: int = 64, mode: str = "forest") -> TrainingBatch:
    """Three completions per group; the second one never has an advantage."""
    count = len(signal)
    advantages = np.array([[1.0, 0.0, -1.0]] * count) * np.array(signal)[:, None]
    lengths = [[3 + g % 4, 5, 2] for g in range(count)]
    return pack(forest_from_rollouts(rollouts(lengths, [4] * count), advantages), ranks, budget, mode)


def weights(minibatch: MiniBatch, targets: int) -> np.ndarray:
    """Returns values by the targets' numbers; NaN for targets in no row."""
    found = np.full(targets, np.nan, np.float32)
    for row in rows(minibatch):
        real = row.index >= 0
        found[row.index[real]] = row.fields["weight"][real]
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=6),
    st.integers(1, 3),
    st.sampled_from(("forest", "block", "single")),
    st.sampled_from(AGGREGATIONS),
)
def test_skipped_trees_have_no_advantage_and_weights_do_not_change(signal, ranks, mode, aggregation) -> None:
    made = batch(signal, ranks, mode=mode)
    loss = PPOClip(aggregation=aggregation, norm_length=7)
    (left,) = made.minibatches(objective=loss)
    (whole,) = made.minibatches(objective=loss.model_copy(update={"entropy_coefficient": 0.1}))
    some, every = weights(left, made.targets), weights(whole, made.targets)
    assert not np.isnan(every).any()
    out = np.isnan(some)
    assert not made.fields["advantage"][out].any()
    assert np.array_equal(some[~out], every[~out])
    assert set(np.flatnonzero(out)) == {i for i in range(made.targets) if not signal[made.sequences[i] // 3]}
    assert (left.targets, left.sequences) == (whole.targets, whole.sequences)
    assert left.skipped == 3 * signal.count(False) and whole.skipped == 0
    assert len({len(rank) for rank in left.by_rank}) == 1 and left.microbatches >= 1


def test_groups_are_kept_if_another_term_has_a_gradient() -> None:
    assert all(loss.zero_advantage_has_no_gradient for loss in ALONE)
    assert not any(loss.zero_advantage_has_no_gradient for loss in NOT_ALONE)
    made = batch([True, False])
    assert [next(made.minibatches(objective=loss)).skipped for loss in NOT_ALONE] == [0, 0, 0]
    assert next(made.minibatches()).skipped == 0
    assert made.everything().skipped == 0
    without = pack(forest_from_rollouts(rollouts([[2, 2, 2]], [3])), 1, 64)
    assert next(without.minibatches(objective=PPOClip())).skipped == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_without_any_signal_still_has_its_micro_batch(ranks: int) -> None:
    (found,) = batch([False, False], ranks).minibatches(objective=PPOClip())
    assert found.skipped == 6 and found.targets == 21
    for rank in found.by_rank:
        (row,) = rank
        assert row.tokens.size == 1 and row.fields["weight"].tolist() == [0.0]
        assert set(row.fields) == {"advantage", "engine_logprob", "weight"}


def test_one_target_with_an_advantage_keeps_its_group() -> None:
    made = batch([False, False])
    one = replace_one(made)
    (found,) = one.minibatches(objective=PPOClip())
    assert found.skipped == 3
    assert {int(number) // 3 for row in rows(found) for number in row.sequences} == {0}


def replace_one(made: TrainingBatch) -> TrainingBatch:
    values = made.fields["advantage"].copy()
    values[4] = 1e-9
    made.set_per_target("advantage", values)
    return made
