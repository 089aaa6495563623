"""Learning from preferences: DPO (Rafailov et al. 2023), KTO (Ethayarajh et al. 2024) and their relatives."""

import numpy as np

from lockstep.config.recipes import PreferenceConfig
from lockstep.data.forest_builder import forest_from_labelled, forest_from_pairs
from lockstep.recipes.pair_update import update_on_pairs
from lockstep.recipes.precomputed_reference import PrecomputedReference, precompute_reference
from lockstep.run.run import Run
from lockstep.run.step_preferences import labelled_update


def preference(run: Run, cfg: PreferenceConfig) -> None:
    """Makes better completions likelier than worse ones, compared with the reference model."""
    forest = forest_from_labelled if cfg.loss.unpaired else forest_from_pairs
    reference = precompute_reference(run, forest) if cfg.precompute_ref_log_probs else None
    (_learn_labels if cfg.loss.unpaired else _learn_pairs)(run, cfg, reference)


def _learn_pairs(run: Run, cfg: PreferenceConfig, reference: PrecomputedReference | None) -> None:
    whole = run.pairs_fit_rows(run.longest_pair)
    for step in run.steps():
        with run.transaction(step):
            pairs = run.pairs(step, cfg.batch_size)
            run.commit(step, [update_on_pairs(run, pairs, cfg.loss, whole, reference)])


def _learn_labels(run: Run, cfg: PreferenceConfig, reference: PrecomputedReference | None) -> None:
    for step in run.steps():
        with run.transaction(step):
            with run.stage("pack"):
                samples = run.labelled(step, cfg.batch_size)
                mismatched = "kto" in cfg.loss.type
                evaluated = run.policy.pack(forest_from_labelled(samples, mismatched=mismatched), cfg.token_budget)
                batch = run.policy.pack(forest_from_labelled(samples), cfg.token_budget)
            with run.stage("logprobs"):
                run.annotate(evaluated)
                if reference is not None:
                    reference.annotate(evaluated, samples)
            labels = np.array([sample.desirable for sample in samples])
            update = labelled_update(evaluated, labels, cfg.loss)
            batch.set_per_target("coefficient", update.coefficients)
            with run.stage("train"):
                stats = [run.policy.step(minibatch) for minibatch in batch.minibatches(objective=cfg.loss)]
            run.commit(step, [{**each, **update.metrics} for each in stats])
