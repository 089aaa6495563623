"""Workers on this host: spawned by a node agent, called over loopback."""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from lockstep.cluster.base import CLOSE_GRACE_S, AgentCluster
from lockstep.cluster.names import RESERVED
from lockstep.cluster.node import Node
from lockstep.cluster.predecessor import Heritage, end_predecessor
from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.config.cluster import LocalCluster as Config
from lockstep.watch import procs
from lockstep.watch.agent_client import AgentClient, AgentGone
from lockstep.watch.agent_start import start_agent
from lockstep.watch.beacon import read_beacons
from lockstep.watch.folders import run_dir
from lockstep.watch.leader import Leader, Superseded

log = logging.getLogger(__name__)

HOST = "127.0.0.1"


class LocalCluster(AgentCluster):
    """The processes of one run on this host.

    Logs of the workers are in `folder/logs`, the agent's affairs and the charges in `folder/cluster`.

    Args:
        token: shared by all processes of the run; made here when None. It travels by environment only.
        heritage: of the generation before, where `run` is its run. Its workers that `start` is asked for again are
            adopted, as they are; `release` ends the others.

    Raises:
        AgentError: the node agent did not come up.
        Superseded: a later generation has the run.
    """

    def __init__(
        self,
        config: Config,
        run: str,
        folder: Path,
        generation: int,
        token: str | None = None,
        heritage: Heritage | None = None,
    ) -> None:
        token = token or (secrets.token_hex(32) if heritage is None else heritage.token)
        super().__init__(config, run, folder, generation, token, HOST)
        info = NodeInfo(socket.gethostname(), HOST, run_dir(run))
        self._node = Node(info, self._affairs, self._folder / "logs")
        self._nodes = [self._node]
        try:
            self._affairs.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._node.logs.mkdir(parents=True, exist_ok=True)
            if heritage is None:
                end_predecessor(self._affairs, generation)
                self._lead()
                self._node.agent = self._start_agent()
            else:
                self._node.agent = heritage.agent
                self._node.agent.on_exit = self._exited
                with contextlib.suppress(AgentGone):  # then another is started, and all workers are new
                    self._heirs.meet(self._node, self._node.agent.list())
                self._lead()
        except BaseException:
            self.close()
            raise

    def _lead(self) -> None:
        """From here on workers find this controller and no other."""
        pid, (host, port), grace_s = os.getpid(), self._hub.address, self._limits.orphan_grace_s
        Leader(self._generation, host, port, pid, procs.start_ticks(pid), grace_s).publish(self._run)

    def _start_agent(self) -> AgentClient:
        grace_s = self._limits.orphan_grace_s
        address = start_agent(
            self._run, self._token, self._affairs, generation=self._generation, orphan_grace_s=grace_s
        )
        try:
            return AgentClient(address, self._token, on_exit=self._exited)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(address.pid, signal.SIGKILL)
            raise

    def _place(self, spec: WorkerSpec) -> Node:
        if spec.node not in (None, self._node.info.name):
            raise ValueError(f"{spec.name} is to be on {spec.node}, and this run has only {self._node.info.name}")
        return self._node

    def _prepare(self, specs: Sequence[WorkerSpec]) -> None:
        """Starts another agent where it was killed. Its workers went with it (the kernel sees to that, so that none is
        ever orphaned): whoever needs them starts them again. Raises AgentGone."""
        with self._lock:
            agent = self._node.agent
            if agent is None or self._closing:
                raise AgentGone("start", "the cluster is closed")
            if agent.alive:
                return
            gone, leader = agent.address, Leader.read(self._run)
            if leader is not None and leader.generation > self._generation:
                raise AgentGone("start", str(Superseded(self._run, self._generation, leader.generation)))
            if not run_dir(self._run).is_dir():
                raise AgentGone("start", f"the agent (pid {gone.pid}) has left, with the run's shared memory")
            log.warning("the node agent (pid %d) has ended, and its workers with it; another is started", gone.pid)
            agent.close()
            self._node.agent = agent = self._start_agent()
            for state in read_beacons(self._run):
                if state.name not in RESERVED:
                    agent.forget(state.name)
            if self._supervision is not None:
                self._supervision.watch(self._agents())

    # --- ends

    def _end_nodes(self) -> None:
        if self._node.agent is None:
            self._abandon_nodes()
            return
        remaining = self._node.agent.leave(CLOSE_GRACE_S)
        if remaining:
            log.error("%s did not end, not even killed", ", ".join(remaining))
        shutil.rmtree(run_dir(self._run), ignore_errors=True)  # an agent that was killed has left it

    def _leave_nodes(self) -> None:
        if self._node.agent is not None:
            self._node.agent.close()

    def _abandon_nodes(self) -> None:
        if self._superseded:
            return
        agent = self._node.agent
        if agent is not None and procs.alive(agent.address.pid, agent.address.start_ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.address.pid, signal.SIGKILL)
        shutil.rmtree(run_dir(self._run), ignore_errors=True)
