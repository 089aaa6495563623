"""The configs of recipes that choose among sampled completions by their rewards, and learn from the chosen ones."""

from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.config.algorithm import CrossEntropy, PreferenceLoss
from lockstep.config.recipes.data_recipes import check_preference
from lockstep.config.recipes.rollout_recipes import RolloutRecipe
from lockstep.config.serve_role import ReferenceConfig, ServeRole, reference_roles


class OnlineDPOConfig(RolloutRecipe):
    """Learning from the best and the worst of several completions of the policy itself (online DPO, Guo et al. 2024).

    Log-probabilities are those at temperature 1, whatever `rollout.sampling.temperature` is, as in TRL. There is no
    ratio to the policy that generated, so any `rollout.max_staleness` is allowed."""

    recipe: Literal["online_dpo"]
    group_size: int = Field(2, ge=2)
    """Completions per prompt. The one with the highest reward and the one with the lowest are a pair."""
    loss: PreferenceLoss = PreferenceLoss()
    """As in `preference`, for every loss of pairs."""
    reference: ReferenceConfig | None = None
    """Processes for the reference model; the policy's ranks hold it when absent."""

    @property
    def objective(self) -> PreferenceLoss:
        return self.loss

    @property
    def sequences_per_step(self) -> int:
        return 2 * self.prompts_per_step

    @property
    def serve_roles(self) -> tuple[ServeRole, ...]:
        return (*reference_roles(self, self.reference), *super().serve_roles)

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.loss.unpaired:
            raise ValueError(
                f"loss.type {', '.join(self.loss.type)} learns from single completions with a label, but here the best "
                "and the worst completion of a prompt are a pair: choose a loss of pairs, such as sigmoid"
            )
        check_preference(self, self.loss, self.reference)
        return self


class RejectionSamplingConfig(RolloutRecipe):
    """Fine-tuning on the best of several completions of the policy itself (rejection sampling, Touvron et al. 2023,
    "Llama 2"; RAFT, Dong et al. 2023)."""

    recipe: Literal["rejection_sampling"]
    group_size: int = Field(8, gt=0)
    """Completions per prompt; 1 only with `min_reward`."""
    best_k: int = Field(1, gt=0)
    """How many completions of each prompt are learned: those with the highest rewards."""
    min_reward: float | None = None
    """Completions with a lower reward are never learned."""
    mask_truncated: bool = False
    """Completions that were cut at `max_tokens` are never learned."""
    loss: CrossEntropy = CrossEntropy()

    @property
    def objective(self) -> CrossEntropy:
        return self.loss

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.best_k

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.best_k > self.group_size:
            raise ValueError(
                f"best_k {self.best_k} is more than the {self.group_size} completions of a prompt (group_size)"
            )
        if self.best_k == self.group_size and self.min_reward is None:
            raise ValueError(
                f"best_k {self.best_k} of group_size {self.group_size} learns every completion, whatever its reward: "
                "raise group_size, lower best_k, or set min_reward"
            )
        return self
