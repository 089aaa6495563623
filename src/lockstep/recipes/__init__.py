"""The recipes: each loop reads in one screen."""

from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.recipes.grpo import grpo
from lockstep.recipes.sft import sft
from lockstep.run.open import open_run
from lockstep.run.prepare import Prepared


def train(prepared: Prepared) -> None:
    """Runs a prepared run's recipe to its end."""
    with open_run(prepared) as run:
        match run.config:
            case SFTConfig():
                sft(run, run.config)
            case GRPOConfig():
                grpo(run, run.config)
