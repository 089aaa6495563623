"""What a config asks of each of its hosts."""

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from lockstep.config.cluster import RayCluster
from lockstep.config.run import RunConfig
from lockstep.doctor.check.needs import Needs


def needs_of(config: RunConfig | None, several: bool = False) -> Needs:
    """Of the host alone where there is no config: its working folder, and what training needs.

    Args:
        several: the run has other hosts, whatever its config says.
    """
    ports = _ports(os.environ)
    if config is None:
        return Needs(several=several, shared=several, folders={str(Path.cwd()): "the working folder"}, ports=ports)
    packages = ["python", "torch", "transformers"]
    cluster = config.cluster
    ray = isinstance(cluster, RayCluster)
    if ray:
        packages.append("ray")
    if config.rollout.engine.kind == "vllm":
        packages.append("vllm")
    folders = {str(Path(config.folder) / config.name): "the run's folder"}
    names = _names(cluster.address) if isinstance(cluster, RayCluster) else ()
    if ray:
        folders["/tmp"] = "Ray's folder"
    return Needs(
        several=several or (isinstance(cluster, RayCluster) and bool(cluster.address or os.environ.get("RAY_ADDRESS"))),
        gpus=cluster.device == "cuda",
        shared=several or config.trainer.ranks > 1 or config.reward is not None or config.evaluation is not None,
        packages=tuple(packages),
        interface=cluster.interface if isinstance(cluster, RayCluster) else None,
        names=names,
        folders=folders,
        ports=ports,
    )


def _ports(environ: Mapping[str, str]) -> dict[int, str]:
    """MASTER_PORT, where MASTER_ADDR is this host or none is given: there rank 0 listens."""
    port, address = environ.get("MASTER_PORT", ""), environ.get("MASTER_ADDR", "localhost")
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        return {}
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    here |= {each.address for found in psutil.net_if_addrs().values() for each in found}
    return {int(port): "MASTER_PORT"} if address in here else {}


def _names(address: str | None) -> tuple[str, ...]:
    """The host of `HOST:PORT` where it is a name."""
    if address is None or address == "auto":
        return ()
    host = address.rpartition(":")[0].strip("[]") or address
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return (host,)
    return ()
