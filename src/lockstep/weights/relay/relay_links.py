"""Transfers chunks from one relay to another: by gloo broadcasts, or by a file in a folder that both nodes share.

Every gloo link has a communicator of its own, so that a receiver that fails or stalls does not affect other links.
Links broadcast instead of sending, because torch's flight recorder does not record gloo's sends. A file is written
completely, with its checksum, and then renamed.
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
from lockstep.base.folders import open_file
from lockstep.base.wait_state import WaitTimeout, track_wait
from lockstep.weights.errors import FolderFailed, LinkFailed
from lockstep.weights.relay.link_protocol import Chunk, chunk_bytes, pack_chunk, unpack_chunk
from lockstep.weights.relay.relay_api import RelayLink

OnBytesMoved = Callable[[int], None]
"""Called with the number of bytes moved; may raise to end the transfer."""
MAX_CHUNKS_IN_FLIGHT = 3
"""Most chunks of a gloo link in flight: while one is copied, the next ones are sent."""
_LENGTH_BYTES = 8
"""Size of the length field in front of the header in a file."""


class LinkSender(Protocol):
    """The sender's end of a link."""

    def send(self, header: bytes, chunks: Sequence[Chunk], memory: memoryview, on_moved: OnBytesMoved) -> None:
        """Sends the header and then the chunks, in order. Raises LinkFailed."""

    def close(self) -> None: ...


class LinkReceiver(Protocol):
    """The receiver's end of a link."""

    def receive_header(self) -> bytes:
        """Receives the header, which the sender sends first. Raises LinkFailed."""

    def receive(self, chunks: Sequence[Chunk], memory: memoryview, on_moved: OnBytesMoved) -> None:
        """Receives the chunks into their ranges of `memory`. Raises LinkFailed."""

    def close(self) -> None: ...


class FileLinkSender:
    """Writes a file named after generation, link and receiver. It appears when it is complete and on the disk."""

    def __init__(self, folder: Path, generation: int, link: RelayLink) -> None:
        self._path = _transfer_path(folder, generation, link)

    def send(self, header: bytes, chunks: Sequence[Chunk], memory: memoryview, on_moved: OnBytesMoved) -> None:
        unfinished = _unfinished_path(self._path)
        digest = hashlib.sha256()
        with _raise_as_folder_failed(self._path):
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_file(unfinished, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                for piece in (len(header).to_bytes(_LENGTH_BYTES, "little"), header):
                    digest.update(piece)
                    file.write(piece)
                for chunk in chunks:
                    for span in chunk:
                        digest.update(memory[span.start : span.end])
                        file.write(memory[span.start : span.end])
                    on_moved(chunk_bytes(chunk))
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._path)

    def close(self) -> None:
        """Deletes an unfinished file."""
        with contextlib.suppress(OSError):
            _unfinished_path(self._path).unlink(missing_ok=True)


class FileLinkReceiver:
    """Waits for the file, reads it and deletes it. Also deletes older files to this receiver that were never read.

    Args:
        refusal_reason: returns why the sender refuses; empty if it does not.

    Raises:
        LinkFailed: the file does not appear, and the unfinished file does not grow for `limit_s`.
    """

    def __init__(
        self, folder: Path, generation: int, link: RelayLink, limit_s: float, refusal_reason: Callable[[], str]
    ) -> None:
        self._path, self._link = _transfer_path(folder, generation, link), link
        delete_stale_files(folder, generation, link.receiver, before=link.number)
        unfinished = _unfinished_path(self._path)

        def has_appeared() -> bool | None:
            if self._path.exists():
                return True
            if why := refusal_reason():
                raise LinkFailed(link.name, link.sender, why)
            return None

        try:
            waits.poll(
                has_appeared, kind="file", waits_for=f"relay of {link.sender}", why=link.name, stall_s=limit_s,
                progress=lambda: _current_size(unfinished),
            )  # fmt: skip
        except WaitTimeout as error:
            raise LinkFailed(link.name, link.sender, f"{self._path} did not appear: {error}") from error
        self._file = self._path.open("rb")
        self._digest = hashlib.sha256()

    def receive_header(self) -> bytes:
        with _raise_file_errors_as_link_failed(self._link, self._path):
            length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
            return self._read(length)

    def receive(self, chunks: Sequence[Chunk], memory: memoryview, on_moved: OnBytesMoved) -> None:
        with _raise_file_errors_as_link_failed(self._link, self._path):
            for chunk in chunks:
                for span in chunk:
                    piece = memory[span.start : span.end]
                    if self._file.readinto(piece) != span.length:
                        raise LinkFailed(self._link.name, self._link.sender, f"{self._path} is truncated")
                    self._digest.update(piece)
                on_moved(chunk_bytes(chunk))
            if self._file.read() != self._digest.digest():
                raise LinkFailed(
                    self._link.name,
                    self._link.sender,
                    f"{self._path} is damaged: its checksum does not match",
                )

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _read(self, count: int) -> bytes:
        piece = self._file.read(count)
        self._digest.update(piece)
        return piece


def delete_stale_files(folder: Path, generation: int, receiver: str, before: int | None = None) -> None:
    """Deletes the files of earlier generations, and the receiver's files of this generation with a link number below
    `before` (all if None)."""
    with contextlib.suppress(OSError):  # another process may have deleted a file or the folder
        for path in folder.glob("weights-*-*-*"):
            _, file_generation, number, to = path.name.removesuffix(".new").split("-", 3)
            if not (file_generation.isdecimal() and number.isdecimal()):
                continue  # not the file of a transfer
            for_receiver = int(file_generation) == generation and to == quote(receiver, safe="")
            if int(file_generation) < generation or (for_receiver and (before is None or int(number) < before)):
                path.unlink(missing_ok=True)


def _transfer_path(folder: Path, generation: int, link: RelayLink) -> Path:
    return folder / f"weights-{generation}-{link.number}-{quote(link.receiver, safe='')}"


def _unfinished_path(path: Path) -> Path:
    """The name of a file while it is written."""
    return path.with_name(path.name + ".new")


def _current_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


@contextlib.contextmanager
def _raise_as_folder_failed(path: Path) -> Iterator[None]:
    """Converts errors of the file system while the sender writes to FolderFailed, so that the receiver is not
    blamed."""
    try:
        yield
    except OSError as error:
        raise FolderFailed(path.parent, str(error)) from error


@contextlib.contextmanager
def _raise_file_errors_as_link_failed(link: RelayLink, path: Path) -> Iterator[None]:
    """Converts errors of the file system while the receiver reads to LinkFailed, which names the folder instead of
    the sender."""
    try:
        yield
    except OSError as error:
        raise LinkFailed(link.name, str(path.parent), f"{error}; check the setting weights.folder") from error


class GlooLink:
    """Either end of a gloo link, connected to the other end; implements `LinkSender` and `LinkReceiver`.

    Args:
        limit_s: time limit of one broadcast. The limit for connecting is half of it, so that there is time for another
            peer if this one is lost.

    Raises:
        LinkFailed: the peer did not connect.
    """

    def __init__(self, store: Store, link: RelayLink, is_sender: bool, limit_s: float) -> None:
        self._link, self._limit_s = link, limit_s
        self._peer = link.receiver if is_sender else link.sender
        link_store = PrefixStore(f"{link.number}/gloo", store)
        with (
            track_wait("rendezvous", f"relay of {self._peer}", link.name, limit_s / 2),
            _raise_gloo_errors_as_link_failed(link, self._peer),
        ):
            # The public functions need a default group and its store; a link has a store of its own.
            self._group, _ = c10d._new_process_group_helper(
                2, 0 if is_sender else 1, [], "gloo", link_store,
                group_name=c10d.GroupName(f"weights-{link.number}"), timeout=timedelta(seconds=limit_s / 2),
                group_desc=link.name,
            )  # fmt: skip
            c10d._set_pg_timeout(timedelta(seconds=limit_s), self._group)
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}

    def send(self, header: bytes, chunks: Sequence[Chunk], memory: memoryview, on_moved: OnBytesMoved) -> None:
        with _raise_gloo_errors_as_link_failed(self._link, self._peer):
            self._finish(self._issue(torch.tensor([len(header)])), "header")
            self._finish(self._issue(_byte_tensor(memoryview(header))), "header")
            staging = self._staging(chunks)
            in_flight: deque[tuple[dist.Work | None, int]] = deque()
            for number, chunk in enumerate(chunks):
                if len(in_flight) == MAX_CHUNKS_IN_FLIGHT:
                    self._finish_send(*in_flight.popleft(), on_moved)
                piece = pack_chunk(chunk, memory, staging[number % len(staging)])
                in_flight.append((self._issue(_byte_tensor(piece)), len(piece)))
            while in_flight:
                self._finish_send(*in_flight.popleft(), on_moved)

    def receive_header(self) -> bytes:
        with _raise_gloo_errors_as_link_failed(self._link, self._peer):
            length = torch.zeros(1, dtype=torch.int64)
            self._finish(self._issue(length), "header")
            body = torch.empty(int(length), dtype=torch.uint8)
            self._finish(self._issue(body), "header")
            return bytes(body.numpy())

    def receive(self, chunks: Sequence[Chunk], memory: memoryview, on_moved: OnBytesMoved) -> None:
        with _raise_gloo_errors_as_link_failed(self._link, self._peer):
            staging = self._staging(chunks)
            in_flight: deque[tuple[dist.Work | None, Chunk, memoryview]] = deque()
            for number, chunk in enumerate(chunks):
                if len(in_flight) == MAX_CHUNKS_IN_FLIGHT:
                    self._finish_receive(*in_flight.popleft(), memory, on_moved)
                piece = _receive_buffer(chunk, memory, staging[number % len(staging)])
                in_flight.append((self._issue(_byte_tensor(piece)), chunk, piece))
            while in_flight:
                self._finish_receive(*in_flight.popleft(), memory, on_moved)

    def close(self) -> None:
        """Destroys the communicator; chunks in flight are lost."""
        dist.destroy_process_group(self._group)

    def _issue(self, tensor: Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
        return work

    def _finish(self, work: dist.Work | None, what: str) -> None:
        # The communicator's own timeout expires first, so that no broadcast is left in gloo's threads.
        waits.work(
            work, communicator=self._link.name, operation="broadcast", why=what, timeout_s=self._limit_s + 5,
            notice_after_s=None,
        )  # fmt: skip

    def _finish_send(self, work: dist.Work | None, count: int, on_moved: OnBytesMoved) -> None:
        self._finish(work, "weights")
        on_moved(count)

    def _finish_receive(
        self, work: dist.Work | None, chunk: Chunk, piece: memoryview, memory: memoryview, on_moved: OnBytesMoved
    ) -> None:
        self._finish(work, "weights")
        unpack_chunk(chunk, piece, memory)
        on_moved(chunk_bytes(chunk))

    def _staging(self, chunks: Sequence[Chunk]) -> list[memoryview]:
        """Allocates memory for chunks of several ranges, one piece for each chunk in flight."""
        largest = max((chunk_bytes(chunk) for chunk in chunks if len(chunk) > 1), default=0)
        return [memoryview(bytearray(largest)) for _ in range(MAX_CHUNKS_IN_FLIGHT)]


def _receive_buffer(chunk: Chunk, memory: memoryview, staging: memoryview) -> memoryview:
    """Returns the memory that receives a chunk: its place in `memory` if it is one range, else the staging memory."""
    return memory[chunk[0].start : chunk[0].end] if len(chunk) == 1 else staging[: chunk_bytes(chunk)]


def _byte_tensor(piece: memoryview) -> Tensor:
    with warnings.catch_warnings():
        # torch warns that the memory is read-only, but memory to send is never written to.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(piece, dtype=torch.uint8)


@contextlib.contextmanager
def _raise_gloo_errors_as_link_failed(link: RelayLink, peer: str) -> Iterator[None]:
    """Converts torch's errors to LinkFailed, which names the peer."""
    try:
        yield
    except (WaitTimeout, dist.DistError) as error:
        raise LinkFailed(link.name, peer, str(error)) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # gloo raises plain ones; a subclass is an error of another kind
            raise
        raise LinkFailed(link.name, peer, str(error)) from error
