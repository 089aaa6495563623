"""Transfers buckets through device memory that is shared by CUDA IPC, with two buffers in turn.

A trainer rank shares the buffers with the engine workers on its GPU. It fills one and announces it in the run's store.
Each worker copies the bucket into memory of its own and confirms; then the rank fills the buffer again. A buffer is
mapped once per channel.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from lockstep.cluster.rendezvous_store import delete_scope
from lockstep.weights.distributed_setup import connect_store, wait_for_key
from lockstep.weights.stream.channel import StreamChannel
from lockstep.weights.stream.tensor_buckets import TensorBucket, bytes_with_trailer

_HANDLE_FIELDS = ("handle", "ref_counter_handle", "event_handle")
_OFFSET_FIELDS = ("storage_bytes", "storage_offset", "ref_counter_offset")


class IpcMemory(Protocol):
    """Device memory that other processes on the host can open."""

    def device_key(self, device: torch.device) -> str:
        """Returns a name of the device that is the same in all processes of the host."""

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Allocates memory, uint8 `[size]`."""

    def export(self, buffer: Tensor) -> dict[str, Any]:
        """Returns a handle (JSON values) with which one other process can open the memory. Each process needs its
        own."""

    def open(self, handle: Mapping[str, Any], device: torch.device) -> Tensor:
        """Opens the memory of another process, uint8 `[size]`. That process must keep it while this view is used."""


class CudaIpcMemory:
    """CUDA IPC, with the functions that torch's multiprocessing queues use."""

    def device_key(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def allocate(self, size: int, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    def export(self, buffer: Tensor) -> dict[str, Any]:
        return export_handle(buffer)

    def open(self, handle: Mapping[str, Any], device: torch.device) -> Tensor:
        return open_handle(handle, device)


def export_handle(tensor: Tensor) -> dict[str, Any]:
    """Returns a handle with which another process on this GPU can open a contiguous tensor once, because torch keeps a
    reference counter per export."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, found = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    (_, _, _, offset, _, _, _, handle, storage_bytes, storage_offset, _, counter, counter_offset, event, sync) = found
    texts = {"handle": handle, "ref_counter_handle": counter, "event_handle": event}
    return {
        **{name: base64.b64encode(value).decode() for name, value in texts.items()},
        "size": tensor.numel(),
        "offset": offset,
        "storage_bytes": storage_bytes,
        "storage_offset": storage_offset,
        "ref_counter_offset": counter_offset,
        "event_sync_required": sync,
    }


def open_handle(found: Mapping[str, Any], device: torch.device) -> Tensor:
    """Opens the tensor of `export_handle`, uint8 `[size]`. `device` is that GPU as this process numbers it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    handle, counter, event = (base64.b64decode(found[name]) for name in _HANDLE_FIELDS)
    storage_bytes, storage_offset, counter_offset = (found[name] for name in _OFFSET_FIELDS)
    opened: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor, torch.Size([found["size"]]), (1,), found["offset"], torch.storage.TypedStorage, torch.uint8,
        device.index or 0, handle, storage_bytes, storage_offset, False, counter, counter_offset, event,
        found["event_sync_required"],
    )  # fmt: skip
    return opened


BUFFER_COUNT = 2


class IpcBufferWriter:
    """A trainer rank's end of the buffers.

    Args:
        buckets: all buckets of a version; the largest determines the size of the buffers.
        readers: names of the workers on this device.
    """

    def __init__(
        self, store: Store, channel: StreamChannel, buckets: Sequence[TensorBucket], readers: Sequence[str],
        memory: IpcMemory, device: torch.device,
    ) -> None:  # fmt: skip
        self._store, self._channel, self._readers, self._device = store, channel, list(readers), device
        size = max(map(bytes_with_trailer, buckets))
        self._memory = [memory.allocate(size, device) for _ in range(BUFFER_COUNT)]
        for reader in readers:
            handles = [memory.export(buffer) for buffer in self._memory]
            store.set(f"{channel.number}/buffers/{reader}", json.dumps(handles))
        self._put = 0
        self._version: int | None = None
        self._key = memory.device_key(device)

    def acquire(self, bucket: TensorBucket, version: int) -> Tensor:
        """Returns memory for a bucket, after all readers have copied its previous content. Raises LinkFailed, which
        names a reader that has not."""
        if version != self._version:
            self._version, self._put = version, 0
            self._store = open_version(self._channel, version, self._key)
        if bucket.number >= BUFFER_COUNT:
            self._wait_until_copied(bucket.number - BUFFER_COUNT)
        return self._memory[bucket.number % BUFFER_COUNT][: bytes_with_trailer(bucket)]

    def put(self, bucket: TensorBucket, buffer: Tensor) -> None:
        """Announces to the readers that the bucket is in the buffer."""
        _synchronize(self._device)
        self._store.set(f"there/{bucket.number}", "1")
        self._put = bucket.number + 1

    def flush(self) -> None:
        """Waits until the readers have copied all buckets."""
        for number in range(max(0, self._put - BUFFER_COUNT), self._put):
            self._wait_until_copied(number)
        if self._version is not None:
            delete_scope(self._channel.store, version_scope(self._channel, self._version, self._key))
            self._version = None

    def close(self) -> None:
        """Frees the memory when no reader has it open any more."""
        self._memory.clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def _wait_until_copied(self, number: int) -> None:
        for reader in self._readers:
            key = f"taken/{reader}/{number}"
            wait_for_key(
                self._store, key, self._channel.name, reader, timeout_s=self._channel.limit_s, notice_after_s=None
            )
            self._store.delete_key(key)
        self._store.delete_key(f"there/{number}")


class IpcBufferReader:
    """An engine worker's end of the buffers. Raises LinkFailed if no trainer rank is on its device."""

    def __init__(
        self, store: Store, channel: StreamChannel, name: str, memory: IpcMemory, device: torch.device
    ) -> None:
        self._channel, self._reader_name, self._device = channel, name, device
        self._key = memory.device_key(device)
        raw = wait_for_key(
            store, f"{channel.number}/buffers/{name}", channel.name, f"a trainer rank on GPU {self._key}",
            timeout_s=channel.limit_s, notice_after_s=None,
        )  # fmt: skip
        handles: list[dict[str, Any]] = json.loads(raw)
        self._memory = [memory.open(handle, device) for handle in handles]

    def buckets(self, buckets: Sequence[TensorBucket], version: int) -> Iterator[Tensor]:
        """Yields the buckets in order, each in new memory."""
        store = open_version(self._channel, version, self._key)
        for bucket in buckets:
            wait_for_key(
                store, f"there/{bucket.number}", self._channel.name, "the trainer rank on this GPU",
                timeout_s=self._channel.limit_s, notice_after_s=None,
            )  # fmt: skip
            copied = self._memory[bucket.number % BUFFER_COUNT][: bytes_with_trailer(bucket)].clone()
            _synchronize(self._device)
            store.set(f"taken/{self._reader_name}/{bucket.number}", "1")
            yield copied

    def close(self) -> None:
        """Closes the trainer rank's memory."""
        self._memory.clear()


def version_scope(channel: StreamChannel, version: int, device: str) -> str:
    """The scope of the keys of a version on a device. Each version has its own, because a store of files grows with
    every key that is set or deleted."""
    return f"{channel.scope}/stream/{channel.number}/{version}/{device}"


def open_version(channel: StreamChannel, version: int, device: str) -> Store:
    """Opens the scope of a version on a device. Raises LinkFailed."""
    return connect_store(channel.store, version_scope(channel, version, device), channel.name)


def _synchronize(device: torch.device) -> None:
    """Waits for copies on the device, because other processes are not ordered after this process's CUDA streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
