"""The nodes of a Ray cluster, as placement wants to know them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from lockstep.cluster.addresses import interfaces, own_address
from lockstep.cluster.bundles import NodeFacts
from lockstep.cluster.ray.asking import ask
from lockstep.cluster.ray.session import close_session, open_session
from lockstep.config.cluster import RayCluster as Config


def look_at_nodes(config: Config) -> list[NodeFacts]:
    """Of the cluster that the config names. Raises RayUnavailable."""
    open_session(config, 1, 0)
    try:
        return node_facts()
    finally:
        close_session()


def node_facts() -> list[NodeFacts]:
    """Those that live, this process's first. Raises RaySilent."""
    table: Sequence[dict[str, Any]]
    table, free = ask(lambda: (ray.nodes(), available_resources_per_node()), "its nodes, and what of them is free")
    here = ray.get_runtime_context().get_node_id()
    living = sorted((row for row in table if row["Alive"]), key=lambda row: row["NodeID"] != here)
    names = Counter(row["NodeManagerHostname"] for row in living)
    found = []
    for row in living:
        total, now = row["Resources"], free.get(row["NodeID"], {})
        host, address = row["NodeManagerHostname"], row["NodeManagerAddress"]
        found.append(
            NodeFacts(
                row["NodeID"],
                host if names[host] == 1 else f"{host}-{address}",
                address,
                total.get("CPU", 0.0),
                total.get("GPU", 0.0),
                now.get("CPU", 0.0),
                now.get("GPU", 0.0),
                int(total.get("memory", 0)),
                head="node:__internal_head__" in total,
            )
        )
    return found


def address_of_this_process(facts: Sequence[NodeFacts], config: Config) -> str:
    """By which the nodes reach it, of which the first is its own. Raises UnreachableAddress."""
    several = len(facts) > 1
    return own_address(facts[0].name, interfaces(), facts[0].address, config.interface, several).address


def is_alive(node_id: str) -> bool:
    """Whether Ray thinks so. Raises RaySilent."""
    return any(row["NodeID"] == node_id and row["Alive"] for row in ask(ray.nodes, "which nodes live"))
