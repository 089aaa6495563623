"""Simulates jobs on a cluster as NCCL runs them, for tests of the analysis of dumps. It shares no code with it.

A rank's host issues operations without waiting for them and runs ahead until it synchronises or has too many unfinished
ones. Its device runs them in streams: one per communicator, and one per pair of ranks for single sends and receives. An
operation may run if the one before it in its stream has ended and so has all that the compute stream waits for. A
collective ends on its members once all of them run it; in a broadcast only the root is needed, in a reduction only the
root needs the others. The n-th send from a to b meets the n-th receive of b from a; a batch ends when all of its parts
have met. The network of these rules has one final state, whatever the order of events is.

Faults stop a host, a device or both at an operation, or keep the kernel of a collective from ending on one rank.
`cluster_dumps` writes what the recorders of the ranks would hold then.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field

SYNCHRONISING = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "all_to_all", "barrier")
NEVER = 10**9


@dataclass(frozen=True)
class Group:
    """A communicator of torch, with its number in the order of creation over all ranks."""

    number: int
    description: str
    ranks: tuple[int, ...]


@dataclass(eq=False)
class Operation:
    """An operation that a rank issues; a batch has several transfers, a single send or receive has one."""

    group: Group
    name: str = ""
    transfers: tuple[tuple[int, int], ...] = ()
    batched: bool = False
    root: int = 0
    waited: bool = True
    """True if the compute stream waits for it; else `Synchronise` or `Join` does."""
    place: int = 0
    """The position among the rank's operations."""
    sequence: int = 0
    order: tuple[int, ...] = ()
    """For each transfer, its number among those of its direction on this communicator."""
    after: list["Operation"] = field(default_factory=list)
    running: bool = False
    ended: bool = False
    issued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True)
class Join:
    """The compute stream waits for all operations issued so far."""


@dataclass(frozen=True)
class Synchronise:
    """The host waits for its device."""


Instruction = Operation | Join | Synchronise


@dataclass(frozen=True)
class Fault:
    """`host`: the host issues nothing from `place` on, and the dump is written; `stopped`: the same without a dump;
    `killed`: host and device end; `device`: the device runs nothing from `place` on; `unfinished`: the collective at
    `place` runs and ends on the others only."""

    kind: str
    rank: int
    place: int


@dataclass
class Cluster:
    """A job: its shape, the programs of its ranks and the faults; after `run`, the state of its operations."""

    seed: int
    tensor: int
    pipeline: int
    data: int
    expert: int
    groups: list[Group]
    programs: list[list[Instruction]]
    faults: tuple[Fault, ...] = ()
    run_ahead: int = 20
    eager: bool = False
    """True if sends end without their receive, as small ones do."""
    issued: list[list[Operation]] = field(default_factory=list)

    @property
    def world(self) -> int:
        return len(self.programs)

    @property
    def stalled(self) -> bool:
        """Whether an operation of a rank waits for ever."""
        return any(not each.ended for issued in self.issued for each in issued)

    def groups_of(self, rank: int) -> list[Group]:
        """The communicators that the rank is a member of, in the order of creation."""
        return [group for group in self.groups if rank in group.ranks]


class _Run:
    """Runs a cluster to its final state."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rng = random.Random(cluster.seed ^ 0x5EED)
        world = cluster.world
        self.at, self.clock = [0] * world, [0.0] * world
        self.issued: list[list[Operation]] = [[] for _ in range(world)]
        self.unfinished: list[list[Operation]] = [[] for _ in range(world)]
        self.streams: list[dict[object, Operation]] = [{} for _ in range(world)]
        self.needed: list[list[Operation]] = [[] for _ in range(world)]
        """What the compute stream waits for."""
        self.loose: list[list[Operation]] = [[] for _ in range(world)]
        self.counts: defaultdict[object, int] = defaultdict(int)
        self.met: defaultdict[object, dict[int, Operation]] = defaultdict(dict)
        self.faults = {(fault.rank, fault.kind): fault.place for fault in cluster.faults}
        self.host_end = [min([self.faults.get((r, kind), NEVER) for kind in ("host", "stopped", "killed")])
                         for r in range(world)]  # fmt: skip
        self.device_end = [min(self.faults.get((r, "device"), NEVER), self.faults.get((r, "killed"), NEVER + 2) - 2)
                           for r in range(world)]  # fmt: skip

    def play(self) -> None:
        ready = set(range(self.cluster.world))
        while ready:
            rank = ready.pop()
            if self._issue(rank) | self._start(rank):
                ready.add(rank)
            ready |= self._end(rank)
        self.cluster.issued = self.issued

    def _issue(self, rank: int) -> bool:
        program, moved = self.cluster.programs[rank], False
        while self.at[rank] < len(program) and len(self.issued[rank]) < self.host_end[rank]:
            instruction = program[self.at[rank]]
            if isinstance(instruction, Join):
                self.needed[rank] += self.loose[rank]
                self.loose[rank] = []
            elif isinstance(instruction, Synchronise):
                if self.unfinished[rank]:
                    break
                last = [each.ended_at for each in self.issued[rank][-20:]]
                self.clock[rank] = max([self.clock[rank], *last])
            elif len(self.unfinished[rank]) >= self.cluster.run_ahead:
                break
            else:
                self._enqueue(rank, instruction)
            self.at[rank] += 1
            moved = True
        return moved

    def _enqueue(self, rank: int, operation: Operation) -> None:
        group = operation.group
        self.clock[rank] += self.rng.uniform(2e-5, 4e-4)
        operation.place, operation.issued_at = len(self.issued[rank]), self.clock[rank]
        if not operation.transfers or operation.batched:
            self.counts[rank, group.number] += 1
            operation.sequence = self.counts[rank, group.number]
        if operation.transfers:
            order = []
            for transfer in operation.transfers:
                key = (rank, group.number, transfer)
                self.counts[key] += 1
                order.append(self.counts[key])
                self.met[group.number, transfer, order[-1]][rank] = operation
            operation.order = tuple(order)
        else:
            self.met[group.number, operation.sequence][rank] = operation
        single = operation.transfers and not operation.batched
        stream = (group.number, tuple(sorted(operation.transfers[0]))) if single else group.number
        before = self.streams[rank].get(stream)
        self.needed[rank] = [each for each in self.needed[rank] if not each.ended]
        operation.after = [*self.needed[rank], *([before] if before else [])]
        self.streams[rank][stream] = operation
        (self.needed if operation.waited else self.loose)[rank].append(operation)
        self.issued[rank].append(operation)
        self.unfinished[rank].append(operation)

    def _start(self, rank: int) -> bool:
        moved = False
        for operation in self.unfinished[rank]:
            if operation.running or operation.place >= self.device_end[rank]:
                continue
            if all(each.ended for each in operation.after):
                operation.running = moved = True
                before = [each.ended_at for each in operation.after]
                operation.started_at = max([operation.issued_at, *before]) + self.rng.uniform(1e-5, 2e-3)
        return moved

    def _end(self, rank: int) -> set[int]:
        """Ends what can end; returns the ranks that moved."""
        moved = set()
        for operation in list(self.unfinished[rank]):
            if not operation.running:
                continue
            partners = self._partners(rank, operation)
            if operation.transfers:
                self._try_end(rank, operation, moved)
                for partner, other in partners.items():
                    if other.running:
                        self._try_end(partner, other, moved)
            else:
                for member, other in partners.items():
                    self._try_end(member, other, moved)
        return moved

    def _partners(self, rank: int, operation: Operation) -> dict[int, Operation]:
        group = operation.group
        if not operation.transfers:
            return self.met[group.number, operation.sequence]
        found = {}
        for transfer, order in zip(operation.transfers, operation.order, strict=True):
            found |= self.met[group.number, transfer, order]
        found.pop(rank, None)
        return found

    def _try_end(self, rank: int, operation: Operation, moved: set[int]) -> None:
        if operation.ended or not operation.running:
            return
        if self.faults.get((rank, "unfinished")) == operation.place:
            return
        group = operation.group
        if operation.transfers:
            times = [operation.started_at]
            for transfer, order in zip(operation.transfers, operation.order, strict=True):
                met = self.met[group.number, transfer, order]
                sends = transfer[0] == rank
                other = met.get(transfer[1] if sends else transfer[0])
                if other is not None and other.running:
                    times.append(other.started_at)
                elif not (sends and self.cluster.eager):
                    return
        else:
            met = self.met[group.number, operation.sequence]
            needed = group.ranks
            if operation.name == "broadcast":
                needed = (operation.root,)
            elif operation.name == "reduce" and rank != operation.root:
                needed = ()
            if not all(each in met and met[each].running for each in needed):
                return
            times = [operation.started_at, *(met[each].started_at for each in needed)]
        operation.ended, operation.ended_at = True, max(times) + self.rng.uniform(1e-5, 1e-3)
        self.unfinished[rank].remove(operation)
        moved.add(rank)


def run(cluster: Cluster) -> Cluster:
    """Runs the job to its end or to its standstill."""
    _Run(cluster).play()
    return cluster


def _groups(tensor: int, pipeline: int, data: int, expert: int) -> list[Group]:
    """World, tensor, embedding (of the first and last stage, so numbers differ between stages), data, pipeline,
    expert."""
    world = tensor * pipeline * data

    def rank(stage: int, replica: int, shard: int) -> int:
        return (stage * data + replica) * tensor + shard

    found = [("default_pg", tuple(range(world)))]
    found += [("tp", tuple(rank(p, d, t) for t in range(tensor))) for p in range(pipeline) for d in range(data)]
    if pipeline > 1:
        found += [("embedding", (rank(0, d, t), rank(pipeline - 1, d, t))) for d in range(data) for t in range(tensor)]
    found += [("dp", tuple(rank(p, d, t) for d in range(data))) for p in range(pipeline) for t in range(tensor)]
    found += [("pp", tuple(rank(p, d, t) for p in range(pipeline))) for d in range(data) for t in range(tensor)]
    found += [
        ("ep", tuple(rank(p, first + e, t) for e in range(expert)))
        for p in range(pipeline) for t in range(tensor) for first in range(0, data, expert)
    ]  # fmt: skip
    kept = [each for each in found if len(each[1]) > 1]
    return [Group(number, name, ranks) for number, (name, ranks) in enumerate(kept)]


class _Program:
    """Writes the program of a rank: the steps of a pipeline stage with its tensor, expert and data parallel calls."""

    def __init__(self, cluster: Cluster, rank: int, plan: random.Random) -> None:
        self.rank, self.lines = rank, []  # type: int, list[Instruction]
        self.by_name = {group.description: group for group in cluster.groups_of(rank)}
        self.stage = rank // (cluster.tensor * cluster.data)
        self.stages = cluster.pipeline
        self.batched = plan.random() < 0.6
        self.microbatches = plan.randint(1, 5)
        self.layers = plan.randint(1, 3)
        self.sharded = plan.random() < 0.5
        self.buckets = plan.randint(1, 3)
        self.steps = plan.randint(2, 4)
        self.looks = [plan.random() < 0.6 for _ in range(self.steps)]
        self.tails = [plan.choice(["all_reduce", "broadcast", "reduce", "barrier"]) for _ in range(self.steps)]

    def write(self) -> list[Instruction]:
        for look, tail in zip(self.looks, self.tails, strict=True):
            self._pipeline()
            for _ in range(self.buckets):
                self._call("dp", "_reduce_scatter_base" if self.sharded else "all_reduce", waited=False)
            self.lines.append(Join())
            self._call("embedding", "all_reduce")
            self._call("default_pg", tail)
            if look:
                self.lines.append(Synchronise())
        return self.lines

    def _call(self, group: str, name: str, waited: bool = True) -> None:
        if group in self.by_name:
            self.lines.append(Operation(self.by_name[group], name, root=self.by_name[group].ranks[0], waited=waited))

    def _pass(self) -> None:
        for _ in range(self.layers):
            if self.sharded:
                self._call("dp", "_all_gather_base", waited=False)
            self._call("tp", "all_reduce")
            self._call("ep", "all_to_all")
            self.lines.append(Join())

    def _transfer(self, *parts: tuple[int, int]) -> None:
        """Sends and receives, (distance to the other stage, 1 to send or -1 to receive), in one batch or one by one."""
        group = self.by_name.get("pp")
        if group is None:
            return
        peers = [(self.stage + step, way) for step, way in parts if 0 <= self.stage + step < self.stages]
        transfers = tuple(
            (self.rank, group.ranks[at]) if way > 0 else (group.ranks[at], self.rank) for at, way in peers
        )
        if self.batched and transfers:
            self.lines.append(Operation(group, "coalesced", transfers, True))
        elif transfers:
            self.lines += [Operation(group, "", (each,)) for each in transfers]

    def _pipeline(self) -> None:
        number = self.microbatches
        warm = min(self.stages - 1 - self.stage, number) if self.batched else number
        for _ in range(warm):
            self._transfer((-1, -1))
            self._pass()
            self._transfer((1, 1))
        steady = number - warm
        if steady:
            self._transfer((-1, -1))
        for left in range(steady, 0, -1):  # one forward, one backward
            self._pass()
            self._transfer((1, 1), (1, -1))
            self._pass()
            self._transfer((-1, 1), *([(-1, -1)] if left > 1 else []))
        for _ in range(warm):
            self._transfer((1, -1))
            self._pass()
            self._transfer((-1, 1))


SHAPES = [(t, p, d, e) for t in (1, 2, 4, 8) for p in (1, 2, 3, 4) for d in (1, 2, 4, 8) for e in (1, 2, 4)
          if d % e == 0 and 4 <= t * p * d <= 64]  # fmt: skip


def make_cluster(seed: int, faults: tuple[Fault, ...] = ()) -> Cluster:
    """The job of a seed, not yet run."""
    rng = random.Random(seed)
    tensor, pipeline, data, expert = rng.choice(SHAPES)
    groups = _groups(tensor, pipeline, data, expert)
    cluster = Cluster(seed, tensor, pipeline, data, expert, groups, [[]] * (tensor * pipeline * data), faults)
    cluster.run_ahead, cluster.eager = rng.choice([4, 10, 30, 100]), rng.random() < 0.3
    plan = rng.randrange(2**32)
    cluster.programs = [_Program(cluster, rank, random.Random(plan)).write() for rank in range(cluster.world)]
    return cluster


def faulty_cluster(seed: int, kinds: tuple[str, ...], count: int) -> Cluster:
    """The job of a seed after `count` faults of the given kinds, on different ranks, of which at least one stops it."""
    rng = random.Random(seed * 7919 + 13)
    while True:
        healthy = run(make_cluster(seed))
        assert not healthy.stalled, f"seed {seed}: the program itself blocks"
        faults = []
        for rank in rng.sample(range(healthy.world), count):
            kind = rng.choice(kinds)
            places = [each.place for each in healthy.issued[rank]
                      if kind != "unfinished" or each.name in SYNCHRONISING]  # fmt: skip
            if len(places) < 2:
                break  # there is nowhere to strike this rank: draw again
            faults.append(Fault(kind, rank, rng.choice(places[1:])))
        else:
            cluster = run(make_cluster(seed, tuple(faults)))
            if cluster.stalled:
                return cluster
