"""Stores finished completions of a step that is not complete yet, in an append-only file of framed records."""

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

import msgspec
import numpy as np

from lockstep.base.folders import open_file
from lockstep.data.samples import Completion, FinishReason
from lockstep.ledger.durable_files import disk_full_as_ledger_error, fsync_folder
from lockstep.ledger.json_values import decode_episode, decode_images, encode_episode, encode_images

_MAGIC = b"LKP1"
_HEADER = struct.Struct("<4sII")


class _CompletionRecord(msgspec.Struct, array_like=True):
    request: str
    tokens: bytes
    logprobs: bytes
    versions: bytes
    finish: str
    text: bytes
    mask: bytes | None = None
    episode: str | None = None
    """The episode as JSON."""
    images: str | None = None
    """The images as JSON; None without any."""


class PartialLog:
    """Writes the file of one step. Opening the file removes an incomplete last frame."""

    def __init__(self, path: Path) -> None:
        self._path = path
        created = not path.exists()
        with disk_full_as_ledger_error(path, None):
            self._descriptor = open_file(path, os.O_RDWR)
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            self._end = _read_complete_frames(file)[1]
        os.ftruncate(self._descriptor, self._end)
        if created:
            fsync_folder(path.parent)

    def append(self, completions: Sequence[Completion]) -> None:
        """Adds completions; they are durable on return. After LedgerFull, the file is unchanged."""
        data = b"".join(_encode_frame(completion) for completion in completions)
        try:
            with disk_full_as_ledger_error(self._path, len(data)):
                self._write(data)
                os.fsync(self._descriptor)
        except BaseException:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        view, at = memoryview(data), self._end
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written


def read_partial(path: Path) -> list[Completion]:
    """Returns the completions of all complete frames, in order. Of several with the same request id, returns the
    last."""
    try:
        with path.open("rb") as file:
            payloads = _read_complete_frames(file)[0]
    except FileNotFoundError:
        return []
    completions = [_decode_completion(payload) for payload in payloads]
    return list({completion.request: completion for completion in completions}.values())


_ARRAYS = (("tokens", np.dtype(np.int32)), ("logprobs", np.dtype(np.float32)), ("versions", np.dtype(np.int32)))


def _encode_frame(completion: Completion) -> bytes:
    for name, dtype in _ARRAYS:
        array = getattr(completion, name)
        if array.dtype != dtype or array.ndim != 1:
            raise ValueError(
                f"{name} of completion {completion.request} must be {dtype.name} [tokens], "
                f"got {array.dtype} {array.shape}"
            )
    payload = msgspec.msgpack.encode(
        _CompletionRecord(
            completion.request,
            completion.tokens.tobytes(),
            completion.logprobs.tobytes(),
            completion.versions.tobytes(),
            completion.finish,
            completion.text.encode("utf-8", "surrogatepass"),
            None if completion.mask is None else _mask_bytes(completion),
            encode_episode(completion.episode, completion.request),
            encode_images(completion.images, completion.request),
        )
    )
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def _mask_bytes(completion: Completion) -> bytes:
    mask = completion.mask
    assert mask is not None
    if mask.dtype != np.bool_ or mask.shape != completion.tokens.shape:
        raise ValueError(
            f"mask of completion {completion.request} must be bool {completion.tokens.shape}, "
            f"got {mask.dtype} {mask.shape}"
        )
    return mask.tobytes()


def _read_complete_frames(file: IO[bytes]) -> tuple[list[bytes], int]:
    """Returns the payloads of the complete frames, and where the last one ends."""
    payloads, end = [], 0
    file.seek(0)
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        magic, length, crc = _HEADER.unpack(header)
        payload = file.read(length) if magic == _MAGIC else b""
        if len(payload) != length or magic != _MAGIC or zlib.crc32(payload) != crc:
            break
        payloads.append(payload)
        end += _HEADER.size + length
    return payloads, end


def _decode_completion(payload: bytes) -> Completion:
    record = msgspec.msgpack.decode(payload, type=_CompletionRecord)
    return Completion(
        request=record.request,
        tokens=np.frombuffer(record.tokens, np.int32).copy(),
        logprobs=np.frombuffer(record.logprobs, np.float32).copy(),
        versions=np.frombuffer(record.versions, np.int32).copy(),
        finish=cast(FinishReason, record.finish),
        text=record.text.decode("utf-8", "surrogatepass"),
        mask=None if record.mask is None else np.frombuffer(record.mask, np.bool_).copy(),
        episode=decode_episode(record.episode),
        images=decode_images(record.images),
    )
