"""Parses the arguments of `lockstep check`. It imports little, so that wrong arguments are reported quickly."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cli.check.check_command import CLUSTERS
from lockstep.config.cluster import LocalClusterConfig, RayClusterConfig
from lockstep.config.loader import apply_overrides, load_config, read_yaml
from lockstep.config.run_config import RunConfig

PROBE_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class HostSelection:
    """The hosts to check, and how to reach them."""

    hosts: tuple[str, ...] = ()
    address: str | None = None
    """Address at which the other hosts reach this one."""
    ports: tuple[int, ...] = ()
    wait_s: float = PROBE_WAIT_S
    """How long to wait for the probes that the user starts on the other hosts."""
    cluster: LocalClusterConfig | RayClusterConfig | None = None
    """Cluster whose hosts are checked if `hosts` is empty."""


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """A parsed command line."""

    config: RunConfig | None
    overrides: list[str]
    """Overrides of the file, including the one from `--cluster`."""
    selection: HostSelection

    @property
    def names_other_hosts(self) -> bool:
        """Whether the command line itself names other hosts."""
        return bool(self.selection.hosts) or (
            self.config is None and isinstance(self.selection.cluster, RayClusterConfig)
        )


def read_arguments(
    file: str | None, overrides: Sequence[str], hosts: str | None, cluster: str | None, address: str | None,
    ports: str | None, wait_s: float | None,
) -> CheckRequest:  # fmt: skip
    """Parses and validates the command line.

    Raises:
        ConfigError: the config cannot be read or is invalid.
        ValueError: an argument is invalid.
    """
    if cluster is not None and hosts is not None:
        raise ValueError("--cluster and --hosts both select the hosts: give only one of them")
    names, numbers, assignments = split_names(hosts), split_ports(ports), list(overrides)
    section = None if cluster is None else cluster_section(cluster)
    if file is None:
        selected = None
        if section is not None:
            selected = RayClusterConfig(**section) if section["kind"] == "ray" else LocalClusterConfig()
        return CheckRequest(None, assignments, HostSelection(names, address, numbers, wait_s or PROBE_WAIT_S, selected))
    if cluster is not None and section is not None:
        assignments.append(_cluster_override(cluster, section, Path(file), assignments))
    config = load_config(Path(file), assignments)
    selection = HostSelection(names, address, numbers, wait_s or PROBE_WAIT_S, config.cluster)
    return CheckRequest(config, assignments, selection)


def split_names(hosts: str | None) -> tuple[str, ...]:
    """The distinct names in `a,b,c`. Raises ValueError."""
    if hosts is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in hosts.split(",") if name.strip()))
    if len(names) < 2:
        raise ValueError(f"--hosts {hosts}: expected two or more hosts, such as a,b,c, with or without this one")
    return names


def split_ports(ports: str | None) -> tuple[int, ...]:
    """The ports of `29500,10002-10100`: single ports, and first, middle and last port of a range. Raises ValueError."""
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
    """The fields of the config's `cluster` section that `--cluster` sets. Raises ValueError."""
    if word == "local":
        return {"kind": "local"}
    if word == "ray":
        return {"kind": "ray"} if environ.get("RAY_ADDRESS") else {"kind": "ray", "address": "auto"}
    host, colon, port = word.rpartition(":")
    if word != "auto" and not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"--cluster {word}: expected {CLUSTERS}")
    return {"kind": "ray", "address": word}


def _cluster_override(word: str, section: Mapping[str, Any], file: Path, overrides: Sequence[str]) -> str:
    """Converts `--cluster` to an override of the config's `cluster` section.

    `kind` is replaced, for `local` Ray's fields are removed, and `ray` keeps the address in the file.
    Raises ConfigError.
    """
    given = apply_overrides(read_yaml(file), overrides).get("cluster")
    ray_only = (
        RayClusterConfig.model_fields.keys() - LocalClusterConfig.model_fields.keys()
        if section["kind"] == "local"
        else ()
    )
    kept = {key: value for key, value in given.items() if key not in ray_only} if isinstance(given, dict) else {}
    address = {"address": kept["address"]} if word == "ray" and kept.get("address") else {}
    return f"cluster={json.dumps({**kept, **section, **address})}"
