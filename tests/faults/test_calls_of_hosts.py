"""Real agents of two hosts and a real supervisor: a call of one rank that gloo pairs silently with the others' is named
while the job runs on, and a healthy job on two hosts is silent."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_supervisor import PATIENCE, TOKEN, until

from lockstep.base.folders import new_run_id
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorEvent, SupervisorSettings

RANKS_PER_HOST = 2
WORLD = 2 * RANKS_PER_HOST
HEALTHY_S = 12.0
WORKER = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from lockstep.watch.beacon.writer import open_beacon
from lockstep.watch.recorder import recorder

run, rank, world, wrong, folder = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
own = open_beacon(run, f"policy-{rank}", "policy", rank)
own.stage("train")
recorder.install(refuse=False)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
step = 0
while True:
    step += 1
    go = torch.tensor([float((folder / "go").exists())] * 2)
    dist.broadcast(go, 0)
    if rank == wrong and go[0] == 1:
        wrong = -1
        dist.broadcast(torch.ones(12), 0)  # larger, once
    else:
        dist.broadcast(torch.ones(4), 0)
    dist.all_reduce(torch.ones(4))
    own.progress("steps", step)
    (folder / f"{rank}.step").write_text(str(step))
    time.sleep(2.0 if step % 80 == 0 else 0.03)
"""
WRONG_LINE = next(number for number, line in enumerate(WORKER.splitlines(), 1) if "larger, once" in line)


@dataclass
class Job:
    """Hosts a and b with two ranks each; the last rank, on host b, makes a different call once there is a file `go`."""

    folder: Path
    run: str = field(default_factory=lambda: new_run_id("hosts"))
    agents: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    addresses: list[ServiceAddress] = field(default_factory=list)
    events: list[SupervisorEvent] = field(default_factory=list)
    clients: list[AgentClient] = field(default_factory=list)

    def environment(self, node: str) -> dict[str, str]:
        return {**os.environ, "LOCKSTEP_BEACONS": str(self.folder / f"shm-{node}"), "OMP_NUM_THREADS": "1"}

    def start_agent(self, node: str) -> None:
        folder = self.folder / node
        folder.mkdir()
        self.agents.append(subprocess.Popen(
            [sys.executable, "-m", "lockstep.watch.agent.node_agent", "--run", self.run, "--folder", str(folder),
             "--node", node, "--controller", str(os.getpid()), "--kill-grace", "0.5"],
            env={**self.environment(node), "LOCKSTEP_TOKEN": TOKEN}, start_new_session=True, stderr=subprocess.DEVNULL,
        ))  # fmt: skip
        until(lambda: (folder / "agent.json").exists(), 30, "an agent")
        self.addresses.append(ServiceAddress.read(folder))
        self.clients.append(AgentClient(self.addresses[-1], TOKEN))

    def start_ranks(self) -> None:
        for rank in range(WORLD):
            host = rank // RANKS_PER_HOST
            argv = [sys.executable, str(self.folder / "worker.py"), self.run, str(rank), str(WORLD), str(WORLD - 1)]
            self.clients[host].spawn(
                f"policy-{rank}", [*argv, str(self.folder)], log_path=self.folder / f"{rank}.log",
                env=self.environment("ab"[host]),
            )  # fmt: skip

    def step(self, rank: int) -> int:
        path = self.folder / f"{rank}.step"
        return int(path.read_text() or 0) if path.exists() else 0

    def mismatches(self) -> list[SupervisorEvent]:
        return [each for each in self.events if each.verdict["kind"] == "mismatch" and each.level == "confirmed"]

    def close(self) -> None:
        for each in self.clients:
            each.close()
        for agent in self.agents:
            agent.terminate()
        for agent in self.agents:
            agent.wait(20)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "worker.py").write_text(WORKER)
    made = Job(tmp_path)
    with ExitStack() as stack:
        stack.callback(made.close)
        for node in "ab":
            made.start_agent(node)
        settings = SupervisorSettings(
            made.run, 1, tmp_path, tmp_path / "incidents", made.addresses, os.getpid(), PATIENCE
        )
        supervision = SupervisorClient(settings, TOKEN, made.events.append)
        stack.callback(supervision.close)
        made.start_ranks()
        until(lambda: min(map(made.step, range(WORLD))) > 3 and supervision.connected.is_set(), 90, "all ranks train")
        yield made


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_silently_paired_call_on_another_host_is_named_with_its_line(job: Job) -> None:
    time.sleep(HEALTHY_S)  # several windows of calls, and a pause
    assert [each for each in job.events if each.level != "notice"] == []
    (job.folder / "go").touch()
    until(job.mismatches, 60, f"the different call; events: {job.events}")
    until(lambda: job.mismatches()[-1].verdict["confidence"] > 0.9, 15, "the ranks of both hosts decide")
    verdict = job.mismatches()[-1].verdict
    assert [(each["rank"], each["host"]) for each in verdict["culprits"]] == [(WORLD - 1, "b")], verdict
    assert f"worker.py:{WRONG_LINE}" in json.dumps(verdict) and "[12]" in json.dumps(verdict), verdict
    assert {each["rank"] for event in job.mismatches() for each in event.verdict["culprits"]} == {WORLD - 1}
    stepped = job.step(0)
    until(lambda: job.step(0) > stepped + 5, 30, "the job runs on")
