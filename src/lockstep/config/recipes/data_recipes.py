"""The configs of recipes that train on data: fine-tuning, preferences, reward models."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.algorithm import BradleyTerry, CrossEntropy, PreferenceLoss
from lockstep.config.run_config import DataKind, RunConfig, ValidationConfig
from lockstep.config.section import with_defaults
from lockstep.config.serve_role import ReferenceConfig, ServeRole, check_reference, reference_roles
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
        return (*reference_roles(self, self.reference), *super().serve_roles)

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
        if self.precompute_ref_log_probs:
            _check_precomputed(self)
        check_preference(self, self.loss, self.reference, self.precompute_ref_log_probs)
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
        return with_defaults(values, {"trainer": {"optimizer": {"lr": 9e-6}}})

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


def check_preference(
    config: RunConfig, loss: PreferenceLoss, reference: ReferenceConfig | None, precomputed: bool = False
) -> None:
    """Checks that a loss of preferences suits the adapter and the reference.

    Args:
        precomputed: whether the reference's log-probabilities are computed once.
    """
    adapter = config.model.adapter
    if adapter is not None and adapter.lora_dropout:
        raise ValueError(
            f"model.adapter.lora_dropout {adapter.lora_dropout} would make the log-probabilities of the "
            "update differ from those that the loss is computed from: leave it out"
        )
    if reference is not None:
        without = f"loss.type {', '.join(loss.type)} has no reference"
        check_reference(config, reference, without, "choose another loss.type, such as sigmoid")
    if not loss.sync_ref_model:
        return
    others = {
        "model.adapter": (adapter is not None, "the reference is the model without the adapter"),
        "precompute_ref_log_probs": (precomputed, "the reference's log-probabilities are fixed"),
        "reference": (reference is not None, "its processes do not have the policy's weights"),
    }
    for field, (present, why) in others.items():
        if present:
            raise ValueError(
                f"loss.sync_ref_model moves the reference, but with {field} {why}: leave one of the two out"
            )


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


def _check_norm_length(aggregation: str, norm_length: int | None) -> None:
    if aggregation == "seq-mean-token-sum-norm" and norm_length is None:
        raise ValueError("loss.aggregation seq-mean-token-sum-norm needs loss.norm_length (a number of tokens)")
