"""`lockstep` with a recipe of two trained models: a policy and a critic, each fine-tuned on its own tokens.

The recipe is a config class, a loop and one line each in two tables, as in `best_of_n.py`.
"""

from typing import Literal

import numpy as np

from lockstep import recipes
from lockstep.cli import app
from lockstep.config.algorithm import CrossEntropy
from lockstep.config.model import ModelConfig
from lockstep.config.recipes import RECIPES
from lockstep.config.run_config import RunConfig
from lockstep.config.section import Section
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.data.forest_builder import forest_from_documents
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Document
from lockstep.run.run import Run
from lockstep.run.trainer_group import TrainerGroup


class CriticConfig(Section):
    """The second model."""

    model: ModelConfig
    trainer: TrainerConfig = TrainerConfig()


class TwoRolesConfig(RunConfig):
    """Fine-tuning of two models on the same documents."""

    recipe: Literal["two_roles"]
    batch_size: int = 8
    loss: CrossEntropy = CrossEntropy()
    critic: CriticConfig

    @property
    def objective(self) -> CrossEntropy:
        return self.loss

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size

    @property
    def train_roles(self) -> tuple[TrainRole, ...]:
        critic = TrainRole(
            name="critic",
            model=self.critic.model,
            trainer=self.critic.trainer,
            objective=self.loss,
            communication=self.communication,
            seed=self.seed + 1,
            optimizer_steps=self.steps,
        )
        return self.policy, critic


def two_roles(run: Run, cfg: TwoRolesConfig) -> None:
    """Trains the policy on the documents' answers, and the critic on all of their tokens."""
    for step in run.steps():
        with run.transaction(step):
            with run.stage("pack"):
                documents = run.samples.take(step * cfg.batch_size, cfg.batch_size)
            with run.stage("train"):
                stats = update(run.policy, documents, cfg)
            with run.stage("critic"):
                values = update(run.critic, [whole(document) for document in documents], cfg)
            run.commit(step, stats, critic=values)
            if cfg.needs_engines:
                with run.stage("publish"):
                    run.weights.publish(version=step + 1)


def update(role: TrainerGroup, documents: list[Document], cfg: TwoRolesConfig) -> list[dict[str, float]]:
    """The optimizer steps of one role."""
    batch = pack(forest_from_documents(documents), role.ranks, cfg.token_budget, role.info.packing)
    return [role.step(minibatch) for minibatch in batch.minibatches(objective=cfg.loss)]


def whole(document: Document) -> Document:
    """The same document, of which every token is learned."""
    return Document(document.uid, document.row, document.tokens, np.arange(document.tokens.size) > 0)


RECIPES["two_roles"] = TwoRolesConfig
recipes.LOOPS[TwoRolesConfig] = two_roles

if __name__ == "__main__":
    app()
