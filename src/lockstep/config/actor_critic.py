"""The critic of a recipe, what it learns, and the advantages that follow from its values."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lockstep.config.algorithm import ObjectiveConfig, TrainerOutput
from lockstep.config.model import ModelConfig
from lockstep.config.section import Section, with_defaults
from lockstep.config.trainer import TrainerConfig


class GAEAdvantage(Section):
    """Generalised advantage estimation (Schulman et al. 2015) over the tokens that the policy generated: tokens that an
    environment wrote between them are no steps of time."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda: 1 for the return minus the value, less for smaller variance and a bias of the critic's errors."""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """Lambda of the returns that the critic learns, where it is not that of the advantages (VAPO, Yue et al. 2025: 1
    beside a `lam` of 0.95)."""
    length_adaptive_alpha: float | None = Field(None, gt=0)
    """The advantages' lambda is 1 - 1 / (alpha n) for a completion of n tokens, instead of `lam` (VAPO, which has
    0.05)."""
    whiten: Literal["mean_std", "mean", "off"] = "mean_std"
    """Whether advantages are centred and divided by their standard deviation, over all tokens of the step."""

    @model_validator(mode="after")
    def _check_lambda(self) -> Self:
        if self.length_adaptive_alpha is not None and "lam" in self.model_fields_set and self.lam != 1:
            raise ValueError(
                f"length_adaptive_alpha gives each completion a lambda of its own, so that lam {self.lam:g} has no "
                "effect on advantages: leave one of the two out (lam_critic is that of the critic's returns)"
            )
        return self


class ValueLoss(ObjectiveConfig):
    """Half the squared error of the critic's values, with a limit on how far a value moves in a step."""

    kind: Literal["value"] = "value"
    clip: float | None = Field(0.5, gt=0)
    """How far a value may move from the value at the beginning of the step before its gradient ends; null for no
    limit."""

    @property
    def evaluated_fields(self) -> dict[str, TrainerOutput]:
        return {"old_value": "scores"}


class KLController(Section):
    """Adapts the coefficient of the KL penalty after every step, so that the KL stays near a target (Ziegler et al.
    2019)."""

    target: float = Field(gt=0)
    """Mean KL to the reference per token, as `policy/reference_kl` measures it."""
    horizon: int = Field(10_000, gt=0)
    """In completions; the larger, the slower the coefficient changes."""


class CriticConfig(Section):
    """The model that estimates the value of each state, and how it is trained."""

    model: ModelConfig | None = None
    """The model that it starts from, such as a reward model; a language model gets a new head. The policy's, with a new
    adapter if the policy has one, when absent."""
    trainer: TrainerConfig = TrainerConfig()
    """The same fields as `trainer`, with their own defaults (one rank) and a learning rate of 9e-6 (OpenRLHF's);
    nothing is taken from the policy's section."""
    loss: ValueLoss = ValueLoss()
    warmup_steps: int = Field(0, ge=0)
    """The first steps of the run, in which only the critic is trained."""
    export: bool = False
    """Also export the critic when the run ends, as `checkpoint.export` does the policy."""

    @model_validator(mode="before")
    @classmethod
    def _set_learning_rate(cls, values: Any) -> Any:
        return with_defaults(values, {"trainer": {"optimizer": {"lr": 9e-6}}})

    @field_validator("model")
    @classmethod
    def _set_head(cls, model: ModelConfig | None) -> ModelConfig | None:
        if model is not None and "head" in model.model_fields_set and model.head != "score":
            raise ValueError(f"head {model.head} does not suit a critic, which has a score: leave it out")
        return None if model is None else model.model_copy(update={"head": "score"})

    def starting_model(self, policy: ModelConfig) -> ModelConfig:
        """The critic's model, given the policy's, on whose tokens it is trained."""
        if self.model is not None:
            return self.model.model_copy(update={"tokenizer": self.model.tokenizer or policy.tokenizer or policy.path})
        adapter = None if policy.adapter is None else policy.adapter.model_copy(update={"path": None})
        return policy.model_copy(update={"head": "score", "adapter": adapter})
