"""A cluster of one host whose workers are called through a call relay, as on a node of a large cluster."""

import time
from collections.abc import Callable
from typing import Any

from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.rpc.relayed_connection import CallRelayLink, RelayedConnection


class RelayedCluster(LocalCluster):
    """This host as if it were one of many nodes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._relays.has_relay = lambda node, nodes: True  # type: ignore[method-assign]


def await_relay(*workers: Any, other_than: CallRelayLink | None = None) -> CallRelayLink:
    """Waits until the workers are connected through one relay (another one); returns its link."""
    until = time.monotonic() + 30
    while True:
        links = {worker.connection.link for worker in workers if isinstance(worker.connection, RelayedConnection)}
        direct = [worker.name for worker in workers if not isinstance(worker.connection, RelayedConnection)]
        if not direct and len(links) == 1 and other_than not in links:
            return links.pop()
        assert time.monotonic() < until, f"connected to the controller itself: {direct}"
        time.sleep(0.01)


def until(there: Callable[[], object], seconds: float = 30.0) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)
