"""Exports have digests; every changed byte is noticed when Lockstep loads the folder, and names the file."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config.algorithm import CrossEntropy
from lockstep.config.model import AdapterConfig, ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.models.adapter_folder import resolve_adapter
from lockstep.models.errors import ModelError
from lockstep.models.folder_digests import DIGESTS_FILE, check_digests, digest_of
from lockstep.models.model_loader import load_policy
from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.engine_service import make_engine
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer


def role(path: Path, adapter: AdapterConfig | None = None) -> TrainRole:
    model = ModelConfig(path=str(path), adapter=adapter)
    return TrainRole(
        name="policy", model=model, trainer=TrainerConfig(), objective=CrossEntropy(), optimizer_steps=1
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an export, `export`, and an exported adapter, `adapter`."""
    folder = tmp_path_factory.mktemp("digests")
    make_tiny(folder / "base", hidden=32, layers=2, heads=2, kv_heads=1, ffn=64)
    trainer = FSDP2Trainer(role(folder / "base", AdapterConfig(r=2)), ParallelContext())
    trainer.export_adapter(folder / "adapter")
    trainer.export(folder / "export")
    return folder


@pytest.fixture
def exported(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "export", tmp_path / "export")
    return tmp_path / "export"


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Changes one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def test_an_export_has_a_digest_of_every_tensor_and_file(exported: Path) -> None:
    content = json.loads((exported / DIGESTS_FILE).read_text())
    (weights,) = content["weights"].values()
    stored = load_file(exported / "model.safetensors")
    assert weights["tensors"] == {name: digest_of(tensor) for name, tensor in stored.items()}
    others = {path.name for path in exported.iterdir()} - {"model.safetensors", DIGESTS_FILE}
    assert set(content["files"]) == others and "config.json" in others
    check_digests(exported)


def test_every_changed_byte_is_noticed(exported: Path) -> None:
    """Also those of the header and of the digests."""
    chance = random.Random(5)
    for path in sorted(exported.iterdir()):
        size = path.stat().st_size
        for at in {0, 8, size - 1, *(chance.randrange(size) for _ in range(20))}:
            bit = chance.randrange(8)
            flip(path, at, bit)
            with pytest.raises(ModelError) as error:
                check_digests(exported)
            assert path.name in str(error.value), f"byte {at}"
            flip(path, at, bit)
    check_digests(exported)


def test_ranks_check_one_part_each(exported: Path) -> None:
    stored = load_file(exported / "model.safetensors")
    offset = (exported / "model.safetensors").stat().st_size - 1  # in the last tensor of the file
    flip(exported / "model.safetensors", offset)
    noticed = 0
    for rank in range(3):
        try:
            check_digests(exported, share=(rank, 3))
        except ModelError:
            noticed += 1
    assert noticed == 1 and len(stored) > 3


def test_trainers_and_engines_refuse_a_damaged_export(exported: Path) -> None:
    flip(exported / "model.safetensors", -1)
    with pytest.raises(ModelError, match=r"model\.safetensors was changed or damaged since it was exported"):
        FSDP2Trainer(role(exported), ParallelContext())
    with pytest.raises(ModelError, match=r"model\.safetensors was changed"):
        make_engine(ModelConfig(path=str(exported)), BuiltinEngineConfig())
    (exported / DIGESTS_FILE).unlink()
    assert isinstance(load_policy(ModelConfig(path=str(exported)), "cpu").lm, torch.nn.Module), "as before digests"


def test_a_changed_config_says_how_to_accept_it(exported: Path) -> None:
    (exported / "config.json").write_text((exported / "config.json").read_text() + "\n")
    with pytest.raises(ModelError, match=rf"config\.json was changed.*on purpose, delete {DIGESTS_FILE}"):
        check_digests(exported)


def test_a_damaged_adapter_is_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "adapter", tmp_path / "adapter")
    assert resolve_adapter(AdapterConfig(path=str(tmp_path / "adapter"))).r == 2
    flip(tmp_path / "adapter/adapter_model.safetensors", -1)
    with pytest.raises(ModelError, match=r"model\.adapter\.path.*adapter_model\.safetensors was changed"):
        resolve_adapter(AdapterConfig(path=str(tmp_path / "adapter")))


def test_a_missing_file_is_named(exported: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (exported / name).rename(exported.parent / name)
        with pytest.raises(ModelError, match=f"{name} is missing"):
            check_digests(exported)
        (exported.parent / name).rename(exported / name)
