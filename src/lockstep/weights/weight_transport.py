"""The protocol of weight transports, which bring published weights to engines, and the choice of one for a run.

The choice depends only on the config and on the placement of the run's processes and devices. It includes its reason.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lockstep.cluster.protocol import Worker
from lockstep.weights.errors import BufferHeld

HostTransport = Literal["shared", "gloo", "files"]
"""Transports through host memory: shared memory on one node, gloo, or files in a shared folder."""
DeviceTransport = Literal["nccl", "cuda_ipc"]
"""Transports from the trainer's GPUs to the engines' GPUs."""


@dataclass(frozen=True, slots=True)
class HostTransportChoice:
    """The selected transport through host memory, and the reason."""

    transport: HostTransport
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceTransportChoice:
    """The selected transport from device to device (None: none), and the reason."""

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
    """Why the trainer's collectives run on gloo although NCCL was expected; empty otherwise."""


def select_host_transport(
    setting: HostTransport | DeviceTransport | Literal["auto"],
    trainers: Collection[str],
    engines: Collection[str],
    here: str,
    nodes: int = 1,
) -> HostTransportChoice:
    """Selects the transport through host memory. If weights are sent from device to device, engines that missed a
    version still get it through host memory.

    Args:
        setting: `weights.transport`.
        trainers, engines: names of the nodes of trainer ranks and of engines.
        here: name of the controller's node.
        nodes: number of nodes in the cluster.

    Raises:
        ValueError: `weights.transport` does not support this placement.
    """
    if setting in ("nccl", "cuda_ipc"):
        setting = "auto"
    nodes_in_use = sorted({*trainers, *engines})
    one_node = nodes == 1 and nodes_in_use == [here]
    if setting == "shared" and not one_node:
        raise ValueError(
            f"weights.transport shared works on one node only, and this run has {max(nodes, len(nodes_in_use))} "
            f"({', '.join(nodes_in_use)}): set it to auto, gloo or files"
        )
    if one_node:
        asked = (
            "" if setting in ("auto", "shared") else f" (weights.transport is {setting}, but there is only one node)"
        )
        return HostTransportChoice("shared", f"engines and trainer are on one node, {here}{asked}")
    if setting == "files":
        return HostTransportChoice("files", "weights.transport requests it")
    spread = f"the cluster has {nodes} nodes" if len(nodes_in_use) == 1 else f"the run is on {', '.join(nodes_in_use)}"
    return HostTransportChoice("gloo", "weights.transport requests it" if setting == "gloo" else spread)


def select_device_transport(
    setting: HostTransport | DeviceTransport | Literal["auto"],
    devices: DevicePlacement,
    trainers: Collection[str],
    engines: Collection[str],
) -> DeviceTransportChoice:
    """Selects the transport from device to device, if the devices support one.

    Raises:
        ValueError: these devices do not support `weights.transport`.
    """
    if setting in ("shared", "gloo", "files"):
        return DeviceTransportChoice(None, f"weights.transport is {setting}")
    refusal = transport_refusal(setting, devices)
    if refusal:
        raise ValueError(refusal)
    if not devices.cuda:
        return DeviceTransportChoice(None, "trainer and engines are not on GPUs")
    if devices.slower:
        return DeviceTransportChoice(None, f"the trainer's collectives do not run on NCCL: {devices.slower}")
    asked = "weights.transport requests it" if setting != "auto" else ""
    if devices.shared == "none" and not devices.crowded:
        return DeviceTransportChoice("nccl", asked or "trainer and engines use different GPUs")
    if devices.shared != "all":
        return DeviceTransportChoice(None, "some engines share their GPUs and others do not")
    apart = sorted(set(engines) - set(trainers))
    if apart and setting == "cuda_ipc":
        raise ValueError(
            f"weights.transport cuda_ipc reaches engines on the trainer's GPUs, and {', '.join(apart)} has engines and "
            "no trainer rank: set it to auto, or place the roles on the same nodes"
        )
    if apart:
        return DeviceTransportChoice(None, f"roles share GPUs, but {', '.join(apart)} has no trainer rank")
    return DeviceTransportChoice("cuda_ipc", asked or "engines and trainer share their GPUs")


def transport_refusal(setting: HostTransport | DeviceTransport | Literal["auto"], devices: DevicePlacement) -> str:
    """Returns why these devices do not support that transport, with a fix; empty if they do."""
    if setting not in ("nccl", "cuda_ipc"):
        return ""
    if not devices.cuda:
        return (
            f"weights.transport {setting} copies from GPU to GPU, and this run is on CPUs (cluster.device): set "
            "weights.transport=auto"
        )
    if setting == "nccl" and (devices.shared != "none" or devices.crowded):
        return (
            "weights.transport nccl needs a GPU of its own for every trainer rank and engine, because NCCL allows one "
            "process per GPU; in this run some share a GPU: set weights.transport=cuda_ipc or auto, or use more GPUs"
        )
    if setting == "cuda_ipc" and devices.shared != "all":
        return (
            "weights.transport cuda_ipc needs all engines on the trainer's GPUs, but some have other GPUs: set "
            "weights.transport=nccl or auto, or placement.colocate=all"
        )
    return ""


WriteVersion = Callable[[], Sequence[Worker]]
"""Makes the trainer's ranks write their rows of a version, and returns the engines that need the version."""


class WeightTransport(Protocol):
    """Brings weights from the trainer's ranks to the nodes of all engines."""

    def store_folder(self, worker: Worker, version: int) -> str | None:
        """Returns the folder of the store on the worker's node, None if that store lacks the version. Thread-safe."""

    def fetch(self, worker: Worker, version: int) -> None:
        """Brings the version to the worker's node, which is new or missed a publish. Thread-safe. Has no time limit
        while the transfer makes progress. Raises Stalled, WorkerDied, RemoteError."""

    def progress(self) -> object:
        """Returns a value that changes while any transfer makes progress."""

    def prepare_stores(self, ranks: Sequence[Worker]) -> list[str]:
        """Prepares a store for each of these trainer ranks; returns the folders in the order of ranks. Idempotent."""

    def publish(self, version: int, write: WriteVersion) -> None:
        """Writes a version by `write` and brings it to every node with engines. Until the commit, no other transfer to
        the ranks' nodes runs. A node that fails or makes no progress misses the version: `store_folder` then returns
        None for its engines.

        Raises:
            BufferHeld: a reader holds the buffer that the version needs; nothing was written.
            IncompleteWeights, PlanMismatch: the version cannot be committed.
        """

    def blocking_readers(self) -> list[BufferHeld]:
        """Returns the readers because of which a node without trainer ranks cannot get a version. The controller calls
        it before a publish and kills the engines that are such readers."""

    def holds_buffer(self, engine: Worker, held: BufferHeld) -> bool:
        """Returns whether this engine is the reader that holds the buffer."""

    def delete_former_stores(self) -> None:
        """Deletes stores that were replaced. Call it when all engines have the latest version."""
