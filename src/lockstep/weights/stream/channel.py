"""A channel between the trainer and engines for device transports: its members and the handshake before bytes move.

Every receiver announces under its name the digest of what it expects. The sender waits for all of them and reports
which are missing or expect something else; only then does any process enter a communicator.
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch._C._distributed_c10d import Store

from lockstep.weights.distributed_setup import wait_for_key
from lockstep.weights.errors import LinkFailed, PlanMismatch

STREAM_RECEIVER = "lockstep.weights.stream.weight_stream:StreamReceiver"
"""The class by which an engine receives a stream."""

StreamTransport = Literal["nccl", "cuda_ipc"]


@dataclass(frozen=True, slots=True)
class StreamChannel:
    """One sender role and some engines. It serves version after version until a member is lost; a channel with another
    number then replaces it, without that member."""

    number: int
    """Unique in a generation of the run; names keys and communicators."""
    way: StreamTransport
    backend: str
    """Backend of torch's process group: `nccl`, or `gloo`, which carries the same stream between CPUs."""
    store: tuple[str, int]
    """Host and port of the run's rendezvous store."""
    scope: str
    """Prefix of all keys in the store: the run's generation."""
    engines: tuple[str, ...]
    width: int = 1
    """Workers of each engine (tensor parallel); each is a member."""
    bucket_bytes: int = 64 << 20
    check: Literal["none", "sampled", "complete"] = "sampled"
    limit_s: float = 60.0
    """How long a member may make no progress."""

    @property
    def members(self) -> list[str]:
        """Names of the receivers, in the order of their ranks, which start at 1; the sender is rank 0."""
        return [member_name(engine, worker, self.width) for engine in self.engines for worker in range(self.width)]

    @property
    def name(self) -> str:
        """Its name in messages and communicators."""
        return f"weights stream {self.number}"

    def where(self, engine: str, plan: str) -> dict[str, Any]:
        """What an engine needs to join.

        Args:
            plan: the weight plan that this engine expects, as JSON.
        """
        return {"receiver": STREAM_RECEIVER, "channel": asdict(self), "engine": engine, "plan": plan}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "StreamChannel":
        """The channel from the fields that an engine received."""
        host, port = found["store"]
        engines: Sequence[str] = found["engines"]
        return cls(**{**found, "store": (str(host), int(port)), "engines": tuple(engines)})


def member_name(engine: str, worker: int, width: int) -> str:
    """Name of one of an engine's workers."""
    return engine if width == 1 else f"{engine}/{worker}"


@dataclass(frozen=True, slots=True)
class StreamReceiverInfo:
    """What a receiver announces."""

    agreement: str
    device: str
    """A host-wide name of its device, such as a GPU's UUID."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def announce_receiver(store: Store, channel: StreamChannel, name: str, card: StreamReceiverInfo) -> None:
    """A receiver's side: announces it, and waits until the sender has seen all receivers.

    Raises:
        PlanMismatch: sender and receiver expect different tensors.
        LinkFailed: the sender did not come, or refuses; names the missing receivers.
    """
    store.set(f"{channel.number}/card/{name}", json.dumps(asdict(card)))
    answer = json.loads(
        wait_for_key(store, f"{channel.number}/answer", channel.name, "the trainer", timeout_s=2 * channel.limit_s)
    )
    if answer["agreement"] != card.agreement:
        raise PlanMismatch("the trainer has another plan or other buckets", answer["agreement"], card.agreement)
    if answer["problem"]:
        raise LinkFailed(channel.name, "the trainer", answer["problem"])


def gather_receivers(
    store: Store, channel: StreamChannel, agreement: str, answers: bool
) -> dict[str, StreamReceiverInfo]:
    """The sender's side: waits for all receivers; returns their announcements by name.

    Args:
        answers: whether this rank answers the receivers (exactly one of the trainer's ranks does).

    Raises:
        LinkFailed: some receivers did not come, or expect something else.
    """
    cards: dict[str, StreamReceiverInfo] = {}
    until = time.monotonic() + channel.limit_s
    missing = []
    for name in channel.members:
        try:
            left_s = max(0.01, until - time.monotonic())
            raw = wait_for_key(store, f"{channel.number}/card/{name}", channel.name, name, timeout_s=left_s)
            cards[name] = StreamReceiverInfo(**json.loads(raw))
        except LinkFailed:
            missing.append(name)
    problem = f"{', '.join(missing)} did not join within {channel.limit_s:g} s" if missing else ""
    others = [name for name, card in cards.items() if card.agreement != agreement]
    if others and not problem:
        problem = f"{', '.join(others)} expect other tensors, dtypes or buckets"
    if answers:
        delete_old_channels(
            store, channel.number - 1
        )  # members that are late for the last channel still find its answer
        store.set(f"{channel.number}/answer", json.dumps({"agreement": agreement, "problem": problem}))
    if problem:
        raise LinkFailed(channel.name, ", ".join(missing or others), problem)
    return cards


def delete_old_channels(store: Store, below: int) -> None:
    """Deletes all keys of channels with lower numbers."""
    for key in store.list_keys():
        number = key.partition("/")[0]
        if number.isdigit() and int(number) < below:
            store.delete_key(key)


def receivers_on_device(cards: Mapping[str, StreamReceiverInfo], device: str) -> list[str]:
    """Names of the receivers on this device of this host."""
    here = socket.gethostname()
    return [name for name, card in cards.items() if (card.host, card.device) == (here, device)]
