"""An engine worker's end of a channel: tensors of a version, in the order in which they come, checked before they are
given away."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.watch import beacon
from lockstep.weights import meeting as stores
from lockstep.weights.plan import Entry, Plan
from lockstep.weights.stream import meeting
from lockstep.weights.stream.broadcast import Broadcast
from lockstep.weights.stream.channel import Channel, member
from lockstep.weights.stream.lots import Lot, agreement, cut
from lockstep.weights.stream.meeting import Card
from lockstep.weights.stream.memory import CudaMemory, Memory
from lockstep.weights.stream.seal import verify
from lockstep.weights.stream.shelves import ShelfReader


class Receiver:
    """Keeps the channel open from version to version.

    Args:
        memory: what CUDA IPC is done by.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory: Memory = memory or CudaMemory()
        self._open: tuple[Channel, Broadcast | ShelfReader] | None = None

    def promised(self, where: Mapping[str, Any]) -> dict[str, Entry]:
        """By name what a version will have (shape, type), from what the controller says (see `Channel.where`)."""
        return {entry.name: entry for entry in Plan.from_json(where["plan"]).entries}

    @contextmanager
    def stream(
        self, where: Mapping[str, Any], version: int, worker: int, device: torch.device
    ) -> Generator[Iterator[tuple[str, Tensor]]]:
        """The tensors of `version` with their names, as they come. A lot's memory is its tensors' own: it lives as long
        as one of them does. Where the context ends with an error, or before the last tensor, the channel is left.

        Args:
            worker: which of the engine's.
            device: where the tensors are to be.

        Raises:
            PlanMismatch: the trainer means other tensors; nothing has moved.
            LinkFailed: it did not come, or no further; TornWeights: a lot is not what was sent.
        """
        channel, plan = Channel.of(where["channel"]), Plan.from_json(where["plan"])
        inlet = self._inlet(channel, plan, member(where["engine"], worker, channel.width), device)
        lots = cut(plan, channel.bucket_bytes)
        whole = False

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal whole
            for lot, buffer in zip(lots, inlet.lots(lots, version), strict=True):
                verify(buffer, lot, channel.number, version, channel.check)
                beacon.current().add("bytes", lot.nbytes)
                yield from views(buffer, lot)
            whole = True

        try:
            yield tensors()
        finally:
            if not whole:
                self.close()

    def close(self) -> None:
        """Leaves the channel."""
        if self._open is not None:
            (_, inlet), self._open = self._open, None
            inlet.close()

    def _inlet(self, channel: Channel, plan: Plan, name: str, device: torch.device) -> Broadcast | ShelfReader:
        if self._open is not None and self._open[0] == channel:
            return self._open[1]
        self.close()
        store = stores.open_store(*channel.store, f"{channel.scope}/stream")
        lends = channel.way == "cuda_ipc"
        known_as = self._memory.known_as(device) if lends else str(device)
        agreed = agreement(plan, channel.bucket_bytes, channel.check)
        meeting.present(store, channel, name, Card(agreed, known_as))
        inlet: Broadcast | ShelfReader
        if lends:
            inlet = ShelfReader(store, channel, name, self._memory, device)
        else:
            inlet = Broadcast(store, channel, 1 + channel.members.index(name), device)
        self._open = channel, inlet
        return inlet


def views(buffer: Tensor, lot: Lot) -> Iterator[tuple[str, Tensor]]:
    """A lot's tensors, where they lie."""
    for entry in lot.entries:
        start, end = lot.place(entry)
        yield entry.name, buffer[start:end].view(entry.torch_dtype).view(entry.shape)
