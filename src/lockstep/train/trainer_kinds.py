"""The kinds of trainers: for each `trainer.kind`, the class of its ranks and its planner. Also those of served
models."""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.config.serve_role import ServeRole
from lockstep.config.train_role import TrainRole
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_plan import FSDP2Planner, FSDP2ServedModelPlanner
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.train.fsdp.sharded_model import FSDP2ServedModel
from lockstep.train.served_model import ServedModel, ServedModelPlanner
from lockstep.train.trainer_plan import TrainerPlanner
from lockstep.train.trainer_protocol import Trainer


@dataclass(frozen=True, slots=True)
class TrainerKind:
    """A way to train a model on several ranks."""

    create: Callable[[TrainRole, ParallelContext, int], Trainer]
    """Creates one rank from its role, its communicators and the run's generation. All ranks call it."""
    planner: TrainerPlanner


TRAINERS: dict[str, TrainerKind] = {"fsdp2": TrainerKind(FSDP2Trainer, FSDP2Planner())}


@dataclass(frozen=True, slots=True)
class ServedModelKind:
    """A way to evaluate a model without a trainer on several ranks."""

    create: Callable[[ServeRole, ParallelContext], ServedModel]
    """Creates one rank from its role and its communicators. All ranks call it."""
    planner: ServedModelPlanner


SERVED_MODELS = ServedModelKind(FSDP2ServedModel, FSDP2ServedModelPlanner())
"""The way of all served models, whatever trains the others."""


def trainer_kind(role: TrainRole) -> TrainerKind:
    """Returns the kind of trainer that a role has."""
    return TRAINERS[role.trainer.kind]
