"""A channel between the trainer and engines for device transports: its members, and the handshake before a transfer.

Every receiver announces a digest of the tensors that it expects, in a key with its name. The sender waits for all
receivers and reports which are missing or expect other tensors. Only afterwards do processes create a communicator.
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
"""The class with which an engine receives a stream."""

StreamTransport = Literal["nccl", "cuda_ipc"]


@dataclass(frozen=True, slots=True)
class StreamChannel:
    """The trainer and some engines. A channel is used for version after version until a member is lost; then a channel
    with another number, without that member, replaces it."""

    number: int
    """Unique within a generation of the run; part of the names of keys and communicators."""
    way: StreamTransport
    backend: str
    """Backend of torch's process group: `nccl`, or `gloo` for CPUs."""
    store: str
    """URL of the run's rendezvous store."""
    scope: str
    """Prefix of all keys in the store, with the run's generation."""
    engines: tuple[str, ...]
    width: int = 1
    """Number of workers of each engine (tensor parallel). Each worker is a member."""
    bucket_bytes: int = 64 << 20
    check: Literal["none", "sampled", "complete"] = "sampled"
    limit_s: float = 60.0
    """How long to wait for a member that makes no progress."""

    @property
    def members(self) -> list[str]:
        """Names of the receivers, in the order of their ranks, which start at 1; the sender is rank 0."""
        return [member_name(engine, worker, self.width) for engine in self.engines for worker in range(self.width)]

    @property
    def name(self) -> str:
        """The channel's name in messages and communicators."""
        return f"weights stream {self.number}"

    def where(self, engine: str, plan: str) -> dict[str, Any]:
        """Returns what an engine needs to join.

        Args:
            plan: the weight plan that this engine expects, as JSON.
        """
        return {"receiver": STREAM_RECEIVER, "channel": asdict(self), "engine": engine, "plan": plan}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "StreamChannel":
        """Makes the channel from the fields that an engine received."""
        engines: Sequence[str] = fields["engines"]
        return cls(**{**fields, "engines": tuple(engines)})


def member_name(engine: str, worker: int, width: int) -> str:
    """Returns the name of one of an engine's workers."""
    return engine if width == 1 else f"{engine}/{worker}"


@dataclass(frozen=True, slots=True)
class StreamReceiverInfo:
    """The announcement of a receiver."""

    agreement: str
    device: str
    """Name of its device that is the same in all processes of the host, such as a GPU's UUID."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def announce_receiver(store: Store, channel: StreamChannel, name: str, info: StreamReceiverInfo) -> None:
    """The receiver's part of the handshake: announces it, and waits for the sender's answer.

    Raises:
        PlanMismatch: sender and receiver expect different tensors.
        LinkFailed: the sender did not answer, or reports a problem, such as missing receivers.
    """
    store.set(f"{channel.number}/card/{name}", json.dumps(asdict(info)))
    answer = json.loads(
        wait_for_key(store, f"{channel.number}/answer", channel.name, "the trainer", timeout_s=2 * channel.limit_s)
    )
    if answer["agreement"] != info.agreement:
        raise PlanMismatch("the trainer has another plan or other buckets", answer["agreement"], info.agreement)
    if answer["problem"]:
        raise LinkFailed(channel.name, "the trainer", answer["problem"])


def gather_receivers(
    store: Store, channel: StreamChannel, agreement: str, answers: bool
) -> dict[str, StreamReceiverInfo]:
    """The sender's part of the handshake: waits for all receivers and returns their announcements by name.

    Args:
        answers: whether this rank answers the receivers; exactly one of the trainer's ranks does.

    Raises:
        LinkFailed: some receivers did not join, or expect other tensors.
    """
    infos: dict[str, StreamReceiverInfo] = {}
    deadline = time.monotonic() + channel.limit_s
    missing = []
    for name in channel.members:
        try:
            remaining_s = max(0.01, deadline - time.monotonic())
            raw = wait_for_key(store, f"{channel.number}/card/{name}", channel.name, name, timeout_s=remaining_s)
            infos[name] = StreamReceiverInfo(**json.loads(raw))
        except LinkFailed:
            missing.append(name)
    problem = f"{', '.join(missing)} did not join within {channel.limit_s:g} s" if missing else ""
    mismatched = [name for name, info in infos.items() if info.agreement != agreement]
    if mismatched and not problem:
        problem = f"{', '.join(mismatched)} expect other tensors, dtypes or buckets"
    if answers:
        # Keeps the previous channel, so that its late members still find an answer.
        delete_old_channels(store, channel.number - 1)
        store.set(f"{channel.number}/answer", json.dumps({"agreement": agreement, "problem": problem}))
    if problem:
        raise LinkFailed(channel.name, ", ".join(missing or mismatched), problem)
    return infos


def delete_old_channels(store: Store, below: int) -> None:
    """Deletes all keys of channels with lower numbers."""
    for key in store.list_keys():
        number = key.partition("/")[0]
        if number.isdigit() and int(number) < below:
            store.delete_key(key)


def receivers_on_device(infos: Mapping[str, StreamReceiverInfo], device: str) -> list[str]:
    """Returns the names of the receivers on this device of this host."""
    host = socket.gethostname()
    return [name for name, info in infos.items() if (info.host, info.device) == (host, device)]
