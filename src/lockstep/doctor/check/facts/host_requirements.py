"""What a run requires of each of its hosts, as derived from its config."""

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lockstep.config.cluster import RayClusterConfig
from lockstep.config.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class HostRequirements:
    """What a run requires of a host. The defaults are those without a config."""

    several: bool = False
    """Whether the run has other hosts, so that addresses that only this host can reach are wrong."""
    gpus: bool = False
    """Whether the run needs a GPU."""
    shared: bool = False
    """Whether processes on one host exchange data through shared memory: ranks, an engine, workers."""
    packages: tuple[str, ...] = ("python", "torch", "transformers")
    """Packages that the run needs to start."""
    interface: str | None = None
    """`cluster.interface`: prefix of the interface to use."""
    names: tuple[str, ...] = ()
    """Names of other hosts in the config, which must resolve."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """The folders to which the run writes, with their purposes."""
    ports: Mapping[int, str] = field(default_factory=dict)
    """The ports on which the run listens, with their purposes."""


def requirements_of(config: RunConfig | None, several: bool = False) -> HostRequirements:
    """The requirements of a run with this config; without a config, those of training in the working folder.

    Args:
        several: whether the run has other hosts, in addition to what its config says.
    """
    ports = _master_port(os.environ)
    if config is None:
        return HostRequirements(
            several=several, shared=several, folders={str(Path.cwd()): "the working folder"}, ports=ports
        )
    packages = ["python", "torch", "transformers"]
    cluster = config.cluster
    ray = isinstance(cluster, RayClusterConfig)
    if ray:
        packages.append("ray")
    if config.rollout.engine.kind == "vllm":
        packages.append("vllm")
    folders = {str(Path(config.folder) / config.name): "the run's folder"}
    names = _host_names(cluster.address) if isinstance(cluster, RayClusterConfig) else ()
    if ray:
        folders["/tmp"] = "Ray's folder"
    return HostRequirements(
        several=several
        or (isinstance(cluster, RayClusterConfig) and bool(cluster.address or os.environ.get("RAY_ADDRESS"))),
        gpus=cluster.device == "cuda",
        shared=several
        or any(role.trainer.ranks > 1 for role in config.train_roles)
        or config.reward is not None
        or config.evaluation is not None,
        packages=tuple(packages),
        interface=cluster.interface if isinstance(cluster, RayClusterConfig) else None,
        names=names,
        folders=folders,
        ports=ports,
    )


def _master_port(environ: Mapping[str, str]) -> dict[int, str]:
    """The port of MASTER_PORT, on which rank 0 listens, if MASTER_ADDR is this host or is not set."""
    port, address = environ.get("MASTER_PORT", ""), environ.get("MASTER_ADDR", "localhost")
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        return {}
    own_addresses = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    own_addresses |= {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    return {int(port): "MASTER_PORT"} if address in own_addresses else {}


def _host_names(address: str | None) -> tuple[str, ...]:
    """The host of `HOST:PORT`, unless it is a numeric address."""
    if address is None or address == "auto":
        return ()
    host = address.rpartition(":")[0].strip("[]") or address
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return (host,)
    return ()
