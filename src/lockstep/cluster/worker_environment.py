"""The environment variables of workers on other nodes, and how they differ from the shell that starts the run.

Only variables that the config names are forwarded (`cluster.env`, `cluster.forward_env`), and none that are valid only
on one host.
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
from lockstep.config.cluster import RESERVED_VARIABLES, matching_reason

log = logging.getLogger(__name__)

_INTERNAL_REASON = RESERVED_VARIABLES["LOCKSTEP_TOKEN"]
_INTERFACE_REASON = "interface names differ between nodes; the route to the head determines it, or cluster.interface"
_ADDRESS_REASON = "it is an address or port of the host that starts the run"
_RANK_REASON = "each worker has its own value"
_HOST_REASON = "it is specific to one host or session"

NEVER_FORWARDED = {
    **RESERVED_VARIABLES,
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), _INTERFACE_REASON),
    **dict.fromkeys(
        ("VLLM_HOST_IP", "VLLM_PORT", "VLLM_DP_MASTER_*", "HOST_IP", "MASTER_ADDR", "MASTER_PORT"), _ADDRESS_REASON
    ),
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_*"), _RANK_REASON
    ),
    **dict.fromkeys(
        (
            "LOCKSTEP_BEACONS", "CUDA_MPS_*", "HOME", "HOSTNAME", "PATH", "PWD", "OLDPWD", "USER", "LOGNAME", "SHELL",
            "SHLVL", "TERM", "TMPDIR", "DISPLAY", "_", "SSH_*", "XDG_*", "DBUS_*", "RAY_*", "SLURM_*", "KUBERNETES_*",
        ),
        _HOST_REASON,
    ),
}  # fmt: skip
"""Why a variable is not forwarded, by name, or by prefix and `*`. `cluster.env` may set it nevertheless, unless it is
in `RESERVED_VARIABLES`."""

_LOOPBACK_ONLY = re.compile(r"=?lo\d*")
_RELEVANT = re.compile(
    r"(NCCL|TORCH|PYTORCH|GLOO|CUDA|UCX|FI|UCC|VLLM|HF|TRANSFORMERS|OMP|MKL|KMP|TOKENIZERS|TRITON|LD|PYTHON|LOCKSTEP"
    r"|WANDB|MLFLOW|RCCL|HIP|TF)_?.*|(http|https|no|all)_proxy|(HTTP|HTTPS|NO|ALL)_PROXY|MALLOC_.*|GOMP_.*"
)
"""Names of variables that a worker, or a library in it, reads."""


@dataclass(frozen=True, slots=True)
class ForwardedEnvironment:
    """The variables that all workers on all nodes get."""

    values: dict[str, str]
    kept_back: dict[str, str]
    """Variables that were named or matched but are not forwarded, with the reason."""


@dataclass(frozen=True, slots=True)
class EnvironmentDifference:
    """A variable whose value on a node differs from the shell's."""

    name: str
    shell: str | None
    """Redacted; None if it is not set in the shell."""
    node: str | None


def forward_environment(
    shell: Mapping[str, str], patterns: Sequence[str], declared: Mapping[str, str], interface: str | None = None
) -> ForwardedEnvironment:
    """Selects the variables of the shell and the config that workers get.

    Args:
        patterns: `cluster.forward_env`: names, or patterns with `*`.
        declared: `cluster.env`, which takes precedence.
        interface: `cluster.interface`: the prefix of a name, which NCCL accepts as well.
    """
    values: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name in sorted(shell):
        if name in declared or not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        reason = not_forwarded_reason(name, shell[name])
        if reason is None:
            values[name] = shell[name]
        elif reason != _HOST_REASON or name in patterns:  # `*` is not meant to match variables of the host
            kept[name] = reason
    values |= declared
    if interface is not None:
        values.setdefault("NCCL_SOCKET_IFNAME", interface)
    return ForwardedEnvironment(values, kept)


def not_forwarded_reason(name: str, value: str) -> str | None:
    """Why a variable of the shell is not forwarded; None if it is forwarded."""
    if name == "NCCL_SOCKET_IFNAME" and _LOOPBACK_ONLY.fullmatch(value):
        return f"{value} is the loopback interface, which reaches no other node"
    return _never_forwarded_reason(name)


def _never_forwarded_reason(name: str) -> str | None:
    return matching_reason(name, NEVER_FORWARDED)


def worker_environment(
    node: Mapping[str, str], given: ForwardedEnvironment, of_role: Mapping[str, str], of_node: Mapping[str, str]
) -> dict[str, str]:
    """A worker's environment: the node's own, then the address and interface at which other nodes reach it, then the
    forwarded variables, then those of the role, then those that only the node knows (its GPUs)."""
    own = {name: value for name, value in node.items() if _never_forwarded_reason(name) != _INTERNAL_REASON}
    reached = {
        name: value
        for name, value in of_node.items()
        if _never_forwarded_reason(name) in (_INTERFACE_REASON, _ADDRESS_REASON)
    }
    rest = {name: value for name, value in of_node.items() if name not in reached}
    return {**own, **reached, **given.values, **of_role, **rest}


def environment_differences(shell: Mapping[str, str], worker: Mapping[str, str]) -> list[EnvironmentDifference]:
    """The relevant variables whose value in a worker differs from the shell's; values redacted.

    Args:
        worker: as returned by `worker_environment`.
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
    """A sentence for each variable that differs, grouping nodes with the same value; without variables that the config
    sets or that are specific to a node."""
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
        return f"workers on {where} have {name}={node}, which is not set in this shell"
    return f"workers on {where} have {name}={node}, and this shell has {shell}: set cluster.env.{name} to be sure"


def environment_report(
    given: ForwardedEnvironment, by_node: Mapping[str, Sequence[EnvironmentDifference]]
) -> dict[str, Any]:
    """The report for the run's folder: forwarded variables, excluded ones with the reason, and differences. Secrets are
    hidden."""
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
    """Removes secrets, because others can read a Ray job's runtime environment."""
    why = "it holds a secret, and a job's runtime environment is shown in the dashboard"
    secret = {name for name, value in given.values.items() if is_secret_name(name) or secret_kind(value) is not None}
    values = {name: value for name, value in given.values.items() if name not in secret}
    return ForwardedEnvironment(values, given.kept_back | dict.fromkeys(sorted(secret), why))


def report_environment(
    declared: Mapping[str, str],
    given: ForwardedEnvironment,
    environments: Mapping[str, Mapping[str, str]],
    file: Path,
) -> None:
    """Warns about variables that workers do not get or that differ there, and writes a report to `file`.

    Args:
        declared: `cluster.env`.
        environments: of workers, by the name of their node.
    """
    shell = {name: value for name, value in os.environ.items() if "ray.util" not in value}  # set by Ray in this process
    by_node = {name: environment_differences(shell, environment) for name, environment in environments.items()}
    for name, why in given.kept_back.items():
        log.warning("%s of this shell is not forwarded to workers: %s", name, why)
    for line in difference_messages(by_node, declared):
        log.warning("%s", line)
    write_atomically(file, json.dumps(environment_report(given, by_node), indent=2).encode())
