"""What carries chunks from one relay to another: gloo broadcasts, or a file in a folder that both see.

Every gloo link has a communicator of its own, so a receiver that fails or stalls costs the others nothing: no rank
waits for two peers. It broadcasts and does not send, because torch's flight recorder does not see gloo's sends. A
file is written whole, with its checksum, and renamed.
"""

import contextlib
import hashlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from lockstep.base import waits
from lockstep.base.wait_state import WaitTimeout, track_wait
from lockstep.weights.errors import FolderFailed, LinkFailed
from lockstep.weights.relay.link_protocol import Chunk, chunk_bytes, pack_chunk, unpack_chunk
from lockstep.weights.relay.relay_api import RelayLink

OnBytesMoved = Callable[[int], None]
"""Called with the number of bytes moved; may raise to end the transfer."""


class LinkSender(Protocol):
    """The sender's end."""

    def send(self, header: bytes, cut: Sequence[Chunk], memory: memoryview, moved: OnBytesMoved) -> None:
        """Sends the header and then the chunks, in their order. Raises LinkFailed."""

    def close(self) -> None: ...


class LinkReceiver(Protocol):
    """The receiver's end."""

    def header(self) -> bytes:
        """The header, which the sender sends first. Raises LinkFailed."""

    def receive(self, cut: Sequence[Chunk], memory: memoryview, moved: OnBytesMoved) -> None:
        """Receives the chunks into their ranges of `memory`. Raises LinkFailed."""

    def close(self) -> None: ...


_LENGTH_BYTES = 8
"""Size of the length field in front of the header."""


class FileLinkSender:
    """Writes a file named by generation, link and receiver, visible once it is complete and on the disk."""

    def __init__(self, folder: Path, generation: int, link: RelayLink) -> None:
        self._path = _transfer_path(folder, generation, link)

    def send(self, header: bytes, cut: Sequence[Chunk], memory: memoryview, moved: OnBytesMoved) -> None:
        scratch = self._path.with_name(self._path.name + ".new")
        total = hashlib.sha256()
        with _folder_errors(self._path):
            scratch.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                for piece in (len(header).to_bytes(_LENGTH_BYTES, "little"), header):
                    total.update(piece)
                    file.write(piece)
                for chunk in cut:
                    for run in chunk:
                        total.update(memory[run.start : run.end])
                        file.write(memory[run.start : run.end])
                    moved(chunk_bytes(chunk))
                file.write(total.digest())
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self._path)

    def close(self) -> None:
        """Deletes an unfinished file."""
        with contextlib.suppress(OSError):
            self._path.with_name(self._path.name + ".new").unlink(missing_ok=True)


class FileLinkReceiver:
    """Reads the file and deletes it, along with older files to this receiver that were never read.

    Args:
        refused: returns why the sender refuses; empty if it does not.

    Raises:
        LinkFailed: the file does not appear, and does not grow for `limit_s`.
    """

    def __init__(
        self, folder: Path, generation: int, link: RelayLink, limit_s: float, refused: Callable[[], str]
    ) -> None:
        self._path, self._link = _transfer_path(folder, generation, link), link
        delete_stale_files(folder, generation, link.receiver, before=link.number)
        scratch = self._path.with_name(self._path.name + ".new")

        def there() -> bool | None:
            if self._path.exists():
                return True
            if why := refused():
                raise LinkFailed(link.name, link.sender, why)
            return None

        try:
            waits.poll(
                there, kind="file", waits_for=f"relay of {link.sender}", why=link.name, stall_s=limit_s,
                progress=lambda: _current_size(scratch),
            )  # fmt: skip
        except WaitTimeout as error:
            raise LinkFailed(link.name, link.sender, f"{self._path} did not appear: {error}") from error
        self._file = self._path.open("rb")
        self._total = hashlib.sha256()

    def header(self) -> bytes:
        with _file_errors(self._link, self._path):
            length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
            return self._read(length)

    def receive(self, cut: Sequence[Chunk], memory: memoryview, moved: OnBytesMoved) -> None:
        with _file_errors(self._link, self._path):
            for chunk in cut:
                for run in chunk:
                    piece = memory[run.start : run.end]
                    if self._file.readinto(piece) != run.length:
                        raise LinkFailed(self._link.name, self._link.sender, f"{self._path} ends too early")
                    self._total.update(piece)
                moved(chunk_bytes(chunk))
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


def delete_stale_files(folder: Path, generation: int, receiver: str, before: int | None = None) -> None:
    """Deletes files that will not be read any more: those of earlier generations, and this generation's files to the
    receiver: all, or those of links before that number."""
    with contextlib.suppress(OSError):  # it is gone, or another process deletes it
        for path in folder.glob("weights-*-*-*"):
            _, made_by, number, to = path.name.removesuffix(".new").split("-", 3)
            if not (made_by.isdecimal() and number.isdecimal()):
                continue  # not a transfer's file
            mine = int(made_by) == generation and to == quote(receiver, safe="")
            if int(made_by) < generation or (mine and (before is None or int(number) < before)):
                path.unlink(missing_ok=True)


def _transfer_path(folder: Path, generation: int, link: RelayLink) -> Path:
    return folder / f"weights-{generation}-{link.number}-{quote(link.receiver, safe='')}"


def _current_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


@contextlib.contextmanager
def _folder_errors(path: Path) -> Iterator[None]:
    """Turns the file system's errors while the sender writes into FolderFailed."""
    try:
        yield
    except OSError as error:
        raise FolderFailed(path.parent, str(error)) from error


@contextlib.contextmanager
def _file_errors(link: RelayLink, path: Path) -> Iterator[None]:
    """Turns the file system's errors into LinkFailed that names the folder."""
    try:
        yield
    except OSError as error:
        raise LinkFailed(link.name, str(path.parent), f"{error} (weights.folder)") from error


MAX_CHUNKS_IN_FLIGHT = 3
"""Chunks in flight: while one is checked or copied, the next is sent."""


class GlooLink:
    """Either end of a link; implements `LinkSender` and `LinkReceiver`.

    Args:
        limit_s: bound of one broadcast. Connecting may take half of it, which leaves time for another peer if this one
            is lost.

    Raises:
        LinkFailed: the peer did not come.
    """

    def __init__(self, store: Store, link: RelayLink, sender: bool, limit_s: float) -> None:
        self._link, self._limit_s, self._sender = link, limit_s, sender
        self._peer = link.receiver if sender else link.sender
        meeting = PrefixStore(f"{link.number}/gloo", store)
        with (
            track_wait("rendezvous", f"relay of {self._peer}", link.name, limit_s / 2),
            _gloo_errors(link, self._peer),
        ):
            self._group, _ = c10d._new_process_group_helper(
                2, 0 if sender else 1, [], "gloo", meeting,
                group_name=c10d.GroupName(f"weights-{link.number}"), timeout=timedelta(seconds=limit_s / 2),
                group_desc=link.name,
            )  # fmt: skip
            c10d._set_pg_timeout(timedelta(seconds=limit_s), self._group)
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}

    def send(self, header: bytes, cut: Sequence[Chunk], memory: memoryview, moved: OnBytesMoved) -> None:
        with _gloo_errors(self._link, self._peer):
            self._finish(self._issue(torch.tensor([len(header)])), "header")
            self._finish(self._issue(_byte_tensor(memoryview(header))), "header")
            staging = self._staging(cut)
            under_way: deque[tuple[dist.Work | None, int]] = deque()
            for number, chunk in enumerate(cut):
                if len(under_way) == MAX_CHUNKS_IN_FLIGHT:
                    self._done(*under_way.popleft(), moved)
                piece = pack_chunk(chunk, memory, staging[number % len(staging)])
                under_way.append((self._issue(_byte_tensor(piece)), len(piece)))
            while under_way:
                self._done(*under_way.popleft(), moved)

    def header(self) -> bytes:
        with _gloo_errors(self._link, self._peer):
            length = torch.zeros(1, dtype=torch.int64)
            self._finish(self._issue(length), "header")
            body = torch.empty(int(length), dtype=torch.uint8)
            self._finish(self._issue(body), "header")
            return bytes(body.numpy())

    def receive(self, cut: Sequence[Chunk], memory: memoryview, moved: OnBytesMoved) -> None:
        with _gloo_errors(self._link, self._peer):
            staging = self._staging(cut)
            under_way: deque[tuple[dist.Work | None, Chunk, memoryview]] = deque()
            for number, chunk in enumerate(cut):
                if len(under_way) == MAX_CHUNKS_IN_FLIGHT:
                    self._placed(*under_way.popleft(), memory, moved)
                piece = _receive_buffer(chunk, memory, staging[number % len(staging)])
                under_way.append((self._issue(_byte_tensor(piece)), chunk, piece))
            while under_way:
                self._placed(*under_way.popleft(), memory, moved)

    def close(self) -> None:
        """Ends the communicator; chunks in flight are lost."""
        dist.destroy_process_group(self._group)

    def _issue(self, tensor: Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
        return work

    def _finish(self, work: dist.Work | None, what: str) -> None:
        # The communicator's own bound comes first, so no broadcast stays behind in gloo's threads.
        waits.work(
            work, communicator=self._link.name, operation="broadcast", why=what, timeout_s=self._limit_s + 5,
            notice_after_s=None,
        )  # fmt: skip

    def _done(self, work: dist.Work | None, count: int, moved: OnBytesMoved) -> None:
        self._finish(work, "weights")
        moved(count)

    def _placed(
        self, work: dist.Work | None, chunk: Chunk, piece: memoryview, memory: memoryview, moved: OnBytesMoved
    ) -> None:
        self._finish(work, "weights")
        unpack_chunk(chunk, piece, memory)
        moved(chunk_bytes(chunk))

    def _staging(self, cut: Sequence[Chunk]) -> list[memoryview]:
        """Memory for ranges that are copied together, one for each chunk in flight."""
        largest = max((chunk_bytes(chunk) for chunk in cut if len(chunk) > 1), default=0)
        return [memoryview(bytearray(largest)) for _ in range(MAX_CHUNKS_IN_FLIGHT + 1)]


def _receive_buffer(chunk: Chunk, memory: memoryview, staging: memoryview) -> memoryview:
    """Where a chunk is received: in place if it is one range, else in the staging memory."""
    return memory[chunk[0].start : chunk[0].end] if len(chunk) == 1 else staging[: chunk_bytes(chunk)]


def _byte_tensor(piece: memoryview) -> Tensor:
    with warnings.catch_warnings():
        # torch warns that the memory is read-only; what is sent is never written to.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(piece, dtype=torch.uint8)


@contextlib.contextmanager
def _gloo_errors(link: RelayLink, peer: str) -> Iterator[None]:
    """Turns torch's errors into LinkFailed that names the peer."""
    try:
        yield
    except (WaitTimeout, dist.DistError) as error:
        raise LinkFailed(link.name, peer, str(error)) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise LinkFailed(link.name, peer, str(error)) from error
