"""Memory checkpoints are complete or absent, whenever the writer is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints, memory_checkpoint_versions
from lockstep.train.errors import MemoryCheckpointMissing, SharedMemoryFull


def state(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "a": torch.randn(5, 3, generator=generator),
        "empty": torch.zeros(0, 3),
        "bf": torch.randn(7, generator=generator).bfloat16(),
        "random": torch.arange(9, dtype=torch.uint8) + version,
        "scalar": torch.tensor(float(version)),
    }


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    copies = MemoryCheckpoints(tmp_path, 0, 1)
    for version in range(1, 6):
        copies.write(version, state(version), {"optimizer_step": 10 * version})
        assert max(memory_checkpoint_versions(tmp_path, 1)) == version
        into = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
        facts = MemoryCheckpoints(tmp_path, 0, 1).read(version, into)
        assert facts == {"optimizer_step": 10 * version}
        assert all(torch.equal(into[name], tensor) for name, tensor in state(version).items())
    copies.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank-0-0",
        "rank-0-0.json",
        "rank-0-1",
        "rank-0-1.json",
    ]


def test_a_damaged_copy_is_not_restored(tmp_path: Path) -> None:
    MemoryCheckpoints(tmp_path, 0, 1).write(1, state(1), {})
    with (tmp_path / "rank-0-0").open("r+b") as file:
        file.seek(10)
        file.write(b"\xff")
    into = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    with pytest.raises(MemoryCheckpointMissing, match="its content is damaged"):
        MemoryCheckpoints(tmp_path, 0, 1).read(1, into)
    assert not any(tensor.any() for tensor in into.values())


def test_newest_version_of_all_ranks(tmp_path: Path) -> None:
    ranks = [MemoryCheckpoints(tmp_path, rank, 2) for rank in range(2)]
    assert memory_checkpoint_versions(tmp_path, 2) == set()
    ranks[0].write(1, state(1), {})
    assert memory_checkpoint_versions(tmp_path, 2) == set()
    ranks[1].write(1, state(1), {})
    ranks[0].write(2, state(2), {})
    assert memory_checkpoint_versions(tmp_path, 2) == {1}, "one rank died before it had copied its part"
    assert memory_checkpoint_versions(tmp_path, 1) == set(), "divided among two, it is of no use to one"


def test_a_repeated_version_overwrites_its_own_slot(tmp_path: Path) -> None:
    """One rank has copied version 2 when the other one dies: both resume from version 1, which is kept until 2 is
    complete."""
    ranks = [MemoryCheckpoints(tmp_path, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.write(1, state(1), {})
    ranks[0].write(2, state(2), {})
    ranks[0].write(2, state(2), {})
    assert memory_checkpoint_versions(tmp_path, 2) == {1}
    ranks[1].write(2, state(2), {})
    assert memory_checkpoint_versions(tmp_path, 2) == {1, 2}


def test_a_copy_of_other_tensors_is_refused(tmp_path: Path) -> None:
    MemoryCheckpoints(tmp_path, 0, 1).write(1, state(1), {})
    with pytest.raises(MemoryCheckpointMissing, match="other tensors"):
        MemoryCheckpoints(tmp_path, 0, 1).read(1, {"a": torch.zeros(5, 4)})
    with pytest.raises(MemoryCheckpointMissing, match="there is none"):
        MemoryCheckpoints(tmp_path, 0, 1).read(2, state(1))


WRITER = """
import sys, torch
from pathlib import Path
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
copies, version = MemoryCheckpoints(Path(sys.argv[1]), 0, 1), 2
while True:
    copies.write(version, {"x": torch.full((4_000_000,), float(version))}, {})
    version += 1
"""


def test_a_killed_writer_leaves_the_previous_copy(tmp_path: Path) -> None:
    big = {"x": torch.zeros(4_000_000)}
    for kill in range(3):
        MemoryCheckpoints(tmp_path, 0, 1).write(1, {"x": torch.ones(4_000_000)}, {})
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) as writer:
            while max(memory_checkpoint_versions(tmp_path, 1), default=0) < 4 + kill:
                assert writer.poll() is None
            writer.kill()
        version = max(memory_checkpoint_versions(tmp_path, 1))
        MemoryCheckpoints(tmp_path, 0, 1).read(version, big)
        assert (big["x"] == version).all(), "whole"
        for path in tmp_path.glob("*.json"):
            path.unlink()


def test_full_shared_memory_is_an_error_and_not_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryFull, match="shm-size"):
        MemoryCheckpoints(tmp_path, 0, 1).write(1, state(1), {})
    assert memory_checkpoint_versions(tmp_path, 1) == set() and not (tmp_path / "rank-0-0").exists()
