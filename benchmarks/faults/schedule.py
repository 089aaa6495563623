"""The lines of the job that issue collectives, the communicators, and the random schedule of a step."""

from dataclasses import dataclass
from random import Random

ROOTED = ("weights", "metrics")


@dataclass(frozen=True)
class Place:
    """A line of the program from which a collective is issued."""

    operation: str
    size: int
    """Number of float32 elements; 0 without a tensor."""


PLACES = {
    "gradients": Place("all_reduce", 64),
    "norm": Place("all_reduce", 1),
    "loss": Place("all_reduce", 1),
    "weights": Place("broadcast", 32),
    "tokens": Place("all_gather_into_tensor", 8),
    "metrics": Place("reduce", 16),
    "meet": Place("barrier", 0),
}
FINISH = "meet"
"""The operation that the program calls on all ranks after its last step."""


@dataclass(frozen=True)
class Call:
    place: str
    group: str


def other(call: Call, backend: str) -> Call:
    """A call of another operation on the same communicator. A barrier of NCCL is an all-reduce of one element, so there
    a broadcast stands for an all-reduce."""
    if PLACES[call.place].operation != "all_reduce":
        return Call("gradients", call.group)
    return Call("meet" if backend == "gloo" else "weights", call.group)


Groups = dict[str, tuple[tuple[int, ...], ...]]
"""The communicators of each name, each as the tuple of its ranks; a rank is in at most one communicator of a name."""

WORLD = "default_pg"


def layouts(world: int) -> dict[str, Groups]:
    """Communicators by the layout's name; each layout contains the default group."""
    everybody = tuple(range(world))
    found: dict[str, Groups] = {
        "world": {WORLD: (everybody,)},
        "twins": {WORLD: (everybody,), "one": (everybody,), "two": (everybody,)},
    }
    if world == 3:
        found["subgroup"] = {WORLD: (everybody,), "tensor": ((0, 1),)}
        found["overlapping"] = {WORLD: (everybody,), "left": ((0, 1),), "right": ((1, 2),)}
    elif world == 4:
        found["subgroup"] = {WORLD: (everybody,), "tensor": ((0, 1), (2, 3))}
        found["overlapping"] = {WORLD: (everybody,), "left": ((0, 1, 2),), "right": ((1, 2, 3),)}
    return found


def draw(rng: Random, groups: Groups) -> tuple[Call, ...]:
    """Draws the calls of a step. Each communicator has two with different signatures, so that a missing or extra call
    is visible."""
    calls = []
    for group in groups:
        first = rng.choice([place for place in PLACES if place != FINISH])
        other = rng.choice([place for place in PLACES if PLACES[place] != PLACES[first]])
        calls += [Call(first, group), Call(other, group)]
    calls += [Call(rng.choice(list(PLACES)), rng.choice(list(groups))) for _ in range(rng.randrange(3))]
    rng.shuffle(calls)
    return tuple(calls)


def members(groups: Groups, name: str, rank: int) -> tuple[int, ...]:
    """The members of a rank's communicator of that name; empty if it has none."""
    return next((each for each in groups[name] if rank in each), ())
