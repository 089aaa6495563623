"""The two ends of a stream: a trainer rank sends the tensors of a version, and an engine worker yields them as they
arrive, verified.
"""

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.watch.beacon.writer import current_beacon
from lockstep.weights.distributed_setup import connect_store, store_link_errors
from lockstep.weights.errors import LinkFailed
from lockstep.weights.stream.broadcast_group import BroadcastGroup
from lockstep.weights.stream.channel import (
    StreamChannel,
    StreamReceiverInfo,
    announce_receiver,
    gather_receivers,
    member_name,
    receivers_on_device,
)
from lockstep.weights.stream.ipc_buffers import CudaIpcMemory, IpcBufferReader, IpcBufferWriter, IpcMemory
from lockstep.weights.stream.tensor_buckets import (
    TensorBucket,
    cut_buckets,
    stream_digest,
    verify_trailer,
    write_trailer,
)
from lockstep.weights.weight_plan import PlanEntry, WeightPlan

log = logging.getLogger(__name__)

GatheredRows = Mapping[str, Sequence[Tensor]]
"""Rows of a bucket's tensors by name, in order, in the plan's dtypes; uint8 `[bytes]` each."""


class StreamSender:
    """A trainer rank's end of a channel, which stays open from version to version. Only the thread that runs all
    collectives calls it.

    Args:
        rank: rank of this process. With NCCL rank 0 sends; with CUDA IPC every rank sends to the workers on its GPU.
        memory: implementation of CUDA IPC.
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
            gathered: yields what this rank sends of each bucket; None on ranks that send nothing. It is consumed even
                if the channel fails, because gathering is a collective of all ranks.

        Returns:
            Why sending failed; empty on success. The controller decides which engines to leave out.
        """
        buckets = cut_buckets(plan, channel.bucket_bytes)
        problem, sender = "", None
        try:
            sender = self._open_sender(channel, plan, buckets)
        except LinkFailed as error:
            problem = str(error)
        for bucket, pieces in zip(buckets, gathered, strict=True):
            if pieces is None or sender is None:
                continue
            try:
                with store_link_errors(channel.store, channel.name):
                    send_bucket(sender, channel, bucket, version, pieces)
            except LinkFailed as error:
                problem, sender = str(error), None
        try:
            if sender is not None:
                with store_link_errors(channel.store, channel.name):
                    sender.flush()
        except LinkFailed as error:
            problem = str(error)
        if problem:
            log.warning("version %d: %s", version, problem)
            self.close()
        return problem

    def close(self) -> None:
        """Closes the channel; buckets in flight are lost."""
        if self._open is not None:
            (_, sender), self._open = self._open, None
            sender.close()

    def _open_sender(
        self, channel: StreamChannel, plan: WeightPlan, buckets: Sequence[TensorBucket]
    ) -> BroadcastGroup | IpcBufferWriter | None:
        """Opens the channel. Returns None on ranks that send nothing."""
        if channel.way == "nccl" and self.rank:
            return None
        if self._open is not None and self._open[0] == channel:
            return self._open[1]
        self.close()  # at most one channel is open
        store = connect_store(channel.store, f"{channel.scope}/stream", channel.name)
        agreement = stream_digest(plan, channel.bucket_bytes, channel.check)
        sender: BroadcastGroup | IpcBufferWriter
        with store_link_errors(channel.store, channel.name):
            infos = gather_receivers(store, channel, agreement, answers=self.rank == 0)
            if channel.way == "nccl":
                sender = BroadcastGroup(store, channel, 0, self.device)
            else:
                readers = receivers_on_device(infos, self._memory.device_key(self.device))
                if not readers:
                    return None
                sender = IpcBufferWriter(store, channel, buckets, readers, self._memory, self.device)
        self._open = channel, sender
        return sender


def send_bucket(
    sender: BroadcastGroup | IpcBufferWriter, channel: StreamChannel, bucket: TensorBucket, version: int,
    pieces: GatheredRows,
) -> None:  # fmt: skip
    """Sends a bucket once there is memory for it. Raises LinkFailed."""
    buffer = sender.acquire(bucket, version)
    fill_bucket(buffer, bucket, pieces)
    write_trailer(buffer, bucket, channel.number, version, channel.check)
    sender.put(bucket, buffer)
    current_beacon().add("bytes", bucket.nbytes)


@torch.no_grad()
def fill_bucket(buffer: Tensor, bucket: TensorBucket, pieces: GatheredRows) -> None:
    """Copies gathered rows into a bucket.

    Raises:
        ValueError: rows are missing, or too many.
    """
    for entry in bucket.entries:
        at, end = bucket.byte_range(entry)
        for piece in pieces[entry.name]:
            if at + piece.numel() > end:
                raise ValueError(f"{entry.name}: more rows than {list(entry.shape)} were gathered")
            buffer[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        if at != end:
            raise ValueError(f"{entry.name}: {end - at} bytes of {list(entry.shape)} were not gathered")


class StreamReceiver:
    """An engine worker's end of a channel, which stays open from version to version.

    Args:
        memory: implementation of CUDA IPC.
    """

    def __init__(self, memory: IpcMemory | None = None) -> None:
        self._memory: IpcMemory = memory or CudaIpcMemory()
        self._open: tuple[StreamChannel, BroadcastGroup | IpcBufferReader] | None = None

    def promised(self, where: Mapping[str, Any]) -> dict[str, PlanEntry]:
        """Returns shapes and dtypes of a version's tensors by name, from the fields of `StreamChannel.where`."""
        return {entry.name: entry for entry in WeightPlan.from_json(where["plan"]).entries}

    @contextmanager
    def stream(
        self, where: Mapping[str, Any], version: int, worker: int, device: torch.device
    ) -> Generator[Iterator[tuple[str, Tensor]]]:
        """Yields an iterator over names and tensors of `version`, as they arrive. If the context ends with an error, or
        before the last tensor, this receiver leaves the channel.

        Args:
            worker: index of this worker in its engine.
            device: device of the tensors.

        Raises:
            PlanMismatch: the trainer sends other tensors; nothing was transferred.
            LinkFailed: the trainer did not join, or stopped.
            TornWeights: a bucket differs from what was sent.
        """
        channel, plan = StreamChannel.of(where["channel"]), WeightPlan.from_json(where["plan"])
        with store_link_errors(channel.store, channel.name):
            source = self._open_receiver(channel, plan, member_name(where["engine"], worker, channel.width), device)
        buckets = cut_buckets(plan, channel.bucket_bytes)
        complete = False

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal complete
            with store_link_errors(channel.store, channel.name):
                for bucket, buffer in zip(buckets, source.buckets(buckets, version), strict=True):
                    verify_trailer(buffer, bucket, channel.number, version, channel.check)
                    current_beacon().add("bytes", bucket.nbytes)
                    yield from bucket_views(buffer, bucket)
            complete = True

        try:
            yield tensors()
        finally:
            if not complete:
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
        store = connect_store(channel.store, f"{channel.scope}/stream", channel.name)
        uses_ipc = channel.way == "cuda_ipc"
        device_key = self._memory.device_key(device) if uses_ipc else str(device)
        agreement = stream_digest(plan, channel.bucket_bytes, channel.check)
        announce_receiver(store, channel, name, StreamReceiverInfo(agreement, device_key))
        source: BroadcastGroup | IpcBufferReader
        if uses_ipc:
            source = IpcBufferReader(store, channel, name, self._memory, device)
        else:
            source = BroadcastGroup(store, channel, 1 + channel.members.index(name), device)
        self._open = channel, source
        return source


def bucket_views(buffer: Tensor, bucket: TensorBucket) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a bucket with their names, as views of its memory."""
    for entry in bucket.entries:
        start, end = bucket.byte_range(entry)
        yield entry.name, buffer[start:end].view(entry.torch_dtype).view(entry.shape)
