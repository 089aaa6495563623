"""Which variables reach workers on other nodes, and what differs between them and the shell that starts the run.

Nothing is passed on that was not declared (`cluster.env`, `cluster.forward_env`), and what is true of one host only is
not passed on even then.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lockstep.config.cluster import NOT_DECLARED, reason_in
from lockstep.watch.naming import some
from lockstep.watch.secrets import HIDDEN, is_secret_name, kind_of, redact_text, secret_values

_INTERNAL = NOT_DECLARED["LOCKSTEP_TOKEN"]
_INTERFACE = "interfaces have other names on other nodes, where it is found by the route: cluster.interface says which"
_ADDRESS = "it is an address or port of the host that starts the run"
_RANK = "each worker has its own"
_HOST = "it is of one host or session"

OF_ONE_HOST = {
    **NOT_DECLARED, "LOCKSTEP_BEACONS": _HOST, "CUDA_MPS_*": _HOST,
    "GLOO_SOCKET_IFNAME": _INTERFACE, "TP_SOCKET_IFNAME": _INTERFACE,
    "VLLM_HOST_IP": _ADDRESS, "VLLM_PORT": _ADDRESS, "VLLM_DP_MASTER_*": _ADDRESS, "HOST_IP": _ADDRESS,
    "MASTER_ADDR": _ADDRESS, "MASTER_PORT": _ADDRESS,
    "RANK": _RANK, "LOCAL_RANK": _RANK, "GROUP_RANK": _RANK, "WORLD_SIZE": _RANK, "LOCAL_WORLD_SIZE": _RANK,
    "TORCHELASTIC_*": _RANK,
    "HOME": _HOST, "HOSTNAME": _HOST, "PATH": _HOST, "PWD": _HOST, "OLDPWD": _HOST, "USER": _HOST, "LOGNAME": _HOST,
    "SHELL": _HOST, "SHLVL": _HOST, "TERM": _HOST, "TMPDIR": _HOST, "DISPLAY": _HOST, "_": _HOST,
    "SSH_*": _HOST, "XDG_*": _HOST, "DBUS_*": _HOST, "RAY_*": _HOST, "SLURM_*": _HOST, "KUBERNETES_*": _HOST,
}  # fmt: skip
"""By name, or its beginning and `*`: why it is not passed on. `cluster.env` may set it all the same, but for those of
`NOT_DECLARED`."""

_LOOPBACK_ONLY = re.compile(r"=?lo\d*")
_MATTERS = re.compile(
    r"(NCCL|TORCH|PYTORCH|GLOO|CUDA|UCX|FI|UCC|VLLM|HF|TRANSFORMERS|OMP|MKL|KMP|TOKENIZERS|TRITON|LD|PYTHON|LOCKSTEP"
    r"|WANDB|MLFLOW|RCCL|HIP|TF)_?.*|(http|https|no|all)_proxy|(HTTP|HTTPS|NO|ALL)_PROXY|MALLOC_.*|GOMP_.*"
)
"""Variables that something in a worker reads."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What of a shell goes to every worker on every node."""

    values: dict[str, str]
    kept_back: dict[str, str]
    """Variables that were named or matched and are not passed on: why."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A variable that a worker on a node has otherwise than the shell."""

    name: str
    shell: str | None
    """Redacted; None where it is not set there."""
    node: str | None


def forwarded(
    shell: Mapping[str, str], patterns: Sequence[str], declared: Mapping[str, str], interface: str | None = None
) -> Forwarded:
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
        reason = why_not(name, shell[name])
        if reason is None:
            values[name] = shell[name]
        elif reason != _HOST or name in patterns:  # nobody means those by `*`
            kept[name] = reason
    values |= declared
    if interface is not None:
        values.setdefault("NCCL_SOCKET_IFNAME", interface)
    return Forwarded(values, kept)


def why_not(name: str, value: str) -> str | None:
    """Why a variable of the shell is not passed on; None where it may be."""
    if name == "NCCL_SOCKET_IFNAME" and _LOOPBACK_ONLY.fullmatch(value):
        return f"{value} is the loopback interface, by which no other node is reached"
    return _reason(name)


def _reason(name: str) -> str | None:
    return reason_in(name, OF_ONE_HOST)


def worker_environment(
    node: Mapping[str, str], given: Forwarded, of_role: Mapping[str, str], of_node: Mapping[str, str]
) -> dict[str, str]:
    """What a worker finds: what its node has, then the address and the interface by which others reach the node, then
    what was passed on, then what its role needs, then what only its node knows (its GPUs)."""
    own = {name: value for name, value in node.items() if _reason(name) != _INTERNAL}
    reached = {name: value for name, value in of_node.items() if _reason(name) in (_INTERFACE, _ADDRESS)}
    rest = {name: value for name, value in of_node.items() if name not in reached}
    return {**own, **reached, **given.values, **of_role, **rest}


def differences(shell: Mapping[str, str], worker: Mapping[str, str]) -> list[Difference]:
    """What a worker has otherwise than the shell, and what could matter to it; values redacted.

    Args:
        worker: as of `worker_environment`.
    """
    known = secret_values({**shell, **worker})
    found = []
    for name in sorted({*shell, *worker}):
        if shell.get(name) != worker.get(name) and _MATTERS.fullmatch(name) and _reason(name) != _INTERNAL:
            found.append(Difference(name, _shown(name, shell, known), _shown(name, worker, known)))
    return found


def _shown(name: str, values: Mapping[str, str], known: Iterable[str]) -> str | None:
    value = values.get(name)
    if value is None:
        return None
    return HIDDEN if value and is_secret_name(name) else redact_text(value, tuple(known))


def told(by_node: Mapping[str, Sequence[Difference]], declared: Iterable[str] = ()) -> list[str]:
    """A sentence for each variable that differs, with the nodes where it does so alike; nothing of those that the
    config sets itself or that are a node's own business."""
    alike: dict[Difference, list[str]] = {}
    for node, found in by_node.items():
        for difference in found:
            if difference.name not in declared and _reason(difference.name) is None:
                alike.setdefault(difference, []).append(node)
    return [_sentence(difference, nodes) for difference, nodes in alike.items()]


def _sentence(difference: Difference, nodes: Sequence[str]) -> str:
    name, shell, node = difference.name, difference.shell, difference.node
    where = some(nodes, 3)
    if node is None:
        return (
            f"{name}={shell} of this shell does not reach workers on {where}: name it in cluster.forward_env, or set "
            f"cluster.env.{name}"
        )
    if shell is None:
        return f"workers on {where} have {name}={node}, which this shell has not"
    return f"workers on {where} have {name}={node}, and this shell has {shell}: set cluster.env.{name} to be sure"


def report(given: Forwarded, by_node: Mapping[str, Sequence[Difference]]) -> dict[str, Any]:
    """For the run's folder: what was passed on, what was not and why, and what differs; secrets hidden."""
    known = secret_values(given.values)
    return {
        "forwarded": {name: _shown(name, given.values, known) for name in sorted(given.values)},
        "kept_back": dict(sorted(given.kept_back.items())),
        "differs": {
            node: {each.name: {"shell": each.shell, "worker": each.node} for each in found}
            for node, found in by_node.items()
        },
    }


def public(given: Forwarded) -> Forwarded:
    """Without what holds secrets: for places that others can read, such as a Ray job's runtime environment."""
    why = "it holds a secret, and a job's runtime environment is shown to everybody who sees the dashboard"
    secret = {name for name, value in given.values.items() if is_secret_name(name) or kind_of(value) is not None}
    values = {name: value for name, value in given.values.items() if name not in secret}
    return Forwarded(values, given.kept_back | dict.fromkeys(sorted(secret), why))
