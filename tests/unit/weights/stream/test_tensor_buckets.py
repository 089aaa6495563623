"""Buckets contain every tensor once and are limited in size; their trailers reveal memory that is not what was sent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.weights.errors import TornWeights
from lockstep.weights.stream.channel import StreamChannel
from lockstep.weights.stream.tensor_buckets import (
    TensorBucket,
    bytes_with_trailer,
    cut_buckets,
    stream_digest,
    tensor_checksum,
    verify_trailer,
    write_trailer,
)
from lockstep.weights.stream.weight_stream import bucket_views, fill_bucket
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.write_records import sample_ranges

SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 30), st.integers(1, 50))),
    min_size=1, max_size=12,
)  # fmt: skip
TYPES = ("float32", "bfloat16", "float64")


@given(SHAPES, st.integers(1, 4000), st.integers(1, 3))
def test_tensors_of_a_bucket_equal_the_rows_that_filled_it(
    shapes: list[tuple[int, ...]], limit: int, ranks: int
) -> None:
    plan = WeightPlan.of((f"t{n}", shape, TYPES[n % 3]) for n, shape in enumerate(shapes))
    tensors = {entry.name: torch.randn(entry.shape).to(entry.torch_dtype) for entry in plan.entries}
    buckets = cut_buckets(plan, limit)
    assert [entry for bucket in buckets for entry in bucket.entries] == list(plan.entries)
    assert all(bucket.nbytes <= limit or len(bucket.entries) == 1 for bucket in buckets)
    found = {}
    for bucket in buckets:
        pieces = {}
        for entry in bucket.entries:
            raw = tensors[entry.name].contiguous().view(-1).view(torch.uint8)
            chunk = -(-entry.rows // ranks) * entry.row_bytes
            pieces[entry.name] = [raw[rank * chunk : (rank + 1) * chunk] for rank in range(ranks)]
        buffer = torch.full((bytes_with_trailer(bucket),), 77, dtype=torch.uint8)
        fill_bucket(buffer, bucket, pieces)
        write_trailer(buffer, bucket, 3, 5, "complete")
        verify_trailer(buffer, bucket, 3, 5, "complete")
        found |= dict(bucket_views(buffer, bucket))
    assert list(found) == [entry.name for entry in plan.entries]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def one_lot() -> tuple[TensorBucket, torch.Tensor]:
    plan = WeightPlan.of([("a", (100, 50), "float32"), ("b", (3,), "float32")])
    (bucket,) = cut_buckets(plan, 1 << 20)
    buffer = torch.arange(bytes_with_trailer(bucket)).to(torch.uint8)
    write_trailer(buffer, bucket, 3, 5, "sampled")
    return bucket, buffer


@pytest.mark.parametrize(
    "stale", [{"channel": 2}, {"version": 4}, {"bucket": 1}, {"byte": 0}, {"byte": 20_011}, {"blank": True}],
    ids=["another-channel", "an-older-version", "another-bucket", "first-byte", "last-byte", "never-received"],
)  # fmt: skip
def test_memory_with_another_bucket_is_refused(stale: dict[str, int]) -> None:
    bucket, buffer = one_lot()
    verify_trailer(buffer, bucket, 3, 5, "sampled")
    if "byte" in stale:
        buffer[stale["byte"]] += 1
    if "blank" in stale:
        buffer.zero_()
    other = TensorBucket(stale.get("bucket", 0), bucket.entries)
    with pytest.raises(TornWeights, match="from a on"):
        verify_trailer(buffer, other, stale.get("channel", 3), stale.get("version", 5), "sampled")


@pytest.mark.parametrize("size", [1, 12_287, 12_289, (4 << 20) + 5, 9 << 20])
def test_samples_are_within_the_bytes_and_include_both_ends(size: int) -> None:
    found = sample_ranges(size)
    assert found[0][0] == 0 and found[-1][1] == size
    assert all(0 <= start < end <= size for start, end in found)
    assert sum(end - start for start, end in found) <= 3 * 4096 * (1 + size // (4 << 20)) + 3 * 4096
    data = torch.zeros(size, dtype=torch.uint8)
    before = tensor_checksum(data, "sampled")
    data[-1] = 1
    assert tensor_checksum(data, "sampled") != before and tensor_checksum(data, "none") == 0


def test_missing_and_surplus_rows_are_refused() -> None:
    bucket, buffer = one_lot()
    rows = torch.zeros(4 * 50 * 99, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"a: 200 bytes of \[100, 50\] were not gathered"):
        fill_bucket(buffer, bucket, {"a": [rows], "b": [rows[:12]]})
    with pytest.raises(ValueError, match="a: more rows"):
        fill_bucket(buffer, bucket, {"a": [rows, rows], "b": [rows[:12]]})


def test_both_sides_agree_on_tensors_buckets_and_checksums() -> None:
    plan, other = WeightPlan.of([("a", (2,), "float32")]), WeightPlan.of([("a", (2,), "bfloat16")])
    agreements = {
        stream_digest(plan, 10, "sampled"),
        stream_digest(other, 10, "sampled"),
        stream_digest(plan, 11, "sampled"),
    }
    assert len(agreements | {stream_digest(plan, 10, "complete")}) == 4


def test_every_worker_of_an_engine_is_a_member_of_the_channel() -> None:
    channel = StreamChannel(1, "nccl", "nccl", "tcp://here:1", "gen1", ("e0", "e1"), width=2)
    assert channel.members == ["e0/0", "e0/1", "e1/0", "e1/1"]
    told = channel.where("e1", "{}")
    assert told["engine"] == "e1" and StreamChannel.of(told["channel"]) == channel
