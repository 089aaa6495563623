"""An optimizer step on pairs of completions: its forward passes, its loss, its update."""

from collections.abc import Mapping, Sequence

from lockstep.config.algorithm import PreferenceLoss
from lockstep.data.forest_builder import forest_from_pairs
from lockstep.data.samples import Pair
from lockstep.recipes.precomputed_reference import PrecomputedReference
from lockstep.run.run import Run
from lockstep.run.step_preferences import preference_update, prepare_pairs


def update_on_pairs(
    run: Run, pairs: Sequence[Pair], loss: PreferenceLoss, whole: bool, reference: PrecomputedReference | None = None
) -> dict[str, float]:
    """Makes one optimizer step, and returns its metrics.

    Args:
        pairs: all pairs of the optimizer step, at least one.
        whole: whether every pair is in one row, so that the ranks can compute the loss themselves.
        reference: where the reference's log-probabilities come from if they are not computed now.
    """
    whole = whole and not loss.evaluates_policy
    with run.stage("pack"):
        batch = run.policy.pack(forest_from_pairs(pairs, loss.learns_prompts), run.config.token_budget, whole)
        prepare_pairs(batch, loss)
    with run.stage("logprobs"):  # of the reference, if they are computed now
        run.annotate(batch, without=["policy_logprob"] if whole else [])
        if reference is not None:
            reference.annotate(batch, pairs)
    metrics: Mapping[str, float] = {}
    if not whole:  # the loss is that of all pairs of the step, however they are split
        update = preference_update(batch, loss)
        batch.set_per_target("coefficient", update.coefficients)
        metrics = update.metrics
    with run.stage("train"):
        (minibatch,) = batch.minibatches(objective=loss)
        return {**run.policy.step(minibatch), **metrics}
