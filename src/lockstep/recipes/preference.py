"""Learning from preferences: DPO (Rafailov et al. 2023) and its relatives."""

from lockstep.config.recipes import PreferenceConfig
from lockstep.data.forest_builder import forest_from_pairs
from lockstep.data.mini_batches import pack
from lockstep.run.run import Run
from lockstep.run.step_preferences import preference_update


def preference(run: Run, cfg: PreferenceConfig) -> None:
    """Makes the better completion of each pair likelier than the worse one, compared with the reference model."""
    for step in run.steps():
        with run.transaction(step):
            with run.stage("pack"):
                pairs = run.pairs(step, cfg.batch_size)
                trees = forest_from_pairs(pairs, cfg.loss.learns_prompts)
                batch = pack(trees, run.policy.ranks, cfg.token_budget, run.policy.info.packing)
            with run.stage("logprobs"):
                run.annotate(batch)  # of the policy, and of the reference unless no loss needs it
            update = preference_update(batch, cfg.loss)  # over all pairs, however they are split
            batch.set_per_target("coefficient", update.coefficients)
            with run.stage("train"):
                stats = [run.policy.step(minibatch) for minibatch in batch.minibatches(objective=cfg.loss)]
            run.commit(step, [{**each, **update.metrics} for each in stats])
