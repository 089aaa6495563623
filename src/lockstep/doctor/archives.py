"""Archives and packed files as streams, read from the front to the end; nothing is ever written."""

import bz2
import gzip
import io
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

MEMORY = 256 << 20
"""Bytes of a zip file inside of another archive, which is held in memory: its directory stands at its end."""
ERRORS = (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError, ValueError,
          OverflowError, struct.error)  # fmt: skip
"""What a file that is not what it should be raises; zipfile lets through what negative sizes and odd names lead to."""
_NAMES = re.compile(r"\.(?:tar|tgz|tbz2?|txz|tzst)$|\.tar\.(?:gz|bz2|xz|zst|lzma)$")
ENTRIES = 200_000
"""Of one tar file, folders and links included."""


def kind(name: str) -> str:
    """`tar` or `zip` for the name of an archive, else empty."""
    low = name.rsplit("/", 1)[-1].lower()
    if low.endswith(".zip"):
        return "zip"
    return "tar" if _NAMES.search(low) else ""


def members(raw: Any, name: str) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """Name, size and stream of each regular member, in the order of the archive.

    Args:
        raw: The archive's own bytes; needs `peek`.
        name: Of the archive.

    A stream ends where the next member is asked for.

    Raises:
        ERRORS: It is none, or broken.
    """
    if kind(name) == "zip":
        with zipfile.ZipFile(raw if isinstance(raw, io.BufferedReader) and _is_file(raw) else _held(raw)) as archive:
            for each in archive.infolist():
                if not each.is_dir():
                    yield each.filename, each.file_size, partial(archive.open, each)
        return
    with tarfile.open(fileobj=unpacked(raw), mode="r|") as tar:
        for number, about in enumerate(tar):
            if number > ENTRIES:
                raise tarfile.TarError(f"has more than {ENTRIES} entries; the rest was not read")
            if about.isreg():
                yield about.name, about.size, partial(_member, tar, about)


def _is_file(raw: io.BufferedReader) -> bool:
    return isinstance(raw.raw, io.FileIO)


def _held(raw: IO[bytes]) -> IO[bytes]:
    data = raw.read(MEMORY + 1)
    if len(data) > MEMORY:
        raise zipfile.BadZipFile(f"a zip file of more than {MEMORY >> 20} MiB inside of an archive is not read")
    return io.BytesIO(data)


def _member(tar: tarfile.TarFile, about: tarfile.TarInfo) -> IO[bytes]:
    found = tar.extractfile(about)
    assert found is not None
    return found


def unpacked(raw: Any) -> Any:
    """The stream itself, or what it becomes where its first bytes say that it is packed."""
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
