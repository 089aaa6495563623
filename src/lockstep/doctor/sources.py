"""What was given, folders, globs, archives or standard input, becomes streams of bytes with a name.

Nothing is ever written: archives are read member by member, and how much comes out of one is bounded.
"""

import bz2
import gzip
import io
import lzma
import re
import stat
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

BLOCK = 4 << 20
MOST_FILES = 20_000
UNPACKED = 8 << 30
"""Bytes that all of one archive may become."""
RATIO = 1_000
"""Times that a member may grow beyond its first `FREE` bytes: text grows 20 to 200 times."""
FREE = 64 << 20
NESTED = 2
"""Archives in archives."""
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
        elif path.suffix in (".zip", ".tar", ".tgz", ".tbz2", ".txz") or ".tar." in path.name:
            _members(path, name, found)
            return
        found.sources.append(Source(name, path, size=about.st_size))
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        found.gaps.append(f"{name}: {error}")


def _members(path: Path, name: str, found: Gathered) -> None:
    """One source for each member that can hold lines."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            names = [(each.filename, each.file_size) for each in archive.infolist() if not each.is_dir()]
    else:
        with _plain(path) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
            names = [(each.name, each.size) for each in archive if each.isreg()]
    total = 0
    for member, size in names[:MOST_FILES]:
        total += size
        if total > UNPACKED:
            found.gaps.append(f"{name}: holds more than {UNPACKED >> 30} GiB; the rest was not read")
            return
        if not _SKIPPED.search(member):
            inside = str(PurePosixPath("/" + member).relative_to("/"))
            found.sources.append(Source(f"{name}/{inside}", path, (member,), size))


@contextmanager
def _plain(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where its first bytes say that it is packed."""
    with path.open("rb") as raw:
        yield _unpacked(raw)


def _unpacked(raw: IO[bytes]) -> Any:
    head = raw.read(10)
    raw.seek(0)
    if head[:3] == b"\x1f\x8b\x08":
        return gzip.GzipFile(fileobj=raw)
    if head[:3] == b"BZh" and head[4:] in (b"1AY&SY", b"\x17rE8P\x90"):
        return bz2.BZ2File(raw)
    if head[:6] == b"\xfd7zXZ\x00":
        return lzma.LZMAFile(raw)
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return _zstd(raw)
    return raw


def _zstd(raw: IO[bytes]) -> IO[bytes]:
    import pyarrow  # slow to import, and zstd files are rare

    stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return io.BufferedReader(_Raw(stream))


class _Raw(io.RawIOBase):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        data: bytes = self._stream.read(len(into))
        into[: len(data)] = data
        return len(data)


def blocks(source: Source, gaps: list[str]) -> Iterator[bytes]:
    """The bytes of a source; what is wrong with it goes to `gaps` and ends it."""
    try:
        if source.path is None:
            yield from _read(sys.stdin.buffer, source, gaps)
        elif source.inside and source.path.suffix == ".zip":
            with zipfile.ZipFile(source.path) as archive, archive.open(source.inside[0]) as member:
                yield from _read(member, source, gaps)
        elif source.inside:
            yield from _tar_member(source, gaps)
        else:
            with _plain(source.path) as plain:
                yield from _read(plain, source, gaps)
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError) as error:
        gaps.append(f"{source.name}: {error}")


def _tar_member(source: Source, gaps: list[str]) -> Iterator[bytes]:
    assert source.path is not None
    with _plain(source.path) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
        for each in archive:
            if each.name == source.inside[0] and each.isreg():
                member = archive.extractfile(each)
                if member is not None:
                    yield from _read(member, source, gaps)
                return


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
