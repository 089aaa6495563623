"""A rank among its peers: the communicators, and the only collectives that the trainer issues itself.

There are five: `gather` of one fixed vector per step, `gather_flat` of an adapter before weights leave, `gather_bucket`
of some weights on their way from device to device, `gather_rows` of one parameter during an export, and `agree` at the
end of a checkpoint. All others are FSDP2's and, on a communicator
of their own, torch's checkpoint writer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from lockstep.train.bringup import Fallback, choose_backend, measure, nccl_trial
from lockstep.train.rendezvous import meet
from lockstep.train.shards import rows_of
from lockstep.watch import recorder, waits

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
    replicas: int = 1
    """Copies of the sharded parameters (HSDP); the ranks of a copy are neighbours."""
    copy: dist.ProcessGroup | None = None
    """The ranks of this rank's copy; None at one, where it is `group`."""
    across: dist.ProcessGroup | None = None
    """The ranks that hold the same rows in every copy."""
    copy_storage: dist.ProcessGroup | None = None
    """The ranks of `copy` by gloo, for the places of tensors in checkpoints."""
    slower: str = ""
    """Why its collectives run on gloo where NCCL was due, and what they cost; empty where they do not."""

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the parameters is sharded."""
        return self.world // self.replicas

    @property
    def replica(self) -> int:
        """Which copy this rank holds a part of."""
        return self.rank // self.shards

    def rows(self, count: int) -> tuple[int, int]:
        """First and last (exclusive) row that this rank holds of a parameter of so many rows."""
        return rows_of(self.rank % self.shards, self.shards, count)

    def mesh(self) -> DeviceMesh:
        """Of FSDP2: `[ranks]`, with several copies `[copies, ranks of one]`."""
        if self.group is None:
            raise RuntimeError("one rank on a CPU has no communicator")
        if self.replicas == 1:
            return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("fsdp",))
        if self.copy is None or self.across is None:
            raise RuntimeError(f"rank {self.rank} has no communicators of its copy; it must come from join()")
        places = torch.arange(self.world).view(self.replicas, self.shards)
        names = ("replicas", "fsdp")
        return DeviceMesh.from_group([self.across, self.copy], self.device.type, mesh=places, mesh_dim_names=names)

    def gather(self, vector: Tensor, why: str) -> Tensor:
        """Every rank's `vector` as float64 `[world, values]` on the CPU, the same on all ranks."""
        if self.world == 1:
            return vector.detach().to("cpu", torch.float64)[None]
        mine = vector.detach().to(self.device, torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        self._finish(dist.all_gather(everyone, mine, group=self.group, async_op=True), "all_gather", why)
        return torch.stack(everyone).cpu()

    def gather_flat(self, flat: Tensor, why: str) -> Tensor:
        """The `flat` of every rank of this copy as `[shards, values]` on the device, in its precision."""
        if self.world == 1:
            return flat[None]
        everyone = [torch.empty_like(flat) for _ in range(self.shards)]
        self._finish(dist.all_gather(everyone, flat, group=self.copy or self.group, async_op=True), "all_gather", why)
        return torch.stack(everyone)

    def gather_bucket(self, flat: Tensor, everyone: bool, why: str) -> list[Tensor] | None:
        """The `flat` of every rank of this copy, in their order: on each, or on the first alone (None elsewhere)."""
        group = self.copy or self.group
        keeps = everyone or self.rank % self.shards == 0
        parts = [torch.empty_like(flat) for _ in range(self.shards)] if keeps else None
        if everyone:
            self._finish(dist.all_gather(parts, flat, group=group, async_op=True), "all_gather", why)
        else:
            self._finish(dist.gather(flat, parts, group=group, group_dst=0, async_op=True), "gather", why)
        return parts

    def gather_rows(self, local: Tensor, rows: int, why: str) -> Tensor | None:
        """On rank 0 the whole of a tensor that is sharded by rows, on the CPU; None elsewhere. One copy gathers."""
        if self.world == 1:
            return local.detach().cpu()
        if self.replica:
            return None
        first, last = rows_of(0, self.shards, rows)
        mine = local.new_zeros((last - first, *local.shape[1:]))
        mine[: local.shape[0]] = local.detach()
        parts = [torch.empty_like(mine) for _ in range(self.shards)] if self.rank == 0 else None
        work = dist.gather(mine, parts, dst=0, group=self.copy or self.group, async_op=True)
        self._finish(work, "gather", why)
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
    replicas: int = 1,
    fallback: Fallback = "none",
    names: Sequence[str] = (),
) -> Ranks:
    """Meets the other ranks at the store that the controller hosts.

    From here on what this process does on communicators is recorded, and a collective that does not fit what a peer on
    this host has entered is refused (CollectiveRefused).

    Args:
        store: host and port of a TCPStore that lives outside the ranks; needed from two ranks on.
        prefix: of all keys in it, unique per role and generation, so that a restarted role never meets its past.
        timeout_s: bound of one collective, on every communicator (`new_group` inherits none).
        replicas: copies of the sharded parameters.
        fallback: what ranks on GPUs go on with where NCCL cannot be brought up by all of them.
        names: of all ranks, with their nodes, for who is told that some are missing.

    Raises:
        ValueError: two or more ranks and no store.
        NcclUnusable: and there is no fallback.
        RanksMissing: others did not come; which.
        torch.distributed.DistStoreError: the store cannot be reached.
    """
    if world == 1 and device.type == "cpu":
        return Ranks(device=device, timeout_s=timeout_s)
    if world > 1 and store is None:
        raise ValueError(f"{world} trainer ranks need a store to meet at; give store_host and store_port")
    recorder.install(refuse=True, links=True, scope=prefix)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with waits.waiting("rendezvous", f"{world} trainer ranks", f"rank {rank} joins {prefix}", RENDEZVOUS_S):
        meeting: Store = (
            HashStore() if store is None else TCPStore(*store, is_master=False, timeout=timedelta(seconds=RENDEZVOUS_S))
        )
        names = names or [f"rank {each}" for each in range(world)]
        meet(PrefixStore(f"{prefix}/meeting", meeting), rank, world, names, RENDEZVOUS_S)
        backend, slower = _backend(PrefixStore(f"{prefix}/backend", meeting), rank, world, device, fallback)
        bound, own = timedelta(seconds=timeout_s), PrefixStore(prefix, meeting)
        dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=bound)
        storage = dist.new_group(backend="gloo", timeout=bound, group_desc="checkpoint")
    ranks = Ranks(rank, world, device, timeout_s, dist.group.WORLD, storage, replicas)
    if slower:
        assert ranks.group is not None
        ranks.slower = (
            f"{slower}. The trainer's collectives run on gloo: {measure(ranks.group, world, device, timeout_s)}"
        )
    if replicas > 1:
        _part(ranks, bound)
    return ranks


def _backend(table: Store, rank: int, world: int, device: torch.device, fallback: Fallback) -> tuple[str, str]:
    """Of the ranks' communicators, and why its collectives are slower than they should be, empty where they are not.
    Every rank gets the same."""
    if device.type != "cuda":
        return "gloo", ""
    own: Store = table.clone()  # type: ignore[attr-defined]  # a trial that hangs holds its client's lock
    found, slower = choose_backend(table, rank, world, lambda: nccl_trial(own, rank, world, device), fallback)
    return ("cpu:gloo,cuda:nccl" if found == "nccl" else "cpu:gloo,cuda:gloo"), slower


def _part(ranks: Ranks, bound: timedelta) -> None:
    """Makes the communicators within and across copies."""
    places = torch.arange(ranks.world).view(ranks.replicas, ranks.shards)
    ranks.copy = _mine(places.tolist(), ranks.rank, bound, "copy")
    ranks.across = _mine(places.T.tolist(), ranks.rank, bound, "across copies")
    ranks.copy_storage = _mine(places.tolist(), ranks.rank, bound, "checkpoint of a copy", "gloo")


def _mine(
    members: list[list[int]], rank: int, bound: timedelta, name: str, backend: str | None = None
) -> dist.ProcessGroup | None:
    """The one of several disjoint communicators that this rank is in; every rank makes all of them."""
    mine: dist.ProcessGroup | None = None
    for each in members:
        made = dist.new_group(each, timeout=bound, backend=backend, group_desc=name)
        mine = made if rank in each else mine
    return mine
