"""Reattachment on a running Ray of this host: what the next controller does with the workers of a killed one."""

import contextlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from needed_systems import TEST_PATHS, needs_ray
from test_ray_nodes import ENVIRONMENT, engine

from benchmarks.faults.ray_hosts import RAY, free_port, until
from lockstep.cluster.placement.bundles import ProcessRequest
from lockstep.config.cluster import PlacementConfig
from lockstep.config.cluster import RayClusterConfig as Config
from lockstep.watch.procfs import processes

pytestmark = [*needs_ray, pytest.mark.slow, pytest.mark.timeout(300)]
CPUS = 4.0
GRACE_S = 120.0
WANTED = [ProcessRequest(f"engine-{rank}", "rollout", rank, 1.0) for rank in range(3)]

CONTROLLER = """
import json, sys, time
from pathlib import Path
from test_ray_reattach import GRACE_S, WANTED
from lockstep.config.cluster import RayClusterConfig
from test_ray_nodes import engine
from cluster_services import Renewable
from lockstep.cluster.ray.ray_cluster import RayCluster
address, run, folder, where = sys.argv[1:]
if where == "starting":
    RayCluster._start_agents = lambda self, nodes: (print("[]", flush=True), time.sleep(300))
config = RayClusterConfig(address=address, orphan_grace_s=GRACE_S)
with RayCluster(config, run, Path(folder), 1, requests=WANTED[:2]) as cluster:
    workers = cluster.start([engine(rank, service=Renewable) for rank in range(2)])
    pids = [worker.pid for worker in workers]
    print(json.dumps([cluster._nodes[0].agent.address.pid, *pids]), flush=True)
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The address of a Ray that is started before a run and survives it."""
    import ray

    from lockstep.cluster.ray import ray_session

    port, temporary = free_port(), tempfile.mkdtemp(prefix="lsr")
    words = [
        RAY, "start", "--head", "--port", str(port), "--node-ip-address", "127.0.0.1", "--num-cpus", f"{CPUS:g}",
        "--object-store-memory", str(100 << 20), "--include-dashboard=false", "--temp-dir", temporary, "--block",
        "--disable-usage-stats",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_MODE", "disabled")
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
            address = f"127.0.0.1:{port}"
            try:
                until(lambda: joins(Config(address=address)), 120, "the head is there")
                yield address
            finally:
                while ray.is_initialized():  # also if a test has failed
                    ray_session.close_session()
                ours = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
                for process in ours:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(ours, timeout=20)
                shutil.rmtree(temporary, ignore_errors=True)


def joins(config: Config) -> bool:
    from lockstep.cluster.ray import ray_session

    try:
        ray_session.open_session(config, 1, 0)
    except ray_session.RayUnavailable:
        time.sleep(0.5)
        return False
    return True


class Killed:
    """A killed controller that ran two engines, and the pids of the agent and the engines."""

    def __init__(self, address: str, folder: Path, where: str = "running") -> None:
        self.run, self.folder = f"heirs-{secrets.token_hex(3)}", folder / "run"
        self.config = Config(address=address, orphan_grace_s=GRACE_S, notice_after_s=2.0)
        path = os.pathsep.join([str(Path(__file__).parent), *TEST_PATHS, *paths()])
        with subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, address, self.run, str(self.folder), where],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            self.pids: list[int] = json.loads(process.stdout.readline())
            process.kill()

    def take_over(self, wanted: list[ProcessRequest], generation: int = 2) -> Any:
        from lockstep.cluster.ray.ray_reattach import take_over_ray_actors

        return take_over_ray_actors(self.config, self.folder / "cluster", generation, wanted, PlacementConfig())

    @property
    def living(self) -> list[int]:
        return [pid for pid in self.pids if processes.is_alive(pid)]


def paths() -> list[str]:
    return ENVIRONMENT["PYTHONPATH"].split(os.pathsep)


def free_cpus() -> float:
    from lockstep.cluster.ray.ray_nodes import alive_nodes

    return alive_nodes()[0].free_cpus


def actors() -> list[Any]:
    import ray

    return list(ray.util.list_named_actors(all_namespaces=True))


def test_a_run_of_other_processes_starts_anew(head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reservations of the earlier run do not fit. They are released, and its workers have ended, when the run
    starts."""
    from lockstep.cluster.ray.ray_cluster import RayCluster

    killed = Killed(head, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert killed.take_over(WANTED) is None
    assert "starting anew: the run also has engine-2" in caplog.text
    assert not killed.living
    until(lambda: not actors() and free_cpus() == CPUS, 30, "nothing is reserved any more")
    with RayCluster(killed.config, "another", killed.folder, 2, requests=WANTED) as cluster:
        assert len(cluster.start([engine(rank) for rank in range(3)])) == 3
        assert free_cpus() == CPUS - 3


def test_the_actors_of_another_run_folder_are_left_alone(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of the state file, or one that somebody wrote, names a run of another folder."""
    killed = Killed(head, tmp_path)
    shutil.copytree(killed.folder / "cluster", tmp_path / "copy" / "cluster")
    before, killed.folder = killed.folder, tmp_path / "copy"
    with caplog.at_level(logging.WARNING):
        assert killed.take_over(WANTED[:2]) is None
    assert f"belongs to a run in another folder, not {killed.folder}: left alone" in caplog.text
    assert killed.living == killed.pids
    killed.folder = before
    assert killed.take_over(WANTED) is None, "its own folder ends them"
    assert not killed.living
    until(lambda: not actors() and free_cpus() == CPUS, 30, "nothing is reserved any more")


def test_workers_with_old_code_are_not_adopted(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "heirs_module.py"
    module.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("heirs_module")
    killed = Killed(head, tmp_path)
    os.utime(module)
    with caplog.at_level(logging.WARNING):
        assert killed.take_over(WANTED[:2]) is None
    del sys.modules["heirs_module"]
    assert "heirs_module.py of" in caplog.text and "has changed since" in caplog.text
    assert not killed.living


def test_if_the_agent_has_ended_as_well_nothing_is_adopted(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = Killed(head, tmp_path)
    psutil.Process(killed.pids[0]).kill()
    until(lambda: not killed.living, 30, "the kernel ends its workers")
    with caplog.at_level(logging.WARNING):
        assert killed.take_over(WANTED[:2]) is None
    assert "all its agents have ended" in caplog.text
    until(lambda: not actors() and free_cpus() == CPUS, 30, "nothing is reserved any more")


def test_an_actor_that_does_not_answer_cannot_rejoin_the_run(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.cluster.ray import actors as node_actors
    from lockstep.cluster.ray import ray_reattach

    monkeypatch.setattr(ray_reattach, "ACTOR_REPLY_S", 2.0)
    monkeypatch.setattr(node_actors, "STOP_ACTORS_S", 2.0)
    killed = Killed(head, tmp_path)
    keeper = psutil.Process(killed.pids[0]).parent()
    assert keeper is not None and "NodeActor" in " ".join(keeper.cmdline())
    keeper.suspend()
    try:
        with caplog.at_level(logging.WARNING):
            assert killed.take_over(WANTED[:2]) is None
        assert "does not respond, and is not lost yet" in caplog.text
    finally:
        keeper.resume()
    until(lambda: not killed.living and not actors() and free_cpus() == CPUS, 60, "it does what it was asked for")


def test_a_controller_that_is_killed_while_it_starts_leaves_nothing(head: str, tmp_path: Path) -> None:
    Killed(head, tmp_path, "starting")
    until(lambda: not actors() and free_cpus() == CPUS, 30, "its actor goes, and what it has reserved is free")


def test_without_a_cluster_none_is_started_to_search_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.cluster.ray import ray_session
    from lockstep.cluster.ray.ray_reattach import RayRunState, take_over_ray_actors

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_session, "open_session", lambda *arguments: pytest.fail("a Ray is started"))
    assert take_over_ray_actors(Config(address="127.0.0.1:1"), tmp_path, 2, WANTED, PlacementConfig()) is None
    RayRunState(1, "a-run").write(tmp_path)
    assert take_over_ray_actors(Config(), tmp_path, 2, WANTED, PlacementConfig()) is None
