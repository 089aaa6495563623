"""Ranks and the relay of a node write into one store: each writes only into a buffer without readers."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lockstep.weights.errors import IncompleteWeights, StaleVersion
from lockstep.weights.store_files import BufferLease, lease_holders
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore
from lockstep.weights.write_records import IncomingVersion, WriteRecord, checksum_blocks

SIZE = 50_000
PLAN = WeightPlan.of([("w", (SIZE,), torch.float32)])


@dataclass
class Shard:
    tensor: torch.Tensor
    name: str = "w"
    offset: int = 0
    constant: bool = False


def write(store: WeightStore, version: int) -> None:
    store.write_shards(0, version, [Shard(torch.full((SIZE,), float(version)))])


def fill(filling: IncomingVersion, version: int, generation: int = 1) -> None:
    """Stores received bytes like a relay."""
    piece = filling.memory[: 4 * SIZE]
    piece[:] = memoryview(torch.full((SIZE,), float(version)).numpy()).cast("B")
    filling.keep(
        [WriteRecord(0, version, generation, PLAN.digest, tuple(checksum_blocks(piece, 0, 0, False)))], "sampled"
    )


def served(store: WeightStore, version: int) -> None:
    with store.reading(version, "sampled") as weights:
        assert bool((weights.tensors["w"] == float(version)).all())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[WeightStore]:
    store = WeightStore.create(tmp_path, PLAN, 1, 1)
    write(store, 1)
    store.commit(1)
    yield store
    store.close()


def waits_for(path: Path, thread: threading.Thread) -> None:
    """Waits until the thread tries to take the lock, for which it opens the file repeatedly."""
    thread.join(0.05)
    assert thread.is_alive() and path.exists() and lease_holders(path)


def test_a_rank_does_not_overwrite_what_a_relay_has_just_committed(home: WeightStore) -> None:
    rank = WeightStore.open(home.folder, PLAN, 1)
    relay = WeightStore.open(home.folder, PLAN, 1)
    writer = threading.Thread(target=write, args=(rank, 3), daemon=True)
    with relay.filling(2, [0]) as filling:
        writer.start()
        waits_for(home.folder / "buffer-1.rank-0.lock", writer)
        fill(filling, 2)
        with WeightStore.open(home.folder).reading(2, "sampled") as weights:
            assert weights.version == 2
    reader = WeightStore.open(home.folder)
    served(reader, 2)
    writer.join(20)
    assert not writer.is_alive()
    served(reader, 2)
    with rank.sending(3, [0]) as held:
        assert held.records[0].version == 3
    home.commit(3)
    served(reader, 3)


def test_a_commit_waits_for_a_writer_and_uses_its_final_records(home: WeightStore) -> None:
    write(home, 2)
    lock = BufferLease.take(home.folder / "buffer-1.rank-0.lock", exclusive=True)
    assert lock is not None
    caught: list[Exception] = []

    def commit() -> None:
        try:
            WeightStore.open(home.folder, PLAN, 1).commit(2)
        except IncompleteWeights as error:
            caught.append(error)

    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    waits_for(home.folder / "buffer-1.rank-0.lock", thread)
    (home.folder / "buffer-1.rank-0.json").unlink()  # as a writer does first
    lock.release()
    thread.join(20)
    assert len(caught) == 1 and home.version() == 1


def test_an_older_version_of_another_node_does_not_replace_a_later_one(home: WeightStore) -> None:
    write(home, 3)
    relay = WeightStore.open(home.folder, PLAN, 1)
    with pytest.raises(StaleVersion, match=r"version 2 .* has version 3"), relay.filling(2, [0]):
        pass
    with home.sending(3, [0]) as held:
        assert held.records[0].version == 3
    home.commit(3)
    served(home, 3)
    with pytest.raises(StaleVersion), relay.filling(3, [0]):
        pass


def test_a_version_that_an_older_generation_published_is_written_and_sent_again(home: WeightStore) -> None:
    later = WeightStore.create(home.folder, PLAN, 1, 2)
    write(later, 1)
    with later.sending(1, [0]) as held:
        assert held.records[0].generation == 2
    later.commit(1)
    served(later, 1)
    later.close()
