"""Simulates jobs for the tests of the diagnosis. The simulator knows how collectives behave, and nothing of the
diagnosis.

Ranks run programs of computations, collectives and requests to services. As with gloo and NCCL, the n-th call of one
member is paired with the n-th calls of the others, whatever these are. When all members have arrived, the collective
completes if the calls match. If the operations differ, all members hang; if only sizes or types differ, one of them
aborts and the connections of the others are reset (gloo). Faults change a program or a process.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.watch.diagnosis.evidence import CallTable, Evidence, MembershipTable, ProcessTable, WaitEdge
from lockstep.watch.diagnosis.evidence_types import (
    NO_EXIT_CODE,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
    ProcessNote,
)

NAN = float("nan")
RING = 12
SHAPES = ((2, 1, 1), (3, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 1), (4, 2, 1), (2, 2, 2), (4, 2, 2))
"""Data, tensor and pipeline parallel sizes."""


@dataclass(frozen=True)
class Compute:
    seconds: float
    where: str = "forward() at model.py:10"


@dataclass(frozen=True)
class Collective:
    group: str
    call: CollectiveCall


@dataclass(frozen=True)
class Ask:
    service: str
    seconds: float


Op = Compute | Collective | Ask


@dataclass(frozen=True)
class Group:
    name: str
    description: str
    members: tuple[int, ...]


@dataclass
class Rank:
    """A trainer rank while it runs."""

    program: list[Op]
    at: int = 0
    liveness: Liveness = Liveness.RUNNING
    code: int = NO_EXIT_CODE
    error: str = ""
    ended: float = NAN
    moved: float = 0.0
    active: float = 0.0
    stack: float = 0.0
    where: str = ""
    entered: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)
    entered_at: dict[str, float] = field(default_factory=dict)
    completed_at: dict[str, float] = field(default_factory=dict)
    calls: dict[str, list[tuple[int, CollectiveCall]]] = field(default_factory=dict)
    asking: tuple[str, float] | None = None
    busy: bool = False
    frozen: bool = False


@dataclass
class Service:
    """A scorer or an engine."""

    liveness: Liveness = Liveness.RUNNING
    moved: float = 0.0
    stuck_since: float | None = None
    free_at: float = 0.0


@dataclass
class Truth:
    kind: str
    culprits: frozenset[str]
    structural: bool
    """Whether the verdict needs no long wait."""
    kinds: frozenset[str]
    """The allowed kinds of the verdict."""


def signature(call: CollectiveCall) -> int:
    """A number that is equal for matching calls."""
    return hash((call.operation, call.shapes, call.dtype, call.root)) & (2**64 - 1)


class Job:
    """Runs the programs of all ranks until they have ended or hang."""

    def __init__(self, programs: Sequence[list[Op]], groups: Sequence[Group], seed: int, hosts: int = 2) -> None:
        self.random = random.Random(seed)
        self.ranks = [Rank(list(program)) for program in programs]
        self.groups = {group.name: group for group in groups}
        self.hosts = hosts
        self.services: dict[str, Service] = {}
        self.arrived: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
        self.broken: set[tuple[str, int]] = set()
        self.late: dict[tuple[str, int], frozenset[int]] = {}
        """The members that never complete a collective although all have entered it."""
        self.stop_at: dict[int, Callable[[Rank, float], None]] = {}
        self.queue: list[tuple[float, int, int]] = []
        self.count = 0
        self.now = 0.0
        self.lost_hosts: set[int] = set()
        self.other_lists: dict[tuple[str, int], int] = {}

    def plan(self, at: float, rank: int) -> None:
        self.count += 1
        heapq.heappush(self.queue, (at, self.count, rank))

    def run(self) -> float:
        """Runs the job and returns the time of the last event."""
        for number in range(len(self.ranks)):
            self.plan(self.random.uniform(0.0, 0.02), number)
        while self.queue:
            self.now, _, number = heapq.heappop(self.queue)
            self.step(number)
        return self.now

    def step(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.liveness is not Liveness.RUNNING or rank.frozen:
            return
        rank.moved = rank.active = rank.stack = self.now
        rank.asking = None
        fault = self.stop_at.get(rank.at)
        if fault is not None and fault(rank, self.now) is True:
            return
        if rank.at >= len(rank.program):
            rank.liveness, rank.code, rank.ended = Liveness.EXITED, 0, self.now
            return
        op = rank.program[rank.at]
        rank.at += 1
        if isinstance(op, Compute):
            rank.where = op.where
            self.plan(self.now + op.seconds * self.random.uniform(0.7, 1.3), number)
        elif isinstance(op, Ask):
            self.ask(number, op)
        else:
            self.enter(number, op)

    def ask(self, number: int, op: Ask) -> None:
        service, rank = self.services[op.service], self.ranks[number]
        rank.asking = (op.service, self.now)
        rank.where = "result() at pool.py:50"
        if service.liveness is Liveness.RUNNING and service.stuck_since is None:
            service.moved = max(service.moved, self.now) + op.seconds
            self.plan(service.moved, number)

    def enter(self, number: int, op: Collective) -> None:
        rank, name = self.ranks[number], op.group
        seq = rank.entered.get(name, 0) + 1
        rank.entered[name], rank.entered_at[name] = seq, self.now
        rank.calls.setdefault(name, []).append((seq, op.call))
        rank.where = op.call.site
        there = self.arrived.setdefault((name, seq), {})
        there[number] = op.call
        if len(there) == len(self.groups[name].members) and not (
            self.other_lists and name in {group for group, _ in self.other_lists}
        ):
            self.complete(name, seq, there)

    def complete(self, name: str, seq: int, there: dict[int, CollectiveCall]) -> None:
        if len({signature(call) for call in there.values()}) > 1:
            self.broken.add((name, seq))
            if len({call.operation for call in there.values()}) == 1:
                self.abort(list(there))
            return
        late = self.late.get((name, seq), frozenset())
        for number in there:
            rank = self.ranks[number]
            if number in late or rank.liveness is not Liveness.RUNNING or rank.frozen:
                continue
            rank.completed[name], rank.completed_at[name] = seq, self.now + 0.005
            self.plan(self.now + 0.005, number)

    def abort(self, members: list[int]) -> None:
        """Lets one member abort, and others fail because their connections are reset, as with gloo."""
        victim = self.random.choice(members)
        self.ranks[victim].liveness, self.ranks[victim].code = Liveness.DEAD, -6
        self.ranks[victim].ended = self.now + 0.05
        for number in members:
            if number != victim and self.random.random() < 0.6:
                self.fall(number, self.now + 0.1 + self.random.random())

    def fall(self, number: int, at: float) -> None:
        """Ends a rank because a connection was reset; its pending collectives count as completed."""
        rank = self.ranks[number]
        rank.liveness, rank.code, rank.ended = Liveness.DEAD, 1, at
        rank.error = "RuntimeError: [transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4242"
        for name in rank.entered:
            rank.completed[name] = rank.entered[name]

    def after_death(self, dead: int) -> None:
        """Some members of a dead process's collectives fail with an error, the others keep waiting."""
        for group in self.groups.values():
            if dead not in group.members:
                continue
            for number in group.members:
                rank = self.ranks[number]
                inside = rank.entered.get(group.name, 0) > rank.completed.get(group.name, 0)
                if number != dead and inside and rank.liveness is Liveness.RUNNING and self.random.random() < 0.4:
                    self.fall(number, self.ranks[dead].ended + 0.02 + 0.5 * self.random.random())

    def give_up(self, last: float) -> float:
        """All ranks inside a collective end by its timeout of half a minute."""
        for rank in self.ranks:
            inside = [name for name, seq in rank.entered.items() if seq > rank.completed.get(name, 0)]
            if rank.liveness is Liveness.RUNNING and inside:
                rank.liveness, rank.code = Liveness.DEAD, 1
                rank.ended = max(rank.entered_at[name] for name in inside) + 30.0
                rank.error = "RuntimeError: [unbound_buffer.cc:84] Timed out waiting 30000ms for recv operation"
                for name in inside:
                    rank.completed[name] = rank.entered[name]
        return last + 30.0

    # --- evidence

    def name(self, number: int) -> str:
        return f"policy-{number}"

    def evidence(self, at: float) -> Evidence:
        services = sorted(self.services)
        hosts = max(1, len(self.ranks) // self.hosts)
        who = [ProcessInfo(self.name(i), "policy", i, f"h{i // hosts}", 100 + i) for i in range(len(self.ranks))]
        for name in services:
            who.append(ProcessInfo(name, name.split("-")[0], int(name.split("-")[1]), "h0", 900 + len(who)))
        who.append(ProcessInfo("controller", "controller", 0, "h0", 999))
        index = {each.name: i for i, each in enumerate(who)}
        liveness = (
            [rank.liveness for rank in self.ranks] + [self.services[n].liveness for n in services] + [Liveness.RUNNING]
        )
        lost = {f"h{host}" for host in self.lost_hosts}
        liveness = [
            Liveness.LOST if each.host in lost and i < len(self.ranks) else liveness[i] for i, each in enumerate(who)
        ]
        stack, active, moved = [], [], []
        for rank in self.ranks:
            active.append(at if rank.busy else rank.active)
            moved.append(rank.moved)
            stack.append(rank.stack)
        for name in services:
            last = min(at, self.services[name].moved)
            active.append(last)
            moved.append(last)
            stack.append(last)
        for column in (active, moved, stack):
            column.append(0.5)
        edges = self.edges(index, services)
        notes = {i: ProcessNote(where=rank.where, error=rank.error) for i, rank in enumerate(self.ranks)}
        processes = ProcessTable(
            info=who,
            liveness=np.array(liveness, dtype=np.int8),
            exit_code=np.array(
                [rank.code for rank in self.ranks] + [NO_EXIT_CODE] * (len(services) + 1), dtype=np.int32
            ),
            ended_at=np.array([rank.ended for rank in self.ranks] + [NAN] * (len(services) + 1)),
            progressed_at=np.array(moved),
            active_at=np.array(active),
            same_stack_since=np.array(stack),
            stage=["train"] * len(self.ranks) + ["serve"] * len(services) + ["train"],
            notes=notes,
        )
        communicators, calls = self.members(at)
        return Evidence(at, processes, communicators, calls, edges)

    def edges(self, index: dict[str, int], services: list[str]) -> list[WaitEdge]:
        edges = []
        for number, rank in enumerate(self.ranks):
            if rank.asking is not None and rank.liveness is Liveness.RUNNING:
                waits_for, since = rank.asking
                edges.append(
                    WaitEdge(
                        number,
                        (index[waits_for],),
                        kind="future",
                        why="scores of a step",
                        since=since,
                        progressed_at=since,
                    )
                )
        asked = {rank.asking[0] for rank in self.ranks if rank.asking is not None}
        for name in services:
            if self.services[name].liveness is Liveness.RUNNING and name not in asked:
                edges.append(
                    WaitEdge(
                        index[name],
                        (index["controller"],),
                        why="the next call",
                        since=0.0,
                        progressed_at=0.0,
                        idle=True,
                    )
                )
        everybody = tuple(range(len(self.ranks)))
        edges.append(WaitEdge(index["controller"], everybody, kind="call", why="step 7", since=0.5, progressed_at=0.5))
        return edges

    def members(self, at: float) -> tuple[MembershipTable, CallTable]:
        starts, process, entered, completed, ins, outs, ranks = [0], [], [], [], [], [], []
        rows: list[tuple[int, int, int]] = []
        about: dict[int, CollectiveCall] = {}
        sites: dict[tuple[int, int], str] = {}
        names = sorted(self.groups)
        for name in names:
            for number in self.groups[name].members:
                rank = self.ranks[number]
                member = len(process)
                process.append(number)
                entered.append(rank.entered.get(name, 0))
                completed.append(rank.completed.get(name, 0))
                ins.append(rank.entered_at.get(name, NAN))
                outs.append(rank.completed_at.get(name, NAN))
                ranks.append(self.other_lists.get((name, number), len(self.groups[name].members)))
                for seq, call in rank.calls.get(name, [])[-RING:]:
                    rows.append((member, seq, signature(call)))
                    about[signature(call)] = call
                    sites[member, seq] = call.site
            starts.append(len(process))
        table = np.array(rows, dtype=object).reshape(-1, 3)
        communicators = MembershipTable(
            info=[CommunicatorInfo(name, self.groups[name].description, "gloo") for name in names],
            starts=np.array(starts),
            process=np.array(process),
            entered=np.array(entered),
            completed=np.array(completed),
            entered_at=np.array(ins),
            completed_at=np.array(outs),
            member_list=np.array(ranks),
        )
        calls = CallTable(
            membership=table[:, 0].astype(np.int64),
            seq=table[:, 1].astype(np.int64),
            signature=table[:, 2].astype(np.uint64),
            by_signature=about,
            sites=sites,
        )
        return communicators, calls


def grid(dp: int, tp: int, pp: int) -> list[Group]:
    """The communicators of a job of dp x tp x pp ranks, without those of a single rank."""
    shape = np.arange(dp * tp * pp).reshape(pp, dp, tp)
    groups = [Group("world", "default", tuple(range(dp * tp * pp)))]
    for axis, name, size in ((1, "dp", dp), (2, "tp", tp), (0, "pp", pp)):
        if size > 1:
            rows = np.moveaxis(shape, axis, -1).reshape(-1, size)
            groups += [Group(f"{name}{i}", name, tuple(int(x) for x in row)) for i, row in enumerate(rows)]
    return groups


def programs(groups: Sequence[Group], size: int, steps: int, seed: int) -> list[list[Op]]:
    """The same program for all ranks, each with its own communicators."""
    rng = random.Random(seed)
    layout: list[tuple[str, CollectiveCall]] = []
    kinds = sorted({group.description for group in groups} - {"default"})
    for kind in kinds:
        for _ in range(rng.randint(1, 3)):
            operation = rng.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
            root = 0 if operation == "broadcast" else None
            shape = f"[{rng.choice([4, 64, 1024])}]"
            layout.append(
                (kind, CollectiveCall(operation, shape, "float32", root, f"train.py:{20 + len(layout)} in step"))
            )
    rng.shuffle(layout)
    layout.append(("default", CollectiveCall("all_reduce", "[1]", "float32", None, "train.py:90 in loss")))
    if rng.random() < 0.5:
        layout.append(("default", CollectiveCall("barrier", "", "", None, "train.py:95 in step")))
    found = []
    for number in range(size):
        own = {group.description: group.name for group in groups if number in group.members}
        program: list[Op] = []
        for _ in range(steps):
            for kind, call in layout:
                program.append(Compute(0.05, "backward() at model.py:77"))
                if kind in own:
                    program.append(Collective(own[kind], call))
        found.append(program)
    return found


# --- faults


FAULTS = (
    "stop", "kill", "exit", "raise", "sleep", "busy", "skip", "extra", "operation", "shape", "dtype", "root", "order",
    "lists", "lag", "flight", "slow", "scorer_stopped", "scorer_asleep", "two_stops", "two_sleeps", "stop_and_sleep",
    "two_kills", "lost_host", "stop_and_timeouts", "sleep_and_timeouts", "healthy",
)  # fmt: skip


@dataclass
class Case:
    fault: str
    job: Job
    truth: Truth
    evidence: Evidence
    shape: tuple[int, int, int]


def simulate(fault: str, seed: int, delay: float, shape: tuple[int, int, int] | None = None) -> Case | None:
    """A job with a fault, observed `delay` seconds after the last event; None if the fault causes no stall with this
    seed (a harmless order, an extra call without effect)."""
    rng = random.Random(seed * 7919 + FAULTS.index(fault))
    dp, tp, pp = shape or rng.choice(
        [(2, 1, 1), (4, 1, 1), (3, 1, 1), (2, 2, 1), (4, 2, 1), (2, 2, 2), (4, 2, 2), (8, 1, 1)]
    )
    size = dp * tp * pp
    groups = grid(dp, tp, pp)
    plans = programs(groups, size, 8, seed)
    job = Job(plans, groups, seed, hosts=rng.choice([1, 2, 4]))
    for name in ("reward-0", "reward-1", "engine-0"):
        job.services[name] = Service()
    one, two = rng.sample(range(size), 2)
    where = rng.randrange(len(plans[one]) // 4, len(plans[one]) * 2 // 3)
    truth = inject(fault, job, rng, one, two, where)
    if truth is None:
        return None
    last = job.run()
    ended = all(rank.liveness is Liveness.EXITED for rank in job.ranks)
    if fault not in ("healthy", "slow") and ended:
        return None
    if fault in ("healthy", "slow"):
        return Case(fault, job, truth, healthy(job, rng, one if fault == "slow" else None), (dp, tp, pp))
    for number in (one, two):
        if fault in ("kill", "two_kills", "raise", "exit") and job.ranks[number].liveness in (
            Liveness.DEAD,
            Liveness.EXITED,
        ):
            job.after_death(number)
    if fault.endswith("timeouts"):
        last = job.give_up(last)
    return Case(fault, job, truth, job.evidence(last + delay), (dp, tp, pp))


def healthy(job: Job, rng: random.Random, slow: int | None) -> Evidence:
    """Evidence from the middle of a healthy run; with `slow`, this rank computes for long and is active."""
    fresh = Job([rank.program for rank in job.ranks], list(job.groups.values()), rng.randrange(10**6), job.hosts)
    fresh.services = {name: Service(moved=0.0) for name in job.services}
    for rank in fresh.ranks:
        rank.at = 0
    until = rng.uniform(0.3, 1.5)
    for number in range(len(fresh.ranks)):
        fresh.plan(rng.uniform(0.0, 0.02), number)
    while fresh.queue and fresh.queue[0][0] < until:
        fresh.now, _, number = heapq.heappop(fresh.queue)
        rank = fresh.ranks[number]
        if number == slow and fresh.now > until / 2:
            rank.busy = True
            rank.where = "tokenize() at data.py:5"
            continue
        fresh.step(number)
    if slow is None:
        for rank in fresh.ranks:
            rank.active = until
        return fresh.evidence(until)
    while fresh.queue:
        fresh.now, _, number = heapq.heappop(fresh.queue)
        if number != slow:
            fresh.step(number)
    at = fresh.now + rng.choice([6.0, 150.0])
    fresh.ranks[slow].moved = at - 0.5
    fresh.ranks[slow].stack = at - 0.2
    return fresh.evidence(at)


def inject(fault: str, job: Job, rng: random.Random, one: int, two: int, where: int) -> Truth | None:
    """Injects a fault and returns the expected verdict."""
    name, other = job.name(one), job.name(two)
    if fault in ("stop_and_timeouts", "sleep_and_timeouts"):
        at_process(job, {one: fault.split("_")[0]}, where)
        return Truth(fault, frozenset({name}), fault.startswith("stop"), frozenset({"absent"}))
    if fault in ("stop", "kill", "exit", "raise", "sleep", "busy"):
        at_process(job, {one: fault}, where)
        kinds = {"stop": {"absent"}, "sleep": {"absent"}, "busy": {"absent"}}.get(fault, {"dead"})
        structural = fault not in ("sleep", "busy")
        return Truth(fault, frozenset({name}), structural, frozenset(kinds))
    if fault in ("two_stops", "two_sleeps", "two_kills", "stop_and_sleep"):
        what = {"two_stops": ("stop", "stop"), "two_sleeps": ("sleep", "sleep"), "two_kills": ("kill", "kill")}
        first, second = what.get(fault, ("stop", "sleep"))
        at_process(job, {one: first, two: second}, where, exactly=True)
        kinds = frozenset({"absent"} if fault != "two_kills" else {"dead"})
        return Truth(fault, frozenset({name, other}), fault in ("two_stops", "two_kills"), kinds)
    if fault in ("healthy", "slow"):
        return Truth(fault, frozenset(), True, frozenset({"absent", "slow"}))
    if fault == "lost_host":
        hosts = max(1, len(job.ranks) // job.hosts)
        if job.hosts < 2 or len(job.ranks) < 2 * hosts:
            return None
        host = one // hosts
        gone = [i for i in range(len(job.ranks)) if i // hosts == host]
        at_process(job, dict.fromkeys(gone, "stop"), where)
        job.lost_hosts.add(host)
        return Truth(fault, frozenset(job.name(i) for i in gone), False, frozenset({"absent"}))
    if fault.startswith("scorer"):
        service = "reward-1"
        for rank in job.ranks:
            rank.program = list(rank.program)
        job.ranks[one].program.insert(where, Ask(service, 0.2))
        if fault == "scorer_stopped":
            job.services[service].liveness = Liveness.STOPPED
        else:
            job.services[service].stuck_since = 0.0
        return Truth(fault, frozenset({service}), fault == "scorer_stopped", frozenset({"absent"}))
    return in_program(fault, job, rng, one, where)


def at_process(job: Job, what: dict[int, str], where: int, exactly: bool = False) -> None:
    def strike(rank: Rank, now: float) -> bool:
        number = next(i for i, each in enumerate(job.ranks) if each is rank)
        fault = what.get(number)
        if fault is None:
            return False
        if fault == "stop":
            rank.liveness = Liveness.STOPPED
        elif fault == "kill":
            rank.liveness, rank.code, rank.ended = Liveness.DEAD, -9, now
        elif fault == "exit":
            rank.liveness, rank.code, rank.ended = Liveness.EXITED, 0, now
        elif fault == "raise":
            rank.liveness, rank.code, rank.ended = Liveness.DEAD, 1, now
            rank.error = "ValueError: not enough values to unpack"
        else:
            rank.frozen, rank.busy = True, fault == "busy"
            rank.where = "score() at reward.py:31"
        return True

    job.stop_at[where] = strike  # type: ignore[assignment]


def in_program(fault: str, job: Job, rng: random.Random, one: int, where: int) -> Truth | None:
    """Injects a fault that changes the calls of a rank."""
    name = job.name(one)
    program = job.ranks[one].program
    places = [i for i, op in enumerate(program) if isinstance(op, Collective)]
    places = [i for i in places if i >= where] or places
    at = places[0]
    op = program[at]
    assert isinstance(op, Collective)
    group = job.groups[op.group]
    parallel_groups = sum(each.description == group.description for each in job.groups.values())
    decided = len(group.members) > 2 or (parallel_groups >= 2 and group.description != "default")
    both = frozenset({name} if decided else {job.name(i) for i in group.members})
    mismatch = frozenset({"mismatch"})
    if fault in ("operation", "shape", "dtype", "root"):
        changes = {
            "operation": {"operation": "all_to_all_single"}, "shape": {"shapes": "[5]"}, "dtype": {"dtype": "float64"},
            "root": {"root": 1},
        }[fault]  # fmt: skip
        if fault == "root" and op.call.root is None:
            return None
        program[at] = Collective(op.group, replace(op.call, **changes))  # type: ignore[arg-type]
        return Truth(fault, both, True, mismatch)
    if fault in ("skip", "extra", "order") and len(group.members) == 2 and len(job.ranks) > 2:
        both = frozenset({name})  # the calls of its peers on other communicators may reveal it
    if fault == "skip":
        del program[at]
        return Truth(fault, both, True, frozenset({"mismatch", "cycle", "absent", "dead"}))
    if fault == "extra":
        program.insert(at, op)
        return Truth(fault, both, True, frozenset({"mismatch", "cycle", "absent"}))
    if fault == "order":
        later = next((i for i in places[1:] if program[i].group != op.group), None)  # type: ignore[union-attr]
        if later is None:
            return None
        program[at], program[later] = program[later], program[at]
        both = frozenset({name} if len(job.ranks) > 2 else {job.name(0), job.name(1)})
        return Truth(fault, both, True, frozenset({"cycle", "mismatch"}))
    if fault == "lists":
        if len(group.members) < 3:
            return None
        job.other_lists[op.group, one] = len(group.members) - 1
        return Truth(fault, frozenset({name}), True, mismatch)
    seq = sum(isinstance(each, Collective) and each.group == op.group for each in program[: at + 1])
    if fault == "lag":
        if len(group.members) < 3:
            return None
        job.late[op.group, seq] = frozenset({one})
        return Truth(fault, frozenset({name}), False, frozenset({"device_lag"}))
    job.late[op.group, seq] = frozenset(group.members)
    return Truth(fault, frozenset(), False, frozenset({"in_flight"}))
