"""A host on which the controller has processes: the agent that starts them, and where their files are."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.procfs import processes

_LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
"""Gloo listens where the host's name points to, which others may see (or nobody resolve), and lets anybody in."""


class NodeRefused(RuntimeError):
    """A node on which the run cannot be: which, why, and what to do."""


class ClusterNode:
    """The host of this process.

    Args:
        affairs: folder of the agent, with the charges of all workers.
        logs: folder of the workers' logs. Both are paths of the host.
    """

    here = True
    """Whether pids, files and shared memory of the host are ours to see."""
    why_lost = ""
    id = ""
    """By which its cluster knows it, where that has several."""

    def __init__(self, info: NodeInfo, affairs: Path, logs: Path) -> None:
        self.info, self.affairs, self.logs = info, affairs, logs
        self.agent: AgentClient | None = None
        """None before it is there."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.info.name})"

    @property
    def alive(self) -> bool:
        """Whether its agent is."""
        return self.agent is not None and self.agent.alive

    def environment_of(self, spec: WorkerSpec) -> dict[str, str]:
        """What a worker finds in its environment there, besides its charge and the token."""
        return {**_LOOPBACK_ENVIRONMENT, **os.environ, **spec.environment}

    def place(self) -> tuple[str, Path]:
        """The interpreter and the working folder of workers."""
        return sys.executable, Path.cwd()

    def used_s(self) -> float:
        """CPU time that the agent and all below it have used: moves while workers import and cannot speak yet."""
        return 0.0 if self.agent is None else processes.descendants_cpu_s(self.agent.address.pid)

    def uses_cuda(self, device: str, environment: Mapping[str, str]) -> bool:
        """Whether workers may touch CUDA, whose state does not survive a fork; found out without importing torch."""
        if device == "auto":
            return environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and Path("/dev/nvidiactl").exists()
        return device == "cuda"
