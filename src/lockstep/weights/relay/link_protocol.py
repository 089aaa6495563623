"""What the two relays of a link agree on: the handshake, and how a version is cut into chunks.

Keys are named by link and relay. The receiver announces itself with its plan's digest and the version it has; the
sender consents, or answers with its own plan where the two differ. Chunks are cut by pure functions, the same on
both sides.
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
    """What a receiver announces."""

    digest: str
    """Digest of its plan."""
    generation: int = 0
    """Generation of the version it has."""
    version: int | None = None
    """None if it has no version that a transfer could build upon."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def handshake_with_receiver(store: Store, link: RelayLink, plan: WeightPlan, limit_s: float) -> RelayReceiverInfo:
    """The sender's side: waits for the receiver. Raises PlanMismatch, and LinkFailed if no receiver came."""
    waits_for = f"relay of {link.receiver}"
    raw = wait_for_key(
        store, f"{link.number}/receiver/{link.receiver}", link.name, link.receiver, waits_for, stall_s=limit_s
    )
    card = RelayReceiverInfo(**json.loads(raw))
    if card.digest == plan.digest:
        store.set(f"{link.number}/sender/{link.sender}", json.dumps({"digest": plan.digest}))
        return card
    store.set(f"{link.number}/sender/{link.sender}", json.dumps({"digest": plan.digest, "plan": plan.to_json()}))
    raise PlanMismatch(f"the relay of {link.receiver} has another plan", plan.digest, card.digest)


def refuse_transfer(store: Store, link: RelayLink, why: str) -> None:
    """Tells the receiver that the sender cannot send, before or after the handshake, so that it does not wait."""
    store.set(f"{link.number}/refused", why)
    store.compare_set(f"{link.number}/sender/{link.sender}", "", json.dumps({"refused": why}))


def refusal_reason(store: Store, link: RelayLink) -> str:
    """Why the sender refuses; empty if it does not."""
    return (_read_sender_key(store, link, "refused") or b"").decode()


def report_preparing(store: Store, link: RelayLink, count: int) -> None:
    """Reports the sender's progress in what it does before the handshake."""
    store.set(f"{link.number}/busy", str(count))


def handshake_with_sender(
    store: Store, link: RelayLink, plan: WeightPlan, card: RelayReceiverInfo, limit_s: float
) -> None:
    """The receiver's side. Raises PlanMismatch, which names the first tensor that differs, and LinkFailed."""
    store.set(f"{link.number}/receiver/{link.receiver}", json.dumps(asdict(card)))
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
    """The value of a key of the sender, if it is set."""
    key = f"{link.number}/{what}"
    if not store.check([key]):
        return None
    return waits.store_get(store, key, waits_for="the store", why=f"{link.name}: {what}", timeout_s=STORE_CONNECT_S)


SMALL_RANGE_BYTES = 256 << 10
"""Bytes. Shorter ranges are sent together in one chunk."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Contiguous bytes of a buffer."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


Chunk = tuple[ByteRange, ...]
"""What is sent at once: one range, directly from memory, or several, copied together first."""


def cut_chunks(plan: WeightPlan, records: Sequence[WriteRecord], limit: int) -> list[Chunk]:
    """Everything that the writers of `records` wrote, in the order of the buffer, cut into chunks of `limit` bytes at
    most. Padding between tensors is included."""
    pieces = []
    for record in records:
        for block in record.blocks:
            entry = plan.entries[block.entry]
            end = block.start + block.length
            # After the end of a tensor comes padding; after the end of a rank's rows come those of another rank.
            padded = entry.offset + (-(-end // ALIGNMENT) * ALIGNMENT if end == entry.nbytes else end)
            pieces.append((entry.offset + block.start, block.length, padded))
    return list(_group_ranges(_split_ranges(_merge_ranges(sorted(pieces)), limit), limit))


def chunk_bytes(chunk: Chunk) -> int:
    """Bytes."""
    return sum(run.length for run in chunk)


def pack_chunk(chunk: Chunk, memory: memoryview, staging: memoryview) -> memoryview:
    """The chunk's bytes in one piece: those of `memory` itself, or copied into `staging`."""
    if len(chunk) == 1:
        return memory[chunk[0].start : chunk[0].end]
    at = 0
    for run in chunk:
        staging[at : at + run.length] = memory[run.start : run.end]
        at += run.length
    return staging[:at]


def unpack_chunk(chunk: Chunk, piece: memoryview, memory: memoryview) -> None:
    """Copies a received chunk to its ranges. A chunk of one range was received in place already."""
    at = 0
    for run in chunk if len(chunk) > 1 else ():
        memory[run.start : run.end] = piece[at : at + run.length]
        at += run.length


def chunk_digest(chunk: Chunk, memory: memoryview) -> bytes:
    """sha256 of a chunk. It decides whether bytes are sent at all, so 32 bits would not do."""
    whole = hashlib.sha256()
    for run in chunk:
        whole.update(memory[run.start : run.end])
    return whole.digest()


def changed_chunks(before: Sequence[bytes] | None, now: Sequence[bytes]) -> list[int]:
    """Positions of the chunks that differ from `before`, the receiver's; all if the two cannot be compared."""
    if before is None or len(before) != len(now):
        return list(range(len(now)))
    return [position for position, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]


def _merge_ranges(pieces: Iterable[tuple[int, int, int]]) -> Iterator[ByteRange]:
    """Merges contiguous pieces, each (start, length, end with padding)."""
    start = end = reach = -1
    for at, length, padded in pieces:
        if at != reach and start >= 0:
            yield ByteRange(start, end - start)
        if at != reach:
            start = at
        end, reach = at + length, padded
    if start >= 0:
        yield ByteRange(start, end - start)


def _split_ranges(runs: Iterable[ByteRange], limit: int) -> Iterator[ByteRange]:
    for run in runs:
        for at in range(run.start, run.end, limit):
            yield ByteRange(at, min(limit, run.end - at))


def _group_ranges(runs: Iterable[ByteRange], limit: int) -> Iterator[Chunk]:
    together: list[ByteRange] = []
    for run in runs:
        small = run.length < min(SMALL_RANGE_BYTES, limit)
        if together and (not small or chunk_bytes(tuple(together)) + run.length > limit):
            yield tuple(together)
            together = []
        if small:
            together.append(run)
        else:
            yield (run,)
    if together:
        yield tuple(together)
