"""The kinds of faults, and of healthy activities that look like one, that `benchmarks.faults.attach` measures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

LOOPS = ("plain", "ddp")
BUSY_FACTOR = 10.0
"""A busy process is confirmed after this many times as long as an idle one."""


@dataclass(frozen=True, slots=True)
class AttachFault:
    """A kind of fault and what is expected of `lockstep watch`."""

    group: str
    """What proves it: `structure`, `idle` or `busy`; `healthy` if no verdict may be confirmed."""
    culprits: tuple[int, ...] = (1,)
    loops: tuple[str, ...] = LOOPS


PLAIN, DDP = ("plain",), ("ddp",)
HEALTHY = AttachFault("healthy", ())
FAULTS = {
    "stopped": AttachFault("structure"),
    "killed": AttachFault("structure"),
    "exits": AttachFault("structure"),
    "raises": AttachFault("structure"),
    "memory": AttachFault("structure", loops=PLAIN),
    "skips": AttachFault("structure"),
    "extra": AttachFault("structure"),
    "operation": AttachFault("structure", loops=PLAIN),
    "shape": AttachFault("structure", loops=PLAIN),
    "dtype": AttachFault("structure", loops=PLAIN),
    "uneven": AttachFault("structure"),
    "order": AttachFault("structure", loops=PLAIN),
    "sleep": AttachFault("idle"),
    "subprocess": AttachFault("idle"),
    "lock": AttachFault("idle"),
    "socket": AttachFault("idle"),
    "fifo": AttachFault("idle"),
    "loader": AttachFault("idle", loops=DDP),
    "hung compiler": AttachFault("idle"),
    "hung import": AttachFault("idle"),
    "never joins": AttachFault("idle", loops=PLAIN),
    "two": AttachFault("idle", culprits=(1, 2), loops=PLAIN),
    "regex": AttachFault("busy", loops=PLAIN),
    "spin": AttachFault("busy", loops=DDP),
    "compiles": HEALTHY,
    "builds": HEALTHY,
    "imports": HEALTHY,
    "reads_slowly": HEALTHY,
    "child_reads": AttachFault("healthy", (), PLAIN),
    "slow_disk": HEALTHY,
    "direct_reads": AttachFault("healthy", (), PLAIN),
    "compute": AttachFault("healthy", (), DDP),
}
GROUPS = ("structure", "idle", "healthy", "busy")
"""In the order in which they are measured."""


@dataclass(frozen=True, slots=True)
class AttachCase:
    """One job to watch."""

    fault: str
    loop: str
    load: int
    """Busy processes beside the jobs, for each core."""
    repeat: int

    @property
    def about(self) -> AttachFault:
        return FAULTS[self.fault]

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.loop}-{self.load}-{self.repeat}".replace(" ", "-")

    def limit_s(self, confirm_after_s: float) -> float:
        """How many seconds the job is watched after the fault, at most."""
        bound = {"structure": 20.0, "healthy": 90.0, "busy": BUSY_FACTOR * confirm_after_s}
        return (1 + self.load / 2) * (bound.get(self.about.group, confirm_after_s) + 20.0)


def attach_cases(
    faults: Sequence[str], loops: Sequence[str], loads: Sequence[int], repeats: int
) -> Iterator[AttachCase]:
    """The cases of each load, ordered so that jobs which are watched for about as long follow each other."""
    ordered = sorted(faults, key=lambda name: GROUPS.index(FAULTS[name].group))
    for load, fault, loop, repeat in product(loads, ordered, loops, range(repeats)):
        if loop in FAULTS[fault].loops:
            yield AttachCase(fault, loop, load, repeat)


def batches(cases: Sequence[AttachCase], size: int) -> Iterator[list[AttachCase]]:
    """Cases that run at once: of one load and one group."""
    batch: list[AttachCase] = []
    for each in cases:
        if batch and (len(batch) == size or (each.load, each.about.group) != (batch[0].load, batch[0].about.group)):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch
