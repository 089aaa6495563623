"""Which transport a run uses: a pure function of where its processes are, with the reason in words."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Transport = Literal["shared", "gloo", "files"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What carries weights, and why."""

    transport: Transport
    reason: str


def choose(
    wanted: Transport | Literal["auto"],
    trainers: Collection[str],
    engines: Collection[str],
    here: str,
    nodes: int = 1,
) -> Choice:
    """
    Args:
        wanted: `weights.transport`.
        trainers, engines: names of the nodes that they are on.
        here: the controller's.
        nodes: how many the cluster has.

    Raises:
        ValueError: `weights.transport` cannot serve this placement.
    """
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
