"""The contract of every trainer: equal results however work is split, complete checkpoints, no step on bad numbers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import trainer_ranks as tr
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.config.algorithm import KLPenalty
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import pack
from lockstep.train.checkpoint import read_manifest
from lockstep.train.checkpoint_retention import checkpoint_bytes, remove_checkpoint, remove_leftovers
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import CheckpointError
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer

TIGHT = 1e-5
VARIANTS = [name for name in tr.CASES if name.startswith(tr.FAMILIES)]
ONE_RANK = ["plain", "split", "block", "single", "recomputed"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trainer")
    tr.make_models(made)
    return made


@pytest.fixture(scope="module")
def truths(folder: Path) -> dict[str, tr.Result]:
    return {
        f"{family}-{recipe}": tr.truth(folder, tr.config(folder, family, recipe))
        for family in tr.FAMILIES
        for recipe in ("sft", "grpo")
    }


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, tr.Result]:
    """Results of the cases with one rank, in this process."""
    names = [name for name in VARIANTS if name.split("-", 2)[2] in ONE_RANK]
    names += ["again", "resume", "export", "non_finite"]
    found = {name: tr.CASES[name](folder, ParallelContext(), 0) for name in names}
    for made in ("exported", "exported-small"):
        shutil.rmtree(folder / made)
    return found


@pytest.fixture(scope="module")
def pair(folder: Path, alone: dict[str, tr.Result]) -> dict[str, list[tr.Result]]:
    """Results of the cases on two ranks. They load checkpoints of the cases with one rank."""
    return tr.launch(folder, 2, tr.CASES)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative distance between two tensors of one name."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm().clamp_min(1e-12)) for n in expected)


def assert_true(results: list[tr.Result], truth: tr.Result) -> None:
    assert apart(tr.assemble([r.gradient for r in results]), tr.assemble([truth.gradient])) < TIGHT
    assert apart(tr.assemble([r.weights for r in results]), tr.assemble([truth.weights])) < TIGHT
    for result in results:
        for step, expected in enumerate(truth.metrics):
            found = {name: result.metrics[step][name] for name in expected}
            assert found == pytest.approx(expected, rel=TIGHT), f"step {step}"


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.split("-", 2)[2] in ONE_RANK])
def test_one_rank_computes_what_torch_and_transformers_do(
    name: str, alone: dict[str, tr.Result], truths: dict[str, tr.Result]
) -> None:
    assert_true([alone[name]], truths["-".join(name.split("-")[:2])])


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_compute_what_torch_and_transformers_do(
    name: str, pair: dict[str, list[tr.Result]], truths: dict[str, tr.Result]
) -> None:
    assert_true(pair[name], truths["-".join(name.split("-")[:2])])


def test_ranks_report_the_same_metrics_bit_by_bit(pair: dict[str, list[tr.Result]]) -> None:
    for name in VARIANTS:
        assert pair[name][0].metrics == pair[name][1].metrics


def test_the_metrics_of_a_policy_step(pair: dict[str, list[tr.Result]], truths: dict[str, tr.Result]) -> None:
    first, *_, last = pair["qwen2-grpo-split"][0].metrics
    parts = first["policy_loss"] + first["kl_loss"] + first["entropy_loss"]
    assert parts == pytest.approx(first["loss"], rel=1e-6)
    assert first["tokens"] == sum(c.tokens.size for group in tr.rollouts()[0].groups for c in group.completions)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert last["kl"] > 1e-5
    assert 4.0 < first["entropy"] < 4.7  # about log(vocabulary) for random weights
    assert 0 < first["clip_fraction"] < 1
    assert first["clip_fraction"] == pytest.approx(first["clip_low"] + first["clip_high"])
    assert 0 < first["engine_gap_mean"] < first["engine_gap_max"]
    assert 0 < first["importance_cut"] < 1


def test_no_rank_holds_more_than_its_rows(pair: dict[str, list[tr.Result]]) -> None:
    one, two = (result.weights for result in pair["llama-sft-plain"])
    for name, (offset, rows) in one.items():
        start, rest = two[name]
        assert offset == 0
        assert start == rows.shape[0] >= rest.shape[0]


def test_two_identical_runs_agree_bit_by_bit(alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]) -> None:
    for first, second in [
        (alone["qwen2-grpo-split"], alone["again"]),
        *zip(pair["qwen2-grpo-split"], pair["again"], strict=True),
    ]:
        assert first.metrics == second.metrics
        assert all(torch.equal(rows, second.weights[name][1]) for name, (_, rows) in first.weights.items())


def test_an_empty_microbatch_changes_nothing(folder: Path, pair: dict[str, list[tr.Result]]) -> None:
    both = pair["empty"]
    assert [result.extra["empty"] for result in both] == [False, True]
    one = tr.empty(folder, ParallelContext(), 0)
    assert apart(tr.assemble([r.weights for r in both]), tr.assemble([one.weights])) < TIGHT
    assert both[1].metrics[0]["loss"] == pytest.approx(one.metrics[0]["loss"], rel=TIGHT)
    assert both[0].metrics[0]["tokens"] == int(tr.documents()[0].loss_mask.sum())


def test_without_advantages_the_weights_do_not_change(folder: Path) -> None:
    cfg = tr.config(folder, "qwen2", "grpo", optimizer={"lr": 0.1, "weight_decay": 0.0})
    loss = cfg.loss.model_copy(update={"entropy_coefficient": 0.0, "kl": KLPenalty()})
    trainer = FSDP2Trainer(cfg.model_copy(update={"loss": loss}).policy, ParallelContext())
    rolled, advantages = tr.rollouts()
    batch = pack(forest_from_rollouts(rolled, 0 * advantages), 1, 100)
    before = tr.rows_of_all(trainer)
    everything = batch.everything()
    batch.set_field("old_logprob", everything, [[row.fields["engine_logprob"] for row in everything.by_rank[0]]])
    stats = [trainer.step(m.by_rank[0]).values for m in batch.minibatches(2, None, loss)]
    assert all(torch.equal(rows, before[name][1]) for name, (_, rows) in tr.rows_of_all(trainer).items())
    assert [s["grad_norm"] for s in stats] == [0.0, 0.0]
    assert all(s["lr"] > 0 for s in stats)


def test_evaluate_gives_the_log_probabilities_of_transformers(folder: Path) -> None:
    cfg = tr.config(folder, "llama", "grpo")
    trainer = FSDP2Trainer(cfg.policy, ParallelContext())
    batch = tr.batch_of(cfg, 1, budget=60)
    everything = batch.everything()
    values = trainer.evaluate(everything.by_rank[0], ["logprobs", "entropy", "reference_logprobs"])
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32)
    with torch.no_grad():
        logprobs, entropies = tr._sequences(model)
    for row, found in zip(everything.by_rank[0], values, strict=True):
        assert found["logprobs"] == pytest.approx(logprobs[row.index].numpy(), abs=1e-5)
        assert found["entropy"] == pytest.approx(entropies[row.index].numpy(), abs=1e-5)
        assert found["reference_logprobs"] == pytest.approx(found["logprobs"], abs=1e-6)
        assert found["logprobs"].dtype == "float32"


@pytest.mark.parametrize("world", [1, 2])
def test_non_finite_numbers_are_refused_by_all_ranks_before_a_weight_changes(
    world: int, alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]
) -> None:
    for result in [alone["non_finite"]] if world == 1 else pair["non_finite"]:
        message, step, what, places = result.extra["error"]
        assert (step, what, places) == (0, "loss", [(world - 1, 1)])
        assert f"rank {world - 1} micro-batch 1" in message
        assert result.extra["untouched"]
        assert result.extra["moments"] == 0
        assert 0 < result.metrics[0]["grad_norm"] < float("inf")  # the trainer continues


def test_a_missing_field_is_named_before_the_step(folder: Path) -> None:
    cfg = tr.config(folder, "qwen2", "grpo")
    trainer = FSDP2Trainer(cfg.policy, ParallelContext())
    rows = next(iter(tr.batch_of(cfg, 1).minibatches(1, None, cfg.loss))).by_rank[0]
    with pytest.raises(ValueError, match="no field 'old_logprob'"):
        trainer.step(rows)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        trainer.step([])


def test_offloading_changes_no_bit_and_moves_the_requested_state(folder: Path, tmp_path: Path) -> None:
    cfg = tr.config(folder, "qwen2", "grpo")
    stays, goes = FSDP2Trainer(cfg.policy, ParallelContext()), FSDP2Trainer(cfg.policy, ParallelContext())
    batch = tr.batch_of(cfg, 1)
    for trainer in (stays, goes):
        tr.train(trainer, batch, 1)
    goes.offload()
    published = tr.rows_of_all(goes)  # from host memory
    goes.save(tmp_path / "step-1")
    goes.onload()
    for name, (_, rows) in tr.rows_of_all(stays).items():
        assert torch.equal(published[name][1], rows)
    one, two = tr.train(stays, batch, 2), tr.train(goes, batch, 2)
    assert one.metrics == two.metrics
    assert all(torch.equal(rows, two.weights[name][1]) for name, (_, rows) in one.weights.items())
    goes.writer.finish()

    def devices(tensors: dict[str, Tensor]) -> set[str]:
        return {tensor.device.type for tensor in tensors.values()}

    nowhere = torch.device("meta")  # stands for the memory of another device
    goes._move(nowhere, parameters=False, optimizer=True)
    assert devices(goes.optimizer.exp_avg) == devices(goes.optimizer.exp_avg_sq) == {"meta"}
    assert devices(goes._rows()) == {"cpu"}
    stays._move(nowhere, parameters=True, optimizer=False)
    assert devices(stays._rows()) == {"meta"} and devices(stays.optimizer.exp_avg) == {"cpu"}
    assert {p.device.type for p in stays.reference.parameters()} == {"meta"}  # type: ignore[union-attr]


# --- checkpoints


def assert_resumed(results: list[tr.Result]) -> None:
    for result in results:
        extra = result.extra
        assert extra["steps"] == 2
        for name, (_, rows) in extra["at_save"].items():
            assert torch.equal(rows, extra["loaded"][name][1]), f"{name} as it was when save() was called"
        for name, (_, rows) in extra["straight"].weights.items():
            assert torch.equal(rows, extra["resumed"].weights[name][1]), name
        assert extra["straight"].metrics == extra["resumed"].metrics
        assert any(not torch.equal(r, extra["loaded"][n][1]) for n, (_, r) in extra["resumed"].weights.items())


def test_resume_is_bitwise_at_one_rank(alone: dict[str, tr.Result]) -> None:
    assert_resumed([alone["resume"]])


def test_resume_is_bitwise_at_two_ranks(pair: dict[str, list[tr.Result]]) -> None:
    assert_resumed(pair["resume"])


def test_a_checkpoint_of_two_ranks_loads_at_one(folder: Path, pair: dict[str, list[tr.Result]]) -> None:
    trainer = FSDP2Trainer(tr.config(folder, "qwen2", "grpo").policy, ParallelContext())
    trainer.load(folder / "saved" / "ranks-2")
    for found, name in (
        (tr.rows_of_all(trainer), "loaded"),
        (tr.rows_of_all(trainer, trainer.optimizer.exp_avg_sq), "moments"),
    ):
        expected = tr.assemble([result.extra[name] for result in pair["resume"]])
        assert all(torch.equal(rows, expected[key]) for key, (_, rows) in found.items())
        assert found.keys() == expected.keys()
    assert trainer.optimizer.steps == 2
    assert trainer.learning_rate() == tr.LR


def test_a_checkpoint_of_one_rank_loads_at_two(alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]) -> None:
    one, two = alone["resume"].extra, pair["reload"]
    for expected, parts in (
        (one["loaded"], [result.weights for result in two]),
        (one["moments"], [result.extra["moments"] for result in two]),
    ):
        found = tr.assemble(parts)
        assert all(torch.equal(rows, found[name]) for name, (_, rows) in expected.items())


@pytest.fixture
def checkpoint(folder: Path, alone: dict[str, tr.Result], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "saved" / "ranks-1", tmp_path / "step-2"))


def refused(folder: Path, checkpoint: Path, family: str = "qwen2") -> str:
    trainer = FSDP2Trainer(tr.config(folder, family, "grpo").policy, ParallelContext())
    before = tr.rows_of_all(trainer)
    with pytest.raises(CheckpointError) as caught:
        trainer.load(checkpoint)
    assert all(torch.equal(rows, before[name][1]) for name, (_, rows) in tr.rows_of_all(trainer).items())
    assert trainer.optimizer.steps == 0
    return caught.value.reason


def test_torn_checkpoints_are_refused(folder: Path, checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    assert (
        refused(folder, checkpoint)
        == f"is incomplete: __0_0.distcp has {len(content) - 1} bytes instead of {len(content)}"
    )
    data.unlink()
    assert "__0_0.distcp is missing" in refused(folder, checkpoint)
    data.write_bytes(content)
    assert read_manifest(checkpoint)["optimizer_step"] == 2
    (checkpoint / "checkpoint.json").write_text("{")
    assert "cannot be read" in refused(folder, checkpoint)
    (checkpoint / "checkpoint.json").unlink()
    assert "not a complete checkpoint" in refused(folder, checkpoint)
    assert "not a complete checkpoint" in refused(folder, checkpoint.with_name("nothing"))


def test_unfinished_checkpoints_and_those_of_other_models_are_refused(folder: Path, checkpoint: Path) -> None:
    assert "another model" in refused(folder, checkpoint, family="llama")
    assert "did not finish" in refused(folder, checkpoint.rename(checkpoint.with_name("step-2.tmp-1-1")))


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(
    folder: Path, pair: dict[str, list[tr.Result]]
) -> None:
    for result in pair["full_disk"]:
        assert "rank 1: " in result.extra["error"]
        assert "File too large" in result.extra["error"]
        assert "bytes are free" in result.extra["error"]
    assert read_manifest(folder / "full" / "again")["world"] == 2
    assert sorted(path.name for path in (folder / "full").iterdir()) == ["again"]


def test_a_save_replaces_one_of_the_same_name_and_removal_leaves_no_trace(folder: Path, tmp_path: Path) -> None:
    trainer = FSDP2Trainer(tr.config(folder, "qwen2", "sft").policy, ParallelContext())
    for _ in range(2):
        trainer.save(tmp_path / "step-0")
        trainer.writer.finish()
    assert trainer.saved()
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
    assert checkpoint_bytes(tmp_path) > 0
    (tmp_path / "step-1.tmp-1-7").mkdir()
    assert remove_leftovers(tmp_path) == [tmp_path / "step-1.tmp-1-7"]
    remove_checkpoint(tmp_path / "step-0")
    assert list(tmp_path.iterdir()) == []


def test_exports_are_ordinary_model_folders(folder: Path, pair: dict[str, list[tr.Result]]) -> None:
    expected = tr.assemble([result.weights for result in pair["export"]])
    for name in ("exported", "exported-small"):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        assert apart(dict(model.state_dict()), expected) == 0
        assert model.dtype == torch.float32
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        assert tokenizer.eos_token_id == model.config.eos_token_id
    index = json.loads((folder / "exported-small" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    assert all((folder / "exported-small" / file).stat().st_size < 25_000 for file in files)
    assert not list(folder.glob("*.tmp-*"))


def test_an_exported_model_has_the_trainers_logits(folder: Path, tmp_path: Path) -> None:
    cfg = tr.config(folder, "qwen2", "sft")  # tied embeddings
    trainer = FSDP2Trainer(cfg.policy, ParallelContext())
    batch = tr.batch_of(cfg, 1)
    tr.train(trainer, batch)
    trainer.export(tmp_path / "final")
    values = trainer.evaluate(batch.everything().by_rank[0], ["logprobs"])[0]["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    with torch.no_grad():
        loss = tr._sft_truth(model)
    assert float(-values.mean()) == pytest.approx(float(loss), rel=TIGHT)
    assert "lm_head.weight" not in json.loads(_header(tmp_path / "final" / "model.safetensors"))


def _header(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode()


# --- the service


def test_the_service_on_two_ranks(pair: dict[str, list[tr.Result]]) -> None:
    for rank, result in enumerate(pair["service"]):
        info = result.extra["info"]
        assert (info.rank, info.world, info.device, info.compute_dtype) == (rank, 2, "cpu", "float32")
        assert info.packing == "forest", info.packing_reason
        assert info.reference
        assert info.context_length == 256
        assert [p.name for p in info.parameters][-1] == "lm_head.weight"
        assert result.extra["steps"] == (2, 1)
        assert result.metrics[1] == result.metrics[2]  # the same step, before and after going back
        assert result.metrics[0] == pytest.approx(pair["llama-grpo-plain"][rank].metrics[0], rel=TIGHT, abs=1e-7)
        assert set(result.extra["values"][0]) == {"logprobs", "entropy", "reference_logprobs"}


def test_a_rank_missing_from_a_step_is_noticed_within_the_time_limit(pair: dict[str, list[tr.Result]]) -> None:
    waiting = pair["absent"][0].extra
    assert "error" in waiting
    assert 5.0 < waiting["waited"] < 20.0
