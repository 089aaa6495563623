"""Reward models: the better completion of a pair gets the higher score (Ouyang et al. 2022, "InstructGPT")."""

import numpy as np

from lockstep.config.recipes import RewardModelConfig
from lockstep.data.forest_builder import forest_of_scored_pairs
from lockstep.run.run import Run
from lockstep.run.step_scores import check_scores, score_metrics, score_sequences, score_update


def reward_model(run: Run, cfg: RewardModelConfig) -> None:
    """Maximises the likelihood that the better completion of each pair wins. Its two sides share their prompt."""
    whole = run.pairs_fit_rows(run.longest_pair + 2)  # the places of the scores
    for step in run.steps():
        with run.transaction(step):
            with run.stage("pack"):
                pairs = run.pairs(step, cfg.batch_size)
                batch = run.policy.pack(forest_of_scored_pairs(pairs), cfg.token_budget, whole)
            tokens = {"tokens": float(batch.forest.tokens.size - batch.targets)}
            update = None
            if not whole:  # the sides of a pair may be in different rows, so all scores are computed first
                with run.stage("scores"):
                    scores = score_sequences(run.policy, batch)
                    check_scores(batch, scores, step)
                    update = score_update(scores, np.array([pair.margin for pair in pairs]), cfg.loss)
                batch.set_per_target("coefficient", update.coefficients[batch.sequences])
            with run.stage("train"):
                stats = [run.policy.step(minibatch) for minibatch in batch.minibatches(objective=cfg.loss)]
            run.commit(step, [score_metrics(each, update) | tokens for each in stats])
