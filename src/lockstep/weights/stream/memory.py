"""Memory of one process that another one on the same device opens: CUDA's inter-process handles, as data.

Whatever has the methods of `Memory` can stand for a GPU's.
"""

import base64
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

_BYTES = ("handle", "ref_counter_handle", "event_handle")
_NUMBERS = ("storage_bytes", "storage_offset", "ref_counter_offset")


class Memory(Protocol):
    """Of one kind of device."""

    def known_as(self, device: torch.device) -> str:
        """What all processes of the host call the device, whatever number it has in each."""

    def shelf(self, size: int, device: torch.device) -> Tensor:
        """New memory, uint8 `[size]`."""

    def export(self, shelf: Tensor) -> dict[str, Any]:
        """What one other process opens it by (JSON); another process needs one of its own."""

    def open(self, handle: Mapping[str, Any], device: torch.device) -> Tensor:
        """The memory of another process, uint8 `[size]`. It is that process's: it must outlive this view."""


class CudaMemory:
    """CUDA IPC, by the functions that torch's own queues of tensors use."""

    def known_as(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def shelf(self, size: int, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    def export(self, shelf: Tensor) -> dict[str, Any]:
        return export(shelf)

    def open(self, handle: Mapping[str, Any], device: torch.device) -> Tensor:
        return rebuild(handle, device)


def export(tensor: Tensor) -> dict[str, Any]:
    """What another process on this GPU opens a contiguous tensor by, once: torch counts, in memory that belongs to this
    one export, whether that process still has it."""
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


def rebuild(found: Mapping[str, Any], device: torch.device) -> Tensor:
    """The tensor behind `export`, uint8 `[size]`, in the process that opens it; `device` is this process's number of
    that GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    handle, counter, event = (base64.b64decode(found[name]) for name in _BYTES)
    storage_bytes, storage_offset, counter_offset = (found[name] for name in _NUMBERS)
    made: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor, torch.Size([found["size"]]), (1,), found["offset"], torch.storage.TypedStorage, torch.uint8,
        device.index or 0, handle, storage_bytes, storage_offset, False, counter, counter_offset, event,
        found["event_sync_required"],
    )  # fmt: skip
    return made
