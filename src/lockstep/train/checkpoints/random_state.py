"""The state of a rank's random number generators, as checkpoints have it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.train.distributed import ParallelContext


def random_state(ranks: ParallelContext) -> dict[str, Tensor]:
    """Returns the state of this rank's generators, under names that no other rank uses."""
    state = {f"random.cpu.{ranks.rank}": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state[f"random.cuda.{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return state


def set_random_state(state: Mapping[str, Tensor], ranks: ParallelContext) -> None:
    """Restores what `random_state` returned."""
    torch.set_rng_state(state[f"random.cpu.{ranks.rank}"])
    if ranks.device.type == "cuda":
        torch.cuda.set_rng_state(state[f"random.cuda.{ranks.rank}"], ranks.device)
