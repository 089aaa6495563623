"""Which transport a run uses: a pure function of where its processes are, with the reason in words."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Transport = Literal["shared", "gloo", "files", "nccl", "cuda_ipc"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What carries weights, and why."""

    transport: Transport
    reason: str


def choose(
    wanted: Literal["auto", "shared", "gloo", "files", "nccl", "cuda_ipc"],
    trainers: Collection[str],
    engines: Collection[str],
    here: str,
    nodes: int = 1,
    engine: str = "builtin",
    device: str = "cpu",
) -> Choice:
    """
    Args:
        wanted: `weights.transport`.
        trainers, engines: names of the nodes that they are on.
        here: the controller's.
        nodes: how many the cluster has.
        engine: `rollout.engine.kind`.
        device: what the trainer and the engines compute on, `cpu` or `cuda`.

    Raises:
        ValueError: `weights.transport` cannot serve this placement.
    """
    everywhere = sorted({*trainers, *engines})
    alone = nodes == 1 and everywhere == [here]
    if wanted in ("nccl", "cuda_ipc"):
        return _on_gpus(wanted, everywhere, engine, device)
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


def _on_gpus(wanted: Literal["nccl", "cuda_ipc"], nodes: list[str], engine: str, device: str) -> Choice:
    if device != "cuda" or engine != "vllm":
        raise ValueError(
            f"weights.transport {wanted} goes from GPU to GPU into vLLM engines, and this run has {engine} engines on "
            f"{device}: set it to auto"
        )
    if wanted == "cuda_ipc" and len(nodes) > 1:
        raise ValueError(f"weights.transport cuda_ipc reaches GPUs of one node, and this run is on {', '.join(nodes)}")
    return Choice(wanted, "weights.transport says so")
