"""The call relays of a run: processes that pass the controller's calls on to all workers of a node, or of several.

A thousand nodes with eight workers each are eight thousand connections and, in every step, tens of thousands of
messages. With relays the controller has a connection, and a message for a call of all workers, for each relay. Workers
use their node's relay as soon as there is one, and the controller's own address while there is none: nothing waits for
a relay, and its end interrupts no call. The agents of its nodes show the workers where it listens.
"""

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from lockstep.base.network import LOOPBACK, PortRange
from lockstep.base.text import count_noun, first_line
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.relay_groups import RelayGroup, RelayGroups
from lockstep.cluster.rpc.relayed_connection import RELAY_SILENT_S, ExpectedRelay
from lockstep.cluster.rpc.rpc_messages import MANIFEST_VARIABLE, WorkerManifest
from lockstep.cluster.rpc.rpc_server import RpcServer
from lockstep.watch.agent.agent_client import AgentClient, AgentError, AgentGone, WorkerExit
from lockstep.watch.agent.service_discovery import ServiceAddress

log = logging.getLogger(__name__)

DIRECT_NODES = 2
"""With more nodes, workers on other hosts than the controller's are called through call relays."""
SEPARATE_NODES = 32
"""With more nodes, those that are new share relays. That many relays cost the controller a few milliseconds a step, and
a relay of one node needs no port that other hosts reach."""
MAX_RESTARTS = 3
"""How often a relay is started again. After that its workers stay connected to the controller."""


@dataclass(slots=True, eq=False)
class _Relay:
    """A relay that was started. Only the thread of `CallRelays` changes it."""

    name: str
    group: RelayGroup[ClusterNode]
    node: ClusterNode
    agent: AgentClient
    """The agent that started it, with which it ends."""
    restarts: int
    ended: bool = False
    address: ServiceAddress | None = None
    """Where it listens; None while no worker can connect to it."""
    shown: dict[ClusterNode, tuple[AgentClient, ServiceAddress | None]] = field(default_factory=dict)
    """What the workers of each node were last shown, and by which agent."""

    @property
    def served(self) -> str:
        """Its node, and how many others have workers behind it."""
        others = sum(node is not self.node for node in self.group.nodes)
        return f"{self.node.info.name} and {count_noun(others, 'other node')}" if others else self.node.info.name


class CallRelays:
    """Starts call relays, and replaces those that end or are silent. Any thread may call. What agents get is sent by a
    thread of its own, because an agent that does not read may hold it up.

    Args:
        closing: whether the cluster is being closed, so that relays end.
        ports: on which relays of several nodes may listen; None allows any.
    """

    def __init__(
        self, server: RpcServer, run: str, generation: int, closing: Callable[[], bool], ports: PortRange | None
    ) -> None:  # fmt: skip
        self._server, self._run, self._generation, self._closing = server, run, generation, closing
        self._ports = ports
        self._numbers = itertools.count()
        self._groups: RelayGroups[ClusterNode] = RelayGroups()
        self._relays: dict[RelayGroup[ClusterNode], _Relay] = {}
        """The last relay of each group."""
        self._lock = threading.Lock()
        """Guards the groups and the jobs."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._working = False
        """Whether a thread does the jobs."""

    def place(self, node: ClusterNode, planned: Callable[[ClusterNode], int], nodes: int) -> None:
        """Decides, before it has a worker, with which other nodes a node of the run shares a relay.

        Args:
            planned: returns how many workers the node will have, as far as they are planned.
            nodes: how many the run has.
        """
        with self._lock:
            if node not in self._groups:
                shared = not node.is_local and nodes > SEPARATE_NODES
                node.calls = self._groups.place(node, planned(node), shared).calls

    def remove(self, node: ClusterNode) -> None:
        """Forgets a node that the run has lost for good."""
        with self._lock:
            self._groups.remove(node)

    def has_relay(self, node: ClusterNode, nodes: int) -> bool:
        """Whether a node has a call relay in a run of so many nodes."""
        return not node.is_local and nodes > DIRECT_NODES

    def ensure(self, nodes: Iterable[ClusterNode], count: int) -> None:
        """Starts the relays of placed nodes that have none, of `count` nodes of the run. Does not wait for them."""
        with self._lock:
            groups = {self._groups[node] for node in nodes if self.has_relay(node, count)}
        self._soon(partial(self._ensure, groups))

    def check(self) -> None:
        """Replaces relays whose nodes are lost. To be called about twice a second; does not wait."""
        for relay in list(self._relays.values()):
            if not relay.ended and not relay.agent.alive:
                self._soon(partial(self._replace, relay, "with its node"))

    def ended(self, end: WorkerExit) -> bool:
        """Handles the end of a process. Returns whether it was a relay."""
        relay = next((each for each in list(self._relays.values()) if each.name == end.name), None)
        if relay is None:
            return False
        self._server.remove_relay(relay.name)
        if end.exit_code:  # else another controller has the run
            how = f"signal {-end.exit_code}" if end.exit_code < 0 else f"exit code {end.exit_code}"
            self._soon(partial(self._replace, relay, f"({how})"))
        return True

    # --- jobs

    def _soon(self, job: Callable[[], None]) -> None:
        """Does a job in another thread, after those before it."""
        with self._lock:
            self._jobs.append(job)
            if self._working:
                return
            self._working = True
        threading.Thread(target=self._work, name="call relays", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._working = bool(self._jobs)
                if not self._working:
                    return
                job = self._jobs.popleft()
            try:
                if not self._closing():
                    job()
            except Exception:  # the others must not wait for a thread that has ended
                log.exception("a call relay is in an unknown state; its workers can do without it")

    def _ensure(self, groups: Iterable[RelayGroup[ClusterNode]]) -> None:
        for group in groups:
            known = self._relays.get(group)
            if known is None or (known.ended and not known.agent.alive):
                self._start(group, 0, None)
            else:
                self._show(known)  # a node may have a new agent

    def _start(self, group: RelayGroup[ClusterNode], restarts: int, before: ClusterNode | None) -> None:
        """Begins to start a relay, if possible on another node than `before`."""
        alive = [(node, node.agent) for node in group.nodes if node.agent is not None and node.agent.alive]
        if not alive:
            return
        node, agent = min(alive, key=lambda each: each[0] is before)
        number = next(self._numbers)
        name = f"call-relay-{self._generation}-{number}"
        relay = self._relays[group] = _Relay(name, group, node, agent, restarts)
        environment = node.environment_of(WorkerSpec(name, "relay", number, ""))
        environment[MANIFEST_VARIABLE] = str(node.cluster_dir / f"{name}.json")
        host, ports = (node.info.address, self._ports) if group.shared else (LOOPBACK, None)
        where = {"host": host, "ports": ports}
        manifest = WorkerManifest(name, "relay", number, "", where, self._run, self._generation)
        python, folder = node.python_and_folder()
        argv = [python, "-P", "-m", "lockstep.cluster.rpc.relay_main"]
        self._server.add_relay(name, ExpectedRelay(
            group.calls, lambda address: self._soon(partial(self._listens, relay, address)),
            partial(self._kill_silent, relay),
        ))  # fmt: skip
        with contextlib.suppress(AgentGone):  # the node is lost, which `check` notices
            pid = agent.submit_spawn(
                name, argv, log_path=node.logs / f"{name}.log", env=environment, cwd=folder, note=manifest.text(),
                trusted=True,
            )  # fmt: skip
            pid.add_done_callback(lambda done: self._soon(partial(self._started, relay, done)))

    def _started(self, relay: _Relay, done: "Future[int]") -> None:
        error = done.exception()
        if error is None or isinstance(error, AgentGone):
            return
        relay.ended = True
        self._server.remove_relay(relay.name)
        log.warning(
            "%s, the call relay of %s, did not start: its workers stay connected to the controller (%s)",
            relay.name, relay.served, first_line(error),
        )  # fmt: skip

    def _listens(self, relay: _Relay, address: ServiceAddress | None) -> None:
        """Shows the workers where a relay listens, or that it does not."""
        if not relay.ended:
            relay.address = address
            self._show(relay)

    def _show(self, relay: _Relay) -> None:
        """Shows the workers of all its nodes the address of a relay, unless they were shown it."""
        for node in relay.group.nodes:
            agent, (by, address) = node.agent, relay.shown.get(node, (None, None))
            if agent is not None and agent.alive and (address != relay.address or (address and by is not agent)):
                with contextlib.suppress(AgentGone):  # and its workers with it
                    agent.show_call_relay(relay.address)
                    relay.shown[node] = agent, relay.address

    def _replace(self, relay: _Relay, how: str) -> None:
        """Handles the end of a relay."""
        if relay.ended:
            return
        relay.ended, relay.address = True, None
        self._server.remove_relay(relay.name)
        self._show(relay)
        again = relay.restarts < MAX_RESTARTS
        log.warning(
            "%s, the call relay of %s, ended %s: its workers connect to the controller themselves%s",
            relay.name, relay.served, how, " until another one has started" if again else "",
        )  # fmt: skip
        with contextlib.suppress(AgentGone):
            relay.agent.forget(relay.name)
        if again:
            self._start(relay.group, relay.restarts + 1, relay.node)

    def _kill_silent(self, relay: _Relay) -> None:
        """Kills a relay whose connection the server has closed; its end is reported like any other."""
        log.warning(
            "%s, the call relay of %s, has been silent for %g s (stopped, or without CPU time); killing it",
            relay.name, relay.served, RELAY_SILENT_S,
        )  # fmt: skip

        def kill() -> None:
            with contextlib.suppress(AgentError, WaitTimeout):
                relay.agent.kill(relay.name)

        threading.Thread(target=kill, name=f"kill {relay.name}", daemon=True).start()
