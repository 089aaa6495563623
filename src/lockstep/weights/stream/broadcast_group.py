"""A process group of a channel's sender and receivers: bounded broadcasts in the order of the buckets.

NCCL on GPUs; gloo carries the same between CPUs. The sender issues them on the thread that gathers the buckets,
after the gather of the bucket in question, so that its communicators have one order; receivers are in no other
communicator meanwhile.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from lockstep.base import waits
from lockstep.base.wait_state import WaitTimeout, track_wait
from lockstep.weights.distributed_setup import init_default_group
from lockstep.weights.errors import LinkFailed, WeightsError
from lockstep.weights.stream.channel import StreamChannel
from lockstep.weights.stream.tensor_buckets import TensorBucket, bytes_with_trailer

MAX_BUCKETS_IN_FLIGHT = 2
"""Buckets in flight: while one is sent, the next is gathered, or the one before is loaded."""
WATCHDOG_FACTOR = 10
"""NCCL's watchdog ends the process, so its bound is this many times ours, which comes first."""


class BroadcastGroup:
    """This process's end of a channel's communicator.

    Args:
        rank: 0 sends.

    Raises:
        LinkFailed: the communicator could not be formed within the channel's limit.
    """

    def __init__(self, store: Store, channel: StreamChannel, rank: int, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._nccl = channel.backend == "nccl"
        self._peer = "its receivers" if rank == 0 else "the trainer"
        self._under_way: deque[tuple[dist.Work | None, Tensor]] = deque()
        if not dist.is_initialized():
            init_default_group(channel.scope)
        with broadcast_errors(channel, self._peer):
            if self._nccl:
                # Forming an NCCL communicator blocks without a bound if a peer is lost, so another thread does it.
                forming = waits.run_in_thread(lambda: self._form(store, rank), f"forms {channel.name}")
                self._group = waits.future(
                    forming,
                    waits_for="all members",
                    why=channel.name,
                    timeout_s=channel.limit_s + 5,
                    notice_after_s=None,
                )
            else:
                with track_wait("rendezvous", self._peer, channel.name, channel.limit_s):
                    self._group = self._form(store, rank)

    def acquire(self, bucket: TensorBucket, version: int) -> Tensor:
        """Memory for a bucket."""
        return torch.empty(bytes_with_trailer(bucket), dtype=torch.uint8, device=self._device)

    def put(self, bucket: TensorBucket, buffer: Tensor) -> None:
        """Sends a bucket from its memory, which must not change until `MAX_BUCKETS_IN_FLIGHT` more were put or `flush`
        returned."""
        while len(self._under_way) >= MAX_BUCKETS_IN_FLIGHT:
            self._finish()
        self._issue(buffer)

    def flush(self) -> None:
        """Waits until everything has arrived."""
        while self._under_way:
            self._finish()

    def buckets(self, buckets: Sequence[TensorBucket], version: int) -> Iterator[Tensor]:
        """The buckets that the sender puts, each in memory of its own; later ones arrive while one is processed."""
        for bucket in buckets:
            if len(self._under_way) == MAX_BUCKETS_IN_FLIGHT:
                yield self._finish()
            self._issue(self.acquire(bucket, version))
        while self._under_way:
            yield self._finish()

    def close(self) -> None:
        """Ends the communicator; buckets in flight are lost."""
        self._under_way.clear()
        if self._nccl:
            c10d._abort_process_group(self._group)
        else:
            dist.destroy_process_group(self._group)

    def _form(self, store: Store, rank: int) -> dist.ProcessGroup:
        channel = self._channel
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the device is per thread
        bound = timedelta(seconds=channel.limit_s * (WATCHDOG_FACTOR if self._nccl else 1))
        found = c10d._new_process_group_helper(
            1 + len(channel.members), rank, [], channel.backend, PrefixStore(f"{channel.number}/group", store),
            group_name=c10d.GroupName(f"stream-{channel.number}"), timeout=bound, group_desc=channel.name,
        )  # fmt: skip
        group: dist.ProcessGroup = found[0]
        c10d._world.pg_group_ranks[group] = {k: k for k in range(1 + len(channel.members))}
        # NCCL connects at the first broadcast; this one keeps that out of the first bucket's time.
        hello = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self._wait(dist.broadcast(hello, group=group, group_src=0, async_op=True), "hello")
        return group

    def _issue(self, buffer: Tensor) -> None:
        with broadcast_errors(self._channel, self._peer):
            work: dist.Work | None = dist.broadcast(buffer, group=self._group, group_src=0, async_op=True)
        self._under_way.append((work, buffer))

    def _finish(self) -> Tensor:
        work, buffer = self._under_way.popleft()
        with broadcast_errors(self._channel, self._peer):
            self._wait(work, "weights")
        return buffer

    def _wait(self, work: dist.Work | None, what: str) -> None:
        # gloo's own bound comes first, so no broadcast stays behind in its threads; NCCL relies on this bound.
        limit_s = self._channel.limit_s + (0 if self._nccl else 5)
        waits.work(
            work, communicator=self._channel.name, operation="broadcast", why=what, timeout_s=limit_s,
            notice_after_s=None,
        )  # fmt: skip


@contextlib.contextmanager
def broadcast_errors(channel: StreamChannel, peer: str) -> Iterator[None]:
    """Turns torch's errors into LinkFailed."""
    try:
        yield
    except WeightsError:
        raise
    except (WaitTimeout, dist.DistError) as error:
        raise LinkFailed(channel.name, peer, str(error)) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise LinkFailed(channel.name, peer, str(error)) from error
