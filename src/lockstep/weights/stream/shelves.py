"""Lots through memory that a trainer rank and the engine workers on its GPU share: two shelves in turn.

A rank fills a shelf and says so at the run's store; each worker copies the lot into memory of its own and says that;
then the shelf is filled again. Nothing is mapped but once in a channel's life.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from lockstep.weights.meeting import word
from lockstep.weights.stream.channel import Channel
from lockstep.weights.stream.lots import Lot
from lockstep.weights.stream.memory import Memory
from lockstep.weights.stream.seal import sealed_bytes

SHELVES = 2


class Shelves:
    """A trainer rank's end.

    Args:
        lots: all of a version; the largest one decides the size.
        readers: names of the workers on this device.
    """

    def __init__(
        self, store: Store, channel: Channel, lots: Sequence[Lot], readers: Sequence[str], memory: Memory,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._store, self._channel, self._readers, self._device = store, channel, list(readers), device
        size = max(map(sealed_bytes, lots))
        self._memory = [memory.shelf(size, device) for _ in range(SHELVES)]
        for reader in readers:
            handles = [memory.export(shelf) for shelf in self._memory]
            store.set(f"{channel.number}/shelves/{reader}", json.dumps(handles))
        self._put = 0
        self._version = 0
        self._key = memory.known_as(device)

    def free(self, lot: Lot, version: int) -> Tensor:
        """Memory for a lot, once all readers have what was in it. Raises LinkFailed, naming who has not."""
        self._version = version
        if lot.number >= SHELVES:
            self._taken(lot.number - SHELVES)
        return self._memory[lot.number % SHELVES][: sealed_bytes(lot)]

    def put(self, lot: Lot, buffer: Tensor) -> None:
        """The lot is in its memory: tells the readers."""
        _settle(self._device)
        self._store.set(self._name(f"there/{self._key}", lot.number), "1")
        self._put = lot.number + 1

    def flush(self) -> None:
        """Waits until the readers have everything."""
        for number in range(max(0, self._put - SHELVES), self._put):
            self._taken(number)

    def close(self) -> None:
        """Gives the memory back once no reader has it open."""
        self._memory.clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def _taken(self, number: int) -> None:
        for reader in self._readers:
            key = self._name(f"taken/{reader}", number)
            word(self._store, key, self._channel.name, reader, timeout_s=self._channel.limit_s, notice_after_s=None)
            self._store.delete_key(key)
        self._store.delete_key(self._name(f"there/{self._key}", number))

    def _name(self, what: str, number: int) -> str:
        return f"{self._channel.number}/{self._version}/{what}/{number}"


class ShelfReader:
    """An engine worker's end. Raises LinkFailed where no trainer rank is on its device."""

    def __init__(self, store: Store, channel: Channel, name: str, memory: Memory, device: torch.device) -> None:
        self._store, self._channel, self._me, self._device = store, channel, name, device
        self._key = memory.known_as(device)
        raw = word(
            store, f"{channel.number}/shelves/{name}", channel.name, f"a trainer rank on GPU {self._key}",
            timeout_s=channel.limit_s, notice_after_s=None,
        )  # fmt: skip
        handles: list[dict[str, Any]] = json.loads(raw)
        self._memory = [memory.open(handle, device) for handle in handles]

    def lots(self, lots: Sequence[Lot], version: int) -> Iterator[Tensor]:
        """Each in memory of its own."""
        start = f"{self._channel.number}/{version}"
        for lot in lots:
            there = f"{start}/there/{self._key}/{lot.number}"
            word(
                self._store, there, self._channel.name, "the trainer rank on this GPU",
                timeout_s=self._channel.limit_s, notice_after_s=None,
            )  # fmt: skip
            own = self._memory[lot.number % SHELVES][: sealed_bytes(lot)].clone()
            _settle(self._device)
            self._store.set(f"{start}/taken/{self._me}/{lot.number}", "1")
            yield own

    def close(self) -> None:
        """Lets go of the trainer's memory."""
        self._memory.clear()


def _settle(device: torch.device) -> None:
    """What was copied is there: another process sees memory, not streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
