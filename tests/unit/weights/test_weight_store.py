"""The store in one process: versions, generations, gaps, checksums, leases, room."""

import os
import shutil
from dataclasses import dataclass

import pytest
import torch

from lockstep.base.wait_state import WaitTimeout
from lockstep.weights import store_files
from lockstep.weights.errors import (
    IncompleteWeights,
    NoRoom,
    NoStore,
    PlanMismatch,
    StaleVersion,
    StaleWriter,
    TornWeights,
)
from lockstep.weights.shared_memory_transport import StoreReader
from lockstep.weights.store_files import ControlBlock
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore


@dataclass
class Shard:
    name: str
    offset: int
    tensor: torch.Tensor
    constant: bool = False


TENSORS = {"embed": torch.randn(11, 5), "norm": torch.randn(5), "scale": torch.randn(()), "big": torch.randn(900, 70)}
PLAN = WeightPlan.of((name, tensor.shape, tensor.dtype) for name, tensor in TENSORS.items())


def part(rank, add=0.0):
    """Shards of two ranks: each has half of the rows, as with FSDP2, and rank 0 has the scalar."""
    for name, tensor in TENSORS.items():
        if not tensor.ndim:
            if rank == 0:
                yield Shard(name, 0, tensor + add)
            continue
        chunk = -(-len(tensor) // 2)
        yield Shard(name, rank * chunk, tensor[rank * chunk : (rank + 1) * chunk] + add)


def publish(store, version, add=0.0, complete=False):
    for rank in (0, 1):
        store.write_shards(rank, version, part(rank, add), complete=complete)
    store.commit(version)


def test_readers_get_what_was_written(tmp_path):
    store = WeightStore.create(tmp_path / "w", PLAN, writers=2)
    assert store.version() is None
    with pytest.raises(StaleVersion, match="nothing was published"), store.reading():
        pass
    reader = StoreReader("complete")
    for version in range(4):
        publish(store, version, add=float(version), complete=version % 2 == 0)
        with reader(tmp_path / "w", version) as tensors:
            assert set(tensors) == set(TENSORS)
            for name, tensor in TENSORS.items():
                assert torch.equal(tensors[name], tensor + float(version))
    with pytest.raises(StaleVersion, match=r"version 9 .* has version 3"), reader(tmp_path / "w", 9):
        pass
    del tensors
    store.close()


def test_constant_tensors_are_copied_once_into_each_buffer(tmp_path):
    store = WeightStore.create(tmp_path, PLAN, writers=2, generation=1)

    def frozen(rank, add, value=None):
        for shard in part(rank, add):
            constant = shard.name in ("big", "scale")
            tensor = shard.tensor if not constant or value is None else torch.full_like(shard.tensor, value)
            yield Shard(shard.name, shard.offset, tensor - (add if constant and value is None else 0), constant)

    def publish_frozen(version, value=None):
        for rank in (0, 1):
            store.write_shards(rank, version, frozen(rank, float(version), value), complete=True)
        store.commit(version)

    publish_frozen(0)
    publish_frozen(1)
    for version in (2, 3):  # what is given as constant is not looked at any more, and still checked by readers
        publish_frozen(version, value=7.0)
        with store.reading(version, "complete") as weights:
            assert torch.equal(weights.tensors["embed"], TENSORS["embed"] + float(version))
            torch.testing.assert_close(weights.tensors["big"], TENSORS["big"], atol=1e-5, rtol=0)
    del weights
    store.close()
    later = WeightStore.create(tmp_path, PLAN, writers=2, generation=2)
    for rank in (0, 1):  # another generation believes nothing
        later.write_shards(rank, 4, frozen(rank, 4.0, value=7.0))
    later.commit(4)
    with later.reading(4) as weights:
        assert torch.equal(weights.tensors["big"], torch.full_like(TENSORS["big"], 7.0))
    del weights
    later.close()


def test_casts_to_the_plans_precision(tmp_path):
    plan = WeightPlan.of((name, tensor.shape, "bfloat16") for name, tensor in TENSORS.items())
    store = WeightStore.create(tmp_path, plan, writers=2)
    publish(store, 1)
    with store.reading(1, "complete") as weights:
        for name, tensor in TENSORS.items():
            assert torch.equal(weights.tensors[name], tensor.bfloat16())


def test_a_version_is_committed_only_if_it_is_complete(tmp_path):
    store = WeightStore.create(tmp_path, PLAN, writers=2)
    publish(store, 1)
    store.write_shards(0, 2, part(0, 1.0))
    with pytest.raises(IncompleteWeights, match="rank 1: has not finished writing") as caught:
        store.commit(2)
    assert caught.value.problems.keys() == {"rank 1"}
    store.write_shards(1, 2, [shard for shard in part(1, 1.0) if shard.name != "big"])
    with pytest.raises(IncompleteWeights, match=r"big: bytes 126000 to 252000 were written by no rank"):
        store.commit(2)
    store.write_shards(1, 2, part(0, 1.0))
    with pytest.raises(IncompleteWeights, match="written twice"):
        store.commit(2)
    with store.reading(1) as weights:
        assert torch.equal(weights.tensors["big"], TENSORS["big"])
    store.write_shards(1, 2, part(1, 1.0))
    store.commit(2)
    with store.reading(2) as weights:
        assert torch.equal(weights.tensors["big"], TENSORS["big"] + 1.0)


def test_a_record_of_another_version_is_not_used(tmp_path):
    store = WeightStore.create(tmp_path, PLAN, writers=2)
    store.write_shards(0, 1, part(0))
    store.write_shards(1, 2, part(1))
    with pytest.raises(IncompleteWeights, match="rank 1: wrote version 2"):
        store.commit(1)
    with pytest.raises(IncompleteWeights, match="rank 0: wrote version 1"):
        store.commit(2)


def test_publishing_again_changes_nothing(tmp_path):
    store = WeightStore.create(tmp_path, PLAN, writers=2)
    publish(store, 3)
    before = store.control.newest()
    publish(store, 3, add=5.0)
    assert store.control.newest() == before
    with store.reading(3) as weights:
        assert torch.equal(weights.tensors["norm"], TENSORS["norm"])
    with pytest.raises(StaleVersion):
        store.commit(2)
    with pytest.raises(StaleVersion):
        store.write_shards(0, 2, part(0))


def test_an_older_generation_is_refused_and_a_newer_one_may_write_older_versions(tmp_path):
    old = WeightStore.create(tmp_path, PLAN, writers=2, generation=1)
    publish(old, 7)
    old.write_shards(0, 8, part(0))
    new = WeightStore.create(tmp_path, PLAN, writers=2, generation=2)
    with new.reading(7) as weights:  # still served until the new one publishes
        assert weights.generation == 1
    with pytest.raises(StaleWriter, match=r"generation 1 .* generation 2 has taken over"):
        old.write_shards(1, 8, part(1))
    with pytest.raises(StaleWriter):
        old.commit(8)
    with pytest.raises(StaleWriter):
        WeightStore.create(tmp_path, PLAN, writers=2, generation=1)
    publish(new, 5, add=2.0)
    with new.reading(5) as weights:
        assert weights.generation == 2


def test_another_plan_is_refused(tmp_path):
    WeightStore.create(tmp_path, PLAN, writers=2)
    other = WeightPlan.of([("embed", (11, 6), torch.float32)])
    with pytest.raises(PlanMismatch):
        WeightStore.open(tmp_path, other)
    store = WeightStore.open(tmp_path, PLAN, generation=1)
    with pytest.raises(PlanMismatch, match="other is not in the plan"):
        store.write_shards(0, 1, [Shard("other", 0, torch.zeros(2))])
    with pytest.raises(PlanMismatch, match=r"embed is \[11, 5\] in the plan, a rank has rows 8 to 12"):
        store.write_shards(0, 1, [Shard("embed", 8, torch.zeros(4, 5))])
    with pytest.raises(ValueError, match="rank: 2"):
        store.write_shards(2, 1, [])
    with pytest.raises(ValueError, match="opened for reading"):
        WeightStore.open(tmp_path).commit(1)


@pytest.mark.parametrize(
    ("check", "at", "caught"), [("sampled", 0, True), ("sampled", 5000, False), ("complete", 5000, True)]
)
def test_changed_bytes_are_detected(tmp_path, check, at, caught):
    store = WeightStore.create(tmp_path, PLAN, writers=2)
    publish(store, 1, complete=True)
    commit, big = store.control.newest(), PLAN.entries[PLAN.index["big"]]
    with (tmp_path / f"buffer-{commit.buffer}").open("r+b") as file:
        file.seek(big.offset + at)
        byte = file.read(1)[0]
        file.seek(big.offset + at)
        file.write(bytes([byte ^ 255]))
    if not caught:  # the samples of a large bucket are its beginning, middle and end
        with store.reading(1, check):
            return
    with pytest.raises(TornWeights, match="big, bytes 0") as error, store.reading(1, check):
        pass
    assert error.value.tensor == "big"


def test_a_torn_commit_record_leaves_the_older_version(tmp_path):
    store = WeightStore.create(tmp_path, PLAN, writers=2)
    publish(store, 1)
    publish(store, 2)
    newest = store.control.newest()
    with (tmp_path / "control").open("r+b") as file:
        file.seek((192, 256)[newest.sequence % 2] + 3)
        file.write(b"\xff")
    assert WeightStore.open(tmp_path).version() == 1


def test_a_writer_waits_for_readers_and_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(store_files, "FENCE_TIMEOUT_S", 0.2)
    store = WeightStore.create(tmp_path, PLAN, writers=2)
    publish(store, 1)
    with store.reading(1) as weights:
        publish(store, 2, add=1.0)  # goes into the other buffer
        assert torch.equal(weights.tensors["big"], TENSORS["big"])
        with pytest.raises(WaitTimeout, match=f"pid {os.getpid()}"):
            store.write_shards(0, 3, part(0, 2.0))
        assert torch.equal(weights.tensors["big"], TENSORS["big"])
    publish(store, 3, add=2.0)
    assert store.version() == 3


def test_missing_room_is_reported_before_files_are_created(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    plan = WeightPlan.of([("huge", (usage.free // 4,), "float32")])
    with pytest.raises(NoRoom, match=r"two buffers .* need") as caught:
        WeightStore.create(tmp_path / "w", plan, writers=1)
    assert caught.value.needed == 2 * plan.nbytes and caught.value.available < caught.value.needed
    assert list((tmp_path / "w").iterdir()) == []


def test_a_folder_without_a_store(tmp_path):
    with pytest.raises(NoStore, match="no weight store"):
        WeightStore.open(tmp_path)
    (tmp_path / "control").write_bytes(b"x" * 4096)
    with pytest.raises(NoStore, match="damaged"):
        ControlBlock(tmp_path / "control", writable=False)
