"""A service for ranks with a gloo collective, in which one rank may end its process."""

import os
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from lockstep.cluster.rendezvous_store import open_store


class Ring:
    """A rank of a communicator."""

    def __init__(self, rank: int, world: int, store: str, prefix: str = "ring") -> None:
        bound = timedelta(seconds=60)
        dist.init_process_group(
            "gloo", store=open_store(store, prefix, 60.0), rank=rank, world_size=world, timeout=bound
        )
        self.rank = rank

    def meet(self, times: int, leaves: int = -1) -> float:
        """Sum over the ranks `times` times; rank `leaves` ends its process half-way."""
        total = torch.ones(1)
        for turn in range(times):
            if self.rank == leaves and turn == times // 2:
                os._exit(3)
            dist.all_reduce(total)
        return float(total)

    def listens(self) -> list[str]:
        """The addresses on which this process listens."""
        connections = psutil.Process().net_connections("inet")
        return sorted({found.laddr.ip for found in connections if found.status == psutil.CONN_LISTEN})
