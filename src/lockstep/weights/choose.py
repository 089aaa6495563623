"""Which transport a run uses: a pure function of where its processes are, with the reason in words."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Transport = Literal["shared", "gloo", "files"]
"""Through host memory."""
Direct = Literal["nccl", "cuda_ipc"]
"""From device to device."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What carries weights through host memory, and why."""

    transport: Transport
    reason: str


@dataclass(frozen=True, slots=True)
class DirectChoice:
    """What carries weights from device to device, None where nothing does, and why."""

    way: Direct | None
    reason: str


@dataclass(frozen=True, slots=True)
class Devices:
    """What trainer ranks and engines compute on."""

    cuda: bool
    shared: Literal["none", "some", "all"]
    """How many of the engines' GPUs are those of trainer ranks."""
    crowded: bool = False
    """Whether two engines have the same GPU."""
    slower: str = ""
    """Why the trainer's collectives do not run on NCCL, where they should."""


def choose(
    wanted: Transport | Direct | Literal["auto"],
    trainers: Collection[str],
    engines: Collection[str],
    here: str,
    nodes: int = 1,
) -> Choice:
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
        return Choice("shared", f"engines and trainer are on one node, {here}{asked}")
    if wanted == "files":
        return Choice("files", "weights.transport says so")
    spread = f"the cluster has {nodes} nodes" if len(everywhere) == 1 else f"the run is on {', '.join(everywhere)}"
    return Choice("gloo", "weights.transport says so" if wanted == "gloo" else spread)


def choose_direct(
    wanted: Transport | Direct | Literal["auto"],
    devices: Devices,
    trainers: Collection[str],
    engines: Collection[str],
) -> DirectChoice:
    """Whether weights go from device to device, and how.

    Raises:
        ValueError: `weights.transport` asks for what these devices do not have.
    """
    if wanted in ("shared", "gloo", "files"):
        return DirectChoice(None, f"weights.transport is {wanted}")
    refusal = impossible(wanted, devices)
    if refusal:
        raise ValueError(refusal)
    if not devices.cuda:
        return DirectChoice(None, "trainer and engines are not on GPUs")
    if devices.slower:
        return DirectChoice(None, f"the trainer's collectives do not run on NCCL: {devices.slower}")
    asked = "weights.transport says so" if wanted != "auto" else ""
    if devices.shared == "none" and not devices.crowded:
        return DirectChoice("nccl", asked or "trainer and engines have GPUs of their own")
    if devices.shared != "all":
        return DirectChoice(None, "some engines share their GPUs and others do not")
    apart = sorted(set(engines) - set(trainers))
    if apart and wanted == "cuda_ipc":
        raise ValueError(
            f"weights.transport cuda_ipc reaches engines on the trainer's GPUs, and {', '.join(apart)} has engines and "
            "no trainer rank: set it to auto, or place the roles on the same nodes"
        )
    if apart:
        return DirectChoice(None, f"roles share GPUs, but {', '.join(apart)} has no trainer rank")
    return DirectChoice("cuda_ipc", asked or "engines and trainer share their GPUs")


def impossible(wanted: Transport | Direct | Literal["auto"], devices: Devices) -> str:
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
