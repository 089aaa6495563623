"""Real agents of two hosts and a real supervisor: a call of one rank that gloo pairs silently with the others' is named
while the job runs on, and a healthy job on two hosts is silent."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agent_hosts import SimulatedHost, start_host, supervised
from test_supervisor import TOKEN, until

from lockstep.base.folders import new_run_id
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

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
    hosts: list[SimulatedHost] = field(default_factory=list)
    events: list[SupervisorEvent] = field(default_factory=list)

    def start_ranks(self, clients: ExitStack) -> None:
        for number, host in enumerate(self.hosts):
            client = clients.enter_context(closing(AgentClient(host.address, TOKEN)))
            for rank in range(number * RANKS_PER_HOST, (number + 1) * RANKS_PER_HOST):
                argv = [sys.executable, str(self.folder / "worker.py"), self.run, str(rank), str(WORLD), str(WORLD - 1)]
                log = self.folder / f"{rank}.log"
                client.spawn(f"policy-{rank}", [*argv, str(self.folder)], log_path=log, env=host.environment)

    def step(self, rank: int) -> int:
        path = self.folder / f"{rank}.step"
        return int(path.read_text() or 0) if path.exists() else 0

    def mismatches(self) -> list[SupervisorEvent]:
        return [each for each in self.events if each.verdict["kind"] == "mismatch" and each.level == "confirmed"]

    def close(self) -> None:
        for host in self.hosts:
            host.agent.terminate()
        for host in self.hosts:
            host.agent.wait(20)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "worker.py").write_text(WORKER)
    made = Job(tmp_path)
    with ExitStack() as stack:
        stack.callback(made.close)
        for node in "ab":
            made.hosts.append(start_host(tmp_path, made.run, node))
        supervision = stack.enter_context(supervised(tmp_path, made.run, made.hosts, made.events))
        made.start_ranks(stack)
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
