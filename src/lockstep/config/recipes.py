"""One config class per recipe, chosen by the field `recipe`."""

from typing import Annotated, Literal

from pydantic import Field

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


Config = Annotated[SFTConfig | GRPOConfig, Field(discriminator="recipe")]
