"""The resources that a plan is computed from: those of this host and of the cluster's nodes."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from lockstep.cluster.placement.bundles import NodeResources, ProcessRequest
from lockstep.config.cluster import LocalClusterConfig, RayClusterConfig

UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class HostResources:
    """The resources of a machine."""

    cores: int
    memory: int
    """Available bytes."""
    shared_memory: int
    """Free bytes of /dev/shm."""
    device: str
    """`cpu` or `cuda`."""
    gpus: int


def host_resources(
    cfg: LocalClusterConfig | RayClusterConfig, nodes: Sequence[NodeResources] | None = None
) -> HostResources:
    """Returns the cores, memory (at most the container's limit), shared memory and GPUs of this host; if `nodes` are
    given, the GPUs of the nodes instead."""
    gpus = 0
    if cfg.device != "cpu":
        gpus = torch.cuda.device_count() if nodes is None else int(sum(node.gpus for node in nodes))
    return HostResources(
        cores=len(os.sched_getaffinity(0)),
        memory=min(psutil.virtual_memory().available, _cgroup_memory()),
        shared_memory=psutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        device="cuda" if gpus or cfg.device == "cuda" else "cpu",
        gpus=gpus,
    )


def _cgroup_memory() -> int:
    """Bytes that the container's memory limit still allows; `UNLIMITED` if there is no limit."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            allowed = (root / limit).read_text().strip()
            taken = int((root / used).read_text())
        except (OSError, ValueError):
            continue
        if allowed != "max":
            return max(0, int(allowed) - taken)
    return UNLIMITED


def uses_existing_cluster(cluster: RayClusterConfig) -> bool:
    """Whether the run uses an existing Ray cluster, instead of starting its own."""
    return bool(cluster.address or os.environ.get("RAY_ADDRESS"))


def list_cluster_nodes(cluster: RayClusterConfig) -> list[NodeResources]:
    """Lists the nodes of an existing Ray cluster. Raises ConnectionError if the cluster cannot be reached."""
    if find_spec("ray") is None:
        raise ConnectionError("cluster.kind ray needs Ray, which is not installed here: pip install 'lockstep-rl[ray]'")
    from lockstep.cluster.ray.ray_nodes import query_nodes  # imports ray

    nodes: list[NodeResources] = query_nodes(cluster)
    return nodes


def local_node(requests: Sequence[ProcessRequest], host: HostResources) -> NodeResources:
    """This host as the only node of a private Ray. If the processes request more CPUs than it has cores, they share the
    cores, as without Ray."""
    name, cpus = socket.gethostname(), float(max(host.cores, sum(each.cpus for each in requests)))
    return NodeResources(name, name, "127.0.0.1", cpus, host.gpus, cpus, host.gpus, host.memory, head=True)
