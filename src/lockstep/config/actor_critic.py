"""The critic of a recipe, what it learns, and the advantages that follow from its values."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lockstep.config.algorithm import ObjectiveConfig, TrainerOutput
from lockstep.config.model import ModelConfig
from lockstep.config.reward import ModelReward, RewardTerm
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

    model: ModelConfig | Literal["policy", "reward_model"] = "policy"
    """The model that it starts from: `policy`, which gets a new head; `reward_model`, that of the first term of
    `reward.terms` with kind `model` and a `path`, which must have the policy's tokens; or a section with the `path` of
    another. `policy` and `reward_model` have a new adapter if the policy trains one."""
    trainer: TrainerConfig = TrainerConfig()
    """The same fields as `trainer`, with their own defaults (one rank) and a learning rate of 9e-6 (OpenRLHF's);
    nothing is taken from the policy's section."""
    loss: ValueLoss = ValueLoss()
    warmup_steps: int = Field(0, ge=0)
    """The first steps of the run, in which only the critic is trained, on completions of the policy as it began (the
    value pre-training of VC-PPO, Yuan et al. 2025, and VAPO). As many as `steps` for a run that trains nothing else."""
    warmup_lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the returns that it learns in these steps: 1 for Monte Carlo returns, the discounted sums of rewards,
    which do not depend on its values. `critic.loss.clip` has no effect
    on them."""
    warmup_epochs: int | None = Field(None, gt=0)
    """Passes over a step's completions in these steps; `epochs` when absent."""
    warmup_explained_variance: float | None = Field(None, gt=0, le=1)
    """These steps end before `warmup_steps` once the critic explains this share of the variance of a step's returns,
    before it learns them. When that is, is not known before: schedules of learning rates without `total_steps` are
    planned for the earliest end, after one step, for the policy, and for `warmup_steps` for the critic."""
    kept_microbatches: int = Field(1, ge=0)
    """The most micro-batches whose forward pass, which gives the values before the first update of a step, is kept
    until that update, which then computes only their backward pass; the result is the same bit by bit. Each needs the
    memory of its activations (`token_budget`), the first one at a time at which no other is in memory. Nothing is kept
    with several ranks, several mini-batches per step, `critic.trainer.offload`, devices that the critic shares,
    `bootstrap_truncated` or the dropout of an adapter."""
    export: bool = False
    """Also export the critic when the run ends, as `checkpoint.export` does the policy."""

    @model_validator(mode="before")
    @classmethod
    def _set_learning_rate(cls, values: Any) -> Any:
        return with_defaults(values, {"trainer": {"optimizer": {"lr": 9e-6}}})

    @field_validator("model", mode="before")
    @classmethod
    def _read_model(cls, value: Any) -> Any:
        """Validates a section as such, so that its errors name its fields and not those of all choices."""
        if isinstance(value, Mapping):
            return ModelConfig.model_validate(value)
        if value is None:  # in configs that were stored before there was a choice
            return "policy"
        if not isinstance(value, ModelConfig) and value not in ("policy", "reward_model"):
            raise ValueError("expected policy, reward_model, or a section with a path: set critic.model.path")
        return value

    @field_validator("model")
    @classmethod
    def _set_head(cls, model: ModelConfig | str) -> ModelConfig | str:
        if isinstance(model, str):
            return model
        if "head" in model.model_fields_set and model.head != "score":
            raise ValueError(f"head {model.head} does not suit a critic, which has a score: leave it out")
        return model.model_copy(update={"head": "score"})

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        defaults = type(self).model_fields
        for name in ("warmup_lam", "warmup_epochs", "warmup_explained_variance"):
            if not self.warmup_steps and getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} has no effect with warmup_steps 0: set warmup_steps, or leave it out")
        return self

    def starting_tokenizer(self, rewards: Sequence[RewardTerm]) -> str | None:
        """The folder or hub name of the tokenizer of the reward model that it starts from; None for that in the folder
        of another model."""
        term = _first_reward_model(rewards) if self.model == "reward_model" else None
        return None if term is None else term.tokenizer or term.path

    def starting_model(self, policy: ModelConfig, rewards: Sequence[RewardTerm]) -> ModelConfig:
        """The critic's model, on the tokens of the policy.

        Args:
            policy: the policy's model.
            rewards: the terms of the reward.

        Raises:
            ValueError: it starts from a reward model, and no term has one.
        """
        tokenizer = policy.tokenizer or policy.path
        if isinstance(self.model, ModelConfig):
            return self.model.model_copy(update={"tokenizer": self.model.tokenizer or tokenizer})
        adapter = None if policy.adapter is None else policy.adapter.model_copy(update={"path": None})
        changes: dict[str, Any] = {"head": "score", "adapter": adapter}
        if self.model == "reward_model":
            term = _first_reward_model(rewards)
            if term is None:
                raise ValueError(
                    "critic.model is reward_model, but no term of reward.terms has kind model and a path: add one, or "
                    "set critic.model.path"
                )
            of_term = ("path", "revision", "trust_remote_code", "packing")
            changes |= {name: getattr(term, name) for name in of_term} | {"tokenizer": tokenizer}
        return policy.model_copy(update=changes)


def _first_reward_model(terms: Sequence[RewardTerm]) -> ModelReward | None:
    return next((each for each in terms if isinstance(each, ModelReward) and each.path is not None), None)
