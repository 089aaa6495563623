"""A gloo communicator of two, sender and receiver, for one transfer: broadcasts in one order, each one bounded.

A pair of its own for every link is why a receiver that fails or stands still costs the others nothing: nobody waits
for two peers. Broadcast and not send, because torch's flight recorder sees no sends of gloo.
"""

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from lockstep.watch import recorder, waits
from lockstep.watch.waits import WaitTimeout
from lockstep.weights.api import Link
from lockstep.weights.errors import LinkFailed
from lockstep.weights.links import Moved
from lockstep.weights.parcels import Parcel, gathered, size, spread

DEPTH = 3
"""Parcels on their way at once: while one is checked or copied, the next travels."""


def prepare(scope: str) -> None:
    """Once in a process: its communicators are recorded from here on. Torch wants a default one before any other."""
    recorder.install(links=True, scope=scope)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


class GlooLink:
    """Either end of a link; implements `Outlet` and `Inlet`.

    Args:
        limit_s: bound of one broadcast. To come together the ends get half of it, so that who waits in vain for one
            that was lost has time left for another.

    Raises:
        LinkFailed: the peer did not come.
    """

    def __init__(self, store: Store, link: Link, sender: bool, limit_s: float) -> None:
        self._link, self._limit_s, self._sender = link, limit_s, sender
        self._peer = link.receiver if sender else link.sender
        meeting = PrefixStore(f"{link.number}/gloo", store)
        with (
            waits.waiting("rendezvous", f"courier of {self._peer}", link.name, limit_s / 2),
            _failing(link, self._peer),
        ):
            self._group, _ = c10d._new_process_group_helper(
                2, 0 if sender else 1, [], "gloo", meeting,
                group_name=c10d.GroupName(f"weights-{link.number}"), timeout=timedelta(seconds=limit_s / 2),
                group_desc=link.name,
            )  # fmt: skip
            c10d._set_pg_timeout(timedelta(seconds=limit_s), self._group)
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}

    def send(self, header: bytes, cut: Sequence[Parcel], memory: memoryview, moved: Moved) -> None:
        with _failing(self._link, self._peer):
            self._finish(self._issue(torch.tensor([len(header)])), "header")
            self._finish(self._issue(_tensor(memoryview(header))), "header")
            staging = self._staging(cut)
            under_way: deque[tuple[dist.Work | None, int]] = deque()
            for number, parcel in enumerate(cut):
                if len(under_way) == DEPTH:
                    self._done(*under_way.popleft(), moved)
                piece = gathered(parcel, memory, staging[number % len(staging)])
                under_way.append((self._issue(_tensor(piece)), len(piece)))
            while under_way:
                self._done(*under_way.popleft(), moved)

    def header(self) -> bytes:
        with _failing(self._link, self._peer):
            length = torch.zeros(1, dtype=torch.int64)
            self._finish(self._issue(length), "header")
            body = torch.empty(int(length), dtype=torch.uint8)
            self._finish(self._issue(body), "header")
            return bytes(body.numpy())

    def receive(self, cut: Sequence[Parcel], memory: memoryview, moved: Moved) -> None:
        with _failing(self._link, self._peer):
            staging = self._staging(cut)
            under_way: deque[tuple[dist.Work | None, Parcel, memoryview]] = deque()
            for number, parcel in enumerate(cut):
                if len(under_way) == DEPTH:
                    self._placed(*under_way.popleft(), memory, moved)
                piece = _place(parcel, memory, staging[number % len(staging)])
                under_way.append((self._issue(_tensor(piece)), parcel, piece))
            while under_way:
                self._placed(*under_way.popleft(), memory, moved)

    def close(self) -> None:
        """Ends the communicator; what is on its way is lost."""
        dist.destroy_process_group(self._group)

    def _issue(self, tensor: Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
        return work

    def _finish(self, work: dist.Work | None, what: str) -> None:
        # The communicator's own bound comes first, and leaves no broadcast behind in gloo's threads.
        waits.work(
            work, communicator=self._link.name, operation="broadcast", why=what, timeout_s=self._limit_s + 5,
            notice_after_s=None,
        )  # fmt: skip

    def _done(self, work: dist.Work | None, count: int, moved: Moved) -> None:
        self._finish(work, "weights")
        moved(count)

    def _placed(
        self, work: dist.Work | None, parcel: Parcel, piece: memoryview, memory: memoryview, moved: Moved
    ) -> None:
        self._finish(work, "weights")
        spread(parcel, piece, memory)
        moved(size(parcel))

    def _staging(self, cut: Sequence[Parcel]) -> list[memoryview]:
        """Room for what is copied together, as long as it is under way."""
        largest = max((size(parcel) for parcel in cut if len(parcel) > 1), default=0)
        return [memoryview(bytearray(largest)) for _ in range(DEPTH + 1)]


def _place(parcel: Parcel, memory: memoryview, staging: memoryview) -> memoryview:
    """Where a parcel is received: where it belongs, or in one piece beside it."""
    return memory[parcel[0].start : parcel[0].end] if len(parcel) == 1 else staging[: size(parcel)]


def _tensor(piece: memoryview) -> Tensor:
    with warnings.catch_warnings():
        # torch warns that the memory is read-only: nobody writes what is sent.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(piece, dtype=torch.uint8)


@contextlib.contextmanager
def _failing(link: Link, peer: str) -> Iterator[None]:
    """What torch raises, as an error that names the peer."""
    try:
        yield
    except (WaitTimeout, dist.DistError) as error:
        raise LinkFailed(link.name, peer, str(error)) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise LinkFailed(link.name, peer, str(error)) from error
