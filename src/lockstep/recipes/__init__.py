"""The recipes: each loop reads in one screen."""

from collections.abc import Callable
from typing import Any

from lockstep.config.recipes import (
    GRPOConfig,
    OnlineDPOConfig,
    PPOConfig,
    PreferenceConfig,
    RejectionSamplingConfig,
    RewardModelConfig,
    SFTConfig,
)
from lockstep.config.run_config import RunConfig
from lockstep.recipes.grpo import grpo
from lockstep.recipes.online_dpo import online_dpo
from lockstep.recipes.ppo import ppo
from lockstep.recipes.preference import preference
from lockstep.recipes.rejection_sampling import rejection_sampling
from lockstep.recipes.reward_model import reward_model
from lockstep.recipes.sft import sft
from lockstep.run.lifecycle import open_run
from lockstep.run.planning.prepare import PreparedRun
from lockstep.run.run import Run

LOOPS: dict[type[RunConfig], Callable[[Run, Any], None]] = {
    SFTConfig: sft,
    GRPOConfig: grpo,
    PPOConfig: ppo,
    OnlineDPOConfig: online_dpo,
    RejectionSamplingConfig: rejection_sampling,
    PreferenceConfig: preference,
    RewardModelConfig: reward_model,
}
"""The loop of each recipe, by its config class."""


def train(prepared: PreparedRun) -> None:
    """Runs a prepared run's recipe to its end."""
    with open_run(prepared) as run:
        LOOPS[type(run.config)](run, run.config)
