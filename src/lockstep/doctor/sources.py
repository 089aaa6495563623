"""What was given, folders, globs, archives or standard input, becomes streams of bytes with a name.

Nothing is ever written: archives are read member by member, and how much comes out of one is bounded.
"""

import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import IO, Any

from lockstep.doctor.archives import ERRORS, kind, members, unpacked

BLOCK = 4 << 20
MOST_FILES = 20_000
UNPACKED = 8 << 30
"""Bytes that all of one archive may become."""
RATIO = 1_000
"""Times that a member may grow beyond its first `FREE` bytes: text grows 20 to 200 times."""
FREE = 64 << 20
NESTED = 2
"""Archives in an archive, one in the other."""
_SKIPPED = re.compile(
    r"\.(?:py|pyc|so|pt|pth|safetensors|bin|npz?|parquet|arrow|ckpt|png|jpe?g|pdf|whl|mp4|ipynb|svg|gif|o|a|db|sqlite"
    r"|tfevents[^/]*)$|(?:^|/)(?:\.git|__pycache__|node_modules|\.venv)/|events\.out\.tfevents"
)
_PACKED = re.compile(r"\.(?:gz|xz|bz2|zst|lzma|tgz|tbz2|txz)$")


class NoSuchPath(ValueError):
    """A path or pattern that matches nothing."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path}: there is no such file or folder, and nothing matches it as a pattern")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, a member of an archive, or standard input.

    Attributes:
        name: Relative to what was given, as evidence cites it.
        path: The file itself; None for standard input.
        inside: Member names from the outside in.
    """

    name: str
    path: Path | None
    inside: tuple[str, ...] = ()
    size: int = 0


@dataclass
class Gathered:
    sources: list[Source] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    """What could not be read, and why."""


def gather(paths: list[str]) -> Gathered:
    """All streams below the paths; "-" is standard input.

    Raises:
        NoSuchPath: One does not exist and matches nothing.
    """
    found = Gathered()
    for given in paths:
        if given == "-":
            found.sources.append(Source("stdin", None))
            continue
        path = Path(given)
        tops = [path] if path.exists() else _matching(path)
        if not tops:
            raise NoSuchPath(given)
        for top in tops:
            _below(top, found, several=len(paths) + len(tops) > 2)
    return found


def _matching(pattern: Path) -> list[Path]:
    """What a pattern matches, from its first part with a wildcard on."""
    parts = pattern.parts
    at = next((at for at, part in enumerate(parts) if set("*?[") & set(part)), None)
    if at is None:
        return []
    try:
        return sorted(Path(*parts[:at]).glob("/".join(parts[at:])))
    except (OSError, ValueError):
        return []


def _below(top: Path, found: Gathered, *, several: bool) -> None:
    if not top.is_dir():
        _file(top, top.name if not several else str(top), found)
        return
    seen: set[tuple[int, int]] = set()
    prefix = f"{top}/" if several else ""
    for folder, folders, names in _walk(top):
        about = folder.stat()
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        for name in sorted(names):
            if len(found.sources) >= MOST_FILES:
                found.gaps.append(f"more than {MOST_FILES} files; the rest was not read")
                return
            file = folder / name
            relative = file.relative_to(top).as_posix()
            if not _SKIPPED.search(relative):
                _file(file, prefix + relative, found)


def _walk(top: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Folders below, links followed, a folder that cannot be read passed over."""
    folders: list[str] = []
    names: list[str] = []
    try:
        for each in sorted(top.iterdir()):
            (folders if each.is_dir() else names).append(each.name)
    except OSError:
        return
    yield top, folders, names
    for name in folders:
        if len(top.parts) < 64:
            yield from _walk(top / name)


def _file(path: Path, name: str, found: Gathered) -> None:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            if not stat.S_ISFIFO(about.st_mode):
                found.gaps.append(f"{name}: no regular file")
                return
        elif kind(path.name):
            with path.open("rb") as raw:
                _members(raw, path.name, Source(name, path), found, [UNPACKED])
            return
        found.sources.append(Source(name, path, size=about.st_size))
    except (*ERRORS, _Full) as error:
        found.gaps.append(f"{name}: {error}")


class _Full(Exception):
    """More is not listed."""


def _members(raw: Any, file: str, about: Source, found: Gathered, left: list[int]) -> None:
    """One source for each member that can hold lines, and for those of archives in it.

    Args:
        raw, file: The bytes and the name of the archive.
        about: The archive, its name as evidence cites it.
        left: The bytes that members may still have, all together.
    """
    listed: set[str] = set()
    for member, size, opened in members(raw, file):
        left[0] -= size
        if left[0] < 0:
            raise _Full(f"holds more than {UNPACKED >> 30} GiB; the rest was not read")
        if len(found.sources) >= MOST_FILES:
            raise _Full(f"more than {MOST_FILES} files; the rest was not read")
        if member in listed:
            continue
        listed.add(member)
        name = f"{about.name}/{_shown(member)}"
        each = Source(name, about.path, (*about.inside, member), size)
        if not kind(member):
            if not _SKIPPED.search(member):
                found.sources.append(each)
        elif len(each.inside) > NESTED:
            found.gaps.append(f"{name}: an archive inside of {NESTED} others was not read")
        else:
            try:
                with closing(opened()) as stream:
                    _members(stream, member, each, found, left)
            except ERRORS as error:
                found.gaps.append(f"{name}: {error}")


def _shown(member: str) -> str:
    """A name as evidence cites it; archives hold any bytes."""
    said = member.encode("utf-8", "replace").decode()
    return str(PurePosixPath("/" + said.lstrip("/")).relative_to("/"))


def streams(sources: Sequence[Source], gaps: list[str]) -> Iterator[tuple[Source, Iterator[bytes]]]:
    """Each source with its bytes, which end where the next one is asked for; an archive is gone through once.

    What is wrong with a source goes to `gaps` and ends it.
    """
    for (path, packed), group in groupby(sources, key=lambda each: (each.path, bool(each.inside))):
        if path is None or not packed:
            for each in group:
                yield each, _told(each, gaps, _whole(each, gaps))
            continue
        try:
            with path.open("rb") as raw:
                yield from _packed(raw, path.name, list(group), 0, gaps)
        except ERRORS as error:
            gaps.append(f"{path.name}: {error}")


def blocks(source: Source, gaps: list[str]) -> Iterator[bytes]:
    """The bytes of one source."""
    for _, found in streams([source], gaps):
        yield from found


def _whole(source: Source, gaps: list[str]) -> Iterator[bytes]:
    if source.path is None:
        yield from _read(sys.stdin.buffer, source, gaps)
        return
    with source.path.open("rb") as raw:
        yield from _read(unpacked(raw), source, gaps)


def _packed(
    raw: Any, file: str, sources: Sequence[Source], depth: int, gaps: list[str]
) -> Iterator[tuple[Source, Iterator[bytes]]]:
    """The sources that an archive holds, in its order, `depth` archives deep."""
    groups = ((name, list(same)) for name, same in groupby(sources, key=lambda each: each.inside[depth]))
    wanted = next(groups, None)
    for member, _, opened in members(raw, file):
        if wanted is None:
            return
        if member != wanted[0]:
            continue
        same, wanted = wanted[1], next(groups, None)
        try:
            with closing(opened()) as stream:
                if len(same[0].inside) == depth + 1:
                    yield same[0], _told(same[0], gaps, _read(unpacked(stream), same[0], gaps))
                else:
                    yield from _packed(stream, member, same, depth + 1, gaps)
        except ERRORS as error:
            gaps.append(f"{same[0].name}: {error}")


def _told(source: Source, gaps: list[str], found: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from found
    except ERRORS as error:
        gaps.append(f"{source.name}: {error}")


def _read(stream: IO[bytes], source: Source, gaps: list[str]) -> Iterator[bytes]:
    packed = source.path is not None and bool(source.inside or _PACKED.search(source.name))
    most = max(FREE, min(UNPACKED, RATIO * (source.path.stat().st_size if source.path else 0))) if packed else None
    total = 0
    while block := stream.read(BLOCK):
        total += len(block)
        if most is not None and total > most:
            gaps.append(f"{source.name}: unpacks to more than {most >> 20} MiB; the rest was not read")
            return
        yield block
