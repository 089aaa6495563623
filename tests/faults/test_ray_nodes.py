"""A run on two hosts (network namespaces) of a Ray cluster: calls, deaths, a lost link, a killed controller, and
refusals before anything starts."""

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from needed_systems import TEST_PATHS, needs_namespaces, needs_ray

import lockstep
from benchmarks.faults.ray_hosts import Hosts, until
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster import call_relays
from lockstep.cluster.placement.assignment import DoesNotFit
from lockstep.cluster.placement.bundles import ProcessRequest
from lockstep.cluster.protocol import WorkerDied, WorkerSpec
from lockstep.cluster.rpc.futures import gather_results
from lockstep.cluster.rpc.group_calls import submit_all
from lockstep.cluster.rpc.relayed_connection import RelayedConnection
from lockstep.config.cluster import PlacementConfig
from lockstep.config.cluster import RayClusterConfig as Config
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.procfs import processes

SERVICES = Path(__file__).parent.parent / "contract"
sys.path.insert(0, str(SERVICES))
from cluster_services import Plain, Renewable  # noqa: E402
from relayed_cluster import await_relay  # noqa: E402

pytestmark = [*needs_ray, pytest.mark.slow, pytest.mark.timeout(400), needs_namespaces]
SPREAD = PlacementConfig(strategy="spread")
WANTED = [ProcessRequest(f"engine-{rank}", "rollout", rank, 1.0) for rank in range(2)]
SOURCE = Path(lockstep.__path__[0]).parent
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(SERVICES), str(SOURCE)])}


def config(hosts: Hosts, **changes: Any) -> Config:
    return Config(**{"address": hosts.address, "orphan_grace_s": 3.0, "notice_after_s": 2.0, **changes})


def engine(rank: int, name: str = "", service: type = Plain, **arguments: Any) -> WorkerSpec:
    where = f"cluster_services:{service.__name__}"
    adoptable = service is Renewable
    name = name or f"engine-{rank}"
    return WorkerSpec(name, "rollout", rank, where, arguments, ENVIRONMENT, ("numpy",), adoptable=adoptable)


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Hosts with as many GPUs as the test sets; Ray only counts them."""
    from lockstep.cluster.ray.ray_nodes import query_nodes

    with ExitStack() as closing:
        made = Hosts(tmp_path)
        closing.callback(made.close)
        made.connect()
        for name, value in made.environment.items():
            if name.startswith("RAY_"):
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("LOCKSTEP_BEACONS", str(made.shared("a")))
        made.start_ray(gpus=getattr(request, "param", (0, 0)))
        until(lambda: len(query_nodes(config(made))) == 2, 120, "Ray knows both hosts")
        yield made


def opened(hosts: Hosts, folder: Path, **changes: Any) -> Any:
    from lockstep.cluster.ray.ray_cluster import RayCluster

    run = f"hosts-{secrets.token_hex(3)}"
    return RayCluster(config(hosts, **changes), run, folder / "run", 1, requests=WANTED, placement=SPREAD)


def remote_worker(workers: list[Any]) -> Any:
    """The worker that is not on the controller's host."""
    (far,) = [worker for worker in workers if not worker.node.is_local]
    return far


def test_a_disconnected_host(hosts: Hosts, tmp_path: Path) -> None:
    """Its worker is lost within ten seconds and replaced elsewhere, and the lost worker ends by itself."""
    with opened(hosts, tmp_path) as cluster:
        workers = cluster.start([engine(0), engine(1)])
        assert sorted(cluster.node_of(worker).name for worker in workers) == sorted(n.name for n in cluster.nodes())
        far = remote_worker(workers)
        assert far.call(Plain.environment, "GLOO_SOCKET_IFNAME") == hosts.cable.far
        assert far.call(Plain.environment, "VLLM_HOST_IP") == hosts.other
        assert far.call(Plain.environment, "LOCKSTEP_BEACONS") == str(hosts.shared("b"))
        pending, died = far.submit(Plain.sleep, 300.0), threading.Event()
        far.on_death(lambda error: died.set())
        hosts.cut()
        cut_at = time.monotonic()
        assert died.wait(60.0)
        lost_s = time.monotonic() - cut_at
        with pytest.raises(WorkerDied, match=r"vanished \(its node .* is lost: it has been silent for 6 s\)"):
            pending.result("nothing")
        assert far.node.info.name not in [node.name for node in cluster.nodes()]
        (successor,) = cluster.start([engine(far.spec.rank, f"{far.name}.1")])
        assert successor.node.is_local and successor.call(Plain.add, 1) == 1
        replaced_s = time.monotonic() - cut_at
        until(lambda: not psutil.pid_exists(far.pid), 60, "the worker that was cut off has ended")
        ended_s = time.monotonic() - cut_at
        print(f"lost after {lost_s:.1f} s, replaced after {replaced_s:.1f} s, ended by itself after {ended_s:.1f} s")
        assert lost_s < 20 and replaced_s < 60


@pytest.mark.parametrize("large", [False, True], ids=["small run", "large run"])
def test_workers_of_another_host_are_called_through_its_relay(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """In a large run at the address of the host, where others might share it."""
    monkeypatch.setattr(call_relays, "DIRECT_NODES", 1)
    monkeypatch.setattr(call_relays, "SEPARATE_NODES", 1 if large else 2)
    with opened(hosts, tmp_path) as cluster:
        workers = cluster.start([engine(0), engine(1)])
        far = remote_worker(workers)
        near = next(worker for worker in workers if worker is not far)
        link = await_relay(far)
        assert gather_results(submit_all(workers, Plain.add, [(1,), (2,)]), "sums") == [1, 2]
        assert not isinstance(near.connection, RelayedConnection), "the controller's host needs none"
        pending = far.submit(Plain.sleep, 2.0)
        (relay,) = cluster._relays._relays.values()
        assert relay.node is far.node and relay.address.host == (hosts.other if large else "127.0.0.1")
        assert relay.group.workers == {far.node: 1}, "of the two engines one is planned there"
        assert relay.agent.kill(relay.name)
        assert pending.result("during the relay's end") == 2.0
        await_relay(far, other_than=link)
        assert far.call(Plain.environment, "LOCKSTEP_BEACONS") == str(hosts.shared("b"))


def test_a_worker_on_a_host_that_was_given_up_is_ended(hosts: Hosts, tmp_path: Path) -> None:
    """The link was down for longer than a node is waited for, but not so long that workers end by themselves."""
    with opened(hosts, tmp_path, orphan_grace_s=120.0) as cluster:
        far = remote_worker(cluster.start([engine(0), engine(1)]))
        hosts.cut()
        until(lambda: far.dead, 60, "it is lost")
        assert processes.is_alive(far.pid)
        hosts.mend()
        until(lambda: not processes.is_alive(far.pid), 60, "it is ended, or its agent is killed")


def test_ends_of_workers_on_another_host_are_reported_with_their_last_output(hosts: Hosts, tmp_path: Path) -> None:
    with opened(hosts, tmp_path) as cluster:
        workers = cluster.start([engine(0), engine(1)])
        far = remote_worker(workers)
        with pytest.raises(WorkerDied) as caught:
            far.call(Plain.exit_process, 3)
        assert caught.value.exit_code == 3
        assert "last words" in caught.value.log_tail
        (other,) = cluster.start([engine(far.spec.rank, f"{far.name}.1")])
        assert not other.node.is_local
        os.kill(other.node.agent.address.pid, signal.SIGKILL)
        until(lambda: other.dead, 60, "its agent has ended, and so has the worker")
        (third,) = cluster.start([engine(far.spec.rank, f"{far.name}.2")])
        assert third.node is other.node, "the host is alive, and has a new agent"
        assert third.call(Plain.add, 2) == 2
        pids = [worker.pid for worker in (third, workers[0])]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def rank(number: int, life: int = 0, limit_s: float | None = None) -> WorkerSpec:
    name = f"policy-{number}" + (f".{life}" if life else "")
    return WorkerSpec(
        name, "policy", number, "cluster_services:Plain", {}, ENVIRONMENT, ("numpy",), placement_limit_s=limit_s
    )


def places(workers: list[Any]) -> dict[str, tuple[bool, str]]:
    """For each worker, whether it is on the controller's host, and its GPUs."""
    return {
        worker.name: (worker.node.is_local, worker.call(Plain.environment, "CUDA_VISIBLE_DEVICES"))
        for worker in workers
    }


@pytest.mark.parametrize("hosts", [(1, 2)], ids=["gpus"], indirect=True)
def test_a_host_with_gpus_is_lost_and_comes_back(
    hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fewer ranks use the remaining GPUs; once the host returns, its GPUs belong to the run again."""
    from lockstep.cluster.ray.ray_cluster import RayCluster
    from lockstep.cluster.ray.ray_nodes import alive_nodes

    wanted = [ProcessRequest(f"policy-{number}", "policy", number, 1.0, 1) for number in range(3)]
    run, settings = f"gpus-{secrets.token_hex(3)}", config(hosts, device="cpu", orphan_grace_s=60.0)
    with RayCluster(settings, run, tmp_path / "run", 1, requests=wanted, placement=PlacementConfig()) as cluster:
        workers = cluster.start([rank(number) for number in range(3)])
        assert places(workers) == {"policy-0": (False, "0"), "policy-1": (False, "1"), "policy-2": (True, "0")}
        hosts.end_b()
        until(lambda: workers[0].dead and workers[1].dead, 60, "its workers are lost")
        cluster.stop(workers[2], 0.0)
        with pytest.raises(WorkerDied, match=r"policy-0\.1 vanished \(its node is lost, and no other node had room"):
            cluster.start([rank(number, 1, limit_s=3.0) for number in range(3)])
        (fewer,) = cluster.start([rank(0, 2, limit_s=3.0)])
        assert places([fewer]) == {"policy-0.2": (True, "0")}
        cluster.stop(fewer, 0.0)
        hosts.join_b(gpus=2)
        with caplog.at_level(logging.WARNING):
            again = cluster.start([rank(number, 3) for number in range(3)])
        assert places(again) == {"policy-0.3": (True, "0"), "policy-1.3": (False, "0"), "policy-2.3": (False, "1")}
        assert any(line.startswith("policy-1..2: on ") for line in caplog.messages), caplog.messages
        (far,) = [each for each in alive_nodes() if each.gpus == 2]
        assert far.free_gpus == 0


BESIDE = [str(Path(__file__).parent), *TEST_PATHS]
CONTROLLER = """
import json, sys, time
from pathlib import Path
from test_ray_nodes import SPREAD, WANTED, engine
from lockstep.config.cluster import RayClusterConfig
from cluster_services import Renewable
from lockstep.cluster.ray.ray_cluster import RayCluster
address, run, folder, grace = sys.argv[1:]
with RayCluster(
    RayClusterConfig(address=address, orphan_grace_s=float(grace)), run, Path(folder), 1, requests=WANTED,
    placement=SPREAD
) as cluster:
    workers = cluster.start([engine(rank, service=Renewable) for rank in range(2)])
    print(json.dumps([worker.pid for worker in workers]), flush=True)
    time.sleep(300)
"""

ELSEWHERE = """
import json, logging, sys, time
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
from pathlib import Path
from test_ray_nodes import SPREAD, WANTED, both
from lockstep.config.cluster import RayClusterConfig
from cluster_services import Renewable
from lockstep.cluster.ray.ray_cluster import RayCluster
from lockstep.cluster.ray.ray_reattach import take_over_ray_actors
config, folder = RayClusterConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])
heritage = take_over_ray_actors(config, folder / "cluster", 2, WANTED, SPREAD)
with RayCluster(config, heritage.run, folder, 2, inherited=heritage, requests=WANTED, placement=SPREAD) as cluster:
    workers = both(cluster)
    time.sleep(config.orphan_grace_s + 6.0)
    assert [worker.call(Renewable.add, 1) for worker in workers] == [1, 1]
    print(json.dumps([worker.pid for worker in workers]))
"""


class Killed:
    """A killed controller that ran an engine on each host, and the pids of the engines."""

    def __init__(self, hosts: Hosts, folder: Path, grace_s: float) -> None:
        self.run, self.folder = f"heirs-{secrets.token_hex(3)}", folder / "run"
        self.config = config(hosts, orphan_grace_s=grace_s)
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*BESIDE, ENVIRONMENT["PYTHONPATH"]])}
        with subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, hosts.address, self.run, str(self.folder), str(grace_s)],
            stdout=subprocess.PIPE, text=True, env=self.environment,
        ) as first:  # fmt: skip
            assert first.stdout is not None
            self.pids: list[int] = json.loads(first.stdout.readline())
            first.kill()
        self.at = time.monotonic()

    @contextmanager
    def taken_over(self) -> Iterator[Any]:
        from lockstep.cluster.ray.ray_cluster import RayCluster
        from lockstep.cluster.ray.ray_reattach import take_over_ray_actors

        heritage = take_over_ray_actors(self.config, self.folder / "cluster", 2, WANTED, SPREAD)
        assert heritage is not None and heritage.run == self.run and len(heritage.left) == 2
        with RayCluster(
            self.config, self.run, self.folder, 2, inherited=heritage, requests=WANTED, placement=SPREAD
        ) as cluster:
            yield cluster


def both(cluster: Any) -> list[Any]:
    """The engines, one on each host."""
    workers = cluster.start([engine(rank, service=Renewable) for rank in range(2)])
    assert sorted(cluster.node_of(worker).name for worker in workers) == sorted(n.name for n in cluster.nodes())
    assert len(cluster.nodes()) == 2
    return list(workers)


@pytest.mark.parametrize("grace_s", [120.0, 30.0], ids=["at-once", "for-longer-than-the-grace"])
def test_the_next_controller_adopts_workers_of_both_hosts(hosts: Hosts, tmp_path: Path, grace_s: float) -> None:
    killed = Killed(hosts, tmp_path, grace_s)
    with killed.taken_over() as cluster:
        workers = both(cluster)
        assert [worker.pid for worker in workers] == killed.pids, "the same processes"
        assert [worker.call(Renewable.add, 1) for worker in workers] == [1, 1]
        if grace_s < 60:
            until(lambda: time.monotonic() > killed.at + grace_s + 6.0, 60, "the grace of the first one is over")
            assert [worker.call(Renewable.add, 1) for worker in workers] == [2, 2]
    assert not any(psutil.pid_exists(pid) for pid in killed.pids)


def test_a_host_that_has_lost_its_agent_as_well_gets_a_new_one(hosts: Hosts, tmp_path: Path) -> None:
    """Its reservation is kept, and the worker of the other host is adopted."""
    killed = Killed(hosts, tmp_path, 120.0)
    agents = [ServiceAddress.read(affairs) for affairs in (killed.folder / "cluster" / "nodes").iterdir()]
    (far,) = [agent for agent in agents if agent.host == hosts.other]
    os.kill(far.pid, signal.SIGKILL)
    until(lambda: sum(processes.is_alive(pid) for pid in killed.pids) == 1, 60, "the kernel has ended its worker")
    with killed.taken_over() as cluster:
        kept = [worker.pid in killed.pids for worker in both(cluster)]
        assert sorted(kept) == [False, True]


def test_the_next_controller_may_be_on_another_host(hosts: Hosts, tmp_path: Path) -> None:
    """It is on one of the hosts of the run."""
    killed = Killed(hosts, tmp_path, 30.0)
    environment = {**killed.environment, "LOCKSTEP_BEACONS": str(hosts.shared("b"))}
    settings = killed.config.model_dump_json()
    done = subprocess.run(
        [*hosts.cable.inside, sys.executable, "-c", ELSEWHERE, settings, str(killed.folder)],
        env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == killed.pids
    assert not any(psutil.pid_exists(pid) for pid in killed.pids)


def test_what_cannot_start_is_refused(hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lockstep.cluster.ray.ray_cluster import RayCluster
    from lockstep.cluster.ray.ray_session import RayUnavailable

    def attempt(wanted: list[ProcessRequest], **changes: Any) -> Any:
        settings = config(hosts, **changes)
        return RayCluster(settings, f"no-{secrets.token_hex(3)}", tmp_path / "no", 1, requests=wanted, placement=SPREAD)

    began = time.monotonic()
    with pytest.raises(RayUnavailable, match=r"no Ray at 127\.0\.0\.1:9 .*ray start"):
        attempt(WANTED, address="127.0.0.1:9")
    with pytest.raises(RayUnavailable, match="expected HOST:PORT"):
        attempt(WANTED, address="somewhere")
    with pytest.raises(RayUnavailable, match="Ray's client"):
        attempt(WANTED, address="ray://127.0.0.1:10001")
    with pytest.raises(DoesNotFit, match="16 CPUs on one node, and the largest"):
        attempt([ProcessRequest("policy-0", "policy", 0, 16.0)])
    with pytest.raises(DoesNotFit, match="1 GPU"):
        attempt([ProcessRequest("policy-0", "policy", 0, 1.0, 1)])
    assert time.monotonic() - began < 60
    with opened(hosts, tmp_path), caplog.at_level(logging.WARNING), pytest.raises(WaitTimeout):
        attempt([ProcessRequest(f"policy-{n}", "policy", n, 4.0) for n in range(2)], busy_limit_s=2.0)
    assert any("wait for" in line and "in use" in line for line in caplog.messages), caplog.messages
