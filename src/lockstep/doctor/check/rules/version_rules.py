"""Judges installed versions: by the table of supported versions, and by comparison between hosts."""

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import yaml
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, ConfigDict, field_validator

from lockstep.base.text import count_noun, summarize_list
from lockstep.doctor.check.facts.host_facts import Gpu, HostVersions
from lockstep.doctor.check.facts.installed_versions import parse_version
from lockstep.doctor.output.findings import Finding


class _SupportRow(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    """URL."""
    checked: datetime.date
    """Date when the source was read."""

    @field_validator("source")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not value.startswith("https://"):
            raise ValueError(f"source {value!r} is not a URL")
        return value


class MinimumVersion(_SupportRow):
    """The oldest supported version of a package."""

    name: str
    least: str
    why: str


class DriverRequirement(_SupportRow):
    """The oldest driver that runs programs of a major CUDA release."""

    cuda: str
    least: str


class BadCombination(_SupportRow):
    """A combination of versions that is known to cause problems."""

    id: str
    when: dict[str, str]
    """Version specifiers (PEP 440) by package."""
    severity: Literal["error", "warning", "note"]
    seen: str
    """Text with {name} for the installed version of a package."""
    why: str
    fix: str

    @field_validator("when")
    @classmethod
    def _specifiers(cls, value: dict[str, str]) -> dict[str, str]:
        for text in value.values():
            SpecifierSet(text)
        return value

    def holds(self, installed: dict[str, str | None]) -> bool:
        """Whether the installed versions match."""
        return all(_version_within(installed.get(name), SpecifierSet(text)) for name, text in self.when.items())


class SupportTable(BaseModel):
    """The table of supported versions and bad combinations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    minimums: tuple[MinimumVersion, ...]
    drivers: tuple[DriverRequirement, ...]
    bad: tuple[BadCombination, ...]


@cache
def support_table() -> SupportTable:
    """The table in support.yaml."""
    text = resources.files(__package__).joinpath("support.yaml").read_text(encoding="utf-8")
    return SupportTable.model_validate(yaml.safe_load(text))


def _version_within(version: str | None, specifiers: SpecifierSet) -> bool:
    known = parse_version(version)
    return known is not None and specifiers.contains(known.base_version, prereleases=True)


COMPAT_SOURCE = "https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html"


def judge_versions(
    host: str,
    versions: HostVersions,
    gpus: Sequence[Gpu] | None,
    needed: Collection[str],
    table: SupportTable | None = None,
) -> Iterator[Finding]:
    """Judges missing, old and bad versions.

    Args:
        gpus: GPUs of the host; None if they are not known.
        needed: packages that the run needs to start.
    """
    table = table or support_table()
    packages = dict(versions.packages)
    yield Finding("versions", "ok", host, _versions_text(packages))
    for least in table.minimums:
        installed = parse_version(packages.get(least.name))
        if packages.get(least.name) is None and least.name in needed:
            extra = least.name if least.name in ("ray", "vllm", "deepspeed") else "train"
            seen = f"{least.name} is not installed, but the run needs it"
            yield Finding(f"missing-{least.name}", "error", host, seen, "", f"pip install 'lockstep-rl[{extra}]'")
        old = parse_version(least.least)
        if installed is not None and old is not None and installed < old:
            seen = f"{least.name} {packages[least.name]} is older than {least.least}, {least.why}"
            fix = f"pip install '{least.name}>={least.least}'"
            severity: Literal["error", "warning"] = "error" if least.name in needed else "warning"
            yield Finding(f"old-{least.name}", severity, host, seen, "", fix, least.source)
    yield from _judge_driver(host, versions, gpus, table)
    for bad in table.bad:
        if bad.holds(packages):
            seen = bad.seen.format_map({name: value or "none" for name, value in packages.items()})
            yield Finding(bad.id, bad.severity, host, seen, bad.why, bad.fix, bad.source)
    for unmet in versions.unmet:
        why = "it was built and tested with the versions it requires; compiled parts fail at import or later"
        yield Finding("unmet-requirement", "warning", host, unmet, why, "pip check; install versions that match")
    for twice in versions.twice:
        why = "they contain the same library, and the order of imports decides which one is loaded"
        yield Finding(
            "installed-twice", "warning", host, f"{twice} are installed together", why, "uninstall all but one"
        )


def _versions_text(packages: Mapping[str, str | None]) -> str:
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
    return ", ".join(there) + (f"; not installed: {', '.join(without)}" if without else "")


def _judge_driver(
    host: str, versions: HostVersions, gpus: Sequence[Gpu] | None, table: SupportTable
) -> Iterator[Finding]:
    packages = versions.packages
    cuda, driver = packages.get("cuda"), parse_version(packages.get("driver"))
    if gpus and cuda is None and packages.get("torch") is not None:
        seen = f"this host has {count_noun(len(gpus), 'GPU')}, but torch {packages['torch']} is built without CUDA"
        why = "the run would use CPUs"
        yield Finding(
            "torch-without-cuda", "error", host, seen, why, "install torch from https://pytorch.org/get-started"
        )
    row = next((row for row in table.drivers if cuda is not None and cuda.split(".")[0] == row.cuda), None)
    least = parse_version(row.least) if row is not None else None
    if row is not None and driver is not None and least is not None and driver < least:
        seen = f"driver {packages['driver']} is too old for CUDA {cuda}, for which torch is built"
        fix = f"install driver {row.least} or newer, or a torch built for an older CUDA"
        if not versions.compat:
            yield Finding("driver-old", "error", host, seen, "CUDA cannot start", fix, row.source)
            return
        seen += f"; the driver library of a newer release is in {versions.compat}"
        why = "CUDA starts with it on data centre GPUs with a supported driver, if the loader finds it first"
        if not versions.compat_asked:
            fix = f"export LD_LIBRARY_PATH={versions.compat} (unless the image's entry point does so); or {fix}"
        yield Finding("driver-old", "warning", host, seen, why, fix, COMPAT_SOURCE)


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """How similar the versions of a package must be on all hosts."""

    parts: int
    """How many leading numbers of the version must be equal; 0 means the whole version."""
    otherwise: Literal["error", "warning", "note"]
    why: str
    where_installed: bool = False
    """Whether hosts without the package are ignored."""


VERSION_POLICIES: Mapping[str, VersionPolicy] = {
    "python": VersionPolicy(2, "error", "Ray, and packages with compiled parts, need the same minor version"),
    "lockstep-rl": VersionPolicy(0, "error", "all processes of a run must use the same protocol"),
    "torch": VersionPolicy(3, "error", "ranks of one communicator need the same collectives"),
    "cuda": VersionPolicy(1, "error", "it determines kernels and NCCL"),
    "nccl": VersionPolicy(0, "error", "different versions of NCCL cannot form a communicator", True),
    "driver": VersionPolicy(1, "warning", "features that peers negotiate (NVLS, cuMem) depend on it", True),
    "transformers": VersionPolicy(2, "warning", "model code and weight names may differ", True),
    "vllm": VersionPolicy(2, "error", "all engines of a run must load weights in the same way", True),
    "ray": VersionPolicy(0, "error", "Ray nodes refuse other versions", True),
    "deepspeed": VersionPolicy(3, "error", "ranks of one engine need the same collectives", True),
    "kernel": VersionPolicy(2, "note", "a kernel fault then affects only some hosts", True),
}


def compare_versions(by_host: Mapping[str, HostVersions]) -> Iterator[Finding]:
    """Reports versions that differ too much between hosts, one finding per package."""
    for name, policy in VERSION_POLICIES.items():
        values = {host: versions.packages.get(name) for host, versions in by_host.items()}
        if policy.where_installed:
            values = {host: value for host, value in values.items() if value is not None}
        if len({_leading_parts(value, policy.parts) for value in values.values()}) < 2:
            continue
        hosts: dict[str, list[str]] = {}
        for host, value in values.items():
            hosts.setdefault(value or "none", []).append(host)
        most = max(hosts, key=lambda value: len(hosts[value]))
        seen = ", ".join(f"{value} on {summarize_list(which, 4)}" for value, which in hosts.items())
        deviating = ",".join(host for value, which in hosts.items() if value != most for host in which)
        fix = f"install {most} on all" if most != "none" else ""
        yield Finding(f"differs-{name}", policy.otherwise, deviating, f"{name} differs: {seen}", policy.why, fix)


def _leading_parts(version: str | None, parts: int) -> object:
    known = parse_version(version)
    return version if known is None or not parts else known.release[:parts]
