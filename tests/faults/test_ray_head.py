"""A run whose Ray head is lost continues as long as it has nodes, reports it, and ends within a time limit.

Each test runs in its own process, because unanswered calls of Ray stay in it.
"""

import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_services import Plain
from needed_systems import TEST_PATHS, needs_namespaces, needs_ray
from test_ray_nodes import ENVIRONMENT, SPREAD, WANTED, engine, hosts

from benchmarks.faults.ray_hosts import Hosts, until
from lockstep.config.cluster import RayClusterConfig as Config
from lockstep.watch.agent.agent_client import AgentGone
from lockstep.watch.procfs import processes

__all__ = ["hosts"]  # the fixture

pytestmark = [*needs_ray, pytest.mark.slow, pytest.mark.timeout(400)]


def in_a_process(name: str, *words: str) -> subprocess.Popen[str]:
    """Start a process that runs a function of this module."""
    python_path = [str(Path(__file__).parent), *TEST_PATHS, ENVIRONMENT["PYTHONPATH"]]
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys, test_ray_head; test_ray_head.{name}(*sys.argv[1:])", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def output_of_success(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate("\n", timeout=300)
    print(output)
    assert process.returncode == 0, output
    return output


def opened(config: Config) -> Any:
    from lockstep.cluster.ray.ray_cluster import RayCluster

    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
    folder = Path(tempfile.mkdtemp(prefix="lsh"))
    return RayCluster(config, f"head-{secrets.token_hex(3)}", folder, 1, requests=WANTED, placement=SPREAD)


def closed(cluster: Any) -> None:
    began = time.monotonic()
    cluster.close()
    took_s = time.monotonic() - began
    print(f"closed within {took_s:.1f} s")
    assert took_s < 60


def own() -> Config:
    return Config(notice_after_s=2.0, node_lost_after_s=2.0)


def end_own_head() -> None:
    (head,) = [each for each in psutil.Process().children(recursive=True) if "gcs_server" in each.name()]
    head.kill()


def a_run_continues() -> None:
    cluster = opened(own())
    workers = cluster.start([engine(0), engine(1)])
    end_own_head()
    assert [worker.call(Plain.add, 1) for worker in workers] == [1, 1]
    os.kill(cluster._nodes[0].agent.address.pid, signal.SIGKILL)
    until(lambda: all(worker.dead for worker in workers), 60, "the agent's workers ended with it")
    began = time.monotonic()
    (successor,) = cluster.start([engine(0, "engine-0.1")])
    print(f"replaced after {time.monotonic() - began:.1f} s")
    assert successor.call(Plain.add, 1) == 1
    closed(cluster)
    assert not processes.is_alive(successor.pid)


def a_run_ends() -> None:
    cluster = opened(own())
    (worker,) = cluster.start([engine(0)])
    end_own_head()
    closed(cluster)
    assert not processes.is_alive(worker.pid)


def a_run_loses_all_nodes(address: str) -> None:
    cluster = opened(Config(address=address, orphan_grace_s=3.0, notice_after_s=2.0))
    workers = cluster.start([engine(0), engine(1)])
    print("started", flush=True)
    sys.stdin.readline()
    for node in cluster._nodes:  # the agents, if a raylet had no time to end them
        with suppress(ProcessLookupError):
            os.kill(node.agent.address.pid, signal.SIGKILL)
    until(lambda: all(worker.dead for worker in workers), 60, "the workers are lost")
    began = time.monotonic()
    try:
        cluster.start([engine(0, "engine-0.1")])
    except AgentGone as error:
        print(error, f"after {time.monotonic() - began:.1f} s")
    closed(cluster)


@pytest.mark.parametrize(("name", "messages"), [("a_run_continues", 1), ("a_run_ends", 0)], ids=["continues", "ends"])
def test_without_the_head(name: str, messages: int) -> None:
    output = output_of_success(in_a_process(name))
    assert output.count(": the run continues on its nodes") == messages, output


@needs_namespaces
def test_a_run_whose_nodes_have_left_with_the_head_ends(hosts: Hosts) -> None:
    process = in_a_process("a_run_loses_all_nodes", hosts.address)
    assert process.stdout is not None
    while "started" not in process.stdout.readline():
        assert process.poll() is None
    hosts.end_head()
    until(hosts.has_ended, 120, "Ray's nodes have left, and the run's actors with them")
    assert "all nodes of the run are lost" in output_of_success(process)
