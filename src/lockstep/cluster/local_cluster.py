"""The cluster of a run on one host, whose workers are called over loopback; and the probes of `lockstep check`."""

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from lockstep.base import waits
from lockstep.base.folders import make_folder, run_shm_dir
from lockstep.base.network import LOOPBACK
from lockstep.base.transport.run_token import new_run_token
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.agent_cluster import CLOSE_GRACE_S, AgentCluster
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import RESERVED_NAMES, NodeInfo, WorkerSpec
from lockstep.cluster.reattach import InheritedAgent, kill_previous_agent
from lockstep.config.cluster import LocalClusterConfig as Config
from lockstep.watch.agent.agent_client import AgentClient, AgentGone, start_agent
from lockstep.watch.agent.prepared_agent import PreparedAgent
from lockstep.watch.agent.service_discovery import Leader, Superseded
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.procfs import processes

log = logging.getLogger(__name__)


class LocalCluster(AgentCluster):
    """The processes of one run on this host.

    Workers' logs are in `folder/logs`, the agent's files and the manifests in `folder/cluster`.

    Args:
        token: shared by all processes of the run; generated if None. It is passed in the environment only.
        inherited: the agent of an earlier generation of the same run. `start` adopts its workers if possible; `release`
            kills the others.
        prepared_agent: a process that becomes the agent, or ends if there is one already.

    Raises:
        AgentError: the node agent did not start.
        TlsUnavailable: `config.tls` is set, and this host cannot make a certificate.
        Superseded: a later generation has the run.
    """

    def __init__(
        self,
        config: Config,
        run: str,
        folder: Path,
        generation: int,
        token: str | None = None,
        inherited: InheritedAgent | None = None,
        prepared_agent: PreparedAgent | None = None,
    ) -> None:
        token = token or (new_run_token(config.tls) if inherited is None else inherited.token)
        super().__init__(config, run, folder, generation, token, LOOPBACK)
        info = NodeInfo(socket.gethostname(), LOOPBACK, run_shm_dir(run))
        self._node = ClusterNode(info, self._cluster_dir, self._folder / "logs")
        self._nodes = [self._node]
        try:
            make_folder(self._cluster_dir)
            make_folder(self._node.logs)
            if inherited is None:
                kill_previous_agent(self._cluster_dir, generation)
                self._publish_leader()
                self._node.agent = self._start_agent(prepared_agent)
            else:
                if prepared_agent is not None:
                    prepared_agent.discard()
                self._node.agent = inherited.agent
                self._node.agent.on_exit = self._exited
                with contextlib.suppress(AgentGone):  # then a new agent is started, and all workers are new
                    self._orphans.add(self._node, self._node.agent.list())
                self._publish_leader()
        except BaseException:
            self.close()
            raise

    def _publish_leader(self) -> None:
        """Publishes this controller as the one that workers connect to."""
        pid, (host, port), grace_s = os.getpid(), self._server.address, self._limits.orphan_grace_s
        Leader(self._generation, host, port, pid, processes.start_ticks(pid), grace_s).publish(self._run)

    def _start_agent(self, prepared: PreparedAgent | None = None) -> AgentClient:
        grace_s = self._limits.orphan_grace_s
        address = start_agent(
            self._run, self._token, self._cluster_dir, generation=self._generation, orphan_grace_s=grace_s,
            prepared=prepared,
        )  # fmt: skip
        try:
            return AgentClient(address, self._token, on_exit=self._exited)
        except BaseException:
            processes.send_signal(address.pid, address.start_ticks, signal.SIGKILL)
            raise

    def _place(self, spec: WorkerSpec) -> ClusterNode:
        if spec.node not in (None, self._node.info.name):
            raise ValueError(f"{spec.name} must run on {spec.node}, and this run has only {self._node.info.name}")
        return self._node

    def _prepare(self, specs: Sequence[WorkerSpec]) -> None:
        """Starts a new agent if the agent was killed. The kernel has then killed its workers, which must be started
        again. Raises AgentGone."""
        with self._lock:
            agent = self._node.agent
            if agent is None or self._closing:
                raise AgentGone("start", "the cluster is closed")
            if agent.alive:
                return
            old, leader = agent.address, Leader.read(self._run)
            if leader is not None and leader.generation > self._generation:
                raise AgentGone("start", str(Superseded(self._run, self._generation, leader.generation)))
            if not run_shm_dir(self._run).is_dir():
                raise AgentGone("start", f"the agent (pid {old.pid}) has exited and removed the run's shared memory")
            log.warning("the node agent (pid %d) died, and its workers with it; starting a new one", old.pid)
            agent.close()
            self._node.agent = agent = self._start_agent()
            for state in read_beacons(self._run):
                if state.name not in RESERVED_NAMES:
                    agent.forget(state.name)
            if self._supervision is not None:
                self._supervision.watch(self._agents())

    # --- end

    def _end_nodes(self) -> None:
        if self._node.agent is None:
            self._abandon_nodes()
            return
        remaining = self._node.agent.shut_down(CLOSE_GRACE_S)
        if remaining:
            log.error("still running after SIGKILL: %s", ", ".join(remaining))
        shutil.rmtree(run_shm_dir(self._run), ignore_errors=True)  # a killed agent does not remove it

    def _leave_nodes(self) -> None:
        if self._node.agent is not None:
            self._node.agent.close()

    def _abandon_nodes(self) -> None:
        if self._superseded:
            return
        agent = self._node.agent
        if agent is not None:
            processes.send_signal(agent.address.pid, agent.address.start_ticks, signal.SIGKILL)
        shutil.rmtree(run_shm_dir(self._run), ignore_errors=True)


_CONNECT_S, _CONNECT_PER_PROBE_S = 3.0, 0.01
"""How long an automatically started probe tries to connect to the head, which already listens; and how much longer for
each probe that is started at the same time."""
_OUTPUT_TAIL_CHARACTERS = 400


def probe_command(head: str, port: int, name: str, many: int) -> list[str]:
    """The command of one of `many` probes. The token is passed in the environment."""
    where = f"[{head}]:{port}" if ":" in head else f"{head}:{port}"
    wait = f"{_CONNECT_S + many * _CONNECT_PER_PROBE_S:.0f}"
    return [sys.executable, "-m", "lockstep", "check", "--join", where, "--name", name, "--wait", wait]


def probe_output_tail(output: IO[bytes]) -> str:
    """The end of a probe's output, without progress notes. Keeps the file position, which the probe shares."""
    size = os.fstat(output.fileno()).st_size
    text = os.pread(output.fileno(), 64 << 10, max(0, size - (64 << 10))).decode(errors="replace")
    lines = [line for line in text.splitlines() if not line.startswith("note ")]
    return " ".join(" ".join(lines).split())[-_OUTPUT_TAIL_CHARACTERS:]


class LocalProbes:
    """Starts one probe per name. Their output goes to anonymous files, so that nothing remains however this process
    ends.

    Args:
        hosts: by name, a command prefix that enters a namespace or container, or an empty one.
        token_variable: the variable from which a probe reads the token.
    """

    def __init__(self, hosts: Mapping[str, Sequence[str]], token_variable: str) -> None:
        self._prefixes, self._variable = dict(hosts), token_variable
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._output: dict[str, IO[bytes]] = {}
        self._why: dict[str, str] = {}

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._prefixes)

    @property
    def addresses(self) -> Mapping[str, str]:
        return {}

    def start(self, head: str, port: int, token: str) -> None:
        """Starts all probes and returns immediately."""
        for name, prefix in self._prefixes.items():
            try:
                self._output[name] = output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
                command = [*prefix, *probe_command(head, port, name, len(self._prefixes))]
                self._started[name] = subprocess.Popen(
                    command, env={**os.environ, self._variable: token},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self._why[name] = f"its probe could not be started: {error}"

    def failed(self) -> Mapping[str, str]:
        """By host, why its probe could not be started, or the end of the output of a probe that has ended."""
        found = dict(self._why)
        for name, process in self._started.items():
            if process.poll() is not None and name in self._output:
                found[name] = f"its probe ended with {process.returncode}: {probe_output_tail(self._output[name])}"
        return found

    def pid(self, name: str) -> int:
        """Process id of a probe that was started."""
        return self._started[name].pid

    def stop(self) -> None:
        """Stops all probes. Idempotent. Probes also exit by themselves when their head releases them or ends."""
        for name, process in self._started.items():
            with contextlib.suppress(WaitTimeout):
                waits.process(process, waits_for=name, why="the exit of its probe", timeout_s=1.0, notice_after_s=None)
        for process in self._started.values():
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, 15)
        for name, process in self._started.items():
            try:
                waits.process(process, waits_for=name, why="the end of its probe", timeout_s=3.0, notice_after_s=None)
            except WaitTimeout:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
        for output in self._output.values():
            output.close()
        self._output.clear()
