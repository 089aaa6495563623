"""Online DPO (Guo et al. 2024, "Direct language model alignment from online AI feedback")."""

from lockstep.config.recipes import OnlineDPOConfig
from lockstep.recipes.chosen_completions import best_and_worst, longest_pair, minibatches_of_pairs, pair_statistics
from lockstep.recipes.pair_update import update_on_pairs
from lockstep.run.run import Run


def online_dpo(run: Run, cfg: OnlineDPOConfig) -> None:
    """Samples completions of each prompt, and makes the best one likelier than the worst one, compared with the
    reference. An optimizer step without any pair is left out."""
    for step in run.steps():
        with run.transaction(step):  # if a trainer rank fails, ranks are restarted and steps are trained again
            rollouts = run.collect(step)  # durable: from here on this step is never generated again
            pairs = best_and_worst(rollouts)
            whole = run.pairs_fit_rows(longest_pair(pairs))
            groups = cfg.minibatch_size // cfg.group_size if cfg.minibatch_size else None
            minibatches = minibatches_of_pairs(pairs, cfg.epochs, groups, run.seed(step))
            stats = [update_on_pairs(run, minibatch, cfg.loss, whole) for minibatch in minibatches]
            run.commit(step, [*stats, pair_statistics(pairs)])
            with run.stage("publish"):
                run.weights.publish(version=step + 1)  # idempotent by version
