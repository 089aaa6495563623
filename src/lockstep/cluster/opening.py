"""The cluster that a run's config names."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lockstep.cluster.base import AgentCluster
from lockstep.cluster.bundles import Wanted
from lockstep.cluster.local import LocalCluster
from lockstep.cluster.predecessor import Heritage, take_over
from lockstep.config.cluster import LocalCluster as LocalConfig
from lockstep.config.cluster import RayCluster as RayConfig
from lockstep.config.placement import Placement

if TYPE_CHECKING:
    from lockstep.cluster.ray.inheriting import RayHeritage

Inherited: TypeAlias = "Heritage | RayHeritage | None"
AFFAIRS = "cluster"
"""Folder of a run's folder: what agents and later controllers need."""


def inherit(
    config: LocalConfig | RayConfig, folder: Path, generation: int, wanted: Sequence[Wanted], placement: Placement
) -> Inherited:
    """What an earlier generation of the run in `folder` has left and this one goes on with.

    Raises:
        ConnectionError: the Ray cluster is not to be had.
        Superseded: a later generation has the run.
    """
    if config.kind == "local":
        return take_over(folder / AFFAIRS, generation, config.orphan_grace_s)
    _must_have_ray()
    from lockstep.cluster.ray import inheriting

    return inheriting.take_over(config, folder / AFFAIRS, generation, wanted, placement)


def open_cluster(
    config: LocalConfig | RayConfig,
    run: str,
    folder: Path,
    generation: int,
    heritage: Inherited,
    wanted: Sequence[Wanted],
    placement: Placement,
) -> AgentCluster:
    """Raises what the cluster's constructor raises."""
    if config.kind == "local":
        assert heritage is None or isinstance(heritage, Heritage)
        return LocalCluster(config, run, folder, generation, heritage=heritage)
    _must_have_ray()
    from lockstep.cluster.ray.cluster import RayCluster

    assert not isinstance(heritage, Heritage)
    return RayCluster(config, run, folder, generation, heritage=heritage, wanted=wanted, placement=placement)


def _must_have_ray() -> None:
    if find_spec("ray") is None:
        raise ConnectionError("cluster.kind ray needs Ray, which is not installed here: pip install 'lockstep-rl[ray]'")
