"""Random cases: which rank fails, how, when and where, and the expected verdict."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from benchmarks.faults.emulated_nccl import NAME as EMULATED_NCCL
from benchmarks.faults.schedule import FINISH, PLACES, ROOTED, WORLD, Call, Groups, draw, layouts, members, other

STEP_LAST = 6
BACKENDS = ("gloo", EMULATED_NCCL)


@dataclass(frozen=True)
class Fault:
    """A kind of fault and the verdict that is expected for it."""

    kinds: tuple[str, ...]
    """The kinds of verdict that are accepted; empty: no rank may be accused."""
    level: str = "confirmed"
    structural: bool = True
    """Whether the verdict is proven by the state of the ranks, not by how long the state lasts."""
    call: bool = False
    """Whether the fault is a wrong call, which may be refused."""
    where: str = ""
    """The function that the verdict must name."""
    device: bool = False
    """Whether the fault is one of a device, which gloo does not have."""
    named: bool = True
    """Whether the evidence can name the culprit; if not, no rank may be named."""


GONE, STILL, BUSY = ("dead",), ("absent",), ("absent", "slow")
WRONG = ("mismatch", "cycle")
"""Kinds of verdict for ranks in different collectives, of one communicator or of two."""
FAULTS = {
    "stopped": Fault(STILL),
    "killed": Fault(GONE),
    "exits": Fault(GONE),
    "raises": Fault(GONE),
    "memory": Fault(GONE),
    "reward": Fault(STILL, structural=False, where="reward"),
    "loader": Fault(STILL, structural=False, where="load"),
    "checkpoint": Fault(STILL, structural=False, where="save"),
    "never": Fault(STILL, structural=False),
    "gil": Fault(BUSY, level="notice", structural=False, where="reward"),
    "spins": Fault(BUSY, level="notice", structural=False, where="reward"),
    "skips": Fault(WRONG, call=True),
    "extra": Fault(WRONG, call=True),
    "operation": Fault(WRONG, call=True),
    "shape": Fault(WRONG, call=True),
    "dtype": Fault(WRONG, call=True),
    "root": Fault(WRONG, call=True),
    "branch": Fault(WRONG, call=True),
    "uneven": Fault((*WRONG, *GONE), call=True),
    "members": Fault((*WRONG, *STILL)),
    "order": Fault(("cycle",)),
    "two": Fault((*GONE, *STILL)),
    "kernel": Fault(("device_lag",), structural=False, device=True),
    "untimed kernel": Fault(("in_flight",), structural=False, device=True, named=False),
    "lag": Fault(("device_lag",), structural=False, device=True),
    "slow kernel": Fault((), level="notice", device=True),
    "slow": Fault((), level="notice"),
    "tail cpu": Fault((), level="notice"),
    "tail io": Fault((), level="notice"),
    "tail counter": Fault((), level="notice"),
    "slow disk": Fault((), level="notice"),
}
PAIRS = (
    ("stopped", "stopped"), ("killed", "killed"), ("killed", "raises"), ("stopped", "killed"), ("reward", "reward"),
    ("reward", "loader"), ("stopped", "reward"),
)  # fmt: skip
"""Pairs of faults that happen at the same time."""


@dataclass(frozen=True)
class Case:
    name: str
    fault: str
    world: int
    layout: str
    schedule: tuple[Call, ...]
    faults: dict[int, str]
    """The fault of each culprit by rank."""
    step: int
    """The step in which the fault happens."""
    at: int
    """The index of the call in that step before which, or to which, the fault happens."""
    refuse: bool = False
    backend: str = "gloo"
    timed: bool = False
    """Whether the flight recorder records when operations start (TORCH_NCCL_ENABLE_TIMING)."""

    @property
    def groups(self) -> Groups:
        return layouts(self.world)[self.layout]

    @property
    def about(self) -> Fault:
        return FAULTS[self.fault]

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(told: dict[str, Any]) -> "Case":
        schedule = tuple(Call(**each) for each in told["schedule"])
        return Case(**{**told, "schedule": schedule, "faults": {int(k): v for k, v in told["faults"].items()}})


def kinds_of(backend: str) -> tuple[str, ...]:
    """The kinds of faults that a backend can have."""
    return tuple(name for name, about in FAULTS.items() if backend == EMULATED_NCCL or not about.device)


def cases(seed: int, count: int, faults: Sequence[str] = (), backend: str = "gloo") -> Iterator[Case]:
    """The first `count` of a seed's cases: the kinds in turn, the rest drawn. `faults` restricts the kinds."""
    kinds = [each for each in kinds_of(backend) if each in faults or not faults]
    for number in range(count):
        rng = Random(f"{seed}-{number}")
        yield case(rng, kinds[number % len(kinds)], f"{seed}-{number}", backend)


def case(rng: Random, fault: str, name: str, backend: str = "gloo") -> Case:
    """A random case of one kind."""
    while True:
        world = rng.choice((2, 3, 3, 4, 4)) if fault != "two" else rng.choice((3, 4))
        layout = rng.choice(sorted(layouts(world)) if fault != "two" else ["world", "twins"])  # both are waited for
        groups = layouts(world)[layout]
        schedule = draw(rng, groups)
        culprit = rng.randrange(world)
        at = _place(rng, fault, schedule, groups, culprit)
        if at is not None:
            break
    done = {culprit: fault}
    if fault == "two":
        first, second = rng.choice(PAIRS)
        done = {culprit: first, rng.choice([each for each in range(world) if each != culprit]): second}
        if len({each in AT_BEGIN for each in done.values()}) > 1:  # no rank gets past a call without the other one
            at = 0
    refuse = FAULTS[fault].call and rng.random() < 0.5
    step = rng.randrange(3, STEP_LAST + 1)
    timed = backend == EMULATED_NCCL and fault != "untimed kernel" and (fault == "kernel" or rng.random() < 0.5)
    return Case(name, fault, world, layout, schedule, done, step, at, refuse, backend, timed)


def _place(rng: Random, fault: str, schedule: Sequence[Call], groups: Groups, culprit: int) -> int | None:
    """The index of the call before which the fault happens; None if the kind does not fit into the schedule."""
    own = [i for i, call in enumerate(schedule) if members(groups, call.group, culprit)]
    if fault == "order":
        own = [i for i in own if _crosses(schedule, groups, culprit, i)]
    elif fault in ("shape", "dtype"):
        own = [i for i in own if PLACES[schedule[i].place].size]
    elif fault == "root":
        own = [i for i in own if schedule[i].place in ROOTED]
    elif fault == "lag":  # the others may complete a rooted operation without a member
        own = [i for i in own if schedule[i].place not in ROOTED]
    return rng.choice(own) if own else None


def _crosses(schedule: Sequence[Call], groups: Groups, culprit: int, at: int) -> bool:
    """Whether a call and the next one wait for each other when exchanged: they are on two communicators with two common
    members, and return on no member before all have entered."""
    if at + 1 == len(schedule):
        return False
    here, there = schedule[at], schedule[at + 1]
    both = {*members(groups, here.group, culprit)} & {*members(groups, there.group, culprit)}
    waits = all(PLACES[each.place].operation in ("all_reduce", "barrier") for each in (here, there))
    return here.group != there.group and len(both) >= 2 and waits


@dataclass(frozen=True)
class Expected:
    """The expected verdict."""

    kinds: tuple[str, ...]
    level: str
    culprits: frozenset[int]
    open_to: frozenset[int] = field(default_factory=frozenset)
    """The members of a communicator without a majority: naming all of them is right as well."""
    collectives: frozenset[tuple[str, int]] = field(default_factory=frozenset)
    """(communicator, sequence number) of the collectives of which one must be named; empty if none has to be."""


def expected(case: Case) -> Expected:
    """Returns the expected verdict of a case."""
    about = case.about
    culprits = frozenset(case.faults) if about.kinds and about.named else frozenset()
    if not about.kinds:
        return Expected((), about.level, culprits)
    if about.call:
        parted = partings(case)
        group = next((name for name, _ in parted), WORLD)
        there = members(case.groups, group, next(iter(culprits)))
        return Expected(about.kinds, about.level, culprits, _pair(there), frozenset(parted) | waited_for(case))
    if case.fault == "order":
        first, second = case.schedule[case.at : case.at + 2]
        both = {*members(case.groups, first.group, next(iter(culprits)))}
        both &= {*members(case.groups, second.group, next(iter(culprits)))}
        return Expected(about.kinds, about.level, culprits, _pair(tuple(sorted(both))), waited_for(case, 2))
    if case.fault in ("never", "members"):
        return Expected(about.kinds, about.level, culprits, _pair(tuple(range(case.world))))
    return Expected(about.kinds, about.level, culprits, collectives=waited_for(case))


def _pair(who: tuple[int, ...]) -> frozenset[int]:
    return frozenset(who) if len(who) == 2 else frozenset()


def waited_for(case: Case, ahead: int = 1) -> frozenset[tuple[str, int]]:
    """The collectives that the culprits would enter next when the fault happens, on each of their communicators; with
    `ahead` 2, also the ones after these. With a process ends what its device has not run yet, so the others may wait in
    any collective that it has issued in this step."""
    found = set()
    for rank, fault in case.faults.items():
        steps = list(case.schedule) * (case.step - 1)
        if fault == "checkpoint":  # at the end of the step
            steps += case.schedule
        elif fault not in AT_BEGIN:
            steps += case.schedule[: case.at]
        lost_from = len(case.schedule) * (case.step - 1) if case.backend != "gloo" and fault in ENDING else len(steps)
        for group in case.groups:
            calls = [i for i, call in enumerate(steps) if call.group == group]
            if members(case.groups, group, rank):
                lost = sum(i >= lost_from for i in calls)
                found |= {(group, len(calls) + k) for k in range(1 - lost, ahead + 1)}
    return frozenset(found)


ENDING = ("killed", "exits", "raises")
"""Faults at a call that end the process."""
AT_BEGIN = ("loader", "reward", "gil", "spins", "memory", "uneven", "slow", "tail cpu", "tail io", "tail counter")
"""Faults in functions that run at the beginning of a step, before its first call."""

Signature = tuple[str, int, str, int]


def done_by(case: Case, rank: int, steps: int) -> list[tuple[str, Signature]]:
    """(communicator, (operation, size, dtype, root)) of all calls of a rank in so many steps, its fault included."""
    fault, found = case.faults.get(rank), []
    for step in range(1, steps + 1):
        if fault == "uneven" and step == case.step:
            return [*found, (WORLD, _signature(Call(FINISH, WORLD)))]
        for i, call in enumerate(case.schedule):
            if not members(case.groups, call.group, rank):
                continue
            usual = (call.group, _signature(call))
            now = step == case.step and i == case.at and fault is not None and FAULTS[fault].call
            found += _instead(fault or "", call, usual, case.backend) if now else [usual]
    return found


def _signature(call: Call) -> Signature:
    place = PLACES[call.place]
    return place.operation, place.size, "float32", 0 if call.place in ROOTED else -1


def _instead(fault: str, call: Call, usual: tuple[str, Signature], backend: str) -> list[tuple[str, Signature]]:
    group, (operation, size, dtype, root) = usual
    if fault == "skips":
        return []
    if fault == "extra":
        return [usual, usual]
    if fault == "branch":
        return [(group, _signature(other(call, backend))), usual]
    changed = {
        "operation": _signature(other(call, backend)), "shape": (operation, 3 * size, dtype, root),
        "dtype": (operation, size, "float64", root), "root": (operation, size, dtype, 1),
    }[fault]  # fmt: skip
    return [(group, changed)]


def partings(case: Case) -> list[tuple[str, int]]:
    """Returns, for each communicator, the first sequence number at which its members' calls differ."""
    culprit = next(iter(case.faults))
    peers = [rank for rank in range(case.world) if rank != culprit]
    found = []
    for group in case.groups:
        there = members(case.groups, group, culprit)
        peer = next((each for each in peers if each in there), None)
        if peer is None:
            continue
        mine, theirs = (
            [what for name, what in done_by(case, rank, case.step + 3) if name == group] for rank in (culprit, peer)
        )
        parted = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False), 1) if a != b), None)
        if parted is not None:
            found.append((group, parted))
    return found
