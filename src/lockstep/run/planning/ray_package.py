"""Packs the config of a run, and the files that it names, for a Ray job."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.run_config import RunConfig
from lockstep.run.errors import RunRefused

CONFIG_FILE = "run.yaml"
MAX_PACKAGE_BYTES = 100 * 2**20
"""Limit for all files together. Ray accepts 512 MiB, but copies the package to every node."""
_FILE_FIELDS = ("path", "chat_template", "tools")
"""Config fields that may name files (or models on the hub)."""


@dataclass(slots=True)
class RayPackage:
    """A folder with the config and the files that it names."""

    folder: Path
    files: list[str] = field(default_factory=list)
    """Relative paths of the packed files. With a Python file, the other Python files of its folder are packed, as it
    may import them."""
    absolute_paths: list[str] = field(default_factory=list)
    """Absolute paths in the config, which are not packed: they must exist on the cluster's nodes."""


def build_ray_package(config: RunConfig, folder: Path) -> RayPackage:
    """Writes the resolved config to `folder/run.yaml`, and copies every file of the working directory that it names by
    a relative path.

    Raises:
        RunRefused: the run's folder would be deleted with the job, a file is outside of the working directory, or the
            files are too large to be sent.
    """
    if not Path(config.folder).is_absolute():
        raise RunRefused(
            f"folder {config.folder!r} is relative, and the working directory of a Ray job is deleted after it: set "
            "folder to an absolute path on a file system that outlives the job, such as a shared one"
        )
    package = RayPackage(folder)
    values = config.model_dump(mode="json")
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    for name in dict.fromkeys(_named_files(values)):
        _copy_file(Path(name), package)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MAX_PACKAGE_BYTES:
        largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        raise RunRefused(
            f"the files that the run names are {size / 2**20:.0f} MiB, more than the "
            f"{MAX_PACKAGE_BYTES / 2**20:.0f} MiB that can be sent; the largest is {largest.relative_to(folder)}: "
            "put it on a file system that the cluster's nodes share, and name it by its absolute path"
        )
    return package


def _named_files(values: Any, key: str = "") -> Iterator[str]:
    """Yields the files that fields of the config name: for `FILE.py:NAME`, only the file."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _named_files(value, str(name))
    elif isinstance(values, list):
        for value in values:
            yield from _named_files(value, key)
    elif isinstance(values, str) and values and key in _FILE_FIELDS:
        stem, _, name = values.rpartition(":")
        yield stem if stem.endswith(".py") and name.isidentifier() else values


def _copy_file(path: Path, package: RayPackage) -> None:
    path = path.expanduser()
    if not path.exists():
        return
    if path.is_absolute():
        package.absolute_paths.append(str(path))
        return
    working_dir = Path.cwd()
    if not path.resolve().is_relative_to(working_dir.resolve()):
        raise RunRefused(f"{path} is outside of the working directory {working_dir}: use its absolute path")
    sources = sorted(path.parent.glob("*.py")) if path.suffix == ".py" else [path]
    for source in sources:
        target = package.folder / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)
        package.files.append(str(source))
