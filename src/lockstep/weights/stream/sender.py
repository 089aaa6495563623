"""A trainer rank's end of a channel: takes part in every gather, whatever becomes of the link."""

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.watch.beacon.writer import current_beacon
from lockstep.weights.distributed_setup import connect_store
from lockstep.weights.errors import LinkFailed
from lockstep.weights.stream.broadcast_group import BroadcastGroup
from lockstep.weights.stream.channel import StreamChannel, gather_receivers, receivers_on_device
from lockstep.weights.stream.ipc_buffers import CudaIpcMemory, IpcBufferWriter, IpcMemory
from lockstep.weights.stream.tensor_buckets import TensorBucket, cut_buckets, stream_digest, write_trailer
from lockstep.weights.weight_plan import WeightPlan

log = logging.getLogger(__name__)

GatheredRows = Mapping[str, Sequence[Tensor]]
"""Of a bucket's tensors, by name: consecutive rows in the plan's types, uint8 `[bytes]` each."""


class StreamSender:
    """Keeps the channel open from version to version. One thread calls it, the one that does all collectives.

    Args:
        rank: of the trainer. Over NCCL rank 0 sends; through shared memory each does to the workers on its GPU.
        memory: what CUDA IPC is done by.
    """

    def __init__(self, rank: int, device: torch.device, memory: IpcMemory | None = None) -> None:
        self.rank, self.device = rank, device
        self._memory: IpcMemory = memory or CudaIpcMemory()
        self._open: tuple[StreamChannel, BroadcastGroup | IpcBufferWriter] | None = None

    def send(
        self, channel: StreamChannel, plan: WeightPlan, version: int, gathered: Iterator[GatheredRows | None]
    ) -> str:
        """Sends a version, bucket by bucket as they are gathered.

        Args:
            gathered: per bucket what this rank is to send, None on ranks that keep nothing of it. It is exhausted in any
                case: to gather is a collective of all ranks.

        Returns:
            Why it failed, empty where it did not: the controller decides who is left out.
        """
        buckets = cut_buckets(plan, channel.bucket_bytes)
        problem, outlet = "", None
        try:
            outlet = self._outlet(channel, plan, buckets)
        except LinkFailed as error:
            problem = str(error)
        for bucket, pieces in zip(buckets, gathered, strict=True):
            if pieces is None or outlet is None:
                continue
            try:
                buffer = outlet.free(bucket, version)
                fill_bucket(buffer, bucket, pieces)
                write_trailer(buffer, bucket, channel.number, version, channel.check)
                outlet.put(bucket, buffer)
                current_beacon().add("bytes", bucket.nbytes)
            except LinkFailed as error:
                problem, outlet = str(error), None
        try:
            if outlet is not None:
                outlet.flush()
        except LinkFailed as error:
            problem = str(error)
        if problem:
            log.warning("version %d: %s", version, problem)
            self.close()
        return problem

    def close(self) -> None:
        """Ends the communicator; what is on its way is lost."""
        if self._open is not None:
            (_, outlet), self._open = self._open, None
            outlet.close()

    def _outlet(
        self, channel: StreamChannel, plan: WeightPlan, buckets: Sequence[TensorBucket]
    ) -> BroadcastGroup | IpcBufferWriter | None:
        """None on ranks that send nothing."""
        if channel.way == "nccl" and self.rank:
            return None
        if self._open is not None and self._open[0] == channel:
            return self._open[1]
        self.close()  # there is never more than one
        store = connect_store(*channel.store, f"{channel.scope}/stream")
        agreed = stream_digest(plan, channel.bucket_bytes, channel.check)
        cards = gather_receivers(store, channel, agreed, answers=self.rank == 0)
        outlet: BroadcastGroup | IpcBufferWriter
        if channel.way == "nccl":
            outlet = BroadcastGroup(store, channel, 0, self.device)
        else:
            readers = receivers_on_device(cards, self._memory.known_as(self.device))
            if not readers:
                return None
            outlet = IpcBufferWriter(store, channel, buckets, readers, self._memory, self.device)
        self._open = channel, outlet
        return outlet


@torch.no_grad()
def fill_bucket(buffer: Tensor, bucket: TensorBucket, pieces: GatheredRows) -> None:
    """Puts a bucket's tensors into their places.

    Raises:
        ValueError: rows are missing, or too many.
    """
    for entry in bucket.entries:
        at, end = bucket.place(entry)
        for piece in pieces[entry.name]:
            if at + piece.numel() > end:
                raise ValueError(f"{entry.name}: more rows than {list(entry.shape)} were gathered")
            buffer[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        if at != end:
            raise ValueError(f"{entry.name}: {end - at} bytes of {list(entry.shape)} were not gathered")
