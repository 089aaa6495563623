"""What only the FSDP2 trainer has: ZeRO-2, sharded state, gradients in Adam's moments, its checkpoints' files.
`test_trainer.py` is the contract of every kind.
"""

import json
import shutil
from pathlib import Path

import fsdp_ranks as fr
import pytest
import torch
import trainer_ranks as tr
from test_trainer import TIGHT, apart, assert_true
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.train.checkpoints.checkpoint_files import read_manifest
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import CheckpointError
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("fsdp")
    tr.make_models(made)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, tr.Result]:
    """Results of the cases with one rank, in this process."""
    names = [name for name in fr.CASES if "zero2" not in name]
    return {name: fr.CASES[name](folder, ParallelContext(), 0) for name in names}


@pytest.fixture(scope="module")
def pair(folder: Path, alone: dict[str, tr.Result]) -> dict[str, list[tr.Result]]:
    """Results of the cases on two ranks. They load checkpoints of the cases with one rank."""
    return tr.launch(folder, 2, fr.CASES, "fsdp_ranks")


@pytest.fixture(scope="module")
def truths(folder: Path) -> dict[str, tr.Result]:
    names = {name.rpartition("-")[0].removesuffix("-zero2") for name in fr.VARIANTS}
    return {name: tr.truth(folder, tr.config(folder, *name.split("-"))) for name in names}


@pytest.mark.parametrize("name", fr.VARIANTS)
def test_gradients_and_weights_are_those_of_torch(
    name: str, alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]], truths: dict[str, tr.Result]
) -> None:
    truth = truths["-".join(name.split("-")[:2])]
    for ranks in ([alone[name]] if name in alone else [], pair[name]):
        if ranks:
            assert apart(tr.assemble([r.gradient for r in ranks]), tr.assemble([truth.gradient])) < TIGHT
            assert_true(ranks, truth)


def test_no_rank_holds_more_than_its_rows(pair: dict[str, list[tr.Result]]) -> None:
    one, two = (result.weights for result in pair["llama-sft-split"])
    for name, (offset, rows) in one.items():
        start, rest = two[name]
        assert offset == 0
        assert start == rows.shape[0] >= rest.shape[0]


def test_offloading_moves_the_requested_state(folder: Path) -> None:
    role = tr.config(folder, "qwen2", "grpo").policy
    first, second = FSDP2Trainer(role, ParallelContext()), FSDP2Trainer(role, ParallelContext())

    def devices(tensors: dict[str, Tensor]) -> set[str]:
        return {tensor.device.type for tensor in tensors.values()}

    nowhere = torch.device("meta")  # stands for the memory of another device
    first._move(nowhere, parameters=False, optimizer=True)
    assert devices(first.optimizer.exp_avg) == devices(first.optimizer.exp_avg_sq) == {"meta"}
    assert devices(first._rows()) == {"cpu"}
    second._move(nowhere, parameters=True, optimizer=False)
    assert devices(second._rows()) == {"meta"} and devices(second.optimizer.exp_avg) == {"cpu"}
    assert {p.device.type for p in second.reference.parameters()} == {"meta"}  # type: ignore[union-attr]


def test_moments_are_loaded_on_another_number_of_ranks(
    folder: Path, alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]
) -> None:
    trainer = FSDP2Trainer(tr.config(folder, "qwen2", "grpo").policy, ParallelContext())
    trainer.load(folder / "saved" / "ranks-2")
    two = tr.assemble([result.extra["moments"] for result in pair["saved"]])
    assert apart(trainer.optimizer.exp_avg_sq, two) == 0
    assert set(trainer.learning_rates().values()) == {tr.LR}
    loaded = tr.assemble([result.extra["loaded moments"] for result in pair["saved"]])
    assert apart(loaded, tr.assemble([alone["saved"].extra["moments"]])) == 0


def test_a_torn_checkpoint_is_described(folder: Path, alone: dict[str, tr.Result], tmp_path: Path) -> None:
    trainer = FSDP2Trainer(tr.config(folder, "qwen2", "grpo").policy, ParallelContext())
    checkpoint = Path(shutil.copytree(folder / "saved" / "ranks-1", tmp_path / "step-2"))

    def reason() -> str:
        with pytest.raises(CheckpointError) as caught:
            trainer.load(checkpoint)
        return caught.value.reason

    data = checkpoint / "rank-00000.safetensors"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    assert reason() == f"is incomplete: rank-00000.safetensors has {len(content) - 1} bytes instead of {len(content)}"
    data.unlink()
    assert "rank-00000.safetensors is missing" in reason()
    data.write_bytes(content)
    assert read_manifest(checkpoint)["optimizer_step"] == 2
    (checkpoint / "checkpoint.json").write_text("{")
    assert "cannot be read" in reason()
    (checkpoint / "checkpoint.json").unlink()
    assert "not a complete checkpoint" in reason()


@pytest.mark.parametrize("world", [1, 2])
def test_a_large_model_is_exported_in_parts(
    world: int, folder: Path, alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]
) -> None:
    results, place = [alone["export"]] if world == 1 else pair["export"], folder / f"small-{world}"
    model = AutoModelForCausalLM.from_pretrained(place)
    assert apart(dict(model.state_dict()), tr.assemble([result.weights for result in results])) == 0
    files = set(json.loads((place / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(files) > 3
    assert all((place / file).stat().st_size < 25_000 for file in files)
