"""The protocol between the two relays of a link: the handshake, and how a version is cut into chunks.

Names of keys contain link and relay. The receiver announces the digest of its plan and the version it has. The sender
answers with the same digest, or with its own plan if the plans differ. Both sides cut chunks by the same pure
functions.
"""

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from torch._C._distributed_c10d import Store

from lockstep.base import waits
from lockstep.weights.distributed_setup import STORE_CONNECT_S, wait_for_key
from lockstep.weights.errors import LinkFailed, PlanMismatch
from lockstep.weights.relay.relay_api import RelayLink
from lockstep.weights.weight_plan import ALIGNMENT, WeightPlan
from lockstep.weights.write_records import WriteRecord


@dataclass(frozen=True, slots=True)
class RelayReceiverInfo:
    """The announcement of a receiver."""

    digest: str
    """Digest of its plan."""
    generation: int = 0
    """Generation of the version that the receiver has."""
    version: int | None = None
    """The version that the receiver has; None if a transfer must send all chunks."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def handshake_with_receiver(store: Store, link: RelayLink, plan: WeightPlan, limit_s: float) -> RelayReceiverInfo:
    """The sender's part of the handshake: waits for the receiver. Raises PlanMismatch, and LinkFailed if there is no
    announcement in time."""
    waits_for = f"relay of {link.receiver}"
    raw = wait_for_key(
        store, f"{link.number}/receiver/{link.receiver}", link.name, link.receiver, waits_for, stall_s=limit_s
    )
    info = RelayReceiverInfo(**json.loads(raw))
    if info.digest == plan.digest:
        store.set(f"{link.number}/sender/{link.sender}", json.dumps({"digest": plan.digest}))
        return info
    store.set(f"{link.number}/sender/{link.sender}", json.dumps({"digest": plan.digest, "plan": plan.to_json()}))
    raise PlanMismatch(f"the relay of {link.receiver} has another plan", plan.digest, info.digest)


def refuse_transfer(store: Store, link: RelayLink, why: str) -> None:
    """Reports to the receiver that the sender cannot send, before or after the handshake, so that it does not wait."""
    store.set(f"{link.number}/refused", why)
    store.compare_set(f"{link.number}/sender/{link.sender}", "", json.dumps({"refused": why}))


def refusal_reason(store: Store, link: RelayLink) -> str:
    """Returns why the sender refuses; empty if it does not."""
    return (_read_sender_key(store, link, "refused") or b"").decode()


def report_preparing(store: Store, link: RelayLink, count: int) -> None:
    """Reports the sender's progress before the handshake."""
    store.set(f"{link.number}/busy", str(count))


def handshake_with_sender(
    store: Store, link: RelayLink, plan: WeightPlan, info: RelayReceiverInfo, limit_s: float
) -> None:
    """The receiver's part of the handshake. Raises PlanMismatch, which names the first tensor that differs, and
    LinkFailed."""
    store.set(f"{link.number}/receiver/{link.receiver}", json.dumps(asdict(info)))
    raw = wait_for_key(
        store, f"{link.number}/sender/{link.sender}", link.name, link.sender, f"relay of {link.sender}",
        stall_s=limit_s, progress=lambda: _read_sender_key(store, link, "busy"),
    )  # fmt: skip
    answer = json.loads(raw)
    if "refused" in answer:
        raise LinkFailed(link.name, link.sender, answer["refused"])
    if "plan" in answer:
        WeightPlan.from_json(answer["plan"]).check(plan)


def delete_link_keys(store: Store, link: RelayLink) -> None:
    """Deletes the link's keys, including those of its gloo rendezvous."""
    for key in store.list_keys():
        if key.startswith(f"{link.number}/"):
            store.delete_key(key)


def _read_sender_key(store: Store, link: RelayLink, what: str) -> bytes | None:
    """Returns the value of a key of the sender; None if it is not set."""
    key = f"{link.number}/{what}"
    if not store.check([key]):
        return None
    return waits.store_get(store, key, waits_for="the store", why=f"{link.name}: {what}", timeout_s=STORE_CONNECT_S)


SMALL_RANGE_BYTES = 256 << 10
"""Ranges with fewer bytes are sent together in one chunk."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Contiguous bytes of a buffer."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


Chunk = tuple[ByteRange, ...]
"""Bytes that are sent at once: one range, directly from memory, or several ranges, which are copied together first."""


def cut_chunks(plan: WeightPlan, records: Sequence[WriteRecord], limit: int) -> list[Chunk]:
    """Cuts everything that `records` describe into chunks of at most `limit` bytes, in the order of the buffer.
    Includes padding between tensors."""
    pieces = []
    for record in records:
        for block in record.blocks:
            entry = plan.entries[block.entry]
            end = block.start + block.length
            # Padding follows the end of a tensor; the rows of another rank follow the end of a rank's rows.
            padded = entry.offset + (-(-end // ALIGNMENT) * ALIGNMENT if end == entry.nbytes else end)
            pieces.append((entry.offset + block.start, block.length, padded))
    return list(_group_ranges(_split_ranges(_merge_ranges(sorted(pieces)), limit), limit))


def chunk_bytes(chunk: Chunk) -> int:
    """Returns the number of bytes of a chunk."""
    return sum(span.length for span in chunk)


def pack_chunk(chunk: Chunk, memory: memoryview, staging: memoryview) -> memoryview:
    """Returns the bytes of a chunk as one piece: a view of `memory`, or copied into `staging`."""
    if len(chunk) == 1:
        return memory[chunk[0].start : chunk[0].end]
    at = 0
    for span in chunk:
        staging[at : at + span.length] = memory[span.start : span.end]
        at += span.length
    return staging[:at]


def unpack_chunk(chunk: Chunk, piece: memoryview, memory: memoryview) -> None:
    """Copies a received chunk to its ranges. A chunk of one range was received in place."""
    at = 0
    for span in chunk if len(chunk) > 1 else ():
        memory[span.start : span.end] = piece[at : at + span.length]
        at += span.length


def chunk_digest(chunk: Chunk, memory: memoryview) -> bytes:
    """Returns the sha256 of a chunk. A crc32 would not suffice, because the digest decides whether a chunk is sent."""
    digest = hashlib.sha256()
    for span in chunk:
        digest.update(memory[span.start : span.end])
    return digest.digest()


def changed_chunks(before: Sequence[bytes] | None, now: Sequence[bytes]) -> list[int]:
    """Returns the positions of the chunks whose digests differ from those of the receiver (`before`); all positions if
    the two cannot be compared."""
    if before is None or len(before) != len(now):
        return list(range(len(now)))
    return [position for position, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]


def _merge_ranges(pieces: Iterable[tuple[int, int, int]]) -> Iterator[ByteRange]:
    """Merges contiguous pieces. Each is (start, length, end with padding)."""
    start = end = end_with_padding = -1
    for at, length, padded in pieces:
        if at != end_with_padding and start >= 0:
            yield ByteRange(start, end - start)
        if at != end_with_padding:
            start = at
        end, end_with_padding = at + length, padded
    if start >= 0:
        yield ByteRange(start, end - start)


def _split_ranges(spans: Iterable[ByteRange], limit: int) -> Iterator[ByteRange]:
    for span in spans:
        for at in range(span.start, span.end, limit):
            yield ByteRange(at, min(limit, span.end - at))


def _group_ranges(spans: Iterable[ByteRange], limit: int) -> Iterator[Chunk]:
    together: list[ByteRange] = []
    for span in spans:
        small = span.length < min(SMALL_RANGE_BYTES, limit)
        if together and (not small or chunk_bytes(tuple(together)) + span.length > limit):
            yield tuple(together)
            together = []
        if small:
            together.append(span)
        else:
            yield (span,)
    if together:
        yield tuple(together)
