"""Hosts on this machine: an agent of each, with a folder of its own for beacons, and a supervisor of all."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from test_supervisor import PATIENCE, TOKEN, until

from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorEvent, SupervisorSettings


@dataclass
class SimulatedHost:
    agent: "subprocess.Popen[bytes]"
    address: ServiceAddress
    environment: dict[str, str]
    """Of the processes on the host."""


def start_host(folder: Path, run: str, node: str) -> SimulatedHost:
    """Starts the agent of a host."""
    own = folder / node
    own.mkdir()
    environment = {**os.environ, "LOCKSTEP_BEACONS": str(folder / f"shm-{node}"), "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(
        [sys.executable, "-m", "lockstep.watch.agent.node_agent", "--run", run, "--folder", str(own),
         "--node", node, "--controller", str(os.getpid()), "--kill-grace", "0.5"],
        env={**environment, "LOCKSTEP_TOKEN": TOKEN}, start_new_session=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: (own / "agent.json").exists(), 30, "an agent")
    return SimulatedHost(agent, ServiceAddress.read(own), environment)


@contextmanager
def supervised(
    folder: Path, run: str, hosts: Sequence[SimulatedHost], events: list[SupervisorEvent]
) -> Iterator[SupervisorClient]:
    """Supervises the hosts; what the supervisor reports is appended to `events`."""
    addresses = [host.address for host in hosts]
    settings = SupervisorSettings(run, 1, folder, folder / "incidents", addresses, os.getpid(), PATIENCE)
    supervision = SupervisorClient(settings, TOKEN, events.append)
    try:
        yield supervision
    finally:
        supervision.close()
