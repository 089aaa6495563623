"""A rank among its peers: the communicators, and the only collectives that the trainer issues itself.

There are four: `gather` of one fixed vector per step, `gather_flat` of an adapter before weights leave, `gather_rows`
of one parameter during an export, and `agree` at the end of a checkpoint. All others are FSDP2's and, on a communicator
of their own, torch's checkpoint writer's.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from lockstep.train.shards import rows_of
from lockstep.watch import waits

RENDEZVOUS_S = 600.0
"""Bound of the meeting of all ranks: torch's import alone can take a minute on a loaded host."""


@dataclass(slots=True)
class Ranks:
    """This rank's place and its communicators."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 1800.0
    """Bound of one collective."""
    group: dist.ProcessGroup | None = None
    """Parameters, gradients, metrics; None where one rank on a CPU needs none."""
    storage: dist.ProcessGroup | None = None
    """gloo, for the checkpoint writer's thread alone, so that its collectives have an order of their own."""

    def gather(self, vector: Tensor, why: str) -> Tensor:
        """Every rank's `vector` as float64 `[world, values]` on the CPU, the same on all ranks."""
        if self.world == 1:
            return vector.detach().to("cpu", torch.float64)[None]
        mine = vector.detach().to(self.device, torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        self._finish(dist.all_gather(everyone, mine, group=self.group, async_op=True), "all_gather", why)
        return torch.stack(everyone).cpu()

    def gather_flat(self, flat: Tensor, why: str) -> Tensor:
        """Every rank's `flat` as `[world, values]` on the device, in its precision, the same on all ranks."""
        if self.world == 1:
            return flat[None]
        everyone = [torch.empty_like(flat) for _ in range(self.world)]
        self._finish(dist.all_gather(everyone, flat, group=self.group, async_op=True), "all_gather", why)
        return torch.stack(everyone)

    def gather_rows(self, local: Tensor, rows: int, why: str) -> Tensor | None:
        """On rank 0 the whole of a tensor that is sharded by rows, on the CPU; None elsewhere."""
        if self.world == 1:
            return local.detach().cpu()
        first, last = rows_of(0, self.world, rows)
        mine = local.new_zeros((last - first, *local.shape[1:]))
        mine[: local.shape[0]] = local.detach()
        parts = [torch.empty_like(mine) for _ in range(self.world)] if self.rank == 0 else None
        self._finish(dist.gather(mine, parts, dst=0, group=self.group, async_op=True), "gather", why)
        return None if parts is None else torch.cat([part.cpu() for part in parts])[:rows]

    def agree(self, good: bool, why: str) -> bool:
        """What rank 0 thinks, on all ranks; on the storage communicator, for the checkpoint writer's thread."""
        if self.world == 1:
            return good
        flag = torch.tensor([int(good)])
        self._finish(dist.broadcast(flag, 0, group=self.storage, async_op=True), "broadcast", why)
        return bool(flag.item())

    def leave(self) -> None:
        """Ends the communicators; what is in flight on them is lost."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _finish(self, work: dist.Work | None, operation: str, why: str) -> None:
        if work is None:
            raise RuntimeError(f"{operation} returned no work: rank {self.rank} is no member of its own communicator")
        waits.work(work, communicator="trainer", operation=operation, why=why, timeout_s=self.timeout_s)


def join(
    rank: int,
    world: int,
    device: torch.device,
    store: tuple[str, int] | None,
    prefix: str,
    timeout_s: float,
) -> Ranks:
    """Meets the other ranks at the store that the controller hosts.

    Args:
        store: host and port of a TCPStore that lives outside the ranks; needed from two ranks on.
        prefix: of all keys in it, unique per role and generation, so that a restarted role never meets its past.
        timeout_s: bound of one collective, on every communicator (`new_group` inherits none).

    Raises:
        ValueError: two or more ranks and no store.
        torch.distributed.DistStoreError: the others did not come.
    """
    if world == 1 and device.type == "cpu":
        return Ranks(device=device, timeout_s=timeout_s)
    if world > 1 and store is None:
        raise ValueError(f"{world} trainer ranks need a store to meet at; give store_host and store_port")
    bound = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with waits.waiting("rendezvous", f"{world} trainer ranks", f"rank {rank} joins {prefix}", RENDEZVOUS_S):
        meeting: Store = (
            HashStore() if store is None else TCPStore(*store, is_master=False, timeout=timedelta(seconds=RENDEZVOUS_S))
        )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(prefix, meeting),
            rank=rank,
            world_size=world,
            timeout=bound,
        )
        storage = dist.new_group(backend="gloo", timeout=bound, group_desc="checkpoint")
    return Ranks(rank, world, device, timeout_s, dist.group.WORLD, storage)
