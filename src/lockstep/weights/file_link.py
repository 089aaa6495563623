"""A file in a folder that both nodes see, for where there is no other way: written whole, summed up, renamed."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from lockstep.watch import waits
from lockstep.watch.waits import WaitTimeout
from lockstep.weights.api import Link
from lockstep.weights.errors import FolderFailed, LinkFailed
from lockstep.weights.links import Moved
from lockstep.weights.parcels import Parcel, size

_LENGTH = 8
"""Bytes of the header's length, in front of it."""


class FileOutlet:
    """Writes a file named by generation, link and receiver; visible once it is whole and on the disk."""

    def __init__(self, folder: Path, generation: int, link: Link) -> None:
        self._path = _path(folder, generation, link)

    def send(self, header: bytes, cut: Sequence[Parcel], memory: memoryview, moved: Moved) -> None:
        scratch = self._path.with_name(self._path.name + ".new")
        total = hashlib.sha256()
        with _writing(self._path):
            scratch.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                for piece in (len(header).to_bytes(_LENGTH, "little"), header):
                    total.update(piece)
                    file.write(piece)
                for parcel in cut:
                    for run in parcel:
                        total.update(memory[run.start : run.end])
                        file.write(memory[run.start : run.end])
                    moved(size(parcel))
                file.write(total.digest())
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self._path)

    def close(self) -> None:
        """What was not finished is of no use."""
        with contextlib.suppress(OSError):
            self._path.with_name(self._path.name + ".new").unlink(missing_ok=True)


class FileInlet:
    """Reads it, and deletes it; what came to this receiver before and was not read as well.

    Args:
        refused: why the sender does not go on; empty where it does.

    Raises:
        LinkFailed: it does not come, and does not grow for `limit_s`.
    """

    def __init__(self, folder: Path, generation: int, link: Link, limit_s: float, refused: Callable[[], str]) -> None:
        self._path, self._link = _path(folder, generation, link), link
        tidy(folder, generation, link.receiver, before=link.number)
        scratch = self._path.with_name(self._path.name + ".new")

        def there() -> bool | None:
            if self._path.exists():
                return True
            if why := refused():
                raise LinkFailed(link.name, link.sender, why)
            return None

        try:
            waits.poll(
                there, kind="file", whom=f"courier of {link.sender}", why=link.name, stall_s=limit_s,
                progress=lambda: _grown(scratch),
            )  # fmt: skip
        except WaitTimeout as error:
            raise LinkFailed(link.name, link.sender, f"{self._path} did not appear: {error}") from error
        self._file = self._path.open("rb")
        self._total = hashlib.sha256()

    def header(self) -> bytes:
        with _failing(self._link, self._path):
            length = int.from_bytes(self._read(_LENGTH), "little")
            return self._read(length)

    def receive(self, cut: Sequence[Parcel], memory: memoryview, moved: Moved) -> None:
        with _failing(self._link, self._path):
            for parcel in cut:
                for run in parcel:
                    piece = memory[run.start : run.end]
                    if self._file.readinto(piece) != run.length:
                        raise LinkFailed(self._link.name, self._link.sender, f"{self._path} ends too early")
                    self._total.update(piece)
                moved(size(parcel))
            if self._file.read() != self._total.digest():
                raise LinkFailed(
                    self._link.name, self._link.sender, f"{self._path} has another digest than was written"
                )

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _read(self, count: int) -> bytes:
        piece = self._file.read(count)
        self._total.update(piece)
        return piece


def tidy(folder: Path, generation: int, receiver: str, before: int | None = None) -> None:
    """Deletes what nobody reads any more: the files of earlier generations, and those of this one to the receiver, all
    of them or those of links before that number."""
    with contextlib.suppress(OSError):  # it is not there, or another one does the same
        for path in folder.glob("weights-*-*-*"):
            _, made_by, number, to = path.name.removesuffix(".new").split("-", 3)
            if not (made_by.isdecimal() and number.isdecimal()):
                continue  # nothing of ours
            mine = int(made_by) == generation and to == quote(receiver, safe="")
            if int(made_by) < generation or (mine and (before is None or int(number) < before)):
                path.unlink(missing_ok=True)


def _path(folder: Path, generation: int, link: Link) -> Path:
    return folder / f"weights-{generation}-{link.number}-{quote(link.receiver, safe='')}"


def _grown(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the file system raises where the sender writes is nobody's fault but that folder's."""
    try:
        yield
    except OSError as error:
        raise FolderFailed(path.parent, str(error)) from error


@contextlib.contextmanager
def _failing(link: Link, path: Path) -> Iterator[None]:
    """What the file system raises, as an error that names the folder."""
    try:
        yield
    except OSError as error:
        raise LinkFailed(link.name, str(path.parent), f"{error} (weights.folder)") from error
