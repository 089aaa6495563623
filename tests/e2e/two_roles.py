"""`lockstep` with a recipe of two trained models: a policy and a critic, each fine-tuned on its own tokens.

The recipe is a config class, a loop and one line each in two tables, as in `best_of_n.py`.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lockstep import recipes
from lockstep.__main__ import main
from lockstep.config.algorithm import CrossEntropy, TrainerOutput
from lockstep.config.model import ModelConfig
from lockstep.config.recipes import RECIPES
from lockstep.config.run_config import RunConfig
from lockstep.config.section import Section
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.data.forest_builder import forest_from_documents
from lockstep.data.micro_batch import MiniBatch
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.data.samples import Document
from lockstep.run.run import Run
from lockstep.run.trainer_group import TrainerGroup

Wanted = tuple[MiniBatch, Sequence[TrainerOutput]]


class CriticConfig(Section):
    """The second model."""

    model: ModelConfig
    trainer: TrainerConfig = TrainerConfig()


class TwoRolesConfig(RunConfig):
    """Fine-tuning of two models on the same documents."""

    recipe: Literal["two_roles"]
    batch_size: int = 8
    minibatch_size: int = 4
    epochs: int = 2
    loss: CrossEntropy = CrossEntropy()
    critic: CriticConfig
    together: bool = False
    """Whether both models are trained at the same time; else they take turns."""

    @property
    def objective(self) -> CrossEntropy:
        return self.loss

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.batch_size // self.minibatch_size

    @property
    def exported_roles(self) -> tuple[str, ...]:
        return "policy", "critic"

    @property
    def train_roles(self) -> tuple[TrainRole, ...]:
        critic = TrainRole(
            name="critic",
            model=self.critic.model,
            trainer=self.critic.trainer,
            objective=self.loss,
            communication=self.communication,
            seed=self.seed + 1,
            optimizer_steps=self.steps * self.updates_per_step,
        )
        return self.policy, critic


def two_roles(run: Run, cfg: TwoRolesConfig) -> None:
    """Trains the policy on the documents' answers, and the critic on all of their tokens."""
    for step in run.steps():
        with run.transaction(step):
            with run.stage("pack"):
                documents = run.samples.take(step * cfg.batch_size, cfg.batch_size)
                batches = {
                    "policy": batch_for(run.policy, documents, cfg),
                    "critic": batch_for(run.critic, [whole(document) for document in documents], cfg),
                }
            with run.stage("logprobs"):
                wanted: dict[str, Wanted] = {
                    role: (batch.everything(), ["logprobs"]) for role, batch in batches.items()
                }
                before = {role: mean(values) for role, values in evaluate(run, wanted, cfg.together).items()}
            minibatches = {
                role: batch.minibatches(cfg.epochs, cfg.minibatch_size, cfg.loss, seed=run.seed(step))
                for role, batch in batches.items()
            }
            if cfg.together:
                with run.stage("train"):
                    stats = run.trained.step(minibatches)
            else:
                with run.stage("train"):
                    stats = {"policy": [run.policy.step(each) for each in minibatches["policy"]]}
                with run.stage("critic"):
                    stats["critic"] = [run.critic.step(each) for each in minibatches["critic"]]
            metrics = {role: [each | {"before": before[role]} for each in of_role] for role, of_role in stats.items()}
            run.commit(step, metrics["policy"], critic=metrics["critic"])
            if cfg.needs_engines:
                with run.stage("publish"):
                    run.weights.publish(version=step + 1)


def evaluate(run: Run, wanted: dict[str, Wanted], together: bool) -> dict[str, list[list[dict[str, np.ndarray]]]]:
    """The log-probabilities of both roles."""
    if together:
        return run.trained.evaluate(wanted)
    return {role: run.trained[role].evaluate(*each) for role, each in wanted.items()}


def mean(values: list[list[dict[str, np.ndarray]]]) -> float:
    """The mean log-probability of all targets."""
    return float(np.concatenate([row["logprobs"] for rank in values for row in rank]).mean())


def batch_for(role: TrainerGroup, documents: list[Document], cfg: TwoRolesConfig) -> TrainingBatch:
    """The data of a step for one role."""
    return pack(forest_from_documents(documents), role.ranks, cfg.token_budget, role.info.packing)


def whole(document: Document) -> Document:
    """The same document, of which every token is learned."""
    return Document(document.uid, document.row, document.tokens, np.arange(document.tokens.size) > 0)


RECIPES["two_roles"] = TwoRolesConfig
recipes.LOOPS[TwoRolesConfig] = two_roles

if __name__ == "__main__":
    main()
