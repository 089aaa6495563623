"""How a worker process is started: its environment, its command, and the order for it."""

import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.remote import RemoteWorker
from lockstep.watch import procs
from lockstep.watch.agent_client import AgentClient

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
"""Gloo listens where the host's name points to, which others may see (or nobody resolve), and lets anybody in."""


def environment_of(spec: WorkerSpec) -> dict[str, str]:
    """What a worker finds in its environment, besides its charge and the token."""
    return {**_LOOPBACK, **os.environ, **spec.environment}


def order(agent: AgentClient, worker: RemoteWorker, environment: Mapping[str, str], device: str) -> "Future[int]":
    """Has the agent start the process; its pid, which the handle is told as well."""
    preload = () if uses_cuda(device, environment) else worker.spec.preload
    argv = [sys.executable, "-m", "lockstep.cluster.worker"]
    pid = agent.submit_spawn(worker.name, argv, log_path=worker.log, env=environment, preload=preload)
    pid.add_done_callback(lambda done: _set_pid(worker, done))  # in the thread that hears of its end, before it
    return pid


def uses_cuda(device: str, environment: Mapping[str, str]) -> bool:
    """Whether workers may touch CUDA, whose state does not survive a fork; found out without importing torch."""
    if device == "auto":
        return environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and Path("/dev/nvidiactl").exists()
    return device == "cuda"


def cpu_seconds_below(pid: int) -> float:
    """CPU time that all descendants of a process have used."""
    return sum(used.cpu_s for below in procs.descendants(pid) if (used := procs.usage(below)) is not None)


def _set_pid(worker: RemoteWorker, done: "Future[int]") -> None:
    if done.exception() is None:
        worker.pid = done.result(timeout=0)
        worker.moved()  # its stall clock starts with its life, not with the order for it
