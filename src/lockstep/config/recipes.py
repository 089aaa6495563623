"""One config class per recipe, chosen by the field `recipe`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.algorithm import Advantage, CrossEntropy, GRPOAdvantage, PolicyLoss
from lockstep.config.reward import Reward
from lockstep.config.run import RunConfig


class SFTConfig(RunConfig):
    """Supervised fine-tuning on documents, prompt-completion pairs or conversations."""

    recipe: Literal["sft"]
    batch_size: int = Field(32, gt=0)
    """Samples per optimizer step, over all ranks."""
    loss: CrossEntropy = CrossEntropy()
    train_on_prompt: bool = False
    """Also learn the tokens of prompts and of user turns."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _needs_norm_length(self.loss.aggregation, self.loss.norm_length)
        return self


class GRPOConfig(RunConfig):
    """Group relative policy optimisation with verifiable or learned rewards."""

    recipe: Literal["grpo"]
    prompts_per_step: int = Field(32, gt=0)
    group_size: int = Field(8, gt=1)
    epochs: int = Field(1, gt=0)
    """Passes over a step's rollouts."""
    minibatch_size: int | None = Field(None, gt=0)
    """Completions per optimizer step; all of the step's when absent. A multiple of `group_size`."""
    advantage: Advantage = GRPOAdvantage()
    loss: PolicyLoss = PolicyLoss()
    reward: Reward

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @model_validator(mode="after")
    def _consistent(self) -> Self:
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
                f"model.max_length {self.model.max_length} leaves no room for a prompt beside "
                f"rollout.sampling.max_tokens {longest - 1}"
            )
        return self


def _needs_norm_length(aggregation: str, norm_length: int | None) -> None:
    if aggregation == "seq-mean-token-sum-norm" and norm_length is None:
        raise ValueError("loss.aggregation seq-mean-token-sum-norm needs loss.norm_length (a number of tokens)")


Config = Annotated[SFTConfig | GRPOConfig, Field(discriminator="recipe")]
