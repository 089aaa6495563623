"""The nodes that a run's plan is based on: lists the cluster's nodes and adds an assignment to the plan.

The placement algorithm itself is in `cluster.placement.assignment`.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from lockstep.cluster.placement.assignment import NodeLookup, NodesBusy, assign
from lockstep.cluster.placement.bundles import NodeResources, ProcessRequest, make_bundles
from lockstep.config.cluster import PlacementConfig, RayClusterConfig
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.run.planning.resources import HostResources
from lockstep.run.planning.run_plan import RunPlan


def uses_existing_cluster(cluster: RayClusterConfig) -> bool:
    """Whether the run uses an existing Ray cluster, instead of starting its own."""
    return bool(cluster.address or os.environ.get("RAY_ADDRESS"))


def list_cluster_nodes(cluster: RayClusterConfig) -> list[NodeResources]:
    """The nodes of an existing Ray cluster. ConnectionError if it cannot be reached."""
    if find_spec("ray") is None:
        raise ConnectionError("cluster.kind ray needs Ray, which is not installed here: pip install 'lockstep-rl[ray]'")
    from lockstep.cluster.ray import ray_nodes  # imports ray

    look: NodeLookup = ray_nodes.query_nodes
    return look(cluster)


def local_node(wanted: Sequence[ProcessRequest], host: HostResources) -> NodeResources:
    """This host as the only node of the run's own Ray: its processes share the cores as without Ray."""
    name, cpus = socket.gethostname(), float(max(host.cores, sum(each.cpus for each in wanted)))
    return NodeResources(name, name, "127.0.0.1", cpus, host.gpus, cpus, host.gpus, host.memory, head=True)


def assign_nodes(plan: RunPlan, placement: PlacementConfig, nodes: Sequence[NodeResources] | None) -> RunPlan:
    """The plan with a node for every process, if the nodes are known.

    Raises:
        PlacementError: the placement contradicts itself or the config.
        DoesNotFit: the nodes can never hold the run; with what would fit.
    """
    if nodes is None:
        make_bundles(plan.wanted, placement)
        return plan
    try:
        return replace(plan, assignment=assign(plan.wanted, placement, nodes))
    except NodesBusy as error:
        return replace(plan, busy=str(error))


def placement_notes(config: SFTConfig | GRPOConfig) -> list[str]:
    """Notes on placement settings that have no effect on one host."""
    others = config.placement.model_copy(update={"colocate": ()})
    if config.cluster.kind == "ray" or others == PlacementConfig():
        return []
    return ["of placement, only `colocate` applies outside Ray: on this host, processes take the GPUs in turn"]
