"""Rejection sampling (Touvron et al. 2023, "Llama 2"), also known as RAFT (Dong et al. 2023) or best of n: supervised
fine-tuning on the policy's own best completions."""

from lockstep.config.recipes import RejectionSamplingConfig
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.recipes.chosen_completions import best_completions, choice_statistics
from lockstep.run.run import Run


def rejection_sampling(run: Run, cfg: RejectionSamplingConfig) -> None:
    """Samples completions of each prompt, and minimises the cross-entropy of the best ones. An optimizer step without
    any is left out."""
    for step in run.steps():
        with run.transaction(step):  # if a trainer rank fails, ranks are restarted and steps are trained again
            rollouts = run.collect(step)  # durable: from here on this step is never generated again
            with run.stage("pack"):
                best = best_completions(rollouts, cfg.best_k, cfg.min_reward, cfg.mask_truncated)
                trees = forest_from_rollouts(rollouts, chosen=best)
                batch = run.policy.pack(trees, cfg.token_budget)
            most, seed = cfg.rollout.sampling.max_tokens, run.seed(step)
            minibatches = batch.minibatches(cfg.epochs, cfg.minibatch_size, cfg.loss, seed=seed, max_tokens=most)
            with run.stage("train"):
                stats = [run.policy.step(minibatch) for minibatch in minibatches if minibatch.sequences]
            run.commit(step, [*stats, choice_statistics(rollouts, best)])
            with run.stage("publish"):
                run.weights.publish(version=step + 1)  # idempotent by version
