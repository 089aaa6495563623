"""The rendezvous of the trainer's ranks, their communicators, and the collectives that the trainer issues itself.

Rendezvous: each rank writes a key into the store. Rank 0 polls these keys, logs the missing ranks every second, and
writes one result for all: complete, or which ranks are missing. The controller shows the missing ranks too, because
rank 0 publishes them with its wait.

The trainer issues five collectives itself: `gather` (one vector of fixed size per step), `gather_flat` (the adapter,
before weight sync or export), `gather_bucket` (some weights, during a sync from device to device), `gather_rows` (one
parameter, during an export) and `gather_texts` (at the end of a checkpoint, on a communicator of its own). The library
that shards the model issues all others.
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
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from lockstep.base import waits
from lockstep.base.text import summarize_list
from lockstep.base.wait_state import WaitTimeout, narrow_wait, track_wait
from lockstep.cluster.rendezvous_store import open_store, store_errors
from lockstep.train.collective_backend import BackendFallback, choose_backend, measure_collectives, nccl_trial
from lockstep.watch.recorder import recorder

log = logging.getLogger(__name__)

MISSING_LOG_EVERY_S = 1.0
STORE_POLL_EVERY_S = 0.05
RESULT_MARGIN_S = 10.0
"""The other ranks wait this much longer for the result than rank 0 waits for the ranks."""
_MAX_NAMES = 8
_MAX_BEACON_NAMES = 4
"""A beacon has room for this many names."""
_TEXT_BYTES = 1024


class RanksMissing(RuntimeError):
    """Some ranks did not join the rendezvous."""

    def __init__(self, missing: Sequence[str], world: int, after_s: float) -> None:
        super().__init__(
            f"{summarize_list(missing, _MAX_NAMES)} of {world} ranks did not join the rendezvous within "
            f"{after_s:g} s: look at the end of their logs, and check that their nodes reach the store"
        )
        self.missing, self.world, self.after_s = tuple(missing), world, after_s


def wait_for_ranks(store: Store, rank: int, world: int, names: Sequence[str], bound_s: float) -> None:
    """Waits until all ranks have joined.

    Args:
        store: a store whose prefix is used only for this rendezvous; rank r writes its host to `joined/r`.
        names: names and nodes of all ranks, for messages: `policy-3 on node-b`.

    Raises:
        RanksMissing: on every rank that joined, with the same missing ranks.
    """
    store.set(f"joined/{rank}", json.dumps({"host": socket.gethostname()}))
    if rank == 0:
        _collect_ranks(store, world, names, bound_s)
        return
    try:
        result = waits.store_get(
            store, "over", waits_for=_without_nodes(names[:1]), why="all ranks have joined", every_s=STORE_POLL_EVERY_S,
            timeout_s=bound_s + RESULT_MARGIN_S,
        )  # fmt: skip
        missing = json.loads(result)
    except WaitTimeout:
        missing = _missing_ranks(store, range(world))  # rank 0 is one of them, or has ended
    if missing:
        raise RanksMissing([names[each] for each in missing], world, bound_s)


def _collect_ranks(store: Store, world: int, names: Sequence[str], bound_s: float) -> None:
    """Polls all keys and writes the result, on rank 0."""
    missing, logged = list(range(world)), time.monotonic()

    def complete() -> bool | None:
        nonlocal missing, logged
        missing = [] if store.check([f"joined/{each}" for each in missing]) else _missing_ranks(store, missing)
        narrow_wait(_without_nodes(_names_of(names, missing)))
        if missing and time.monotonic() - logged >= MISSING_LOG_EVERY_S:
            logged = time.monotonic()
            log.warning(
                "%d of %d ranks have joined, missing: %s",
                world - len(missing),
                world,
                summarize_list(_names_of(names, missing), _MAX_NAMES),
            )
        return None if missing else True

    try:
        waits.poll(
            complete, kind="rendezvous", waits_for=_without_nodes(names), why="all ranks have joined",
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
    """Returns the names without their nodes, as waits show them."""
    return summarize_list(names, _MAX_BEACON_NAMES, lambda name: name.partition(" on ")[0])


def shard_rows(rank: int, world: int, rows: int) -> tuple[int, int]:
    """Returns the first and last (exclusive) row of `rank` if `rows` are sharded over `world` ranks: in
    chunks of `ceil(rows / world)`, of which the last may be shorter or empty."""
    chunk = -(-rows // world)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


RENDEZVOUS_S = 600.0
"""Time limit of the rendezvous: importing torch alone can take a minute on a loaded host."""


@dataclass(slots=True)
class ParallelContext:
    """This rank's number, device and communicators."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 1800.0
    """Time limit of one collective."""
    group: dist.ProcessGroup | None = None
    """The communicator for parameters, gradients and metrics; None for a single rank on a CPU."""
    storage: dist.ProcessGroup | None = None
    """A gloo communicator for the checkpoint writer's thread only, so that the order of its collectives is independent
    of training."""
    replicas: int = 1
    """Number of copies of the sharded parameters (HSDP). The ranks of a copy have consecutive numbers."""
    copy: dist.ProcessGroup | None = None
    """Communicator of the ranks that share this rank's copy; None if there is only one copy (use `group`)."""
    across: dist.ProcessGroup | None = None
    """Communicator of the ranks that hold the same rows, one of each copy."""
    slower: str = ""
    """Why the collectives run on gloo although NCCL was expected, and what they cost; empty if they run as expected."""

    @property
    def shards(self) -> int:
        """Number of ranks over which one copy of the parameters is sharded."""
        return self.world // self.replicas

    @property
    def replica(self) -> int:
        """Number of the copy of which this rank holds a part."""
        return self.rank // self.shards

    def rows(self, count: int) -> tuple[int, int]:
        """Returns the first and last (exclusive) row that this rank holds of a parameter with `count` rows."""
        return shard_rows(self.rank % self.shards, self.shards, count)

    def gather(self, vector: Tensor, why: str) -> Tensor:
        """Gathers every rank's `vector` on all ranks, as float64 `[world, values]` on the CPU."""
        if self.world == 1:
            return vector.detach().to("cpu", torch.float64)[None]
        local = vector.detach().to(self.device, torch.float64)
        gathered = [torch.empty_like(local) for _ in range(self.world)]
        self._finish(dist.all_gather(gathered, local, group=self.group, async_op=True), "all_gather", why)
        return torch.stack(gathered).cpu()

    def gather_flat(self, flat: Tensor, why: str) -> Tensor:
        """Gathers `flat` from every rank of this copy on all of them, as `[shards, values]` on the device."""
        if self.shards == 1:
            return flat[None]
        gathered = [torch.empty_like(flat) for _ in range(self.shards)]
        self._finish(dist.all_gather(gathered, flat, group=self.copy or self.group, async_op=True), "all_gather", why)
        return torch.stack(gathered)

    def gather_bucket(self, flat: Tensor, everyone: bool, why: str) -> list[Tensor] | None:
        """Gathers `flat` from every rank of this copy, in the order of the ranks: on all of them, or only on the first
        (None elsewhere)."""
        group = self.copy or self.group
        keeps = everyone or self.rank % self.shards == 0
        parts = [torch.empty_like(flat) for _ in range(self.shards)] if keeps else None
        if everyone:
            self._finish(dist.all_gather(parts, flat, group=group, async_op=True), "all_gather", why)
        else:
            self._finish(dist.gather(flat, parts, group=group, group_dst=0, async_op=True), "gather", why)
        return parts

    def gather_rows(self, local: Tensor, rows: int, why: str) -> Tensor | None:
        """Gathers a tensor that is sharded by rows on the CPU of rank 0; returns None elsewhere. Only the first copy
        takes part."""
        if self.replica:
            return None
        if self.shards == 1:
            return local.detach().cpu()
        first, last = shard_rows(0, self.shards, rows)
        padded = local.new_zeros((last - first, *local.shape[1:]))
        padded[: local.shape[0]] = local.detach()
        parts = [torch.empty_like(padded) for _ in range(self.shards)] if self.rank == 0 else None
        work = dist.gather(padded, parts, dst=0, group=self.copy or self.group, async_op=True)
        self._finish(work, "gather", why)
        return None if parts is None else torch.cat([part.cpu() for part in parts])[:rows]

    def gather_texts(self, text: str, why: str) -> list[str]:
        """Gathers a short text from every rank on all ranks. Uses the storage communicator, for the checkpoint writer's
        thread. A longer text than `_TEXT_BYTES` is cut."""
        if self.world == 1:
            return [text]
        raw = text.encode()[:_TEXT_BYTES]
        own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        own[: len(raw)] = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]
        gathered = [torch.empty_like(own) for _ in range(self.world)]
        self._finish(dist.all_gather(gathered, own, group=self.storage, async_op=True), "all_gather", why)
        return [each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in gathered]

    def leave(self) -> None:
        """Destroys the communicators; collectives in flight are lost."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _finish(self, work: dist.Work | None, operation: str, why: str) -> None:
        if work is None:
            raise RuntimeError(f"{operation} returned no work: rank {self.rank} is not a member of its communicator")
        waits.work(work, communicator="trainer", operation=operation, why=why, timeout_s=self.timeout_s)


def join_ranks(
    rank: int,
    world: int,
    device: torch.device,
    store: str | None,
    prefix: str,
    timeout_s: float,
    replicas: int = 1,
    fallback: BackendFallback = "none",
    names: Sequence[str] = (),
) -> ParallelContext:
    """Waits for the other ranks at the store that the controller hosts, and creates the communicators.

    Afterwards, this process's collectives are recorded, and a collective that does not match the one that a peer on
    this host has entered raises CollectiveRefused.

    Args:
        store: URL of a store outside the ranks; required for two or more ranks.
        prefix: the scope in the store. It is unique per start of a role, so that a restarted role never reads its old
            keys.
        timeout_s: time limit of one collective, on every communicator (`new_group` does not inherit it).
        replicas: number of copies of the sharded parameters.
        fallback: the backend to use on GPUs if NCCL does not work on all ranks.
        names: names and nodes of all ranks, to report which are missing.

    Raises:
        ValueError: there are two or more ranks and no store.
        NcclUnusable: NCCL does not work and there is no fallback.
        RanksMissing: other ranks did not join.
        RendezvousStoreLost: the store cannot be reached, or ended meanwhile.
    """
    if world == 1 and device.type == "cpu":
        return ParallelContext(device=device, timeout_s=timeout_s)
    if world > 1 and store is None:
        raise ValueError(f"{world} trainer ranks need a store for their rendezvous; give its URL")
    recorder.install(refuse=True, keepalive=True, scope=prefix)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with (
        track_wait("rendezvous", f"{world} trainer ranks", f"rank {rank} joins {prefix}", RENDEZVOUS_S),
        store_errors(store or prefix),
    ):
        scope: Store = HashStore() if store is None else open_store(store, prefix, RENDEZVOUS_S)
        names = names or [f"rank {each}" for each in range(world)]
        wait_for_ranks(PrefixStore("meeting", scope), rank, world, names, RENDEZVOUS_S)
        backend, slower = _select_backend(PrefixStore("backend", scope), rank, world, device, fallback)
        bound = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=scope, rank=rank, world_size=world, timeout=bound)
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
    store: Store, rank: int, world: int, device: torch.device, fallback: BackendFallback
) -> tuple[str, str]:
    """Returns the backend of the communicators, the same on every rank, and the reason if it is not NCCL as
    expected."""
    if device.type != "cuda":
        return "gloo", ""
    trial_store: Store = store.clone()  # type: ignore[attr-defined]  # a trial that hangs holds its client's lock
    backend, slower = choose_backend(store, rank, world, lambda: nccl_trial(trial_store, rank, world, device), fallback)
    return ("cpu:gloo,cuda:nccl" if backend == "nccl" else "cpu:gloo,cuda:gloo"), slower


def _make_replica_groups(ranks: ParallelContext, bound: timedelta) -> None:
    """Creates the communicators within and across copies."""
    places = torch.arange(ranks.world).view(ranks.replicas, ranks.shards)
    ranks.copy = new_group_with(places.tolist(), ranks.rank, bound, "copy")
    ranks.across = new_group_with(places.T.tolist(), ranks.rank, bound, "across copies")


def new_group_with(members: list[list[int]], rank: int, bound: timedelta, name: str) -> dist.ProcessGroup | None:
    """Creates several disjoint communicators, as every rank must, and returns the one that has this rank as a
    member."""
    mine: dist.ProcessGroup | None = None
    for each in members:
        made = dist.new_group(each, timeout=bound, group_desc=name)
        mine = made if rank in each else mine
    return mine
