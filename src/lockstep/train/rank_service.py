"""What the worker processes of trained and served models have in common: each is one rank of a model."""

import os
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from lockstep.base.malloc import tune_malloc
from lockstep.base.text import count_noun
from lockstep.config.model import ModelConfig
from lockstep.config.trainer import CommunicationConfig
from lockstep.data.packing import PackingMode
from lockstep.models.packing_probe import PackingProbeResult
from lockstep.train.distributed import ParallelContext, join_ranks


class RankService:
    """A rank's number, device and threads, and its rendezvous with the other ranks of its role.

    Args:
        name: the role, the prefix of the store's keys.
        threads: torch threads; None for an even share of the cores.
        malloc: `tuned` sets malloc's parameters for tensors of changing size.
        rank, world: number of this rank, and number of all ranks of the role.
        store: URL of the store for the rendezvous of two or more ranks.
        device: `cpu`, `cuda` or `cuda:1`; `auto` uses a GPU if there is one.
        generation: generation of the run.
        restarts: number of earlier starts of this role in this generation; each start uses its own keys.
    """

    def __init__(
        self,
        name: str,
        threads: int | None,
        malloc: Literal["tuned", "default"],
        *,
        rank: int = 0,
        world: int = 1,
        store: str | None = None,
        device: str = "auto",
        generation: int = 1,
        restarts: int = 0,
    ) -> None:
        self.rank, self.world, self.generation, self.restarts = rank, world, generation, restarts
        self.store = store
        self.device = choose_device(device, rank)
        self._prefix = f"gen{generation}/{name}/{restarts}"
        if malloc == "tuned":
            tune_malloc()
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // world))

    def join(
        self, names: Sequence[str], timeout_s: float, communication: CommunicationConfig, replicas: int = 1
    ) -> ParallelContext:
        """Waits for the other ranks and creates the communicators; see `join_ranks`.

        Args:
            names: names and nodes of all ranks, to report which are missing.
        """
        return join_ranks(
            self.rank,
            self.world,
            self.device,
            self.store,
            prefix=self._prefix,
            timeout_s=timeout_s,
            replicas=replicas,
            fallback=communication.fallback,
            names=names,
        )


def choose_packing(
    model: ModelConfig, probe: Callable[[], PackingProbeResult], field: str = "model.packing"
) -> tuple[PackingMode, str]:
    """Returns the configured packing, or else the densest one that the model computes correctly, and the reason.

    Args:
        field: the field of the config that sets the packing.
    """
    if model.packing != "auto":
        return model.packing, f"set by {field}"
    probed = probe()
    return probed.mode, probed.reason


def choose_device(name: str, rank: int) -> torch.device:
    """Resolves a device name: `auto` is the rank's own GPU if the host has GPUs, else the CPU; `cuda` is the rank's
    own.

    Raises:
        ValueError: this host does not have that GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    index = rank % max(count, 1) if device.type == name else device.index
    if index >= count:
        raise ValueError(
            f"device {name!r} was requested for rank {rank}, but this host has {count_noun(count, 'GPU')}; set "
            "cluster.device"
        )
    return torch.device("cuda", index)
