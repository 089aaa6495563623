"""Creates the cluster that a run's config names."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lockstep.cluster.agent_cluster import AgentCluster
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.placement.bundles import ProcessRequest
from lockstep.cluster.reattach import InheritedAgent, take_over_local_agent
from lockstep.config.cluster import LocalClusterConfig as LocalConfig
from lockstep.config.cluster import PlacementConfig
from lockstep.config.cluster import RayClusterConfig as RayConfig
from lockstep.watch.agent.prepared_agent import PreparedAgent

if TYPE_CHECKING:
    from lockstep.cluster.ray.ray_reattach import InheritedRayNodes

InheritedProcesses: TypeAlias = "InheritedAgent | InheritedRayNodes | None"
CLUSTER_FOLDER = "cluster"
"""Subfolder of the run's folder, with files for agents and later controllers."""


def take_over_processes(
    config: LocalConfig | RayConfig,
    folder: Path,
    generation: int,
    requests: Sequence[ProcessRequest],
    placement: PlacementConfig,
) -> InheritedProcesses:
    """Takes over the processes that an earlier generation of the run in `folder` left behind, if they are usable.

    Raises:
        ConnectionError: the Ray cluster is not available.
        Superseded: a later generation has taken over the run.
    """
    if config.kind == "local":
        return take_over_local_agent(folder / CLUSTER_FOLDER, generation, config.orphan_grace_s, config.tls)
    _require_ray()
    from lockstep.cluster.ray import ray_reattach

    return ray_reattach.take_over_ray_actors(config, folder / CLUSTER_FOLDER, generation, requests, placement)


def open_cluster(
    config: LocalConfig | RayConfig,
    run: str,
    folder: Path,
    generation: int,
    inherited: InheritedProcesses,
    requests: Sequence[ProcessRequest],
    placement: PlacementConfig,
    prepared_agent: PreparedAgent | None = None,
) -> AgentCluster:
    """Opens the cluster that the config names. Raises what the cluster's constructor raises.

    Args:
        prepared_agent: a process that can become the agent of a run on this host.
    """
    if config.kind == "local":
        assert inherited is None or isinstance(inherited, InheritedAgent)
        return LocalCluster(config, run, folder, generation, inherited=inherited, prepared_agent=prepared_agent)
    _require_ray()
    from lockstep.cluster.ray.ray_cluster import RayCluster

    assert not isinstance(inherited, InheritedAgent)
    return RayCluster(config, run, folder, generation, inherited=inherited, requests=requests, placement=placement)


def _require_ray() -> None:
    if find_spec("ray") is None:
        raise ConnectionError("cluster.kind ray needs Ray, which is not installed: pip install 'lockstep-rl[ray]'")
