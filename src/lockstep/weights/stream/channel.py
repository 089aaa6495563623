"""Who sends to whom over a device transport, and how: the same on all sides, without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

RECEIVER = "lockstep.weights.stream.receiver:Receiver"
"""What an engine takes a stream by."""

Way = Literal["nccl", "cuda_ipc"]


@dataclass(frozen=True, slots=True)
class Channel:
    """One sender role and some engines. It serves version after version until one of its members is lost; then another
    one, with another number, is formed without it."""

    number: int
    """Unique in a generation of the run: keys and communicators are named by it."""
    way: Way
    backend: str
    """Of torch's process group: `nccl`; `gloo` carries the same stream between CPUs."""
    store: tuple[str, int]
    """Host and port of the run's rendezvous store."""
    scope: str
    """Prefix of all keys in it: generation of the run."""
    engines: tuple[str, ...]
    width: int = 1
    """Workers of each engine (tensor parallel); every one is a member."""
    bucket_bytes: int = 64 << 20
    check: Literal["none", "sampled", "complete"] = "sampled"
    limit_s: float = 60.0
    """How long a member may make no progress."""

    @property
    def members(self) -> list[str]:
        """Names of the receivers, in the order of their ranks, which begin at 1: the sender is 0."""
        return [member(engine, worker, self.width) for engine in self.engines for worker in range(self.width)]

    @property
    def name(self) -> str:
        """For messages and communicators."""
        return f"weights stream {self.number}"

    def where(self, engine: str, plan: str) -> dict[str, Any]:
        """What one of the engines is told.

        Args:
            plan: of the weights, as JSON: what this engine is to expect.
        """
        return {"receiver": RECEIVER, "channel": asdict(self), "engine": engine, "plan": plan}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Channel":
        """As it arrives at an engine."""
        host, port = found["store"]
        engines: Sequence[str] = found["engines"]
        return cls(**{**found, "store": (str(host), int(port)), "engines": tuple(engines)})


def member(engine: str, worker: int, width: int) -> str:
    """Of one of an engine's workers."""
    return engine if width == 1 else f"{engine}/{worker}"
