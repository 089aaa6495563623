"""The protocol of weight transports, which bring published weights to the engines, and the choice of one for a run.

The choice depends only on the config and on where the run's processes and devices are, and states its reason.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lockstep.cluster.protocol import Worker
from lockstep.weights.errors import BufferHeld

HostTransport = Literal["shared", "gloo", "files"]
"""Transports through host memory."""
DeviceTransport = Literal["nccl", "cuda_ipc"]
"""Transports from device to device."""


@dataclass(frozen=True, slots=True)
class HostTransportChoice:
    """The selected transport through host memory, and why."""

    transport: HostTransport
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceTransportChoice:
    """The selected transport from device to device (None if there is none), and why."""

    way: DeviceTransport | None
    reason: str


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """The devices of trainer ranks and engines."""

    cuda: bool
    shared: Literal["none", "some", "all"]
    """How many of the engines' GPUs are also used by trainer ranks."""
    crowded: bool = False
    """Whether two engines share a GPU."""
    slower: str = ""
    """Why the trainer's collectives do not run on NCCL although they should; empty otherwise."""


def select_host_transport(
    wanted: HostTransport | DeviceTransport | Literal["auto"],
    trainers: Collection[str],
    engines: Collection[str],
    here: str,
    nodes: int = 1,
) -> HostTransportChoice:
    """Selects the transport through host memory. Where weights go from device to device, engines that missed a version
    get it this way.

    Args:
        wanted: `weights.transport`.
        trainers, engines: names of their nodes.
        here: name of the controller's node.
        nodes: number of nodes in the cluster.

    Raises:
        ValueError: `weights.transport` cannot serve this placement.
    """
    if wanted in ("nccl", "cuda_ipc"):
        wanted = "auto"
    everywhere = sorted({*trainers, *engines})
    alone = nodes == 1 and everywhere == [here]
    if wanted == "shared" and not alone:
        raise ValueError(
            f"weights.transport shared works on one node only, and this run has {max(nodes, len(everywhere))} "
            f"({', '.join(everywhere)}): set it to auto, gloo or files"
        )
    if alone:
        asked = "" if wanted in ("auto", "shared") else f" (weights.transport is {wanted}, but there is only one node)"
        return HostTransportChoice("shared", f"engines and trainer are on one node, {here}{asked}")
    if wanted == "files":
        return HostTransportChoice("files", "weights.transport requests it")
    spread = f"the cluster has {nodes} nodes" if len(everywhere) == 1 else f"the run is on {', '.join(everywhere)}"
    return HostTransportChoice("gloo", "weights.transport requests it" if wanted == "gloo" else spread)


def select_device_transport(
    wanted: HostTransport | DeviceTransport | Literal["auto"],
    devices: DevicePlacement,
    trainers: Collection[str],
    engines: Collection[str],
) -> DeviceTransportChoice:
    """Selects how weights go from device to device, if they do.

    Raises:
        ValueError: these devices do not support `weights.transport`.
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
    asked = "weights.transport requests it" if wanted != "auto" else ""
    if devices.shared == "none" and not devices.crowded:
        return DeviceTransportChoice("nccl", asked or "trainer and engines use different GPUs")
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
    """Why these devices do not support that transport, with a fix; empty where they do."""
    if wanted not in ("nccl", "cuda_ipc"):
        return ""
    if not devices.cuda:
        return (
            f"weights.transport {wanted} copies from GPU to GPU, and this run is on CPUs (cluster.device): set "
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
"""Makes the trainer's ranks write their rows of a version; returns the engines whose nodes need the version."""


class WeightTransport(Protocol):
    """Brings weights from the trainer's ranks to the nodes of all engines."""

    def store_folder(self, worker: Worker, version: int) -> str | None:
        """Returns the folder of the store on the worker's node, None if that store lacks the version. Thread-safe."""

    def fetch(self, worker: Worker, version: int) -> None:
        """Brings the version to the worker's node, which was left behind or is new. Thread-safe; may take as long as
        bytes keep moving. Raises Stalled, WorkerDied, RemoteError."""

    def progress(self) -> object:
        """Returns a value that changes while any transfer makes progress."""

    def prepare_stores(self, ranks: Sequence[Worker]) -> list[str]:
        """Prepares a store for each of these trainer ranks; returns its folder, by rank. Idempotent."""

    def publish(self, version: int, write: WriteVersion) -> None:
        """Writes a version by `write` and brings it to every node with engines. No other transfer to the ranks' nodes
        runs until it is committed. A node that fails or makes no progress is left behind: `store_folder` then returns
        None for its engines.

        Raises:
            BufferHeld: a reader holds the memory that the version needs; nothing was written.
            IncompleteWeights, PlanMismatch: the version cannot be committed.
        """

    def blocking_readers(self) -> list[BufferHeld]:
        """Returns the readers that keep a node without trainer ranks from getting a version. Called before a publish,
        so that the engines that block it can be killed."""

    def holds_buffer(self, engine: Worker, held: BufferHeld) -> bool:
        """Returns whether this engine is the reader that holds the buffer."""

    def delete_former_stores(self) -> None:
        """Deletes stores that were replaced. Call it when all engines have the latest version."""
