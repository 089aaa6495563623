"""Agents held by a Ray actor, on a Ray of this host: killed agents are replaced, superseded controllers are refused,
and a refused run leaves nothing."""

import os
import secrets
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from needed_systems import needs_ray
from test_ray_nodes import WANTED, engine

from benchmarks.faults.ray_hosts import until
from lockstep.base.folders import run_shm_dir
from lockstep.cluster import node_versions
from lockstep.cluster.node_versions import VersionError
from lockstep.config.cluster import RayClusterConfig as Config
from lockstep.watch.agent.agent_client import AgentError, AgentGone
from lockstep.watch.agent.service_discovery import Superseded
from lockstep.watch.procfs import processes

pytestmark = [*needs_ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def own() -> Iterator[Config]:
    """A Ray on this host that survives its clusters."""
    from lockstep.cluster.ray import ray_session

    config = Config(notice_after_s=2.0)
    ray_session.open_session(config, 4, 0)
    yield config
    ray_session.close_session()


def opened(config: Config, folder: Path) -> Any:
    from lockstep.cluster.ray.ray_cluster import RayCluster

    return RayCluster(config, f"agents-{secrets.token_hex(3)}", folder / "run", 1, requests=WANTED)


def test_two_replacement_workers_share_one_new_agent(own: Config, tmp_path: Path) -> None:
    """And they find the run's shared memory, with the weights, unchanged."""
    with opened(own, tmp_path) as cluster:
        workers = cluster.start([engine(0), engine(1)])
        kept = run_shm_dir(cluster._run) / "weights"
        kept.write_text("version 7")
        os.kill(cluster._nodes[0].agent.address.pid, signal.SIGKILL)
        until(lambda: all(worker.dead for worker in workers), 60, "the agent's workers ended with it")
        successors: list[Any] = []
        starting = [
            threading.Thread(
                target=lambda rank=rank: successors.extend(cluster.start([engine(rank, f"engine-{rank}.1")]))
            )
            for rank in range(2)
        ]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join(120.0)
        assert sorted(worker.name for worker in successors) == ["engine-0.1", "engine-1.1"]
        assert all(processes.is_alive(worker.pid) for worker in successors)
        assert kept.read_text() == "version 7"


def test_a_superseded_controller_is_refused(own: Config, tmp_path: Path) -> None:
    from lockstep.cluster.ray.ray_session import ray_get

    with opened(own, tmp_path) as cluster:
        holder = cluster._nodes[0]
        past = asdict(replace(cluster._leader(True), generation=1))
        ray_get(holder.actor.hand_over.remote(2, []), "the actor", "generation 2 takes over")
        for asked in (
            holder.actor.start_agent.remote(9, past, 0.0),
            holder.actor.reserve.remote(1, {"CPU": 1.0}, []),
            holder.actor.save_reservations.remote(1, []),
            holder.actor.leave.remote(1),
            holder.actor.watch_controller.remote(1, os.getpid(), None, 0.0),
        ):
            with pytest.raises(Superseded, match=r"generation 1 of .* generation 2 has taken it over"):
                ray_get(asked, "the actor", "a refusal")
        assert holder.alive


def test_a_refused_controller_learns_of_it(own: Config, tmp_path: Path) -> None:
    """And it starts and ends nothing more, although its own host was not informed."""
    from lockstep.cluster.ray.ray_session import ray_get

    with opened(own, tmp_path) as cluster:
        (worker,) = cluster.start([engine(0)])
        holder = cluster._nodes[0]
        ray_get(holder.actor.hand_over.remote(2, []), "the actor", "generation 2 takes over")
        os.kill(holder.agent.address.pid, signal.SIGKILL)
        until(lambda: worker.dead, 60, "the agent's workers ended with it")
        for _ in range(2):
            with pytest.raises(AgentGone, match=r"generation 2 has taken it over|a later generation"):
                cluster.start([engine(0, "engine-0.1")])
    assert ray_get(holder.actor.facts.remote(), "the actor", "it is there")
    ray_get(holder.actor.leave.remote(2), "the actor", "its end")


def test_a_controller_checks_who_had_the_run_last(own: Config, tmp_path: Path) -> None:
    """It was not informed by the cluster: its successor is on another host, and the folder is shared."""
    from lockstep.cluster.ray.ray_reattach import RayRunState

    with opened(own, tmp_path) as cluster:
        RayRunState(2, "another").write(cluster._cluster_dir)
        with pytest.raises(AgentGone, match="a later generation"):
            cluster.start([engine(0)])
        RayRunState().write(cluster._cluster_dir)


def test_a_late_request_ends_no_agent(own: Config, tmp_path: Path) -> None:
    from lockstep.cluster.ray.ray_session import ray_get

    with opened(own, tmp_path) as cluster:
        holder = cluster._nodes[0]
        late = holder.actor.start_agent.remote(0, asdict(cluster._leader(True)), 0.0)
        with pytest.raises(AgentError, match="a later request for an agent"):
            ray_get(late, "the actor", "a refusal")
        assert holder.alive


def test_nothing_is_left_of_a_run_that_is_refused(own: Config, tmp_path: Path) -> None:
    import ray

    from lockstep.cluster.ray.actors import start_compatible_actors
    from lockstep.cluster.ray.node_actor import NodeActorArguments
    from lockstep.cluster.ray.ray_nodes import alive_nodes

    folder = str(tmp_path)
    site = NodeActorArguments(
        f"agents-{secrets.token_hex(3)}", "a token", folder, folder, "a mark", None, None, False, None
    )
    old = {"old-host": {**node_versions.installed_versions(), "python": "3.9.1"}}
    with pytest.raises(VersionError, match="old-host"):
        start_compatible_actors(alive_nodes(), site, old, set())
    until(lambda: not ray.util.list_named_actors(all_namespaces=True), 30, "its actors have ended")


def test_a_killed_actor_is_replaced_and_its_resources_are_reserved_again(own: Config, tmp_path: Path) -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    with opened(own, tmp_path) as cluster:
        (worker,) = cluster.start([engine(0)])
        first = cluster._nodes[0]
        ray.kill(first.actor)
        until(lambda: worker.dead, 60, "its agent and its workers ended with it")
        (successor,) = cluster.start([engine(0, "engine-0.1")])
        assert successor.node is not first and cluster._nodes == [successor.node]
        groups = [each.group for each in cluster._reservations.held]
        assert [placement_group_table()[group]["state"] for group in groups] == ["CREATED"]
