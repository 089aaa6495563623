"""HSDP: four ranks in two replicas compute the same as one rank, and save and publish every row once."""

from pathlib import Path

import pytest
import replica_ranks as rr
import torch
import trainer_ranks as tr
from safetensors.torch import load_file
from test_trainer import TIGHT, apart

from lockstep.train.checkpoints.checkpoint_files import read_manifest
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.weights.weight_store import WeightStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("replicas")
    tr.make_models(made)
    for world in (1, 4):
        WeightStore.create(made / f"store-{world}", rr.plan_of(made), writers=world).close()
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, tr.Result]:
    return {name: case(folder, ParallelContext(), 0) for name, case in rr.CASES.items()}


@pytest.fixture(scope="module")
def four(folder: Path, alone: dict[str, tr.Result]) -> dict[str, list[tr.Result]]:
    return tr.launch(folder, 4, rr.CASES, "replica_ranks", replicas=2)


@pytest.mark.parametrize("name", ["trained", "adapter"])
def test_four_ranks_in_two_copies_compute_what_one_does(
    name: str, alone: dict[str, tr.Result], four: dict[str, list[tr.Result]]
) -> None:
    one, ranks = alone[name], four[name]
    assert apart(tr.assemble([rank.weights for rank in ranks]), tr.assemble([one.weights])) < TIGHT
    for rank in ranks:
        assert rank.metrics == ranks[0].metrics
        for step, expected in enumerate(one.metrics):
            for metric in ("loss", "grad_norm", "tokens"):
                assert rank.metrics[step][metric] == pytest.approx(expected[metric], rel=TIGHT), (step, metric)
    written = [list(rank.weights) for rank in ranks]
    assert not set(written[0]) & set(written[2]) and not set(written[1]) & set(written[3]), "replicas take turns"


def test_a_replica_is_sharded_over_its_ranks(four: dict[str, list[tr.Result]], alone: dict[str, tr.Result]) -> None:
    full = alone["trained"].extra["held"]
    held = [rank.extra["held"] for rank in four["trained"]]
    assert held[0] == held[2] and held[1] == held[3]
    for name, shape in full.items():
        assert held[0][name][0] + held[1][name][0] == shape[0], name


def test_checkpoint_export_and_published_weights_contain_every_row_once(
    folder: Path, four: dict[str, list[tr.Result]]
) -> None:
    ranks = four["trained"]
    assert all(rank.extra["loaded"] for rank in ranks)
    expected = tr.assemble([rank.weights for rank in ranks])
    manifest = read_manifest(folder / "saved" / "ranks-4")
    sizes = {world: sum(read_manifest(folder / "saved" / f"ranks-{world}")["files"].values()) for world in (1, 4)}
    assert manifest["world"] == 4 and sizes[4] < 1.5 * sizes[1], "not twice"
    single = FSDP2Trainer(tr.config(folder, "qwen2", "grpo").policy, ParallelContext())
    single.load(folder / "saved" / "ranks-4")
    assert apart({name: rows for name, (_, rows) in tr.rows_of_all(single).items()}, expected) == 0
    assert apart(load_file(folder / "exported-4" / "model.safetensors"), expected) == 0
    store = WeightStore.open(folder / "store-4", generation=1)
    store.commit(1)  # refuses gaps and rows that were written twice
    with store.reading(1, "complete") as weights:
        assert apart({name: tensor.clone() for name, tensor in weights.tensors.items()}, expected) == 0
    del weights
    store.close()
