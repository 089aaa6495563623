"""The kinds of trainers: for each `trainer.kind`, the class of its ranks and its planner. Also those of served
models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.algorithm import TrainerOutput
from lockstep.config.serve_role import ServeRole
from lockstep.config.train_role import TrainRole
from lockstep.train.deepspeed.deepspeed_plan import DeepSpeedPlanner
from lockstep.train.deepspeed.deepspeed_trainer import DeepSpeedTrainer
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import TrainerUnsupported
from lockstep.train.fsdp.fsdp_plan import FSDP2Planner, FSDP2ServedModelPlanner
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.train.fsdp.sharded_model import FSDP2ServedModel
from lockstep.train.objective import make_objective
from lockstep.train.served_model import ServedModel, ServedModelPlanner
from lockstep.train.trainer_plan import TrainerPlanner
from lockstep.train.trainer_protocol import Trainer


@dataclass(frozen=True, slots=True)
class TrainerKind:
    """A way to train a model on several ranks."""

    create: Callable[[TrainRole, ParallelContext, int, Path | None], Trainer]
    """Creates one rank from its role, its communicators, the run's generation, and the folder of the prepared images;
    None if the data has none. All ranks call it."""
    planner: TrainerPlanner


TRAINERS: dict[str, TrainerKind] = {
    "fsdp2": TrainerKind(FSDP2Trainer, FSDP2Planner()),
    "deepspeed": TrainerKind(DeepSpeedTrainer, DeepSpeedPlanner()),
}


@dataclass(frozen=True, slots=True)
class ServedModelKind:
    """A way to evaluate a model without a trainer on several ranks."""

    create: Callable[[ServeRole, ParallelContext, Path | None], ServedModel]
    """Creates one rank from its role, its communicators, and the folder of the prepared images; None if the data has
    none. All ranks call it."""
    planner: ServedModelPlanner


SERVED_MODELS = ServedModelKind(FSDP2ServedModel, FSDP2ServedModelPlanner())
"""The way of all served models, whatever trains the others."""


_SETTINGS: dict[TrainerOutput, str] = {
    "reference_logprobs": "a reference model",
    "renyi_entropy": "loss.use_weighting",
    "scores": "reward models",
}
"""The setting, in the words of a user, that needs an output of a trainer which not all kinds have."""


def check_role(role: TrainRole) -> None:
    """Checks that the role's kind of trainer implements every setting of the role.

    Raises:
        TrainerUnsupported: it does not. The remedy names the kinds that do.
    """
    objective = role.objective
    needed = {*role.evaluated_fields.values(), *role.outputs_of_divided_pairs, *make_objective(objective).outputs}
    for output in sorted(needed):
        able = [kind for kind, each in TRAINERS.items() if output in each.planner.outputs]
        _check_able(role, _SETTINGS.get(output, output), able)
    if objective.reference_mixing is not None:
        able = [kind for kind, each in TRAINERS.items() if each.planner.moves_reference]
        _check_able(role, "loss.sync_ref_model", able)
    trainer_kind(role).planner.check(role)


def _check_able(role: TrainRole, setting: str, able: Sequence[str]) -> None:
    if role.trainer.kind not in able:
        others = " or ".join(f"{role.field('trainer.kind')}={kind}" for kind in able)
        raise TrainerUnsupported(role.trainer.kind, setting, f"leave it out, or set {others}")


def trainer_kind(role: TrainRole) -> TrainerKind:
    """Returns the kind of trainer that a role has."""
    return TRAINERS[role.trainer.kind]
