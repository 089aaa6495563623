"""Which run is next, and which faults it gets: functions of a seed and a number, so that any machine continues."""

import random
from dataclasses import dataclass

from benchmarks.faults.run_faults import CRITIC, GENERATION, HOSTS, LOCAL, RunFault

STEPS, EVERY = 100, 10
FAULTS = STEPS // EVERY - 1
FULL, SLOW = "full disk", "slow disk"


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of run."""

    task: str
    """`grpo`, `ppo`, `dpo`, or `vlm`: GRPO with images."""
    cluster: str
    """`local`, `ray`, or `hosts`: Ray on two hosts, of which one is a network namespace."""
    trainer: str

    @property
    def name(self) -> str:
        return f"{self.task} {self.cluster} {self.trainer}"

    @property
    def faults(self) -> tuple[RunFault, ...]:
        """Every fault that such a run can have."""
        found = LOCAL + (() if self.task == "dpo" else GENERATION) + (CRITIC if self.task == "ppo" else ())
        if self.cluster == "local":
            return found
        # Ray's processes use deadlines of the wall clock inside the kernel, where a library cannot shift it.
        found = tuple(each for each in found if each.name != "jump of clock")
        return found + (HOSTS if self.cluster == "hosts" else ())


TASKS = ("grpo", "ppo", "dpo", "vlm")
PLACES = (
    ("local", "fsdp2"), ("ray", "fsdp2"), ("local", "deepspeed"),
    ("hosts", "fsdp2"), ("ray", "deepspeed"), ("hosts", "deepspeed"),
)  # fmt: skip
VARIANTS = tuple(Variant(TASKS[each], *PLACES[(row + each) % 6]) for row in range(6) for each in range(4))
"""All combinations, ordered so that neighbours differ in everything."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A run and its faults."""

    number: int
    variant: Variant
    seed: int
    """Of the run; all episodes of a variant have the same one, and so the same undisturbed run."""
    faults: tuple[tuple[int, RunFault], ...]
    """With the step in which each comes, counted from 1."""
    small_disk: bool
    """Whether the run's folder is on a small disk of its own, as one of the faults fills it."""
    orphan_grace_s: float
    """How long the workers of a killed controller wait for the next one."""

    @property
    def chance(self) -> random.Random:
        return random.Random(f"{self.seed} {self.number} {self.variant.name}")


def episode(seed: int, number: int) -> Episode:
    """The `number`th episode (from 0) of this seed."""
    turn, place = divmod(number, len(VARIANTS))
    variant = VARIANTS[place]
    faults = _deal(f"{seed} {variant.name}", variant.faults, turn)
    names = [each.name for each in faults]
    if FULL in names and SLOW in names:  # a small disk is in memory, and not slow
        instead = next(each for each in LOCAL if each.name == "kill policy")
        faults = [instead if each.name == SLOW else each for each in faults]
    steps = range(EVERY, STEPS, EVERY)
    grace_s = 60.0 if random.Random(f"{seed} {number} grace").random() < 0.5 else 0.0
    return Episode(
        number, variant, seed + place, tuple(zip(steps, faults, strict=True)), FULL in names,
        grace_s if variant.cluster == "local" else 60.0,
    )  # fmt: skip


def _deal(name: str, faults: tuple[RunFault, ...], turn: int) -> list[RunFault]:
    """The `turn`th hand from an endless row of shuffled decks: each fault comes equally often."""
    first = turn * FAULTS
    row: list[RunFault] = []
    deck = 0
    while len(row) < first + FAULTS:
        shuffled = list(faults)
        random.Random(f"{name} {deck}").shuffle(shuffled)
        row += shuffled
        deck += 1
    return row[first : first + FAULTS]
