"""The configs of recipes that train on sampled completions and their rewards: what all of them have, and GRPO's."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.config.algorithm import Advantage, AnyPolicyLoss, FilterGroups, GRPOAdvantage, PolicyLoss, PPOClip
from lockstep.config.reward import EnvironmentReward, RewardConfig, TaskReward
from lockstep.config.rollout import SamplingConfig
from lockstep.config.run_config import DataKind, Generation, RunConfig
from lockstep.config.serve_role import ReferenceConfig, ServeRole, check_reference, reference_roles
from lockstep.config.train_role import TrainRole


class RolloutRecipe(RunConfig):
    """The fields of recipes that train on sampled completions."""

    prompts_per_step: int = Field(32, gt=0)
    group_size: int = Field(8, gt=0)
    """Completions per prompt."""
    epochs: int = Field(1, gt=0)
    """Passes over a step's rollouts."""
    minibatch_size: int | None = Field(None, gt=0)
    """Completions per optimizer step; all of the step's when absent. A multiple of `group_size`."""
    filter_groups: FilterGroups = FilterGroups()
    reward: RewardConfig

    @property
    def completions_per_step(self) -> int:
        """Completions that engines generate for a step."""
        return self.prompts_per_step * self.group_size

    @property
    def sequences_per_step(self) -> int:
        return self.completions_per_step

    def passes_of(self, role: TrainRole) -> int:
        return self.epochs

    @property
    def updates_per_step(self) -> int:
        return self.epochs * (self.completions_per_step // (self.minibatch_size or self.completions_per_step))

    @property
    def data_kind(self) -> DataKind:
        return "prompts"

    @property
    def generation(self) -> Generation:
        return Generation(self.prompts_per_step, self.group_size, self.filter_groups)

    @property
    def trial_overrides(self) -> dict[str, int]:
        prompts = {"prompts_per_step": max(2, self.trainer.ranks)}
        minibatch = {"minibatch_size": self.group_size} if self.minibatch_size else {}
        tokens = min(16, self.rollout.sampling.max_tokens)
        return prompts | minibatch | {"rollout.sampling.max_tokens": tokens}

    @model_validator(mode="after")
    def _check_rollouts(self) -> Self:
        total, size = self.completions_per_step, self.minibatch_size
        if size is not None and (size % self.group_size or total % size):
            raise ValueError(
                f"minibatch_size {size} must be a multiple of group_size {self.group_size} and divide the "
                f"{total} completions of a step (prompts_per_step x group_size)"
            )
        longest = self.rollout.sampling.max_tokens + 1
        if self.token_budget < longest:
            raise ValueError(
                f"token_budget {self.token_budget} does not hold one sample: rollout.sampling.max_tokens "
                f"{longest - 1} and at least one prompt token need {longest}"
            )
        if self.model.max_length is not None and self.model.max_length < longest:
            raise ValueError(
                f"model.max_length {self.model.max_length} leaves no room for a prompt in addition to "
                f"rollout.sampling.max_tokens {longest - 1}"
            )
        if self.group_size == 1 and self.filter_groups.enable:
            raise ValueError(
                "filter_groups.enable with group_size 1: the rewards in a group of one never differ, so that every "
                "group would be filtered out. Set group_size to 2 or more"
            )
        if self.rollout.sampling.temperature == 0:
            raise ValueError(
                "with rollout.sampling.temperature 0 all completions of a group are the same, and training needs their "
                "differences: set it above 0 (evaluation.sampling may be greedy)"
            )
        _check_conversations(self)
        for role in self.train_roles:
            alone = len(self.device_set(role.name)) == 1
            if self.rollout.max_staleness and role.trainer.offload.anything and alone:
                raise ValueError(
                    f"{role.field('trainer.offload')} frees the GPU for engines while the trainer is idle, but with "
                    "rollout.max_staleness they generate while it trains: leave one of the two out"
                )
        others = [each.kind for each in self.data.sources if each.kind != "reasoning_gym"]
        if others and any(isinstance(term, TaskReward) for term in self.reward.terms):
            raise ValueError(f"reward.terms has kind task, but data.kind is {others[0]}, not reasoning_gym")
        return self


class PolicyGradientRecipe(RolloutRecipe):
    """The fields of recipes that weigh the tokens of completions with advantages."""

    loss: AnyPolicyLoss = PPOClip()
    reference: ReferenceConfig | None = None
    """Processes for the reference model of `loss.kl`; the policy's ranks hold it when absent."""

    @property
    def objective(self) -> PolicyLoss:
        return self.loss

    @property
    def serve_roles(self) -> tuple[ServeRole, ...]:
        return (*reference_roles(self, self.reference), *super().serve_roles)

    @property
    def train_temperature(self) -> float:
        """That of sampling, so that the ratio compares the distribution that was sampled from."""
        return self.rollout.sampling.temperature

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        _check_truncation(self.rollout.sampling, self.loss)
        _check_staleness(self.rollout.max_staleness, self.loss)
        if self.reference is not None:
            check_reference(self, self.reference, "loss.kl.coefficient is 0", "set loss.kl.coefficient above 0")
        return self


class GRPOConfig(PolicyGradientRecipe):
    """Group relative policy optimisation with verifiable or learned rewards."""

    recipe: Literal["grpo"]
    group_size: int = Field(8, gt=0)
    """Completions per prompt; 1 only with the advantage `reinforce_plus_plus`, whose baseline is the mean reward of the
    whole step."""
    advantage: Advantage = GRPOAdvantage()

    @model_validator(mode="after")
    def _check_baseline(self) -> Self:
        if self.group_size == 1 and self.advantage.kind != "reinforce_plus_plus":
            raise ValueError(
                f"group_size 1 with advantage {self.advantage.kind}, which compares the completions of a group: set "
                "group_size to 2 or more, or advantage.kind=reinforce_plus_plus"
            )
        return self


def _check_truncation(sampling: SamplingConfig, loss: PolicyLoss) -> None:
    """Checks that the sampling settings suit the importance ratio."""
    chosen = {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p")}
    defaults = SamplingConfig.model_fields
    truncations = {name: value for name, value in chosen.items() if value != defaults[name].default}
    if truncations and loss.old_logprobs == "engine":
        named = " and ".join(f"rollout.sampling.{name} {value}" for name, value in truncations.items())
        raise ValueError(
            f"with {named} the engine's log-probabilities are normalised over the tokens that sampling keeps, "
            "the trainer's over all tokens: ratios would start below 1, and whole updates would be clipped. "
            "Set loss.old_logprobs=trainer"
        )


def _check_conversations(config: RolloutRecipe) -> None:
    """Checks that conversations, their rewards and the groups are consistent."""
    environment = config.rollout.environment
    if environment is None:
        if any(isinstance(term, EnvironmentReward) for term in config.reward.terms):
            raise ValueError("reward.terms has kind environment, but there is no rollout.environment that gives it")
        return
    paths = math.prod(environment.branches)
    if config.group_size % paths:
        raise ValueError(
            f"rollout.environment.branches {list(environment.branches)} makes {paths} conversations, which does not "
            f"divide group_size {config.group_size}"
        )


def _check_staleness(max_staleness: int, loss: PolicyLoss) -> None:
    """Checks that the loss accounts for tokens of older weights."""
    if max_staleness and loss.old_logprobs == "trainer" and loss.importance.kind == "off":
        raise ValueError(
            f"rollout.max_staleness {max_staleness} with loss.old_logprobs trainer treats tokens of older weights as "
            "tokens of the newest: set loss.old_logprobs=engine (the importance ratio then corrects "
            "for the older weights), or loss.importance.kind=truncate or mask"
        )
