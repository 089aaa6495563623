"""A checkpoint is loaded as it was written, or not at all; nothing in it is executed."""

import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.train.checkpoints.checkpoint import CheckpointWriter, LocalRows, load_checkpoint
from lockstep.train.checkpoints.checkpoint_files import (
    INDEX_FILE,
    LocalPart,
    read_manifest,
    write_index,
    write_rank_file,
)
from lockstep.train.distributed import ParallelContext, shard_rows
from lockstep.train.errors import CheckpointError

EARLIER = Path(__file__).parents[2] / "e2e" / "earlier_run" / "runs"
TENSORS = {
    "parameter.a": torch.arange(35, dtype=torch.float32).view(7, 5),
    "parameter.b": torch.arange(3, dtype=torch.bfloat16),
    "exp_avg.one": torch.ones(1, 4),
}
RANDOM = torch.arange(40, dtype=torch.uint8)


def write(folder: Path, world: int) -> Path:
    """A checkpoint as `world` ranks write it."""
    for rank in range(world):
        parts = {}
        for name, tensor in TENSORS.items():
            first, last = shard_rows(rank, world, tensor.shape[0])
            parts[name] = LocalPart(tensor[first:last].contiguous(), first, tuple(tensor.shape))
        parts[f"random.cpu.{rank}"] = LocalPart(RANDOM + rank, 0, tuple(RANDOM.shape))
        write_rank_file(folder, rank, parts)
    write_index(folder, range(world), {"world": world, "optimizer_step": 3})
    return folder


def read(folder: Path, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """What a rank loads; tensors that are not in the checkpoint are -1."""
    rows = {
        name: LocalRows(torch.full_like(tensor[slice(*shard_rows(rank, world, tensor.shape[0]))], -1), tensor.shape)
        for name, tensor in TENSORS.items()
    }
    whole = {f"random.cpu.{rank}": torch.full_like(RANDOM, 255)}
    load_checkpoint(folder, rows, whole, ParallelContext(rank, world))
    return {name: each.local for name, each in rows.items()} | whole


@pytest.mark.parametrize("written", [1, 2, 3, 8])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, written: int, world: int) -> None:
    folder = write(tmp_path / "c", written)
    for rank in range(world):
        found = read(folder, rank, world)
        for name, tensor in TENSORS.items():
            assert torch.equal(found[name], tensor[slice(*shard_rows(rank, world, tensor.shape[0]))])
        expected = RANDOM + rank if rank < written else torch.full_like(RANDOM, 255)
        assert torch.equal(found[f"random.cpu.{rank}"], expected)


def test_tensors_are_filled_whatever_their_strides(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", 2)
    rows = {name: LocalRows(torch.zeros_like(each), each.shape) for name, each in TENSORS.items()}
    rows["parameter.a"] = LocalRows(torch.zeros(5, 7).t(), (7, 5))
    load_checkpoint(folder, rows, {}, ParallelContext())
    assert torch.equal(rows["parameter.a"].local, TENSORS["parameter.a"])


def test_weights_of_parts_that_are_no_longer_trained_are_not_ignored(tmp_path: Path) -> None:
    folder, rows = write(tmp_path / "c", 2), {"parameter.a": LocalRows(torch.zeros(7, 5), (7, 5))}
    with pytest.raises(CheckpointError, match=r"other weights: it has 'parameter\.b', which is not trained here"):
        load_checkpoint(folder, rows, {}, ParallelContext())
    assert not rows["parameter.a"].local.any(), "nothing was changed"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("intact") / "c", 2)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), file=st.integers(0, 2), length=st.integers(1, 64), data=st.data())
def test_a_changed_byte_is_noticed_or_changes_nothing(
    intact: Path, tmp_path: Path, where: float, file: int, length: int, data: st.DataObject
) -> None:
    copy = tmp_path / "c"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(intact, copy)
    path = sorted(copy.iterdir())[file]
    content = bytearray(path.read_bytes())
    at = int(where * len(content))
    content[at : at + length] = data.draw(st.binary(min_size=length, max_size=length))[: len(content) - at]
    path.write_bytes(content)
    try:
        found = read(copy)
    except CheckpointError as error:
        assert str(copy) in str(error)
        return
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_what_is_damaged_is_named(intact: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(intact, tmp_path / "c"))
    path = copy / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the first byte after the header
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged: '.*' in rank-00001\.safetensors has another digest"):
        read(copy)
    manifest = json.loads((copy / INDEX_FILE).read_text())
    (copy / INDEX_FILE).write_text(json.dumps(manifest | {"optimizer_step": 4}))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        read_manifest(copy)


def test_files_outside_of_the_folder_are_refused(intact: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(intact, tmp_path / "c"))
    manifest = json.loads((copy / INDEX_FILE).read_text())
    (copy / INDEX_FILE).write_text(json.dumps(manifest | {"format": 1, "files": {"../secret": 3}}))
    with pytest.raises(CheckpointError, match=r"names '\.\./secret', which is not in the folder"):
        read_manifest(copy)


def test_saving_does_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    original = Path.open

    def recorded(self: Path, mode: str = "r", *rest: Any, **others: Any) -> Any:
        if "safetensors" in self.name and mode == "rb":
            opened.append(self.name)
        return original(self, mode, *rest, **others)

    monkeypatch.setattr(Path, "open", recorded)
    writer = CheckpointWriter(ParallelContext())
    writer.save(tmp_path / "c", {n: LocalRows(t, t.shape) for n, t in TENSORS.items()}, {"random.cpu.0": RANDOM}, {})
    writer.finish()
    assert opened == ["rank-00000.safetensors"]  # for its fsync
    assert torch.equal(read(tmp_path / "c")["parameter.a"], TENSORS["parameter.a"])


# --- format 1


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A checkpoint that torch.distributed.checkpoint wrote on two ranks."""
    found = sorted(EARLIER.glob("*/checkpoints/0*"))[-1]
    return Path(shutil.copytree(found, tmp_path / "c"))


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    stored: Mapping[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: tuple(each.size) for name, each in stored.items() if not name.startswith("random")}


def test_an_earlier_checkpoint_loads_as_torch_loads_it(earlier: Path, caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    expected: dict[str, Any] = {name: torch.empty(shape) for name, shape in shapes_of(earlier).items()}
    load(expected, storage_reader=FileSystemReader(earlier), no_dist=True)
    rows = {name: LocalRows(torch.zeros(shape), shape) for name, shape in shapes_of(earlier).items()}
    manifest = load_checkpoint(earlier, rows, {}, ParallelContext())
    assert manifest["optimizer_step"] > 0 and "without digests" in caplog.text
    assert all(torch.equal(each.local, expected[name]) for name, each in rows.items())


class Intruder:
    """Leaves a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


def damaged_indexes(trace: Path, index: bytes) -> Iterator[bytes]:
    yield pickle.dumps(Intruder(trace))
    yield index.replace(b"torch.distributed.checkpoint.metadata\x94", b"torch.distributed.checkpoint.metadatb\x94")
    yield index[: len(index) // 2]
    yield b""


def test_the_index_of_an_earlier_checkpoint_runs_no_code(earlier: Path, tmp_path: Path) -> None:
    index, trace = (earlier / ".metadata").read_bytes(), tmp_path / "trace"
    rows = {name: LocalRows(torch.zeros(shape), shape) for name, shape in shapes_of(earlier).items()}
    manifest = json.loads((earlier / INDEX_FILE).read_text())
    for content in damaged_indexes(trace, index):
        (earlier / ".metadata").write_bytes(content)
        manifest["files"][".metadata"] = len(content)
        (earlier / INDEX_FILE).write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
            load_checkpoint(earlier, rows, {}, ParallelContext())
    assert not trace.exists()
