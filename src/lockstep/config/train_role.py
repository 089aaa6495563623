"""A trained model of a run: everything that its ranks need to know."""

from typing import Annotated

from pydantic import Field

from lockstep.config.actor_critic import ValueLoss
from lockstep.config.algorithm import (
    CISPO,
    GSPO,
    BradleyTerry,
    CrossEntropy,
    PPOClip,
    PreferenceLoss,
    TrainerOutput,
)
from lockstep.config.model import ModelConfig
from lockstep.config.section import Section
from lockstep.config.trainer import CommunicationConfig, TrainerConfig

AnyObjective = Annotated[
    PPOClip | GSPO | CISPO | CrossEntropy | PreferenceLoss | BradleyTerry | ValueLoss, Field(discriminator="kind")
]


class TrainRole(Section):
    """A model with its trainer and its objective. A recipe's config derives it from its own fields, so that a rank
    knows no recipe."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """The role of the processes, such as `policy` or `critic`."""
    model: ModelConfig
    trainer: TrainerConfig
    objective: AnyObjective
    communication: CommunicationConfig = CommunicationConfig()
    seed: int = Field(0, ge=0)
    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits: log-probabilities are those of the distribution that completions were sampled from."""
    optimizer_steps: int = Field(gt=0)
    """Optimizer steps of the whole run, over which a schedule without `total_steps` decays."""
    served_fields: tuple[str, ...] = ()
    """Fields of the objective that served roles compute, or that were computed once for all data."""
    precomputed_fields: tuple[str, ...] = ()
    """Those of them that the role's ranks compute once for all data, before the first step."""
    kept_microbatches: int = Field(0, ge=0)
    """The most micro-batches whose forward pass for the evaluated fields is continued by the first update of a step."""

    @property
    def evaluated_fields(self) -> dict[str, TrainerOutput]:
        """Fields of the targets that the role's ranks compute before the first update of a step, and from what."""
        fields = self.objective.evaluated_fields
        return {name: output for name, output in fields.items() if name not in self.served_fields}

    @property
    def outputs_of_divided_pairs(self) -> tuple[TrainerOutput, ...]:
        """What the role's ranks compute before the first update of a step only if the completions of pairs are in
        different rows."""
        match self.objective:
            case BradleyTerry():
                return ("scores",)
            case PreferenceLoss(evaluates_policy=False):
                return ("logprobs",)
        return ()

    @property
    def holds_reference(self) -> bool:
        """Whether the ranks hold a frozen copy of the model as it was loaded."""
        return "reference_logprobs" in self.evaluated_fields.values()

    @property
    def section(self) -> str:
        """The section of the run's config that has the role's `model` and `trainer`: its name; empty for the policy,
        whose fields are not in a section."""
        return "" if self.name == "policy" else self.name

    def field(self, path: str) -> str:
        """The path of one of the role's fields in the run's config, such as `critic.trainer.ranks`."""
        return f"{self.section}.{path}" if self.section else path
