"""The call relays of a run: on a node with one, a process passes the controller's calls on to all workers there.

A thousand nodes with eight workers each are eight thousand connections and, in every step, tens of thousands of
messages. With relays the controller has a connection, and a message for a call of all workers, for each node. Workers
use their node's relay as soon as there is one, and the controller's own address while there is none: nothing waits for
a relay, and its end interrupts no call.
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from lockstep.base.text import first_line
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.rpc.relayed_connection import RELAY_SILENT_S
from lockstep.cluster.rpc.rpc_messages import MANIFEST_VARIABLE, WorkerManifest
from lockstep.cluster.rpc.rpc_server import RpcServer
from lockstep.watch.agent.agent_client import AgentClient, AgentError, AgentGone, WorkerExit

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""How often the relay of a node is started again. After that its workers stay connected to the controller."""


@dataclass(slots=True)
class _NodeRelay:
    """The relay of a node."""

    name: str
    node: ClusterNode
    agent: AgentClient
    """The agent that started it, with which it ends."""
    restarts: int


class CallRelays:
    """Starts call relays, and replaces those that end or are silent. Any thread may call.

    Args:
        closing: whether the cluster is being closed, so that relays end.
    """

    def __init__(self, server: RpcServer, run: str, generation: int, closing: Callable[[], bool]) -> None:
        self._server, self._run, self._generation, self._closing = server, run, generation, closing
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._relays: dict[ClusterNode, _NodeRelay] = {}

    def ensure(self, nodes: Iterable[ClusterNode]) -> None:
        """Starts the relays of nodes that have none. Does not wait for them."""
        with self._lock:
            for node in nodes:
                known = self._relays.get(node)
                if known is None or known.agent is not node.agent:
                    self._start(node, 0)

    def ended(self, end: WorkerExit) -> bool:
        """Handles the end of a process. Returns whether it was a relay."""
        with self._lock:
            relay = next((each for each in self._relays.values() if each.name == end.name), None)
            if relay is None:
                return False
            self._server.remove_relay(relay.name)
            if self._closing() or end.exit_code == 0:  # another controller has the run
                return True
            how = f"signal {-end.exit_code}" if end.exit_code < 0 else f"exit code {end.exit_code}"
            again = relay.restarts < MAX_RESTARTS
            log.warning(
                "%s, the call relay of %s, ended (%s): its workers connect to the controller themselves%s",
                relay.name, relay.node.info.name, how, " until another one has started" if again else "",
            )  # fmt: skip
            with contextlib.suppress(AgentGone):
                relay.agent.forget(relay.name)
            if again:
                self._start(relay.node, relay.restarts + 1)
        return True

    def _start(self, node: ClusterNode, restarts: int) -> None:
        """Begins to start a relay. The caller holds the lock."""
        agent, number = node.agent, next(self._numbers)
        if agent is None:
            return
        name = f"call-relay-{self._generation}-{number}"
        relay = self._relays[node] = _NodeRelay(name, node, agent, restarts)
        environment = node.environment_of(WorkerSpec(name, "relay", number, ""))
        environment[MANIFEST_VARIABLE] = str(node.cluster_dir / f"{name}.json")
        manifest = WorkerManifest(name, "relay", number, "", {}, self._run, self._generation)
        python, folder = node.python_and_folder()
        argv = [python, "-P", "-m", "lockstep.cluster.rpc.relay_main"]
        self._server.add_relay(name, lambda: self._replace_silent(relay))
        try:
            pid = agent.submit_spawn(
                name, argv, log_path=node.logs / f"{name}.log", env=environment, cwd=folder, note=manifest.text(),
                trusted=True,
            )  # fmt: skip
        except AgentGone:  # the node is lost
            self._server.remove_relay(name)
            return
        pid.add_done_callback(lambda done: self._started(relay, done))

    def _started(self, relay: _NodeRelay, done: "Future[int]") -> None:
        error = done.exception()
        if error is not None and not self._closing():
            self._server.remove_relay(relay.name)
            log.warning(
                "%s, the call relay of %s, did not start: its workers stay connected to the controller (%s)",
                relay.name, relay.node.info.name, first_line(error),
            )  # fmt: skip

    def _replace_silent(self, relay: _NodeRelay) -> None:
        """Kills a relay whose connection the server has closed; its end is reported like any other."""
        log.warning(
            "%s, the call relay of %s, has been silent for %g s (stopped, or without CPU time); killing it",
            relay.name, relay.node.info.name, RELAY_SILENT_S,
        )  # fmt: skip

        def kill() -> None:
            with contextlib.suppress(AgentError, WaitTimeout):
                relay.agent.kill(relay.name)

        threading.Thread(target=kill, name=f"kill {relay.name}", daemon=True).start()
