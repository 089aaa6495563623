"""What a head may ask of a probe, and how much of it: each order as a type, and ValueError for anything else. (Of
`look` see `others`.)

Whoever knows the token may stand in the head's place, so nothing here runs a command that it names, and what it names
is limited."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.doctor.check.typed import Address, Port, Word, reader

Variable = Literal[
    "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME",
]  # fmt: skip
"""All that a head may set for ranks: what `collectives` and `isolation` do. Others of NCCL name libraries that it loads
and files that it writes."""
MOST_BYTES = 256 << 20
"""Of one collective."""
MOST_RANKS = 256
"""On one host."""
MOST_SECONDS = 600.0

Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Short = Annotated[float, Field(ge=0, le=60)]


@dataclass(frozen=True, slots=True)
class AskCard:
    """What it sees of itself, with ports that it is to bind."""

    ports: Annotated[list[Port], Field(max_length=4096)]
    kernels: Annotated[int, Field(ge=0, le=64)] = 3


@dataclass(frozen=True, slots=True)
class Reach:
    """Whom it reaches: peers are dialled, shown that it knows the token, and sent some small frames."""

    hosts: list[tuple[Word, Address, Mapping[Word, Port]]]
    dial_s: Short
    bound_s: Short
    lanes: Annotated[int, Field(gt=0, le=256)]


@dataclass(frozen=True, slots=True)
class Rate:
    """How much goes to one peer on one connection."""

    target: tuple[Word, Address, Port, Word]
    seconds: Annotated[float, Field(gt=0, le=10)]
    dial_s: Short


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator of the self-test, its members as ranks."""

    name: Word
    backend: Literal["nccl", "gloo"]
    members: list[Annotated[int, Field(ge=0)]]
    operations: list[Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]]


@dataclass(frozen=True, slots=True)
class Task:
    """What the ranks of a host do in a self-test; see `selftest`."""

    world: Annotated[int, Field(gt=0)]
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MOST_RANKS)]
    host: Address
    port: Annotated[int, Field(ge=0, lt=1 << 16)]
    address: Address
    device: Literal["cpu", "cuda"]
    bytes: Annotated[int, Field(gt=0, le=MOST_BYTES)]
    bound_s: Seconds
    communicators: list[Group]
    serve: bool = False

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start the ranks of the self-test."""

    spec: Task
    environment: Mapping[Variable, Word]


@dataclass(frozen=True, slots=True)
class AwaitRanks:
    """Their results."""

    bound_s: Seconds


ask_card, reach, rate = reader(AskCard), reader(Reach), reader(Rate)
start_ranks, await_ranks = reader(StartRanks), reader(AwaitRanks)
