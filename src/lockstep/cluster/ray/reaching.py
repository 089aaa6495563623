"""Whether a run's nodes and its controller get to each other's ports: told by name before anything waits for it."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.cluster.node import NodeRefused
from lockstep.cluster.ray.session import answer
from lockstep.watch.ports import Ports, dial

DIAL_S = 5.0
"""A firewall that drops what it does not let in answers nothing."""
ASK_S = 60.0


@dataclass(frozen=True, slots=True)
class Door:
    """A port on which somebody of a run listens."""

    what: str
    """Who does: `the controller`."""
    node: str
    host: str
    port: int


def why_shut(host: str, port: int) -> str | None:
    """Why nobody answers there; None where somebody does."""
    try:
        dial(host, port, "whether its port is open", DIAL_S)
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


def must_get_here(nodes: Sequence[tuple[str, Any]], listening: dict[str, tuple[str, int]], ports: Ports | None) -> None:
    """Every node, by its name and its actor, to where this host listens, by who does.

    Raises:
        NodeRefused: one does not.
        WaitTimeout, ray's errors: its actor does not answer.
    """
    doors = [Door(what, socket.gethostname(), *where) for what, where in listening.items()]
    asked = [(name, keeper.dial.remote([(door.host, door.port) for door in doors])) for name, keeper in nodes]
    for name, ref in asked:
        for door, why in zip(doors, answer(ref, name, "whether it gets to this host", ASK_S), strict=True):
            if why is not None:
                raise _shut(name, door, why, ports)


def must_get_there(door: Door, ports: Ports | None) -> None:
    """This host, to where a node listens. Raises NodeRefused."""
    why = why_shut(door.host, door.port)
    if why is not None:
        raise _shut(socket.gethostname(), door, why, ports)


def _shut(who: str, door: Door, why: str, ports: Ports | None) -> NodeRefused:
    what = "it, or ports that cluster.ports names," if ports is None else f"{ports[0]} to {ports[1]} (cluster.ports)"
    return NodeRefused(
        f"{who} does not get to port {door.port} of {door.node} ({door.host}), where {door.what} listens ({why}): "
        f"open {what} between all nodes of the run"
    )
