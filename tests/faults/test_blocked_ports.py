"""Two hosts of a Ray cluster with a firewall between them: a blocked port is reported at the start, with host, port and
direction."""

import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from needed_systems import needs_namespaces, needs_ray

from benchmarks.faults.ray_hosts import Hosts, until
from lockstep.cluster.cluster_node import NodeRefused
from lockstep.cluster.placement.bundles import ProcessRequest
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.cluster import PlacementConfig
from lockstep.config.cluster import RayClusterConfig as Config

SERVICES = Path(__file__).parent.parent / "contract"
sys.path.insert(0, str(SERVICES))
from cluster_services import Plain  # noqa: E402

pytestmark = [*needs_ray, pytest.mark.slow, pytest.mark.timeout(400), needs_namespaces]
PORTS = 21300, 21309


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    from lockstep.cluster.ray.ray_nodes import query_nodes

    with ExitStack() as closing:
        patched = closing.enter_context(pytest.MonkeyPatch.context())
        made = Hosts(tmp_path_factory.mktemp("hosts"))
        closing.callback(made.close)
        made.connect()
        for name, value in made.environment.items():
            if name.startswith("RAY_"):
                patched.setenv(name, value)
        patched.setenv("LOCKSTEP_BEACONS", str(made.shared("a")))
        made.start_ray()
        until(lambda: len(query_nodes(Config(address=made.address))) == 2, 120, "Ray knows both hosts")
        yield made


def opened(hosts: Hosts, folder: Path) -> Any:
    from lockstep.cluster.ray.ray_cluster import RayCluster

    config = Config(address=hosts.address, orphan_grace_s=3.0, notice_after_s=2.0, ports=PORTS)
    wanted = [ProcessRequest(f"engine-{rank}", "rollout", rank, 1.0) for rank in range(2)]
    placement = PlacementConfig(strategy="spread")
    run = f"ports-{secrets.token_hex(3)}"
    return RayCluster(config, run, folder / "run", 1, requests=wanted, placement=placement)


def test_all_listeners_use_the_ports_of_the_config(hosts: Hosts, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(SERVICES)}
    with opened(hosts, tmp_path) as cluster:
        (worker,) = cluster.start(
            [WorkerSpec("engine-0", "rollout", 0, "cluster_services:Plain", {}, environment, ("numpy",))]
        )
        assert worker.call(Plain.add, 1) == 1
        used = [urlsplit(cluster.store()).port, cluster._server.address[1], *(each.port for each in cluster._agents())]
        assert len(used) == 4 and all(PORTS[0] <= port <= PORTS[1] for port in used), used


def test_a_blocked_port_is_reported_with_its_direction(hosts: Hosts, tmp_path: Path) -> None:
    here, there = socket.gethostname(), hosts.other
    began = time.monotonic()
    hosts.cable.drop_in(PORTS)
    with pytest.raises(NodeRefused) as caught:
        opened(hosts, tmp_path)
    error = str(caught.value)
    assert re.match(rf"{here} cannot reach port 213\d\d of \S+ \({there}\), where the run's agent listens \(", error)
    assert error.endswith(f"(timed out): open {PORTS[0]} to {PORTS[1]} (cluster.ports) between all nodes of the run")
    dropped_s, began = time.monotonic() - began, time.monotonic()

    hosts.cable.refuse_out(PORTS)
    with pytest.raises(NodeRefused) as caught:
        opened(hosts, tmp_path)
    error = str(caught.value)
    assert re.search(
        rf" cannot reach port 213\d\d of {here} \({hosts.cable.here}\), where the controller listens", error
    )
    assert "(Network is unreachable): open" in error
    print(f"told after {dropped_s:.1f} s and {time.monotonic() - began:.1f} s")
    assert max(dropped_s, time.monotonic() - began) < 60
