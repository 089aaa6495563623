"""A killed controller leaves workers with a grace period; a resumed run ends them first."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep.base.folders import run_shm_dir
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.reattach import kill_previous_agent
from lockstep.config.cluster import LocalClusterConfig as Config

SERVICES = os.pathsep.join([str(Path(__file__).parent.parent / "contract"), os.environ.get("PYTHONPATH", "")])

CONTROLLER = """
import sys, time
from pathlib import Path
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.cluster import LocalClusterConfig as Config
cluster = LocalCluster(Config(orphan_grace_s=60.0), sys.argv[1], Path(sys.argv[2]), 1)
spec = WorkerSpec("old", "tester", 0, "cluster_services:Plain", {}, {}, ("numpy",))
print(cluster.start([spec])[0].pid, flush=True)
time.sleep(60)
"""


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_resumed_run_ends_the_workers_of_the_killed_one(tmp_path: Path) -> None:
    run = f"old-{secrets.token_hex(3)}"
    environment = {**os.environ, "PYTHONPATH": SERVICES}
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, run, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    worker = int(controller.stdout.readline())
    agent = json.loads((tmp_path / "cluster" / "agent.json").read_text())["pid"]
    controller.send_signal(signal.SIGKILL)
    controller.communicate(timeout=10)
    time.sleep(0.5)
    assert running(worker) and running(agent), "they live on for the grace period"

    with LocalCluster(Config(), f"new-{secrets.token_hex(3)}", tmp_path, 2) as cluster:
        assert not running(worker)
        assert not running(agent)
        assert not run_shm_dir(run).exists()
        (fresh,) = cluster.start(
            [WorkerSpec("old", "tester", 0, "cluster_services:Plain", {}, {"PYTHONPATH": SERVICES}, ("numpy",))]
        )
        assert fresh.alive()
    assert not (tmp_path / "cluster" / "agent.json").exists()


@pytest.mark.parametrize("generation", [3, 4])
def test_an_equal_or_later_generation_is_not_ended(tmp_path: Path, generation: int) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    ticks = int(Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()[19])
    address = {"run": "bystander", "generation": generation, "host": "127.0.0.1", "port": 1}
    try:
        (tmp_path / "agent.json").write_text(json.dumps({**address, "pid": bystander.pid, "start_ticks": ticks}))
        kill_previous_agent(tmp_path, 3)
        assert bystander.poll() is None
        # A pid that another process has by now is not of this run.
        old = {**address, "generation": 1, "pid": bystander.pid, "start_ticks": ticks + 1}
        (tmp_path / "agent.json").write_text(json.dumps(old))
        kill_previous_agent(tmp_path, 3)
        assert bystander.poll() is None
        (tmp_path / "agent.json").write_text("[]")
        kill_previous_agent(tmp_path, 3)
    finally:
        bystander.kill()
        bystander.wait(10)


def test_an_agent_that_shuts_down_late_keeps_its_successors_address(tmp_path: Path) -> None:
    """This happens if the agent was not ended, for example on another host."""
    first = LocalCluster(Config(), f"first-{secrets.token_hex(3)}", tmp_path, 1)
    address = tmp_path / "cluster" / "agent.json"
    try:
        other = {**json.loads(address.read_text()), "pid": 1, "generation": 2}
        address.write_text(json.dumps(other))
    finally:
        first.close()
    assert json.loads(address.read_text()) == other
