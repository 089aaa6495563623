"""How versions are cut for the way: every byte once, whatever the shapes, ranks and sizes."""

import itertools
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.weights.buckets import Bucket, Mark
from lockstep.weights.parcels import Parcel, changed, digest, gathered, parcels, size, spread
from lockstep.weights.plan import Plan

SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 700)),
        st.tuples(st.integers(1, 90), st.integers(1, 300)),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


def digests(cut: list[Parcel], memory: memoryview) -> list[bytes]:
    return [digest(parcel, memory) for parcel in cut]


def marks_of(plan: Plan, ranks: int) -> list[Mark]:
    """As FSDP2 shards: chunks of ceil(rows / ranks), one bucket each."""
    marks = []
    for rank in range(ranks):
        buckets = []
        for position, entry in enumerate(plan.entries):
            chunk = -(-entry.rows // ranks) if entry.shape else 1
            first, last = min(rank * chunk, entry.rows), min((rank + 1) * chunk, entry.rows)
            if last > first and entry.nbytes:
                buckets.append(Bucket(position, first * entry.row_bytes, (last - first) * entry.row_bytes, 0, None))
        marks.append(Mark(rank, 1, 1, plan.digest, tuple(buckets)))
    return marks


def owned(plan: Plan, marks: list[Mark]) -> set[int]:
    """Every byte of the buffer that these ranks wrote."""
    return {
        byte
        for mark in marks
        for bucket in mark.buckets
        for byte in range(
            plan.entries[bucket.entry].offset + bucket.start,
            plan.entries[bucket.entry].offset + bucket.start + bucket.length,
        )
    }


@given(SHAPES, st.integers(1, 5), st.integers(1, 400_000), st.sampled_from(["float32", "bfloat16"]), st.data())
def test_every_byte_travels_once(
    shapes: list[tuple[int, ...]], ranks: int, limit: int, dtype: str, data: st.DataObject
) -> None:
    limit = max(limit, 1000)
    plan = Plan.of((f"t{number:02}", shape, dtype) for number, shape in enumerate(shapes))
    marks = marks_of(plan, ranks)
    some = data.draw(st.lists(st.sampled_from(marks), min_size=1, unique_by=lambda mark: mark.rank))
    cut = parcels(plan, some, limit)
    assert cut == parcels(plan, list(reversed(some)), limit), "both sides cut alike"
    assert all(0 < size(parcel) <= limit for parcel in cut)
    runs = [run for parcel in cut for run in parcel]
    assert all(a.end <= b.start for a, b in itertools.pairwise(runs)), "in order, none twice"
    covered = {byte for run in runs for byte in range(run.start, run.end)}
    wanted = owned(plan, some)
    assert wanted <= covered
    if len(some) == ranks:
        assert covered <= set(range(plan.nbytes))
    else:
        assert not (covered - wanted) & owned(plan, marks), "nothing of ranks that were not asked for"


@given(SHAPES, st.integers(1, 4), st.integers(1000, 300_000), st.integers(0, 1000))
def test_what_is_sent_arrives_in_its_place(shapes: list[tuple[int, ...]], ranks: int, limit: int, seed: int) -> None:
    plan = Plan.of((f"t{number:02}", shape, "float32") for number, shape in enumerate(shapes))
    source = memoryview(random.Random(seed).randbytes(plan.nbytes))
    target = memoryview(bytearray(plan.nbytes))
    for mark in marks_of(plan, ranks):
        for parcel in parcels(plan, [mark], limit):
            staging = memoryview(bytearray(size(parcel)))
            piece = gathered(parcel, source, staging)
            if len(parcel) == 1:
                target[parcel[0].start : parcel[0].end] = piece
            spread(parcel, piece, target)
    for entry in plan.entries:
        assert target[entry.offset : entry.offset + entry.nbytes] == source[entry.offset : entry.offset + entry.nbytes]


def test_only_changed_parcels_are_named() -> None:
    plan = Plan.of([("a", (4000, 64), "float32")])
    cut = parcels(plan, marks_of(plan, 1), 100_000)
    memory = bytearray(random.Random(0).randbytes(plan.nbytes))
    before = digests(cut, memoryview(memory))
    memory[250_000] ^= 1
    now = digests(cut, memoryview(memory))
    assert changed(before, now) == [2]
    assert changed(before, before) == []
    assert changed(None, now) == changed(before[:-1], now) == list(range(len(cut))), "all, where nothing fits"


def test_equal_checksums_are_not_taken_for_equal_bytes() -> None:
    """A known pair with one crc32: to the digest they differ."""
    plan = Plan.of([("a", (8,), "uint8")])
    cut = parcels(plan, marks_of(plan, 1), 100)
    one, other = b"plumless", b"buckeroo"
    assert zlib.crc32(one) == zlib.crc32(other)
    assert changed(digests(cut, memoryview(one)), digests(cut, memoryview(other))) == [0]


@pytest.mark.parametrize("limit", [1 << 20, 64 << 20], ids=["1MiB", "64MiB"])
def test_a_whole_version_is_few_large_parcels(limit: int) -> None:
    plan = Plan.of((f"layer.{n:02}.{name}", shape, "float32") for n in range(40)
                   for name, shape in (("norm", (512,)), ("weight", (512, 512))))  # fmt: skip
    cut = parcels(plan, marks_of(plan, 1), limit)
    assert len(cut) == -(-plan.nbytes // limit)
    assert all(len(parcel) == 1 for parcel in cut), "sent as it lies in memory"
