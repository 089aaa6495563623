"""Real agents of four hosts and a real supervisor: agents that stop or die during an incident lose no other host."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agent_hosts import SimulatedHost, start_host, supervised
from test_supervisor import PATIENCE, TOKEN, WORKER, until

from lockstep.base.folders import new_run_id
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

HOSTS = ("a", "b", "c", "d")


@dataclass
class Job:
    """`policy-1` on host b works; `policy-0`, `policy-2` and `policy-3` on the others wait for it."""

    folder: Path
    run: str = field(default_factory=lambda: new_run_id("hosts"))
    hosts: dict[str, SimulatedHost] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    events: list[SupervisorEvent] = field(default_factory=list)

    def start_workers(self, clients: ExitStack) -> None:
        for number, host in enumerate(self.hosts.values()):
            client = AgentClient(host.address, TOKEN)
            clients.callback(client.close)
            name = f"policy-{number}"
            words = [self.run, name, "slow" if number == 1 else "waits", str(self.folder / "go"), "policy-1"]
            argv = [sys.executable, str(self.folder / "worker.py"), *words]
            log = self.folder / f"{number}.log"
            self.pids[name] = client.spawn(name, argv, log_path=log, env=host.environment)

    def confirmed(self, name: str) -> SupervisorEvent | None:
        return next((each for each in self.events if each.level == "confirmed" and name in each.who), None)

    def close(self) -> None:
        for host in self.hosts.values():
            for number in (signal.SIGCONT, signal.SIGTERM):
                host.agent.send_signal(number)
        for host in self.hosts.values():
            host.agent.wait(20)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "worker.py").write_text(WORKER)
    made = Job(tmp_path)
    with ExitStack() as stack:
        stack.callback(made.close)
        for node in HOSTS:
            made.hosts[node] = start_host(tmp_path, made.run, node)
        supervision = stack.enter_context(supervised(tmp_path, made.run, [*made.hosts.values()], made.events))
        made.start_workers(stack)
        until(lambda: (tmp_path / "policy-1.3").exists() and supervision.connected.is_set(), 60, "all work")
        time.sleep(2.0)  # the supervisor knows all hosts
        yield made


def test_agents_that_stop_or_die_in_an_incident_lose_no_other_host(job: Job) -> None:
    job.hosts["c"].agent.send_signal(signal.SIGSTOP)
    os.kill(job.pids["policy-1"], signal.SIGSTOP)
    until(lambda: any("policy-1" in each.who for each in job.events), 20, "the first notice about the stopped rank")
    job.hosts["d"].agent.kill()
    until(lambda: job.confirmed("policy-1") is not None, 20, "the incident")
    event = job.confirmed("policy-1")
    assert event is not None and event.who == ("policy-1",)
    folder = Path(event.incident or "")
    found = json.loads((folder / "beacons.json").read_text())
    gaps = json.loads((folder / "verdict.json").read_text())["gaps"]
    assert set(found) >= {"a", "b"} and found["a"]["policy-0"] and found["b"]["policy-1"]
    assert "c" not in found and any("c" in gap.split() for gap in gaps), gaps
    assert "d" in found or any("d" in gap.split() for gap in gaps), gaps
    assert (folder / "stacks" / "policy-1.txt").is_file()
    time.sleep(PATIENCE.host_s + 2.0)  # the silent hosts count as lost now
    accused = {name for each in job.events for name in each.who}
    assert "policy-0" not in accused, "the host that answers is not lost"
