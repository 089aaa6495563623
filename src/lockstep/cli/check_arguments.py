"""What the command line of `lockstep check` says of other hosts. Imports little: what is wrong is said at once."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.cluster import LocalClusterConfig, RayClusterConfig
from lockstep.config.loader import apply_overrides, load_config, read_yaml
from lockstep.config.recipes import GRPOConfig, SFTConfig

PROBE_WAIT_S = 120.0
CLUSTERS = "local, ray, auto, or HOST:PORT of the head of a running Ray cluster"


@dataclass(frozen=True, slots=True)
class HostSelection:
    """What is to be checked beside this host."""

    hosts: tuple[str, ...] = ()
    address: str | None = None
    """Of this host, for the others."""
    ports: tuple[int, ...] = ()
    wait_s: float = PROBE_WAIT_S
    """How long people have to start probes."""
    cluster: LocalClusterConfig | RayClusterConfig | None = None
    """Whose hosts it is, where none are named."""


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What a check is about."""

    config: SFTConfig | GRPOConfig | None
    overrides: list[str]
    """Those that make the config of its file, `--cluster` among them."""
    beyond: HostSelection

    @property
    def several(self) -> bool:
        """Whether the command line itself says that there are other hosts."""
        return bool(self.beyond.hosts) or (self.config is None and isinstance(self.beyond.cluster, RayClusterConfig))


def read_arguments(
    file: str | None, overrides: Sequence[str], hosts: str | None, cluster: str | None, address: str | None,
    ports: str | None, wait_s: float | None,
) -> CheckRequest:  # fmt: skip
    """Of the command line, checked.

    Raises:
        ConfigError: the config cannot be read, or is wrong.
        ValueError: an argument cannot be.
    """
    if cluster is not None and hosts is not None:
        raise ValueError("--cluster and --hosts both say which hosts there are: give one of them")
    names, numbers, words = split_names(hosts), split_ports(ports), list(overrides)
    section = None if cluster is None else cluster_section(cluster)
    if file is None:
        kind = (
            None
            if section is None
            else RayClusterConfig(**section)
            if section["kind"] == "ray"
            else LocalClusterConfig()
        )
        return CheckRequest(None, words, HostSelection(names, address, numbers, wait_s or PROBE_WAIT_S, kind))
    if cluster is not None and section is not None:
        words.append(_cluster_override(cluster, section, Path(file), words))
    config = load_config(Path(file), words)
    return CheckRequest(config, words, HostSelection(names, address, numbers, wait_s or PROBE_WAIT_S, config.cluster))


def split_address(where: str) -> tuple[str, int]:
    """`HOST:PORT`, `[IPv6]:PORT`. Raises ValueError."""
    host, colon, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--join {where}: expected HOST:PORT, as the check on the head printed it")
    return host, int(port)


def split_names(hosts: str | None) -> tuple[str, ...]:
    """Of `a,b,c`, each once. Raises ValueError."""
    if hosts is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in hosts.split(",") if name.strip()))
    if len(names) < 2:
        raise ValueError(f"--hosts {hosts}: expected two hosts or more, such as a,b,c, this one among them or not")
    return names


def split_ports(ports: str | None) -> tuple[int, ...]:
    """Of `29500,10002-10100`: each port, and first, middle and last one of a range. Raises ValueError."""
    found: list[int] = []
    for part in (ports or "").split(","):
        low, dash, high = part.strip().partition("-")
        if not part.strip():
            continue
        first, last = (int(word) if word.isdecimal() else 0 for word in (low, high if dash else low))
        if not 0 < first <= last < 65536:
            raise ValueError(
                f"--ports {part.strip()}: expected a port or a range of ports, such as 29500 or 10002-10100"
            )
        found += [first, (first + last) // 2, last]
    return tuple(dict.fromkeys(found))


def cluster_section(word: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The section `cluster` that `--cluster` stands for, over one that a file has. Raises ValueError."""
    if word == "local":
        return {"kind": "local"}
    if word == "ray":
        return {"kind": "ray"} if environ.get("RAY_ADDRESS") else {"kind": "ray", "address": "auto"}
    host, colon, port = word.rpartition(":")
    if word != "auto" and not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"--cluster {word}: expected {CLUSTERS}")
    return {"kind": "ray", "address": word}


def _cluster_override(word: str, section: Mapping[str, Any], file: Path, overrides: Sequence[str]) -> str:
    """`--cluster` as one more override of a config: its section with another kind, without what only Ray knows.
    With `ray_choice` the file's own address stays. Raises ConfigError."""
    given = apply_overrides(read_yaml(file), overrides).get("cluster")
    foreign = (
        RayClusterConfig.model_fields.keys() - LocalClusterConfig.model_fields.keys()
        if section["kind"] == "local"
        else ()
    )
    own = {key: value for key, value in given.items() if key not in foreign} if isinstance(given, dict) else {}
    stays = {"address": own["address"]} if word == "ray" and own.get("address") else {}
    return f"cluster={json.dumps({**own, **section, **stays})}"
