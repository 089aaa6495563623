"""`lockstep` with one more recipe: best of n. Fine-tunes on the best completion of each group, as the package's own
`rejection_sampling` does with more choices; this is how short a recipe of one's own can be.

The recipe is a config class, a loop and one line each in two tables; nothing in `lockstep.run` knows it.
"""

from typing import Literal

import numpy as np

from lockstep import recipes
from lockstep.__main__ import main
from lockstep.config.algorithm import CrossEntropy, FilterGroups
from lockstep.config.recipes import RECIPES
from lockstep.config.reward import RewardConfig
from lockstep.config.run_config import DataKind, Generation, RunConfig
from lockstep.data.forest_builder import forest_from_documents
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Document, Group
from lockstep.run.run import Run


class BestOfNConfig(RunConfig):
    """Fine-tuning on the best of n completions."""

    recipe: Literal["best_of_n"]
    prompts_per_step: int = 4
    group_size: int = 4
    loss: CrossEntropy = CrossEntropy()
    reward: RewardConfig

    @property
    def objective(self) -> CrossEntropy:
        return self.loss

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step

    @property
    def data_kind(self) -> DataKind:
        return "prompts"

    @property
    def generation(self) -> Generation:
        return Generation(self.prompts_per_step, self.group_size, FilterGroups())


def best_of_n(run: Run, cfg: BestOfNConfig) -> None:
    """Minimises the cross-entropy of each prompt's best completion."""
    for step in run.steps():
        with run.transaction(step):
            with run.stage("rollout"):
                groups = run.groups(step)
                rollouts = run.rollouts.take(step, groups.missing) if groups.missing else None
            if rollouts is not None:
                with run.stage("reward"):
                    groups.add(run.rewards.score(rollouts))
            with run.stage("ledger"):
                run.collected(step, groups)
            with run.stage("pack"):
                trees = forest_from_documents([best(group) for group in groups.rollouts.groups])
                batch = pack(trees, run.policy.ranks, cfg.token_budget, run.policy.info.packing)
            with run.stage("train"):
                stats = [run.policy.step(minibatch) for minibatch in batch.minibatches(objective=cfg.loss)]
            run.commit(step, stats)
            with run.stage("publish"):
                run.weights.publish(version=step + 1)


def best(group: Group) -> Document:
    """The prompt with its best completion, whose tokens are learned."""
    assert group.rewards is not None
    prompt, answer = group.prompt.tokens, group.completions[int(group.rewards.argmax())].tokens
    learned = np.arange(prompt.size + answer.size) >= prompt.size
    return Document(group.prompt.uid, group.prompt.row, np.concatenate([prompt, answer]), learned)


RECIPES["best_of_n"] = BestOfNConfig
recipes.LOOPS[BestOfNConfig] = best_of_n

if __name__ == "__main__":
    main()
