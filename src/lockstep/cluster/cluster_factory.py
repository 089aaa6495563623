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

if TYPE_CHECKING:
    from lockstep.cluster.ray.ray_reattach import InheritedRayNodes

InheritedProcesses: TypeAlias = "InheritedAgent | InheritedRayNodes | None"
CLUSTER_FOLDER = "cluster"
"""Folder of a run's folder: what agents and later controllers need."""


def take_over_processes(
    config: LocalConfig | RayConfig,
    folder: Path,
    generation: int,
    wanted: Sequence[ProcessRequest],
    placement: PlacementConfig,
) -> InheritedProcesses:
    """What an earlier generation of the run in `folder` has left and this one goes on with.

    Raises:
        ConnectionError: the Ray cluster is not to be had.
        Superseded: a later generation has the run.
    """
    if config.kind == "local":
        return take_over_local_agent(folder / CLUSTER_FOLDER, generation, config.orphan_grace_s)
    _require_ray()
    from lockstep.cluster.ray import ray_reattach

    return ray_reattach.take_over_ray_actors(config, folder / CLUSTER_FOLDER, generation, wanted, placement)


def open_cluster(
    config: LocalConfig | RayConfig,
    run: str,
    folder: Path,
    generation: int,
    heritage: InheritedProcesses,
    wanted: Sequence[ProcessRequest],
    placement: PlacementConfig,
) -> AgentCluster:
    """Raises what the cluster's constructor raises."""
    if config.kind == "local":
        assert heritage is None or isinstance(heritage, InheritedAgent)
        return LocalCluster(config, run, folder, generation, heritage=heritage)
    _require_ray()
    from lockstep.cluster.ray.ray_cluster import RayCluster

    assert not isinstance(heritage, InheritedAgent)
    return RayCluster(config, run, folder, generation, heritage=heritage, wanted=wanted, placement=placement)


def _require_ray() -> None:
    if find_spec("ray") is None:
        raise ConnectionError("cluster.kind ray needs Ray, which is not installed here: pip install 'lockstep-rl[ray]'")
