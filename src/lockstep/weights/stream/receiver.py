"""An engine worker's end of a channel: yields the tensors of a version in the order they arrive, verified."""

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
        memory: implementation of CUDA IPC.
    """

    def __init__(self, memory: IpcMemory | None = None) -> None:
        self._memory: IpcMemory = memory or CudaIpcMemory()
        self._open: tuple[StreamChannel, BroadcastGroup | IpcBufferReader] | None = None

    def promised(self, where: Mapping[str, Any]) -> dict[str, PlanEntry]:
        """Shapes and dtypes of a version's tensors by name, from the fields of `StreamChannel.where`."""
        return {entry.name: entry for entry in WeightPlan.from_json(where["plan"]).entries}

    @contextmanager
    def stream(
        self, where: Mapping[str, Any], version: int, worker: int, device: torch.device
    ) -> Generator[Iterator[tuple[str, Tensor]]]:
        """The tensors of `version` with their names, as they arrive. A bucket's memory lives as long as one of its
        tensors. If the context ends with an error, or before the last tensor, this receiver leaves the channel.

        Args:
            worker: index of this worker in its engine.
            device: where the tensors are put.

        Raises:
            PlanMismatch: the trainer sends other tensors; nothing has moved.
            LinkFailed: the trainer did not come, or stopped.
            TornWeights: a bucket is not what was sent.
        """
        channel, plan = StreamChannel.of(where["channel"]), WeightPlan.from_json(where["plan"])
        source = self._open_receiver(channel, plan, member_name(where["engine"], worker, channel.width), device)
        buckets = cut_buckets(plan, channel.bucket_bytes)
        whole = False

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal whole
            for bucket, buffer in zip(buckets, source.buckets(buckets, version), strict=True):
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
            (_, source), self._open = self._open, None
            source.close()

    def _open_receiver(
        self, channel: StreamChannel, plan: WeightPlan, name: str, device: torch.device
    ) -> BroadcastGroup | IpcBufferReader:
        if self._open is not None and self._open[0] == channel:
            return self._open[1]
        self.close()
        store = connect_store(*channel.store, f"{channel.scope}/stream")
        lends = channel.way == "cuda_ipc"
        device_key = self._memory.device_key(device) if lends else str(device)
        agreed = stream_digest(plan, channel.bucket_bytes, channel.check)
        announce_receiver(store, channel, name, StreamReceiverInfo(agreed, device_key))
        source: BroadcastGroup | IpcBufferReader
        if lends:
            source = IpcBufferReader(store, channel, name, self._memory, device)
        else:
            source = BroadcastGroup(store, channel, 1 + channel.members.index(name), device)
        self._open = channel, source
        return source


def bucket_views(buffer: Tensor, bucket: TensorBucket) -> Iterator[tuple[str, Tensor]]:
    """A bucket's tensors, as views of its memory."""
    for entry in bucket.entries:
        start, end = bucket.place(entry)
        yield entry.name, buffer[start:end].view(entry.torch_dtype).view(entry.shape)
