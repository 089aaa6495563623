"""Group relative policy optimisation (Shao et al. 2024, "DeepSeekMath") and its relatives."""

from lockstep.config.recipes import GRPOConfig
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.run.run import Run
from lockstep.run.step_advantages import compute_advantages


def grpo(run: Run, cfg: GRPOConfig) -> None:
    """Samples a group of completions for each prompt, and makes those likelier that are better than their group."""
    for step in run.steps():
        with run.transaction(step):  # if a trainer rank fails, ranks are restarted and steps are trained again
            rollouts = run.collect(step)  # durable: from here on this step is never generated again
            with run.stage("pack"):
                trees = forest_from_rollouts(rollouts, mask_truncated=cfg.loss.mask_truncated)
                batch = run.policy.pack(trees, cfg.token_budget)
            with run.stage("logprobs"):
                run.annotate(batch)
            batch.set_per_target("advantage", compute_advantages(rollouts.rewards, batch, cfg.advantage, cfg.loss.kl))
            most, seed = cfg.rollout.sampling.max_tokens, run.seed(step)
            minibatches = batch.minibatches(cfg.epochs, cfg.minibatch_size, cfg.loss, seed=seed, max_tokens=most)
            with run.stage("train"):
                stats = [run.policy.step(minibatch) for minibatch in minibatches]
            run.commit(step, stats)
            with run.stage("publish"):
                run.weights.publish(version=step + 1)  # idempotent by version
