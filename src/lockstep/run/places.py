"""Who of a run is to be where on a cluster of several nodes, before it starts."""

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from lockstep.cluster.placement import Busy, LookAtNodes, NodeFacts, Wanted, assign, bundles_of
from lockstep.config.cluster import RayCluster
from lockstep.config.placement import Placement
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.run.facts import HostFacts
from lockstep.run.plan import Plan


def names_cluster(cluster: RayCluster) -> bool:
    """Whether the run goes to a Ray that runs already, and not to one of its own."""
    return bool(cluster.address or os.environ.get("RAY_ADDRESS"))


def look_at_nodes(cluster: RayCluster) -> list[NodeFacts]:
    """The nodes of a running Ray cluster. ConnectionError where it cannot be reached."""
    if find_spec("ray") is None:
        raise ConnectionError("cluster.kind ray needs Ray, which is not installed here: pip install 'lockstep-rl[ray]'")
    from lockstep.cluster.ray import nodes  # imports ray

    look: LookAtNodes = nodes.look_at_nodes
    return look(cluster)


def own_node(wanted: Sequence[Wanted], host: HostFacts) -> NodeFacts:
    """This host as the only node of a Ray that is started for the run: processes share its cores as without Ray."""
    name, cpus = socket.gethostname(), float(max(host.cores, sum(each.cpus for each in wanted)))
    return NodeFacts(name, name, "127.0.0.1", cpus, host.gpus, cpus, host.gpus, host.memory, head=True)


def placed(plan: Plan, placement: Placement, nodes: Sequence[NodeFacts] | None) -> Plan:
    """The plan with a place for every process, as far as the nodes are known.

    Raises:
        PlacementError: the placement contradicts itself or the config.
        DoesNotFit: the nodes can never hold the run; with what would fit.
    """
    if nodes is None:
        bundles_of(plan.wanted, placement)
        return plan
    try:
        return replace(plan, assignment=assign(plan.wanted, placement, nodes))
    except Busy as error:
        return replace(plan, busy=str(error))


def place_notes(config: SFTConfig | GRPOConfig) -> list[str]:
    """What a placement does not do on one host."""
    others = config.placement.model_copy(update={"colocate": ()})
    if config.cluster.kind == "ray" or others == Placement():
        return []
    return [
        "of placement, all but colocate is for cluster.kind ray: on this host, processes take the GPUs in turn, as "
        "many as there are"
    ]
