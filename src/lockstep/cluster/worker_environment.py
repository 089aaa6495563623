"""The environment variables that workers on other nodes get, and how it differs from the shell that starts the run.

Only declared variables are forwarded (`cluster.env`, `cluster.forward_env`), and never those that are valid on one
host only.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lockstep.base.folders import write_atomically
from lockstep.base.secrets import HIDDEN, is_secret_name, redact_text, secret_kind, secret_values
from lockstep.base.text import summarize_list
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.cluster import RESERVED_VARIABLES, matching_reason
from lockstep.config.cluster import RayClusterConfig as Config

_INTERNAL_REASON = RESERVED_VARIABLES["LOCKSTEP_TOKEN"]
_INTERFACE_REASON = (
    "interfaces have other names on other nodes, where it is found by the route: cluster.interface says which"
)
_ADDRESS_REASON = "it is an address or port of the host that starts the run"
_RANK_REASON = "each worker has its own"
_HOST_REASON = "it is of one host or session"

NEVER_FORWARDED = {
    **RESERVED_VARIABLES, "LOCKSTEP_BEACONS": _HOST_REASON, "CUDA_MPS_*": _HOST_REASON,
    "GLOO_SOCKET_IFNAME": _INTERFACE_REASON, "TP_SOCKET_IFNAME": _INTERFACE_REASON,
    "VLLM_HOST_IP": _ADDRESS_REASON, "VLLM_PORT": _ADDRESS_REASON, "VLLM_DP_MASTER_*": _ADDRESS_REASON, "HOST_IP": _ADDRESS_REASON,
    "MASTER_ADDR": _ADDRESS_REASON, "MASTER_PORT": _ADDRESS_REASON,
    "RANK": _RANK_REASON, "LOCAL_RANK": _RANK_REASON, "GROUP_RANK": _RANK_REASON, "WORLD_SIZE": _RANK_REASON, "LOCAL_WORLD_SIZE": _RANK_REASON,
    "TORCHELASTIC_*": _RANK_REASON,
    "HOME": _HOST_REASON, "HOSTNAME": _HOST_REASON, "PATH": _HOST_REASON, "PWD": _HOST_REASON, "OLDPWD": _HOST_REASON, "USER": _HOST_REASON, "LOGNAME": _HOST_REASON,
    "SHELL": _HOST_REASON, "SHLVL": _HOST_REASON, "TERM": _HOST_REASON, "TMPDIR": _HOST_REASON, "DISPLAY": _HOST_REASON, "_": _HOST_REASON,
    "SSH_*": _HOST_REASON, "XDG_*": _HOST_REASON, "DBUS_*": _HOST_REASON, "RAY_*": _HOST_REASON, "SLURM_*": _HOST_REASON, "KUBERNETES_*": _HOST_REASON,
}  # fmt: skip
"""By name, or its beginning and `*`: why it is not passed on. `cluster.env` may set it all the same, but for those of
`RESERVED_VARIABLES`."""

_LOOPBACK_ONLY = re.compile(r"=?lo\d*")
_RELEVANT = re.compile(
    r"(NCCL|TORCH|PYTORCH|GLOO|CUDA|UCX|FI|UCC|VLLM|HF|TRANSFORMERS|OMP|MKL|KMP|TOKENIZERS|TRITON|LD|PYTHON|LOCKSTEP"
    r"|WANDB|MLFLOW|RCCL|HIP|TF)_?.*|(http|https|no|all)_proxy|(HTTP|HTTPS|NO|ALL)_PROXY|MALLOC_.*|GOMP_.*"
)
"""Variables that something in a worker reads."""


@dataclass(frozen=True, slots=True)
class ForwardedEnvironment:
    """What of a shell goes to every worker on every node."""

    values: dict[str, str]
    kept_back: dict[str, str]
    """Variables that were named or matched and are not passed on: why."""


@dataclass(frozen=True, slots=True)
class EnvironmentDifference:
    """A variable that a worker on a node has otherwise than the shell."""

    name: str
    shell: str | None
    """Redacted; None where it is not set there."""
    node: str | None


def forward_environment(
    shell: Mapping[str, str], patterns: Sequence[str], declared: Mapping[str, str], interface: str | None = None
) -> ForwardedEnvironment:
    """What reaches workers of the shell and of the config.

    Args:
        patterns: `cluster.forward_env`: names, or with `*`.
        declared: `cluster.env`, which wins.
        interface: `cluster.interface`: beginning of a name, which is how NCCL takes it as well.
    """
    values: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name in sorted(shell):
        if name in declared or not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        reason = not_forwarded_reason(name, shell[name])
        if reason is None:
            values[name] = shell[name]
        elif reason != _HOST_REASON or name in patterns:  # nobody means those by `*`
            kept[name] = reason
    values |= declared
    if interface is not None:
        values.setdefault("NCCL_SOCKET_IFNAME", interface)
    return ForwardedEnvironment(values, kept)


def not_forwarded_reason(name: str, value: str) -> str | None:
    """Why a variable of the shell is not passed on; None where it may be."""
    if name == "NCCL_SOCKET_IFNAME" and _LOOPBACK_ONLY.fullmatch(value):
        return f"{value} is the loopback interface, by which no other node is reached"
    return _never_forwarded_reason(name)


def _never_forwarded_reason(name: str) -> str | None:
    return matching_reason(name, NEVER_FORWARDED)


def worker_environment(
    node: Mapping[str, str], given: ForwardedEnvironment, of_role: Mapping[str, str], of_node: Mapping[str, str]
) -> dict[str, str]:
    """What a worker finds: what its node has, then the address and the interface by which others reach the node, then
    what was passed on, then what its role needs, then what only its node knows (its GPUs)."""
    own = {name: value for name, value in node.items() if _never_forwarded_reason(name) != _INTERNAL_REASON}
    reached = {
        name: value
        for name, value in of_node.items()
        if _never_forwarded_reason(name) in (_INTERFACE_REASON, _ADDRESS_REASON)
    }
    rest = {name: value for name, value in of_node.items() if name not in reached}
    return {**own, **reached, **given.values, **of_role, **rest}


def environment_differences(shell: Mapping[str, str], worker: Mapping[str, str]) -> list[EnvironmentDifference]:
    """What a worker has otherwise than the shell, and what could matter to it; values redacted.

    Args:
        worker: as of `worker_environment`.
    """
    known = secret_values({**shell, **worker})
    found = []
    for name in sorted({*shell, *worker}):
        if (
            shell.get(name) != worker.get(name)
            and _RELEVANT.fullmatch(name)
            and _never_forwarded_reason(name) != _INTERNAL_REASON
        ):
            found.append(
                EnvironmentDifference(name, _redacted_value(name, shell, known), _redacted_value(name, worker, known))
            )
    return found


def _redacted_value(name: str, values: Mapping[str, str], known: Iterable[str]) -> str | None:
    value = values.get(name)
    if value is None:
        return None
    return HIDDEN if value and is_secret_name(name) else redact_text(value, tuple(known))


def difference_messages(
    by_node: Mapping[str, Sequence[EnvironmentDifference]], declared: Iterable[str] = ()
) -> list[str]:
    """A sentence for each variable that differs, with the nodes where it does so alike; nothing of those that the
    config sets itself or that are a node's own business."""
    alike: dict[EnvironmentDifference, list[str]] = {}
    for node, found in by_node.items():
        for difference in found:
            if difference.name not in declared and _never_forwarded_reason(difference.name) is None:
                alike.setdefault(difference, []).append(node)
    return [_difference_message(difference, nodes) for difference, nodes in alike.items()]


def _difference_message(difference: EnvironmentDifference, nodes: Sequence[str]) -> str:
    name, shell, node = difference.name, difference.shell, difference.node
    where = summarize_list(nodes, 3)
    if node is None:
        return (
            f"{name}={shell} of this shell does not reach workers on {where}: name it in cluster.forward_env, or set "
            f"cluster.env.{name}"
        )
    if shell is None:
        return f"workers on {where} have {name}={node}, which this shell has not"
    return f"workers on {where} have {name}={node}, and this shell has {shell}: set cluster.env.{name} to be sure"


def environment_report(
    given: ForwardedEnvironment, by_node: Mapping[str, Sequence[EnvironmentDifference]]
) -> dict[str, Any]:
    """For the run's folder: what was passed on, what was not and why, and what differs; secrets hidden."""
    known = secret_values(given.values)
    return {
        "forwarded": {name: _redacted_value(name, given.values, known) for name in sorted(given.values)},
        "kept_back": dict(sorted(given.kept_back.items())),
        "differs": {
            node: {each.name: {"shell": each.shell, "worker": each.node} for each in found}
            for node, found in by_node.items()
        },
    }


def without_secrets(given: ForwardedEnvironment) -> ForwardedEnvironment:
    """Without what holds secrets: for places that others can read, such as a Ray job's runtime environment."""
    why = "it holds a secret, and a job's runtime environment is shown to everybody who sees the dashboard"
    secret = {name for name, value in given.values.items() if is_secret_name(name) or secret_kind(value) is not None}
    values = {name: value for name, value in given.values.items() if name not in secret}
    return ForwardedEnvironment(values, given.kept_back | dict.fromkeys(sorted(secret), why))


log = logging.getLogger(__name__)


def report_environment(config: Config, given: ForwardedEnvironment, nodes: Sequence[ClusterNode], file: Path) -> None:
    """Warnings for people, and all of it for the run's folder."""
    shell = {name: value for name, value in os.environ.items() if "ray.util" not in value}  # Ray's own doing here
    asker = WorkerSpec("any", "", 0, "")
    by_node = {node.info.name: environment_differences(shell, node.environment_of(asker)) for node in nodes}
    for name, why in given.kept_back.items():
        log.warning("%s of this shell does not reach workers: %s", name, why)
    for line in difference_messages(by_node, config.env):
        log.warning("%s", line)
    write_atomically(file, json.dumps(environment_report(given, by_node), indent=2).encode())
