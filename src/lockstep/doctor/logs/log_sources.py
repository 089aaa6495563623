"""Turns the given paths (files, folders, globs, archives, standard input) into named byte streams.

Nothing is written to disk: archives are read member by member, and the unpacked size is bounded.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import IO, Any

from lockstep.base import waits
from lockstep.base.wait_state import WaitTimeout
from lockstep.doctor.logs.issue_text import log_blocks
from lockstep.doctor.logs.record_streams import plain_blocks

MAX_ZIP_BYTES = 256 << 20
"""Limit for a zip file inside another archive. It is held in memory, because its directory is at its end."""
ARCHIVE_ERRORS = (
    OSError,
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    RuntimeError,
    ValueError,
    OverflowError,
    struct.error,
)
"""The errors of damaged archives. The last four come from `zipfile`, for negative sizes and malformed names."""
_TAR_NAMES = re.compile(r"\.(?:tar|tgz|tbz2?|txz|tzst)$|\.tar\.(?:gz|bz2|xz|zst|lzma)$")
MAX_ENTRIES = 200_000
"""Maximum number of entries of one tar file, including folders and links."""


def archive_kind(name: str) -> str:
    """Returns `tar` or `zip` if the name is that of an archive, else ""."""
    lower = name.rsplit("/", 1)[-1].lower()
    if lower.endswith(".zip"):
        return "zip"
    return "tar" if _TAR_NAMES.search(lower) else ""


def archive_members(raw: Any, name: str) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """Yields name, size and a function that opens the stream of each regular member, in archive order.

    A stream can be read until the next member is requested.

    Args:
        raw: The stream of the archive; it must have `peek`.
        name: The archive's name.

    Raises:
        ARCHIVE_ERRORS: The stream is not an archive, or is damaged.
    """
    if archive_kind(name) == "zip":
        with zipfile.ZipFile(
            raw if isinstance(raw, io.BufferedReader) and _is_file(raw) else _read_into_memory(raw)
        ) as archive:
            for each in archive.infolist():
                if not each.is_dir():
                    yield each.filename, each.file_size, partial(archive.open, each)
        return
    with tarfile.open(fileobj=decompressed(raw), mode="r|") as tar:
        for number, member in enumerate(tar):
            if number > MAX_ENTRIES:
                raise tarfile.TarError(f"has more than {MAX_ENTRIES} entries; the rest was not read")
            if member.isreg():
                yield member.name, member.size, partial(_open_member, tar, member)


def _is_file(raw: io.BufferedReader) -> bool:
    return isinstance(raw.raw, io.FileIO)


def _read_into_memory(raw: IO[bytes]) -> IO[bytes]:
    data = raw.read(MAX_ZIP_BYTES + 1)
    if len(data) > MAX_ZIP_BYTES:
        raise zipfile.BadZipFile(f"a zip file of more than {MAX_ZIP_BYTES >> 20} MiB inside an archive is not read")
    return io.BytesIO(data)


def _open_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = tar.extractfile(member)
    assert stream is not None
    return stream


def decompressed(raw: Any) -> Any:
    """Returns the decompressed stream if the first bytes show a compression format, else the stream itself."""
    head = raw.peek(10)[:10]
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
    return io.BufferedReader(_ZstdStream(stream))


class _ZstdStream(io.RawIOBase):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        data: bytes = self._stream.read(len(into))
        into[: len(data)] = data
        return len(data)


BLOCK_BYTES = 4 << 20
MAX_FILES = 20_000
MAX_UNPACKED_BYTES = 8 << 30
"""Maximum number of unpacked bytes of one archive."""
MAX_RATIO = 1_000
"""A packed file of more than `FREE_BYTES` may unpack to this many times its size; text unpacks to 20 to 200 times."""
FREE_BYTES = 64 << 20
PIPE_WAIT_S = 10.0
"""How long a pipe may stay silent before its first byte."""
MAX_NESTING = 2
"""Maximum depth of archives within archives."""
_SKIPPED = re.compile(
    r"\.(?:py|pyc|so|pt|pth|safetensors|bin|npz?|parquet|arrow|ckpt|png|jpe?g|pdf|whl|mp4|ipynb|svg|gif|o|a|db|sqlite"
    r"|tfevents[^/]*)$|(?:^|/)(?:\.git|__pycache__|node_modules|\.venv)/|events\.out\.tfevents|(?:^|/)bundle\.json$"
)
_PACKED = re.compile(r"\.(?:gz|xz|bz2|zst|lzma|tgz|tbz2|txz)$")


class NoSuchPath(ValueError):
    """A path or pattern matches nothing."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path}: no such file or folder, and nothing matches it as a pattern")


@dataclass(frozen=True, slots=True)
class LogSource:
    """A file, a member of an archive, or standard input.

    Attributes:
        name: The name relative to the given path, as evidence cites it.
        path: The file; None for standard input.
        inside: The names of the archive members that lead to it, outermost first.
    """

    name: str
    path: Path | None
    inside: tuple[str, ...] = ()
    size: int = 0


@dataclass
class CollectedSources:
    """The sources below the given paths."""

    sources: list[LogSource] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    """What could not be read, and why."""


def collect_sources(paths: list[str]) -> CollectedSources:
    """Lists all sources below the paths; "-" is standard input.

    Raises:
        NoSuchPath: A path does not exist and matches nothing as a pattern.
    """
    found = CollectedSources()
    for given in paths:
        if given == "-":
            found.sources.append(LogSource("stdin", None))
            continue
        path = Path(given)
        tops = [path] if path.exists() else _glob(path)
        if not tops:
            raise NoSuchPath(given)
        for top in tops:
            _collect_below(top, found, several=len(paths) + len(tops) > 2)
    return found


def _glob(pattern: Path) -> list[Path]:
    """Returns the paths that match a pattern."""
    parts = pattern.parts
    at = next((at for at, part in enumerate(parts) if set("*?[") & set(part)), None)
    if at is None:
        return []
    try:
        return sorted(Path(*parts[:at]).glob("/".join(parts[at:])))
    except (OSError, ValueError):
        return []


def _collect_below(top: Path, found: CollectedSources, *, several: bool) -> None:
    if not top.is_dir():
        _add_file(top, top.name if not several else str(top), found)
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
            if len(found.sources) >= MAX_FILES:
                found.gaps.append(f"more than {MAX_FILES} files; the rest was not read")
                return
            file = folder / name
            relative = file.relative_to(top).as_posix()
            if not _SKIPPED.search(relative):
                if file.is_fifo():
                    found.gaps.append(f"{prefix}{relative}: a pipe, which is read only if it is given by name")
                else:
                    _add_file(file, prefix + relative, found)


def _walk(top: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yields each folder below `top`, and `top` itself, with the names of its folders and files.

    Follows links, and skips unreadable folders.
    """
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


def _add_file(path: Path, name: str, found: CollectedSources) -> None:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            if not stat.S_ISFIFO(about.st_mode):
                found.gaps.append(f"{name}: not a regular file")
                return
        elif archive_kind(path.name):
            with path.open("rb") as raw:
                _add_members(raw, path.name, LogSource(name, path), found, [MAX_UNPACKED_BYTES])
            return
        found.sources.append(LogSource(name, path, size=about.st_size))
    except (*ARCHIVE_ERRORS, _LimitReached) as error:
        found.gaps.append(f"{name}: {error}")


class _LimitReached(Exception):
    """A limit was reached, so that the rest of an archive is not listed."""


def _add_members(raw: Any, file: str, archive: LogSource, found: CollectedSources, left: list[int]) -> None:
    """Adds a source for each member that can contain log lines, including members of nested archives.

    Args:
        raw, file: The stream and the name of the archive.
        archive: The archive, with the name that evidence cites.
        left: The number of bytes that may still be unpacked, as a list of one number, which is updated.
    """
    listed: set[str] = set()
    for member, size, opened in archive_members(raw, file):
        left[0] -= size
        if left[0] < 0:
            raise _LimitReached(f"holds more than {MAX_UNPACKED_BYTES >> 30} GiB; the rest was not read")
        if len(found.sources) >= MAX_FILES:
            raise _LimitReached(f"more than {MAX_FILES} files; the rest was not read")
        if member in listed:
            continue
        listed.add(member)
        name = f"{archive.name}/{_member_name(member)}"
        each = LogSource(name, archive.path, (*archive.inside, member), size)
        if not archive_kind(member):
            if not _SKIPPED.search(member):
                found.sources.append(each)
        elif len(each.inside) > MAX_NESTING:
            found.gaps.append(f"{name}: an archive nested in {MAX_NESTING} others was not read")
        else:
            try:
                with closing(opened()) as stream:
                    _add_members(stream, member, each, found, left)
            except ARCHIVE_ERRORS as error:
                found.gaps.append(f"{name}: {error}")


def _member_name(member: str) -> str:
    """Returns the name of a member as evidence cites it; names in archives may contain any bytes."""
    text = member.encode("utf-8", "replace").decode()
    return str(PurePosixPath("/" + text.lstrip("/")).relative_to("/"))


def open_streams(sources: Sequence[LogSource], gaps: list[str]) -> Iterator[tuple[LogSource, Iterator[bytes]]]:
    """Yields each source with its blocks of bytes, which must be read before the next source is requested.

    An archive is read only once. An error ends its source and is added to `gaps`.
    """
    for (path, packed), group in groupby(sources, key=lambda each: (each.path, bool(each.inside))):
        if path is None or not packed:
            for each in group:
                yield each, log_blocks(each.name, plain_blocks(_note_errors(each, gaps, _read_whole(each, gaps))))
            continue
        try:
            with path.open("rb") as raw:
                yield from _read_archive(raw, path.name, list(group), 0, gaps)
        except ARCHIVE_ERRORS as error:
            gaps.append(f"{path.name}: {error}")


def read_blocks(source: LogSource, gaps: list[str]) -> Iterator[bytes]:
    """Yields the blocks of one source."""
    for _, found in open_streams([source], gaps):
        yield from found


def _read_whole(source: LogSource, gaps: list[str]) -> Iterator[bytes]:
    if source.path is None:
        yield from _read_bounded(sys.stdin.buffer, source, gaps)
        return
    with _open_file(source.path) as raw:
        yield from _read_bounded(decompressed(raw), source, gaps)


def _open_file(path: Path) -> io.BufferedReader:
    """Opens a file, or a pipe that a process writes to. Raises TimeoutError if nothing comes through the pipe."""
    if not stat.S_ISFIFO(path.stat().st_mode):
        return path.open("rb")
    raw = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    try:
        waits.readable(raw, waits_for="another process", why=f"write to {path}", timeout_s=PIPE_WAIT_S)
    except WaitTimeout:
        raw.close()
        raise TimeoutError(f"a pipe to which no process has written for {PIPE_WAIT_S:g} s") from None
    os.set_blocking(raw.fileno(), True)
    return raw


def _read_archive(
    raw: Any, file: str, sources: Sequence[LogSource], depth: int, gaps: list[str]
) -> Iterator[tuple[LogSource, Iterator[bytes]]]:
    """Yields the sources inside an archive, in the archive's order.

    Args:
        depth: The number of archives around this one.
    """
    groups = ((name, list(same)) for name, same in groupby(sources, key=lambda each: each.inside[depth]))
    next_group = next(groups, None)
    for member, _, opened in archive_members(raw, file):
        if next_group is None:
            return
        if member != next_group[0]:
            continue
        same, next_group = next_group[1], next(groups, None)
        try:
            with closing(opened()) as stream:
                if len(same[0].inside) == depth + 1:
                    blocks = _read_bounded(decompressed(stream), same[0], gaps)
                    yield same[0], log_blocks(same[0].name, plain_blocks(_note_errors(same[0], gaps, blocks)))
                else:
                    yield from _read_archive(stream, member, same, depth + 1, gaps)
        except ARCHIVE_ERRORS as error:
            gaps.append(f"{same[0].name}: {error}")


def _note_errors(source: LogSource, gaps: list[str], found: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from found
    except ARCHIVE_ERRORS as error:
        gaps.append(f"{source.name}: {error}")


def _read_bounded(stream: IO[bytes], source: LogSource, gaps: list[str]) -> Iterator[bytes]:
    packed = source.path is not None and bool(source.inside or _PACKED.search(source.name))
    most = (
        max(FREE_BYTES, min(MAX_UNPACKED_BYTES, MAX_RATIO * (source.path.stat().st_size if source.path else 0)))
        if packed
        else None
    )
    total = 0
    while block := stream.read(BLOCK_BYTES):
        total += len(block)
        if most is not None and total > most:
            gaps.append(f"{source.name}: unpacks to more than {most >> 20} MiB; the rest was not read")
            return
        yield block
