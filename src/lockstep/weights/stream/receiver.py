"""An engine worker's end of a channel: tensors of a version, in the order in which they come, checked before they are
given away."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.watch.beacon.writer import current_beacon
from lockstep.weights.distributed_setup import connect_store
from lockstep.weights.stream.broadcast_group import BroadcastGroup
from lockstep.weights.stream.channel import StreamChannel, StreamReceiverInfo, announce_receiver, member_name
from lockstep.weights.stream.ipc_buffers import CudaIpcMemory, IpcBufferReader, IpcMemory
from lockstep.weights.stream.tensor_buckets import TensorBucket, cut_buckets, stream_digest, verify_trailer
from lockstep.weights.weight_plan import PlanEntry, WeightPlan


class StreamReceiver:
    """Keeps the channel open from version to version.

    Args:
        memory: what CUDA IPC is done by.
    """

    def __init__(self, memory: IpcMemory | None = None) -> None:
        self._memory: IpcMemory = memory or CudaIpcMemory()
        self._open: tuple[StreamChannel, BroadcastGroup | IpcBufferReader] | None = None

    def promised(self, where: Mapping[str, Any]) -> dict[str, PlanEntry]:
        """By name what a version will have (shape, type), from what the controller says (see `Channel.where`)."""
        return {entry.name: entry for entry in WeightPlan.from_json(where["plan"]).entries}

    @contextmanager
    def stream(
        self, where: Mapping[str, Any], version: int, worker: int, device: torch.device
    ) -> Generator[Iterator[tuple[str, Tensor]]]:
        """The tensors of `version_numbers` with their names, as they come. A bucket's memory is its tensors' own: it
        lives as long as one of them does. Where the context ends with an error, or before the last tensor, the
        channel is left.

        Args:
            worker: which of the engine's.
            device: where the tensors are to be.

        Raises:
            PlanMismatch: the trainer means other tensors; nothing has moved.
            LinkFailed: it did not come, or no further; TornWeights: a bucket is not what was sent.
        """
        channel, plan = StreamChannel.of(where["channel"]), WeightPlan.from_json(where["plan"])
        inlet = self._inlet(channel, plan, member_name(where["engine"], worker, channel.width), device)
        buckets = cut_buckets(plan, channel.bucket_bytes)
        whole = False

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal whole
            for bucket, buffer in zip(buckets, inlet.buckets(buckets, version), strict=True):
                verify_trailer(buffer, bucket, channel.number, version, channel.check)
                current_beacon().add("bytes", bucket.nbytes)
                yield from bucket_views(buffer, bucket)
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

    def _inlet(
        self, channel: StreamChannel, plan: WeightPlan, name: str, device: torch.device
    ) -> BroadcastGroup | IpcBufferReader:
        if self._open is not None and self._open[0] == channel:
            return self._open[1]
        self.close()
        store = connect_store(*channel.store, f"{channel.scope}/stream")
        lends = channel.way == "cuda_ipc"
        known_as = self._memory.known_as(device) if lends else str(device)
        agreed = stream_digest(plan, channel.bucket_bytes, channel.check)
        announce_receiver(store, channel, name, StreamReceiverInfo(agreed, known_as))
        inlet: BroadcastGroup | IpcBufferReader
        if lends:
            inlet = IpcBufferReader(store, channel, name, self._memory, device)
        else:
            inlet = BroadcastGroup(store, channel, 1 + channel.members.index(name), device)
        self._open = channel, inlet
        return inlet


def bucket_views(buffer: Tensor, bucket: TensorBucket) -> Iterator[tuple[str, Tensor]]:
    """A bucket's tensors, where they lie."""
    for entry in bucket.entries:
        start, end = bucket.place(entry)
        yield entry.name, buffer[start:end].view(entry.torch_dtype).view(entry.shape)
