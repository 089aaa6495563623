"""PPO's config."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lockstep.config.actor_critic import CriticConfig, GAEAdvantage, KLController
from lockstep.config.algorithm import AnyPolicyLoss, KLPenalty, PPOClip
from lockstep.config.recipes.rollout_recipes import PolicyGradientRecipe
from lockstep.config.reward import LengthPenalty
from lockstep.config.section import with_defaults
from lockstep.config.train_role import TrainRole

_KL = {"coefficient": 0.01, "estimator": "k1", "where": "reward"}


class PPOConfig(PolicyGradientRecipe):
    """Proximal policy optimisation with a critic (Schulman et al. 2017; Ouyang et al. 2022)."""

    recipe: Literal["ppo"]
    group_size: int = Field(1, gt=0)
    """Completions per prompt."""
    advantage: GAEAdvantage = GAEAdvantage()
    loss: AnyPolicyLoss = PPOClip(kl=KLPenalty.model_validate(_KL))
    """As in `grpo`, with a KL penalty of 0.01 per token in the reward, estimated by k1 (k3 with `where: loss`), where
    none is given."""
    critic: CriticConfig = CriticConfig.model_validate({})
    reward_clip: tuple[float, float] | None = (-10.0, 10.0)
    """Lowest and highest reward of a completion, to which it is clipped before KL penalties are added; null for no
    limits."""
    normalize_reward: bool = False
    """Subtract the mean of the step's rewards, and divide by their standard deviation, before they are clipped."""
    kl_controller: KLController | None = None
    """Adapts `loss.kl.coefficient`, with which it begins; the coefficient is fixed when absent."""
    bootstrap_truncated: bool = False
    """Let the value after the last token of a completion that was cut, at `max_tokens` or a limit of its turns, stand
    for the rewards that it would still have got, instead of 0."""

    @property
    def train_roles(self) -> tuple[TrainRole, ...]:
        model = self.critic.starting_model(self.model, self.reward.terms)
        critic = TrainRole(
            name="critic",
            model=model,
            trainer=self.trainer_of("critic", model, self.critic.trainer),
            objective=self.critic.loss,
            communication=self.communication,
            seed=self.seed,
            optimizer_steps=self._critic_updates,
        )
        kept = 0 if self._obstacle_to_keeping(critic) else self.critic.kept_microbatches
        return self.policy, critic.model_copy(update={"kept_microbatches": kept})

    def _obstacle_to_keeping(self, critic: TrainRole) -> str:
        """The setting because of which the critic keeps no forward pass for its first update of a step: that has other
        passes, or the device has other uses in between. Empty if there is none."""
        trainer, adapter = critic.trainer, critic.model.adapter
        # If one rank continued a pass and another computed its own, their collectives would differ.
        obstacles = {
            f"critic.trainer.ranks {trainer.ranks}": trainer.ranks > 1,
            f"minibatch_size {self.minibatch_size}": self.updates_per_step > self.epochs,
            "bootstrap_truncated": self.bootstrap_truncated,
            "the dropout of the critic's adapter": bool(adapter and adapter.lora_dropout),
            "critic.trainer.offload": trainer.offload.anything,
            "devices that the critic shares (placement.colocate)": len(self.placement.set_of(critic.name)) > 1,
        }
        return next((setting for setting, present in obstacles.items() if present), "")

    @property
    def policy(self) -> TrainRole:
        untrained = self.critic.warmup_steps
        if self.critic.warmup_explained_variance is not None:
            untrained = min(1, untrained)  # the earliest end
        trained_steps = max(1, self.steps - untrained)
        return super().policy.model_copy(update={"optimizer_steps": trained_steps * self.updates_per_step})

    @property
    def _critic_updates(self) -> int:
        """Optimizer steps of the critic in the whole run."""
        warmup = self.critic.warmup_steps
        epochs = warmup * self.epochs_of_critic(warmup=True) + (self.steps - warmup) * self.epochs
        return epochs * self.updates_per_step // self.epochs

    def starting_tokenizer(self, role: TrainRole) -> str | None:
        return self.critic.starting_tokenizer(self.reward.terms) if role.name == "critic" else None

    def passes_of(self, role: TrainRole) -> int:
        warmup = self.epochs_of_critic(warmup=True) if role.name == "critic" else 0
        return max(warmup, self.epochs)

    def epochs_of_critic(self, warmup: bool) -> int:
        """The critic's passes over the completions of a step.

        Args:
            warmup: whether only the critic is trained in it.
        """
        return (self.critic.warmup_epochs or self.epochs) if warmup else self.epochs

    @property
    def trains_only_critic(self) -> bool:
        """Whether the run is only the pre-training of a critic."""
        return self.critic.warmup_steps == self.steps

    @property
    def scores_last_state(self) -> bool:
        return self.bootstrap_truncated

    @property
    def exported_roles(self) -> tuple[str, ...]:
        policy = () if self.trains_only_critic else ("policy",)
        return (*policy, "critic") if self.critic.export else policy

    def reason_to_stop(self, committed: Mapping[str, Any]) -> str:
        least = self.critic.warmup_explained_variance
        explained = committed.get("critic/explained_variance")
        if not self.trains_only_critic or least is None or explained is None or explained < least:
            return ""
        return f"the critic explains {explained:.3g} of the variance of returns (warmup_explained_variance {least:g})"

    @property
    def trial_overrides(self) -> dict[str, int]:
        return super().trial_overrides | {"critic.warmup_steps": min(1, self.critic.warmup_steps)}

    @model_validator(mode="before")
    @classmethod
    def _set_kl_penalty(cls, values: Any) -> Any:
        loss = values.get("loss", {}) if isinstance(values, Mapping) else {}
        if isinstance(loss, str):
            values = {**values, "loss": {"kind": loss}}
        values = with_defaults(values, {"loss": {"kl": {}}})
        # As a loss, k1 has an expected gradient of 0: the estimator is then the section's own default.
        kl = values["loss"]["kl"] if isinstance(values, Mapping) else {}
        in_loss = isinstance(kl, Mapping) and kl.get("where") == "loss"
        return with_defaults(values, {"loss": {"kl": {"coefficient": 0.01} if in_loss else _KL}})

    @field_validator("reward_clip")
    @classmethod
    def _check_clip(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and clip[0] >= clip[1]:
            raise ValueError(f"the lowest reward {clip[0]:g} must be less than the highest {clip[1]:g}")
        return clip

    @model_validator(mode="after")
    def _check_controller(self) -> Self:
        if self.kl_controller is not None and (self.loss.kl.coefficient == 0 or self.loss.kl.where != "reward"):
            raise ValueError(
                "kl_controller adapts the coefficient of a KL penalty in the reward: set loss.kl.where=reward and "
                "loss.kl.coefficient above 0, or leave it out"
            )
        if self.kl_controller is not None and 5 * self.kl_controller.horizon <= self.sequences_per_step:
            raise ValueError(
                f"kl_controller.horizon {self.kl_controller.horizon} is too short for {self.sequences_per_step} "
                "completions of a step (prompts_per_step x group_size): the coefficient could become 0 or negative; "
                f"set it above {self.sequences_per_step // 5}, better to several steps' completions"
            )
        return self

    @model_validator(mode="after")
    def _check_truncated(self) -> Self:
        if not self.bootstrap_truncated:
            return self
        penalised = any(isinstance(term, LengthPenalty) for term in self.reward.terms)
        for field, present in (
            ("the term of kind length in reward.terms", penalised),
            ("loss.mask_truncated", self.loss.mask_truncated),
        ):
            if present:
                raise ValueError(
                    f"bootstrap_truncated judges a truncated completion as if it continued, but {field} treats it as a "
                    "failure: leave one of the two out"
                )
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        warmup = self.critic.warmup_steps
        if warmup > self.steps or (warmup == self.steps and not self.exports):
            raise ValueError(
                f"critic.warmup_steps {warmup} leaves no step of {self.steps} in which the policy is trained: lower "
                "it, or raise steps. For a run that trains only the critic, set both to the same number, "
                "critic.export=true and checkpoint.export=true"
            )
        return self

    @model_validator(mode="after")
    def _check_kept_microbatches(self) -> Self:
        kept = self.critic.kept_microbatches
        if kept > 1 and (setting := self._obstacle_to_keeping(self.train_roles[1])):
            raise ValueError(f"critic.kept_microbatches {kept} has no effect with {setting}: leave one of the two out")
        return self
