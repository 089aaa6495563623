"""One config class per recipe, chosen by the field `recipe`.

A recipe's class says by the properties of `RunConfig` what a run of it needs: its trained models, its data, and what
engines generate. Nothing outside this folder and the recipe's loop knows a recipe by name.
"""

from lockstep.config.recipes.data_recipes import PreferenceConfig, RewardModelConfig, SFTConfig
from lockstep.config.recipes.online_recipes import OnlineDPOConfig, RejectionSamplingConfig
from lockstep.config.recipes.ppo_recipe import PPOConfig
from lockstep.config.recipes.rollout_recipes import GRPOConfig
from lockstep.config.run_config import RunConfig

__all__ = [
    "RECIPES", "GRPOConfig", "OnlineDPOConfig", "PPOConfig", "PreferenceConfig", "RejectionSamplingConfig",
    "RewardModelConfig", "SFTConfig",
]  # fmt: skip

RECIPES: dict[str, type[RunConfig]] = {
    "sft": SFTConfig, "grpo": GRPOConfig, "ppo": PPOConfig, "online_dpo": OnlineDPOConfig,
    "rejection_sampling": RejectionSamplingConfig, "preference": PreferenceConfig, "reward": RewardModelConfig,
}  # fmt: skip
"""The config class of each recipe, by the value of `recipe`."""
