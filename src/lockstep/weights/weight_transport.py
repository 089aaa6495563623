"""What brings published weights to the engines: the protocol of transports, and the choice of one for a run.

The choice is a pure function of where the run's processes and devices are, and gives its reason in words.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lockstep.cluster.protocol import Worker
from lockstep.weights.errors import BufferHeld

HostTransport = Literal["shared", "gloo", "files"]
"""Through host memory."""
DeviceTransport = Literal["nccl", "cuda_ipc"]
"""From device to device."""


@dataclass(frozen=True, slots=True)
class HostTransportChoice:
    """What carries weights through host memory, and why."""

    transport: HostTransport
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceTransportChoice:
    """What carries weights from device to device, None where nothing does, and why."""

    way: DeviceTransport | None
    reason: str


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """What trainer ranks and engines compute on."""

    cuda: bool
    shared: Literal["none", "some", "all"]
    """How many of the engines' GPUs are those of trainer ranks."""
    crowded: bool = False
    """Whether two engines have the same GPU."""
    slower: str = ""
    """Why the trainer's collectives do not run on NCCL, where they should."""


def select_host_transport(
    wanted: HostTransport | DeviceTransport | Literal["auto"],
    trainers: Collection[str],
    engines: Collection[str],
    here: str,
    nodes: int = 1,
) -> HostTransportChoice:
    """Of the ways through host memory. Where weights go from device to device, this is how engines get them that were
    not there.

    Args:
        wanted: `weights.transport`.
        trainers, engines: names of the nodes that they are on.
        here: the controller's.
        nodes: how many the cluster has.

    Raises:
        ValueError: `weights.transport` cannot serve this placement.
    """
    if wanted in ("nccl", "cuda_ipc"):
        wanted = "auto"
    everywhere = sorted({*trainers, *engines})
    alone = nodes == 1 and everywhere == [here]
    if wanted == "shared" and not alone:
        raise ValueError(
            f"weights.transport shared reaches one node, and this run has {max(nodes, len(everywhere))} "
            f"({', '.join(everywhere)}): set it to auto, gloo or files"
        )
    if alone:
        asked = "" if wanted in ("auto", "shared") else f" (weights.transport is {wanted}: there is no other node)"
        return HostTransportChoice("shared", f"engines and trainer are on one node, {here}{asked}")
    if wanted == "files":
        return HostTransportChoice("files", "weights.transport says so")
    spread = f"the cluster has {nodes} nodes" if len(everywhere) == 1 else f"the run is on {', '.join(everywhere)}"
    return HostTransportChoice("gloo", "weights.transport says so" if wanted == "gloo" else spread)


def select_device_transport(
    wanted: HostTransport | DeviceTransport | Literal["auto"],
    devices: DevicePlacement,
    trainers: Collection[str],
    engines: Collection[str],
) -> DeviceTransportChoice:
    """Whether weights go from device to device, and how.

    Raises:
        ValueError: `weights.transport` asks for what these devices do not have.
    """
    if wanted in ("shared", "gloo", "files"):
        return DeviceTransportChoice(None, f"weights.transport is {wanted}")
    refusal = transport_refusal(wanted, devices)
    if refusal:
        raise ValueError(refusal)
    if not devices.cuda:
        return DeviceTransportChoice(None, "trainer and engines are not on GPUs")
    if devices.slower:
        return DeviceTransportChoice(None, f"the trainer's collectives do not run on NCCL: {devices.slower}")
    asked = "weights.transport says so" if wanted != "auto" else ""
    if devices.shared == "none" and not devices.crowded:
        return DeviceTransportChoice("nccl", asked or "trainer and engines have GPUs of their own")
    if devices.shared != "all":
        return DeviceTransportChoice(None, "some engines share their GPUs and others do not")
    apart = sorted(set(engines) - set(trainers))
    if apart and wanted == "cuda_ipc":
        raise ValueError(
            f"weights.transport cuda_ipc reaches engines on the trainer's GPUs, and {', '.join(apart)} has engines and "
            "no trainer rank: set it to auto, or place the roles on the same nodes"
        )
    if apart:
        return DeviceTransportChoice(None, f"roles share GPUs, but {', '.join(apart)} has no trainer rank")
    return DeviceTransportChoice("cuda_ipc", asked or "engines and trainer share their GPUs")


def transport_refusal(wanted: HostTransport | DeviceTransport | Literal["auto"], devices: DevicePlacement) -> str:
    """Why these devices cannot have that transport, with a remedy; empty where they can."""
    if wanted not in ("nccl", "cuda_ipc"):
        return ""
    if not devices.cuda:
        return (
            f"weights.transport {wanted} goes from GPU to GPU, and this run is on CPUs (cluster.device): set "
            "weights.transport=auto"
        )
    if wanted == "nccl" and (devices.shared != "none" or devices.crowded):
        return (
            "weights.transport nccl needs a GPU of its own for every trainer rank and engine: NCCL takes one process "
            "per GPU, and here some share one: set weights.transport=cuda_ipc or auto, or use more GPUs"
        )
    if wanted == "cuda_ipc" and devices.shared != "all":
        return (
            "weights.transport cuda_ipc needs all engines on the trainer's GPUs, and here some have others: set "
            "weights.transport=nccl or auto, or placement.colocate=all"
        )
    return ""


WriteVersion = Callable[[], Sequence[Worker]]
"""Has the trainer's ranks write their rows of a version; the engines that are to find it on their nodes then."""


class WeightTransport(Protocol):
    """From trainer ranks to the nodes of all engines."""

    def where(self, worker: Worker, version: int) -> str | None:
        """The folder of its node's store; None where that does not have the version (yet). From any thread."""

    def fetch(self, worker: Worker, version: int) -> None:
        """Brings the version to the worker's node, which was left behind or is new. From any thread; takes as long as
        bytes move. Raises Stalled, WorkerDied, RemoteError."""

    def moves(self) -> object:
        """Changes as long as bytes of some transfer do."""

    def lay_out(self, ranks: Sequence[Worker]) -> list[str]:
        """Stores for these trainer ranks; the folder of each. Idempotent."""

    def publish(self, version: int, write: WriteVersion) -> None:
        """Makes what `write` has the ranks write the version of every node with engines. From before it is
        written until it is committed nobody else brings weights to the ranks' nodes. A node that fails or makes no
        progress is left behind: `where` is None for its engines then.

        Raises:
            BufferHeld: a reader does not let go of the memory that the version needs; nothing was written.
            IncompleteWeights, PlanMismatch: it cannot be committed.
        """

    def hanging(self) -> list[BufferHeld]:
        """Readers that have kept a node without trainer ranks from getting a version, and still do. Asked before a
        publish, which does without them."""

    def reads(self, engine: Worker, held: BufferHeld) -> bool:
        """Whether it is this engine that a version could not be written for."""

    def served(self) -> None:
        """Engines have the version that was published last: what there was before is not needed any more."""
