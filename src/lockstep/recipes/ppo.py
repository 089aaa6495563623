"""Proximal policy optimisation (Schulman et al. 2017) with a critic, as in reinforcement learning from human feedback
(Ouyang et al. 2022, "InstructGPT")."""

from collections.abc import Iterator

from lockstep.config.algorithm import ObjectiveConfig
from lockstep.config.recipes import PPOConfig
from lockstep.data.forest_builder import forest_from_rollouts, forest_of_states
from lockstep.data.micro_batch import MiniBatch
from lockstep.data.mini_batches import TrainingBatch
from lockstep.run.run import Run
from lockstep.run.step_advantages import actor_critic_targets, is_warmup, kl_coefficient, values_of_states


def ppo(run: Run, cfg: PPOConfig) -> None:
    """Makes tokens likelier after which the rewards exceed the value that the critic had expected."""
    for step in run.steps():
        with run.transaction(step):  # if a trainer rank fails, ranks are restarted and steps are trained again
            rollouts = run.collect(step)  # durable: from here on this step is never generated again
            with run.stage("pack"):
                trees = forest_from_rollouts(rollouts, mask_truncated=cfg.loss.mask_truncated)
                actor = run.policy.pack(trees, cfg.token_budget)
                critic = states = run.critic.pack(trees, cfg.token_budget)
                if cfg.bootstrap_truncated:
                    states = run.critic.pack(forest_of_states(rollouts), cfg.token_budget)
            with run.stage("logprobs"):
                run.annotate(actor, critic=states)
            values, last = values_of_states(states, actor)
            previous = run.ledger.committed(step - 1)
            kl, warmup = kl_coefficient(cfg, previous), is_warmup(cfg, step, previous)
            targets = actor_critic_targets(rollouts.rewards, actor, values, last, kl, cfg, warmup)
            actor.set_per_target("advantage", targets.advantages)
            critic.set_per_target("old_value", targets.old_values)
            critic.set_per_target("return", targets.returns)
            epochs = cfg.epochs_of_critic(warmup)
            minibatches = {"critic": _minibatches(critic, cfg.critic.loss, cfg, run.seed(step), epochs)}
            if not warmup:
                minibatches["policy"] = _minibatches(actor, cfg.loss, cfg, run.seed(step), cfg.epochs)
            with run.stage("train"):
                stats = run.trained.step(minibatches)  # both at the same time
            run.commit(step, [*stats.get("policy", []), targets.metrics], critic=stats["critic"])
            with run.stage("publish"):
                run.weights.publish(version=step + 1)  # idempotent by version


def _minibatches(
    batch: TrainingBatch, objective: ObjectiveConfig, cfg: PPOConfig, seed: int, epochs: int
) -> Iterator[MiniBatch]:
    """The data of a role's optimizer steps. Policy and critic have the same completions in each."""
    most = cfg.rollout.sampling.max_tokens
    return batch.minibatches(epochs, cfg.minibatch_size, objective, seed=seed, max_tokens=most)
