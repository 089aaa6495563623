"""A served model computes the same as the reference on the policy's ranks, bit by bit, on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served_ranks as sr
import trainer_ranks as tr

from lockstep.config.recipes import GRPOConfig
from lockstep.run.planning.prepare import resolve_adapters
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.train.fsdp.parallelize import move_weights
from lockstep.train.fsdp.sharded_model import FSDP2ServedModel
from lockstep.train.served_model_service import ServedModelService


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    tr.make_models(made)
    return made


@pytest.fixture(scope="module")
def held(folder: Path) -> dict[Any, np.ndarray]:
    """The values of the reference on two ranks of the policy, by family and budget."""
    return joined(tr.launch(folder, sr.POLICY_RANKS, ["held"], "served_ranks")["held"])


def joined(results: list[tr.Result]) -> dict[Any, Any]:
    """Each target's value, from the only rank that computed it."""
    found = {}
    for key in results[0].extra:
        of_ranks = [result.extra[key] for result in results]
        if isinstance(of_ranks[0], np.ndarray):
            values = np.stack(of_ranks)
            assert (np.isfinite(values).sum(0) == 1).all(), "every target is computed once"
            of_ranks = np.nansum(values, 0)
        found[key] = of_ranks
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_served_model_equals_the_reference_on_the_policys_ranks(
    folder: Path, held: dict[Any, np.ndarray], ranks: int
) -> None:
    found = joined(tr.launch(folder, ranks, ["served"], "served_ranks")["served"])
    for family in tr.FAMILIES:
        infos = found[family, "info"]
        assert [(info.rank, info.world, info.packing) for info in infos] == [(r, ranks, "forest") for r in range(ranks)]
        for name in sr.BUDGETS:
            assert found[family, name].tobytes() == held[family, name].tobytes(), (family, name)
            assert len(set(found[family, name, "rows"])) == 1, "every rank enters the same collectives"
            assert (found[family, name, "entropy"] > 0).all()


def test_a_policy_that_starts_from_an_adapter_is_served_with_it(folder: Path) -> None:
    """Then the base model is not the policy as it was loaded."""
    tr.torch.set_num_threads(1)
    values = sr.config(folder, "qwen2").model_dump(mode="json")
    values["model"]["adapter"] = {"r": 4}
    first = FSDP2Trainer(GRPOConfig.model_validate(values).policy, ParallelContext())
    with tr.torch.no_grad():
        for parameter in first.trained_parameters.values():
            parameter += 0.01
    first.export_adapter(folder / "adapter")
    values["model"]["adapter"] = {"path": str(folder / "adapter")}
    config = resolve_adapters(GRPOConfig.model_validate(values))
    rows = sr.batch(folder, "qwen2", 400).everything().by_rank[0]
    served = FSDP2ServedModel(config.serve_roles[0], ParallelContext()).evaluate(rows, ["logprobs"])
    held = FSDP2Trainer(config.policy.model_copy(update={"served_fields": ()}), ParallelContext())
    expected = held.evaluate(rows, ["reference_logprobs", "logprobs"])
    base = FSDP2ServedModel(sr.role(folder, "qwen2"), ParallelContext()).evaluate(rows, ["logprobs"])
    for one, other, without in zip(served, expected, base, strict=True):
        assert one["logprobs"].tobytes() == other["reference_logprobs"].tobytes()
        assert np.abs(one["logprobs"] - without["logprobs"]).max() > 1e-3
    assert not FSDP2Trainer(config.policy, ParallelContext()).has_reference


def test_offloading_changes_no_bit_and_an_offloaded_model_does_not_compute(folder: Path) -> None:
    role, rows = sr.role(folder, "qwen2"), sr.batch(folder, "qwen2", 400).everything().spread(1)
    service = ServedModelService(role.model_dump(mode="json"), device="cpu")
    for call in (service.offload, service.onload):
        with pytest.raises(RuntimeError, match="call setup"):
            call()
    service.setup()
    (encoded,) = rows.encode()
    before = service.evaluate(encoded, ["logprobs"])
    for _ in range(2):
        service.offload()
        with pytest.raises(RuntimeError, match=r"reference model is offloaded .*call onload"):
            service.evaluate(encoded, ["logprobs"])
    for _ in range(2):
        service.onload()
        again = service.evaluate(encoded, ["logprobs"])
        assert [each["logprobs"].tobytes() for each in again] == [each["logprobs"].tobytes() for each in before]


def test_offloading_moves_every_weight(folder: Path) -> None:
    model = FSDP2ServedModel(sr.role(folder, "llama"), ParallelContext())
    meta = tr.torch.device("meta")  # stands for the memory of another device
    move_weights(model.model, meta, model.ranks.device)
    tensors = [*model.model.parameters(), *model.model.buffers()]
    assert tensors and {each.device.type for each in tensors} == {"meta"}
