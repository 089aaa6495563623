"""Versions are cut into chunks that contain every byte once, whatever the shapes, ranks and sizes."""

import itertools
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.weights.relay.link_protocol import (
    Chunk,
    changed_chunks,
    chunk_bytes,
    chunk_digest,
    cut_chunks,
    pack_chunk,
    unpack_chunk,
)
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.write_records import ChecksumBlock, WriteRecord

SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 700)),
        st.tuples(st.integers(1, 90), st.integers(1, 300)),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


def digests(cut: list[Chunk], memory: memoryview) -> list[bytes]:
    return [chunk_digest(chunk, memory) for chunk in cut]


def marks_of(plan: WeightPlan, ranks: int) -> list[WriteRecord]:
    """Shards like FSDP2: ceil(rows / ranks) rows per rank, one block each."""
    records = []
    for rank in range(ranks):
        buckets = []
        for position, entry in enumerate(plan.entries):
            chunk = -(-entry.rows // ranks) if entry.shape else 1
            first, last = min(rank * chunk, entry.rows), min((rank + 1) * chunk, entry.rows)
            if last > first and entry.nbytes:
                buckets.append(
                    ChecksumBlock(position, first * entry.row_bytes, (last - first) * entry.row_bytes, 0, None)
                )
        records.append(WriteRecord(rank, 1, 1, plan.digest, tuple(buckets)))
    return records


def owned(plan: WeightPlan, records: list[WriteRecord]) -> set[int]:
    """Returns the positions of all bytes that these ranks wrote."""
    return {
        byte
        for record in records
        for block in record.blocks
        for byte in range(
            plan.entries[block.entry].offset + block.start,
            plan.entries[block.entry].offset + block.start + block.length,
        )
    }


@given(SHAPES, st.integers(1, 5), st.integers(1, 400_000), st.sampled_from(["float32", "bfloat16"]), st.data())
def test_every_byte_is_sent_once(
    shapes: list[tuple[int, ...]], ranks: int, limit: int, dtype: str, data: st.DataObject
) -> None:
    limit = max(limit, 1000)
    plan = WeightPlan.of((f"t{number:02}", shape, dtype) for number, shape in enumerate(shapes))
    records = marks_of(plan, ranks)
    some = data.draw(st.lists(st.sampled_from(records), min_size=1, unique_by=lambda record: record.rank))
    cut = cut_chunks(plan, some, limit)
    assert cut == cut_chunks(plan, list(reversed(some)), limit), "both sides cut alike"
    assert all(0 < chunk_bytes(chunk) <= limit for chunk in cut)
    runs = [run for chunk in cut for run in chunk]
    assert all(a.end <= b.start for a, b in itertools.pairwise(runs)), "in order, none twice"
    covered = {byte for run in runs for byte in range(run.start, run.end)}
    wanted = owned(plan, some)
    assert wanted <= covered
    if len(some) == ranks:
        assert covered <= set(range(plan.nbytes))
    else:
        assert not (covered - wanted) & owned(plan, records), "nothing of ranks that were not asked for"


@given(SHAPES, st.integers(1, 4), st.integers(1000, 300_000), st.integers(0, 1000))
def test_sent_bytes_arrive_at_their_position(shapes: list[tuple[int, ...]], ranks: int, limit: int, seed: int) -> None:
    plan = WeightPlan.of((f"t{number:02}", shape, "float32") for number, shape in enumerate(shapes))
    source = memoryview(random.Random(seed).randbytes(plan.nbytes))
    target = memoryview(bytearray(plan.nbytes))
    for record in marks_of(plan, ranks):
        for chunk in cut_chunks(plan, [record], limit):
            staging = memoryview(bytearray(chunk_bytes(chunk)))
            piece = pack_chunk(chunk, source, staging)
            if len(chunk) == 1:
                target[chunk[0].start : chunk[0].end] = piece
            unpack_chunk(chunk, piece, target)
    for entry in plan.entries:
        assert target[entry.offset : entry.offset + entry.nbytes] == source[entry.offset : entry.offset + entry.nbytes]


def test_only_changed_chunks_are_listed() -> None:
    plan = WeightPlan.of([("a", (4000, 64), "float32")])
    cut = cut_chunks(plan, marks_of(plan, 1), 100_000)
    memory = bytearray(random.Random(0).randbytes(plan.nbytes))
    before = digests(cut, memoryview(memory))
    memory[250_000] ^= 1
    now = digests(cut, memoryview(memory))
    assert changed_chunks(before, now) == [2]
    assert changed_chunks(before, before) == []
    assert changed_chunks(None, now) == changed_chunks(before[:-1], now) == list(range(len(cut))), (
        "all, where nothing fits"
    )


def test_chunks_with_equal_checksums_and_other_bytes_differ() -> None:
    """A known pair of texts with the same crc32 has different digests."""
    plan = WeightPlan.of([("a", (8,), "uint8")])
    cut = cut_chunks(plan, marks_of(plan, 1), 100)
    one, other = b"plumless", b"buckeroo"
    assert zlib.crc32(one) == zlib.crc32(other)
    assert changed_chunks(digests(cut, memoryview(one)), digests(cut, memoryview(other))) == [0]


@pytest.mark.parametrize("limit", [1 << 20, 64 << 20], ids=["1MiB", "64MiB"])
def test_a_whole_version_has_few_large_chunks(limit: int) -> None:
    plan = WeightPlan.of((f"layer.{n:02}.{name}", shape, "float32") for n in range(40)
                   for name, shape in (("norm", (512,)), ("weight", (512, 512))))  # fmt: skip
    cut = cut_chunks(plan, marks_of(plan, 1), limit)
    assert len(cut) == -(-plan.nbytes // limit)
    assert all(len(chunk) == 1 for chunk in cut), "sent as it lies in memory"
