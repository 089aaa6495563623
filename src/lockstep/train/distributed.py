"""A rank among its peers: the rendezvous of all trainer ranks, their communicators, and the collectives that the
trainer issues itself.

Rendezvous: each rank writes a key into the store. Rank 0 polls these keys, logs the missing ranks every second, and
writes one result for all: complete, or which ranks are missing. Its wait names the missing ranks too, so the controller
shows them.

There are five collectives: `gather` of one fixed vector per step, `gather_flat` of an adapter before weights leave,
`gather_bucket` of some weights on their way from device to device, `gather_rows` of one parameter during an export, and
`broadcast_flag` at the end of a checkpoint. All others are FSDP2's and, on a communicator of their own, torch's
checkpoint writer's.
"""

import json
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from lockstep.base import waits
from lockstep.base.text import summarize_list
from lockstep.base.wait_state import WaitTimeout, narrow_wait, track_wait
from lockstep.train.collective_backend import BackendFallback, choose_backend, measure_collectives, nccl_trial
from lockstep.watch.recorder import recorder

log = logging.getLogger(__name__)

MISSING_LOG_EVERY_S = 1.0
STORE_POLL_EVERY_S = 0.05
RESULT_MARGIN_S = 10.0
"""The other ranks wait this much longer than rank 0 for its result."""
_MAX_NAMES = 8
_MAX_BEACON_NAMES = 4
"""As many names fit in a beacon."""


class RanksMissing(RuntimeError):
    """Some ranks did not come to the rendezvous."""

    def __init__(self, missing: Sequence[str], world: int, after_s: float) -> None:
        super().__init__(
            f"{summarize_list(missing, _MAX_NAMES)} of {world} ranks did not come to the rendezvous within "
            f"{after_s:g} s: look at the end of their logs, and check that their nodes reach the store"
        )
        self.missing, self.world, self.after_s = tuple(missing), world, after_s


def wait_for_ranks(store: Store, rank: int, world: int, names: Sequence[str], bound_s: float) -> None:
    """Returns when all ranks have come.

    Args:
        store: of this rendezvous alone; rank r writes its host to `joined/r`.
        names: of all ranks, for messages: `policy-3 on node-b`.

    Raises:
        RanksMissing: on every rank that came, with the same names.
    """
    store.set(f"joined/{rank}", json.dumps({"host": socket.gethostname()}))
    if rank == 0:
        _collect_ranks(store, world, names, bound_s)
        return
    try:
        result = waits.store_get(
            store, "over", waits_for=_without_nodes(names[:1]), why="all ranks are there", every_s=STORE_POLL_EVERY_S,
            timeout_s=bound_s + RESULT_MARGIN_S,
        )  # fmt: skip
        missing = json.loads(result)
    except WaitTimeout:
        missing = _missing_ranks(store, range(world))  # rank 0 is one of them, or has ended
    if missing:
        raise RanksMissing([names[each] for each in missing], world, bound_s)


def _collect_ranks(store: Store, world: int, names: Sequence[str], bound_s: float) -> None:
    """The part of rank 0: polls all keys and writes the result."""
    missing, logged = list(range(world)), time.monotonic()

    def complete() -> bool | None:
        nonlocal missing, logged
        missing = [] if store.check([f"joined/{each}" for each in missing]) else _missing_ranks(store, missing)
        narrow_wait(_without_nodes(_names_of(names, missing)))
        if missing and time.monotonic() - logged >= MISSING_LOG_EVERY_S:
            logged = time.monotonic()
            log.warning(
                "%d of %d ranks are there, missing: %s",
                world - len(missing),
                world,
                summarize_list(_names_of(names, missing), _MAX_NAMES),
            )
        return None if missing else True

    try:
        waits.poll(
            complete, kind="rendezvous", waits_for=_without_nodes(names), why="all ranks are there",
            every_s=STORE_POLL_EVERY_S, timeout_s=bound_s,
        )  # fmt: skip
    except WaitTimeout as error:
        store.set("over", json.dumps(missing))
        raise RanksMissing(_names_of(names, missing), world, bound_s) from error
    store.set("over", "[]")


def _missing_ranks(store: Store, ranks: Sequence[int]) -> list[int]:
    return [each for each in ranks if not store.check([f"joined/{each}"])]


def _names_of(names: Sequence[str], ranks: Sequence[int]) -> list[str]:
    return [names[each] for each in ranks]


def _without_nodes(names: Sequence[str]) -> str:
    """The names as waits spell them: without the nodes."""
    return summarize_list(names, _MAX_BEACON_NAMES, lambda name: name.partition(" on ")[0])


def shard_rows(rank: int, world: int, rows: int) -> tuple[int, int]:
    """First and last (exclusive) row of `rank` where `rows` are sharded over `world` ranks as FSDP2 does:
    chunks of `ceil(rows / world)`, the last ones shorter or empty."""
    chunk = -(-rows // world)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


RENDEZVOUS_S = 600.0
"""Bound of the rendezvous of all ranks: torch's import alone can take a minute on a loaded host."""


@dataclass(slots=True)
class ParallelContext:
    """This rank's place and its communicators."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 1800.0
    """Bound of one collective."""
    group: dist.ProcessGroup | None = None
    """Parameters, gradients, metrics; None for a single rank on a CPU."""
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
    """Why the collectives run on gloo although NCCL was expected, and what they cost; else empty."""

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the parameters is sharded."""
        return self.world // self.replicas

    @property
    def replica(self) -> int:
        """The copy of which this rank holds a part."""
        return self.rank // self.shards

    def rows(self, count: int) -> tuple[int, int]:
        """First and last (exclusive) row that this rank holds of a parameter with `count` rows."""
        return shard_rows(self.rank % self.shards, self.shards, count)

    def mesh(self) -> DeviceMesh:
        """FSDP2's device mesh: `[ranks]`, with several copies `[copies, ranks of one]`."""
        if self.group is None:
            raise RuntimeError("one rank on a CPU has no communicator")
        if self.replicas == 1:
            return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("fsdp",))
        if self.copy is None or self.across is None:
            raise RuntimeError(f"rank {self.rank} has no communicators of its copy; create it with join_ranks()")
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
        first, last = shard_rows(0, self.shards, rows)
        mine = local.new_zeros((last - first, *local.shape[1:]))
        mine[: local.shape[0]] = local.detach()
        parts = [torch.empty_like(mine) for _ in range(self.shards)] if self.rank == 0 else None
        work = dist.gather(mine, parts, dst=0, group=self.copy or self.group, async_op=True)
        self._finish(work, "gather", why)
        return None if parts is None else torch.cat([part.cpu() for part in parts])[:rows]

    def broadcast_flag(self, value: bool, why: str) -> bool:
        """Rank 0's value, on all ranks; on the storage communicator, for the checkpoint writer's thread."""
        if self.world == 1:
            return value
        flag = torch.tensor([int(value)])
        self._finish(dist.broadcast(flag, 0, group=self.storage, async_op=True), "broadcast", why)
        return bool(flag.item())

    def leave(self) -> None:
        """Destroys the communicators; collectives in flight are lost."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _finish(self, work: dist.Work | None, operation: str, why: str) -> None:
        if work is None:
            raise RuntimeError(f"{operation} returned no work: rank {self.rank} is no member of its own communicator")
        waits.work(work, communicator="trainer", operation=operation, why=why, timeout_s=self.timeout_s)


def join_ranks(
    rank: int,
    world: int,
    device: torch.device,
    store: tuple[str, int] | None,
    prefix: str,
    timeout_s: float,
    replicas: int = 1,
    fallback: BackendFallback = "none",
    names: Sequence[str] = (),
) -> ParallelContext:
    """Waits for the other ranks at the store that the controller hosts, and creates the communicators.

    From here on this process's collectives are recorded, and a collective that does not match what a peer on this host
    has entered is refused (CollectiveRefused).

    Args:
        store: host and port of a TCPStore that lives outside the ranks; needed from two ranks on.
        prefix: of all keys in it, unique per role and generation, so that a restarted role never reads its old keys.
        timeout_s: bound of one collective, on every communicator (`new_group` inherits none).
        replicas: copies of the sharded parameters.
        fallback: the backend of ranks on GPUs where NCCL does not work for all of them.
        names: of all ranks with their nodes, to report which are missing.

    Raises:
        ValueError: two or more ranks and no store.
        NcclUnusable: NCCL does not work and there is no fallback.
        RanksMissing: other ranks did not come.
        torch.distributed.DistStoreError: the store cannot be reached.
    """
    if world == 1 and device.type == "cpu":
        return ParallelContext(device=device, timeout_s=timeout_s)
    if world > 1 and store is None:
        raise ValueError(f"{world} trainer ranks need a store for their rendezvous; give store_host and store_port")
    recorder.install(refuse=True, links=True, scope=prefix)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with track_wait("rendezvous", f"{world} trainer ranks", f"rank {rank} joins {prefix}", RENDEZVOUS_S):
        meeting: Store = (
            HashStore() if store is None else TCPStore(*store, is_master=False, timeout=timedelta(seconds=RENDEZVOUS_S))
        )
        names = names or [f"rank {each}" for each in range(world)]
        wait_for_ranks(PrefixStore(f"{prefix}/meeting", meeting), rank, world, names, RENDEZVOUS_S)
        backend, slower = _select_backend(PrefixStore(f"{prefix}/backend", meeting), rank, world, device, fallback)
        bound, own = timedelta(seconds=timeout_s), PrefixStore(prefix, meeting)
        dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=bound)
        storage = dist.new_group(backend="gloo", timeout=bound, group_desc="checkpoint")
    ranks = ParallelContext(rank, world, device, timeout_s, dist.group.WORLD, storage, replicas)
    if slower:
        assert ranks.group is not None
        cost = measure_collectives(ranks.group, world, device, timeout_s)
        ranks.slower = f"{slower}. The trainer's collectives run on gloo: {cost}"
    if replicas > 1:
        _make_replica_groups(ranks, bound)
    return ranks


def _select_backend(
    table: Store, rank: int, world: int, device: torch.device, fallback: BackendFallback
) -> tuple[str, str]:
    """The backend of the communicators, and why it is slower than NCCL where it is. Every rank gets the same."""
    if device.type != "cuda":
        return "gloo", ""
    own: Store = table.clone()  # type: ignore[attr-defined]  # a trial that hangs holds its client's lock
    found, slower = choose_backend(table, rank, world, lambda: nccl_trial(own, rank, world, device), fallback)
    return ("cpu:gloo,cuda:nccl" if found == "nccl" else "cpu:gloo,cuda:gloo"), slower


def _make_replica_groups(ranks: ParallelContext, bound: timedelta) -> None:
    """Makes the communicators within and across copies."""
    places = torch.arange(ranks.world).view(ranks.replicas, ranks.shards)
    ranks.copy = _new_group_with(places.tolist(), ranks.rank, bound, "copy")
    ranks.across = _new_group_with(places.T.tolist(), ranks.rank, bound, "across copies")
    ranks.copy_storage = _new_group_with(places.tolist(), ranks.rank, bound, "checkpoint of a copy", "gloo")


def _new_group_with(
    members: list[list[int]], rank: int, bound: timedelta, name: str, backend: str | None = None
) -> dist.ProcessGroup | None:
    """The one of several disjoint communicators that this rank is in; every rank makes all of them."""
    mine: dist.ProcessGroup | None = None
    for each in members:
        made = dist.new_group(each, timeout=bound, backend=backend, group_desc=name)
        mine = made if rank in each else mine
    return mine
