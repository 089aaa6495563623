"""One config class per recipe, chosen by the field `recipe`.

A recipe's class says by the properties of `RunConfig` what a run of it needs: its trained models, its data, and what
engines generate. Nothing outside this file and the recipe's loop knows a recipe by name.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.algorithm import (
    Advantage,
    AnyPolicyLoss,
    BradleyTerry,
    CrossEntropy,
    FilterGroups,
    GRPOAdvantage,
    PolicyLoss,
    PPOClip,
    PreferenceLoss,
)
from lockstep.config.reward import EnvironmentReward, RewardConfig, TaskReward
from lockstep.config.rollout import SamplingConfig
from lockstep.config.run_config import DataKind, Generation, RunConfig, ValidationConfig
from lockstep.config.serve_role import ReferenceConfig, ServeRole, check_reference, reference_role
from lockstep.config.trainer import TrainerConfig


class SFTConfig(RunConfig):
    """Supervised fine-tuning on documents, prompt-completion pairs or conversations."""

    recipe: Literal["sft"]
    batch_size: int = Field(32, gt=0)
    """Samples per optimizer step, over all ranks."""
    loss: CrossEntropy = CrossEntropy()
    train_on_prompt: bool = False
    """Also train on the tokens of prompts and user turns."""
    validation: ValidationConfig | None = None

    @property
    def held_out_samples(self) -> ValidationConfig | None:
        return self.validation

    @property
    def objective(self) -> CrossEntropy:
        return self.loss

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size

    @property
    def learns_prompts(self) -> bool:
        return self.train_on_prompt

    @property
    def trial_overrides(self) -> dict[str, int]:
        held_out = {} if self.validation is None else {"validation.samples": 2}
        return {"batch_size": min(self.batch_size, 2 * self.trainer.ranks)} | held_out

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        _check_norm_length(self.loss.aggregation, self.loss.norm_length)
        if self.rollout.max_staleness:
            raise ValueError("rollout.max_staleness applies to recipes with rollouts only: leave it out")
        return self


class GRPOConfig(RunConfig):
    """Group relative policy optimisation with verifiable or learned rewards."""

    recipe: Literal["grpo"]
    prompts_per_step: int = Field(32, gt=0)
    group_size: int = Field(8, gt=0)
    """Completions per prompt; 1 only with the advantage `reinforce_plus_plus`, whose baseline is the mean reward of the
    whole step."""
    epochs: int = Field(1, gt=0)
    """Passes over a step's rollouts."""
    minibatch_size: int | None = Field(None, gt=0)
    """Completions per optimizer step; all of the step's when absent. A multiple of `group_size`."""
    advantage: Advantage = GRPOAdvantage()
    filter_groups: FilterGroups = FilterGroups()
    loss: AnyPolicyLoss = PPOClip()
    reference: ReferenceConfig | None = None
    """Processes for the reference model of `loss.kl`; the policy's ranks hold it when absent."""
    reward: RewardConfig

    @property
    def objective(self) -> PolicyLoss:
        return self.loss

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def epochs_per_step(self) -> int:
        return self.epochs

    @property
    def updates_per_step(self) -> int:
        return self.epochs * (self.sequences_per_step // (self.minibatch_size or self.sequences_per_step))

    @property
    def data_kind(self) -> DataKind:
        return "prompts"

    @property
    def generation(self) -> Generation:
        return Generation(self.prompts_per_step, self.group_size, self.filter_groups)

    @property
    def serve_roles(self) -> tuple[ServeRole, ...]:
        references = () if self.reference is None else (reference_role(self, self.reference),)
        return (*references, *super().serve_roles)

    @property
    def train_temperature(self) -> float:
        """That of sampling, so that the ratio compares the distribution that was sampled from."""
        return self.rollout.sampling.temperature

    @property
    def trial_overrides(self) -> dict[str, int]:
        prompts = {"prompts_per_step": max(2, self.trainer.ranks)}
        minibatch = {"minibatch_size": self.group_size} if self.minibatch_size else {}
        tokens = min(16, self.rollout.sampling.max_tokens)
        return prompts | minibatch | {"rollout.sampling.max_tokens": tokens}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        total, size = self.sequences_per_step, self.minibatch_size
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
        if self.group_size == 1 and self.advantage.kind != "reinforce_plus_plus":
            raise ValueError(
                f"group_size 1 with advantage {self.advantage.kind}, which compares the completions of a group: set "
                "group_size to 2 or more, or advantage.kind=reinforce_plus_plus"
            )
        if self.group_size == 1 and self.filter_groups.enable:
            raise ValueError(
                "filter_groups.enable with group_size 1: the rewards in a group of one never differ, so that every "
                "group would be filtered out. Set group_size to 2 or more"
            )
        _check_sampling(self.rollout.sampling, self.loss)
        _check_conversations(self)
        _check_staleness(self.rollout.max_staleness, self.loss)
        if self.rollout.max_staleness and self.trainer.offload.anything:
            raise ValueError(
                "trainer.offload frees the GPU for engines while the trainer is idle, but with rollout.max_staleness "
                "they generate while it trains: leave one of the two out"
            )
        if self.reference is not None:
            check_reference(self, self.reference, "loss.kl.coefficient is 0", "set loss.kl.coefficient above 0")
        others = [each.kind for each in self.data.sources if each.kind != "reasoning_gym"]
        if others and any(isinstance(term, TaskReward) for term in self.reward.terms):
            raise ValueError(f"reward.terms has kind task, but data.kind is {others[0]}, not reasoning_gym")
        return self


class PreferenceConfig(RunConfig):
    """Learning from pairs of a better and a worse completion (DPO, IPO, SimPO, ORPO and their relatives), or from
    completions with a label (KTO)."""

    recipe: Literal["preference"]
    batch_size: int = Field(32, gt=0)
    """Pairs, or completions with a label, per optimizer step, over all ranks."""
    loss: PreferenceLoss = PreferenceLoss()
    reference: ReferenceConfig | None = None
    """Processes for the reference model; the policy's ranks hold it when absent."""
    precompute_ref_log_probs: bool = False
    """Compute the reference's log-probabilities of all data once, before the first step, and keep them in the run's
    folder. No reference model is in memory then."""

    @property
    def objective(self) -> PreferenceLoss:
        return self.loss

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size if self.loss.unpaired else 2 * self.batch_size

    @property
    def data_kind(self) -> DataKind:
        return "labelled" if self.loss.unpaired else "pairs"

    @property
    def serve_roles(self) -> tuple[ServeRole, ...]:
        references = () if self.reference is None else (reference_role(self, self.reference),)
        return (*references, *super().serve_roles)

    @property
    def precomputed_fields(self) -> tuple[str, ...]:
        return ("reference_logprob",) if self.precompute_ref_log_probs else ()

    @property
    def trial_overrides(self) -> dict[str, int]:
        return {"batch_size": min(self.batch_size, max(2, self.trainer.ranks))}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.rollout.max_staleness:
            raise ValueError("rollout.max_staleness applies to recipes with rollouts only: leave it out")
        if "kto" in self.loss.type and self.batch_size < 2:
            raise ValueError(
                "batch_size 1: kto compares completions with those of other prompts, so set it to 2 or more"
            )
        if self.model.adapter is not None and self.model.adapter.lora_dropout:
            raise ValueError(
                f"model.adapter.lora_dropout {self.model.adapter.lora_dropout} would make the log-probabilities of the "
                "update differ from those that the loss is computed from: leave it out"
            )
        if self.reference is not None:
            without = f"loss.type {', '.join(self.loss.type)} has no reference"
            check_reference(self, self.reference, without, "choose another loss.type, such as sigmoid")
        if self.precompute_ref_log_probs:
            _check_precomputed(self)
        if self.loss.sync_ref_model:
            _check_moving_reference(self)
        return self


class RewardModelConfig(RunConfig):
    """Training of a reward model: the better completion of each pair gets the higher score (Ouyang et al. 2022)."""

    recipe: Literal["reward"]
    trainer: TrainerConfig = TrainerConfig()
    """As in other recipes, with a learning rate of 9e-6 (OpenRLHF's) where none is given."""
    batch_size: int = Field(32, gt=0)
    """Pairs per optimizer step, over all ranks."""
    loss: BradleyTerry = BradleyTerry()
    validation: ValidationConfig | None = None
    """The loss and the accuracy on held-out pairs, as `eval/loss` and `eval/accuracy`."""

    head: ClassVar[Literal["vocabulary", "score"]] = "score"

    @property
    def objective(self) -> BradleyTerry:
        return self.loss

    @property
    def sequences_per_step(self) -> int:
        return 2 * self.batch_size

    @property
    def data_kind(self) -> DataKind:
        return "pairs"

    @property
    def reads_margins(self) -> bool:
        return self.loss.use_margin

    @property
    def held_out_samples(self) -> ValidationConfig | None:
        return self.validation

    @property
    def validation_metrics(self) -> tuple[str, ...]:
        names = "loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "mean_reward", "std_reward"
        return tuple(f"eval/{name}" for name in names)

    @property
    def trial_overrides(self) -> dict[str, int]:
        held_out = {} if self.validation is None else {"validation.samples": 2}
        return {"batch_size": min(self.batch_size, max(2, self.trainer.ranks))} | held_out

    @model_validator(mode="before")
    @classmethod
    def _set_learning_rate(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("trainer", {}), Mapping):
            return values
        trainer = values.get("trainer", {})
        optimizer = trainer.get("optimizer", {})
        if not isinstance(optimizer, Mapping):
            return values
        return {**values, "trainer": {**trainer, "optimizer": {"lr": 9e-6, **optimizer}}}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.model.adapter is not None and self.model.adapter.lora_dropout:
            raise ValueError(
                f"model.adapter.lora_dropout {self.model.adapter.lora_dropout} would make the scores of the update "
                "differ from those that the loss of divided pairs is computed from: leave it out"
            )
        if self.evaluation is not None:
            raise ValueError("evaluation samples completions, and a reward model gives scores: use validation")
        if self.reward is not None:
            raise ValueError("reward is for recipes that score completions: leave it out")
        if self.rollout.max_staleness:
            raise ValueError("rollout.max_staleness applies to recipes with rollouts only: leave it out")
        return self


def _check_precomputed(config: PreferenceConfig) -> None:
    """Checks that the reference's log-probabilities can be computed once."""
    loss = config.loss
    if not loss.needs_reference:
        raise ValueError(
            f"precompute_ref_log_probs with loss.type {', '.join(loss.type)}, which has no reference: leave it out"
        )
    if "kto" in loss.type:
        raise ValueError(
            "precompute_ref_log_probs with loss.type kto, which compares each prompt with a completion of another "
            "sample of its step: these pairs depend on batch_size, and those of later steps could not be computed once "
            "the policy is trained. Leave it out (reference keeps the reference out of the policy's ranks), or set "
            "loss.type=apo_zero_unpaired"
        )
    if config.reference is not None:
        raise ValueError(
            "precompute_ref_log_probs takes the reference's log-probabilities from the policy's ranks before the first "
            "step, so that reference has nothing to compute: leave reference out, or, to compare with another model "
            "(reference.path), leave precompute_ref_log_probs out"
        )


def _check_moving_reference(config: PreferenceConfig) -> None:
    """Checks that the policy's ranks hold a copy of the reference that can follow the policy."""
    others = {
        "model.adapter": (config.model.adapter is not None, "the reference is the model without the adapter"),
        "precompute_ref_log_probs": (config.precompute_ref_log_probs, "the reference's log-probabilities are fixed"),
        "reference": (config.reference is not None, "its processes do not have the policy's weights"),
    }
    for field, (present, why) in others.items():
        if present:
            raise ValueError(
                f"loss.sync_ref_model moves the reference, but with {field} {why}: leave one of the two out"
            )


def _check_sampling(sampling: SamplingConfig, loss: PolicyLoss) -> None:
    """Checks that the sampling settings suit training and the importance ratio."""
    if sampling.temperature == 0:
        raise ValueError(
            "with rollout.sampling.temperature 0 all completions of a group are the same, and training needs their "
            "differences: set it above 0 (evaluation.sampling may be greedy)"
        )
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


def _check_conversations(config: GRPOConfig) -> None:
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


def _check_norm_length(aggregation: str, norm_length: int | None) -> None:
    if aggregation == "seq-mean-token-sum-norm" and norm_length is None:
        raise ValueError("loss.aggregation seq-mean-token-sum-norm needs loss.norm_length (a number of tokens)")


RECIPES: dict[str, type[RunConfig]] = {
    "sft": SFTConfig, "grpo": GRPOConfig, "preference": PreferenceConfig, "reward": RewardModelConfig,
}  # fmt: skip
"""The config class of each recipe, by the value of `recipe`."""
