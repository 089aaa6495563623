"""The recipes: each loop reads in one screen."""

from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.recipes.grpo import grpo
from lockstep.recipes.sft import sft
from lockstep.run.lifecycle import open_run
from lockstep.run.planning.prepare import PreparedRun


def train(prepared: PreparedRun) -> None:
    """Runs a prepared run's recipe to its end."""
    with open_run(prepared) as run:
        match run.config:
            case SFTConfig():
                sft(run, run.config)
            case GRPOConfig():
                grpo(run, run.config)
