"""A process group of a channel's sender and receivers, which broadcasts the buckets in order, with a time limit.

The backend is NCCL on GPUs, and gloo on CPUs. The sender broadcasts each bucket after it was gathered, on the thread
that gathers, so that collectives have the same order everywhere. Receivers use no other communicator meanwhile.
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
"""Most buckets in flight: while one is sent, the sender gathers the next and receivers load the previous one."""
WATCHDOG_FACTOR = 10
"""NCCL's timeout is this many times the channel's, so that the channel's expires first: NCCL's watchdog would end the
process."""


class BroadcastGroup:
    """A channel's communicator, in one of its processes.

    Args:
        rank: rank of this process; rank 0 sends.

    Raises:
        LinkFailed: the communicator could not be formed within the channel's limit.
    """

    def __init__(self, store: Store, channel: StreamChannel, rank: int, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._nccl = channel.backend == "nccl"
        self._peer = "its receivers" if rank == 0 else "the trainer"
        self._in_flight: deque[tuple[dist.Work | None, Tensor]] = deque()
        if not dist.is_initialized():
            init_default_group(channel.scope)
        with broadcast_errors(channel, self._peer):
            if self._nccl:
                # If a peer is lost, creating an NCCL communicator can block forever, so another thread does it.
                creating = waits.run_in_thread(lambda: self._create_group(store, rank), f"create {channel.name}")
                self._group = waits.future(
                    creating,
                    waits_for="all members",
                    why=channel.name,
                    timeout_s=channel.limit_s + 5,
                    notice_after_s=None,
                )
            else:
                with track_wait("rendezvous", self._peer, channel.name, channel.limit_s):
                    self._group = self._create_group(store, rank)

    def acquire(self, bucket: TensorBucket, version: int) -> Tensor:
        """Allocates memory for a bucket."""
        return torch.empty(bytes_with_trailer(bucket), dtype=torch.uint8, device=self._device)

    def put(self, bucket: TensorBucket, buffer: Tensor) -> None:
        """Sends a bucket. Its memory must not change until `MAX_BUCKETS_IN_FLIGHT` more buckets were put, or `flush`
        returned."""
        while len(self._in_flight) >= MAX_BUCKETS_IN_FLIGHT:
            self._finish()
        self._issue(buffer)

    def flush(self) -> None:
        """Waits until all buckets have arrived."""
        while self._in_flight:
            self._finish()

    def buckets(self, buckets: Sequence[TensorBucket], version: int) -> Iterator[Tensor]:
        """Yields the buckets that the sender puts, each in new memory. The next ones are received while the caller uses
        one."""
        for bucket in buckets:
            if len(self._in_flight) == MAX_BUCKETS_IN_FLIGHT:
                yield self._finish()
            self._issue(self.acquire(bucket, version))
        while self._in_flight:
            yield self._finish()

    def close(self) -> None:
        """Destroys the communicator; buckets in flight are lost."""
        self._in_flight.clear()
        if self._nccl:
            c10d._abort_process_group(self._group)
        else:
            dist.destroy_process_group(self._group)

    def _create_group(self, store: Store, rank: int) -> dist.ProcessGroup:
        channel = self._channel
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the device is per thread
        bound = timedelta(seconds=channel.limit_s * (WATCHDOG_FACTOR if self._nccl else 1))
        created = c10d._new_process_group_helper(
            1 + len(channel.members), rank, [], channel.backend, PrefixStore(f"{channel.number}/group", store),
            group_name=c10d.GroupName(f"stream-{channel.number}"), timeout=bound, group_desc=channel.name,
        )  # fmt: skip
        group: dist.ProcessGroup = created[0]
        c10d._world.pg_group_ranks[group] = {k: k for k in range(1 + len(channel.members))}
        # NCCL connects at the first broadcast; do it now and not with the first bucket.
        warmup = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self._wait(dist.broadcast(warmup, group=group, group_src=0, async_op=True), "hello")
        return group

    def _issue(self, buffer: Tensor) -> None:
        with broadcast_errors(self._channel, self._peer):
            work: dist.Work | None = dist.broadcast(buffer, group=self._group, group_src=0, async_op=True)
        self._in_flight.append((work, buffer))

    def _finish(self) -> Tensor:
        work, buffer = self._in_flight.popleft()
        with broadcast_errors(self._channel, self._peer):
            self._wait(work, "weights")
        return buffer

    def _wait(self, work: dist.Work | None, what: str) -> None:
        # gloo's own timeout expires first, so that no broadcast is left in its threads. NCCL has only this one.
        limit_s = self._channel.limit_s + (0 if self._nccl else 5)
        waits.work(
            work, communicator=self._channel.name, operation="broadcast", why=what, timeout_s=limit_s,
            notice_after_s=None,
        )  # fmt: skip


@contextlib.contextmanager
def broadcast_errors(channel: StreamChannel, peer: str) -> Iterator[None]:
    """Converts torch's errors to LinkFailed."""
    try:
        yield
    except WeightsError:
        raise
    except (WaitTimeout, dist.DistError) as error:
        raise LinkFailed(channel.name, peer, str(error)) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # gloo raises plain ones; a subclass is an error of another kind
            raise
        raise LinkFailed(channel.name, peer, str(error)) from error
