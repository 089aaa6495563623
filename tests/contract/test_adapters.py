"""LoRA and DoRA equal peft however the work is split; adapters are saved, merged and exported completely."""

from pathlib import Path
from typing import Any

import adapter_ranks as ar
import pytest
import torch
import trainer_ranks as tr
from peft import PeftModel
from safetensors.torch import load_file
from test_trainer import TIGHT, apart, marks
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.models.tiny_model import make_tiny
from lockstep.train.checkpoints.checkpoint_files import read_manifest
from lockstep.train.errors import CheckpointError

VARIANTS = [name for name in ar.SUITE if name.startswith(("lora", "dora", "saved"))]


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=marks(kind)) for kind in ar.KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    torch.set_num_threads(1)
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(f"adapters-{kind}")
    tr.make_models(made)
    return made


@pytest.fixture(scope="module")
def alone(kind: str, folder: Path) -> dict[str, tr.Result]:
    """Results of the cases with one rank, in this process."""
    return {name: case(kind, folder, tr.alone(), 0) for name, case in ar.SUITE.items() if name != "reload"}


@pytest.fixture(scope="module")
def pair(kind: str, folder: Path, alone: dict[str, tr.Result]) -> dict[str, list[tr.Result]]:
    """Results of the cases on two ranks. They load checkpoints of the cases with one rank."""
    found = tr.launch(folder, 2, [f"{kind}:{name}" for name in ar.SUITE], "adapter_ranks", limit_s=500)
    return {name.partition(":")[2]: results for name, results in found.items()}


@pytest.fixture(scope="module")
def truths(folder: Path, alone: dict[str, tr.Result]) -> dict[str, tr.Result]:
    return {name: ar.truth(folder, name, alone[name].extra["start"]) for name in VARIANTS}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_training_an_adapter_equals_peft(
    name: str,
    world: int,
    alone: dict[str, tr.Result],
    pair: dict[str, list[tr.Result]],
    truths: dict[str, tr.Result],
) -> None:
    results, truth = [alone[name]] if world == 1 else pair[name], truths[name]
    assert apart(tr.assemble([r.weights for r in results]), tr.assemble([truth.weights])) < TIGHT
    for result in results:
        for step, expected in enumerate(truth.metrics):
            found = {metric: result.metrics[step][metric] for metric in expected}
            assert found == pytest.approx(expected, rel=TIGHT), f"step {step}"
        assert result.extra["frozen"], "the model's own weights stay"
        assert result.extra["optimizer"] == sorted(result.extra["adapter"]), "only the adapter has optimizer state"
        for part, value in result.extra["start"].items():
            if "lora" in part:
                assert torch.equal(value, alone[name].extra["start"][part]), (
                    "the initial adapter does not depend on the number of ranks"
                )


def test_the_reference_is_the_model_without_its_adapter(kind: str, folder: Path) -> None:
    cfg = ar.config(folder, "llama", "grpo", ar.LORA, kind=kind)
    trainer = ar.create(cfg.policy)
    assert trainer.reference is None and trainer.has_reference
    batch = tr.batch_of(cfg, 1)
    ar.adapter_train(trainer, batch, 2)
    rows = batch.everything().by_rank[0]
    found = trainer.evaluate(rows, ["logprobs", "reference_logprobs"])
    other = ar.create(tr.config(folder, "llama", "grpo", kind=kind).policy).evaluate(rows, ["logprobs"])
    for mine, theirs in zip(found, other, strict=True):
        assert mine["reference_logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-6)
        assert abs(mine["logprobs"] - theirs["logprobs"]).max() > 1e-4


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_starts_from_an_existing_adapter_which_is_its_reference(
    world: int, alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]
) -> None:
    results = [alone["begun"]] if world == 1 else pair["begun"]
    exported = alone["export_saved"].extra["adapter"]
    for result in results:
        for name, value in result.extra["start"].items():
            assert torch.equal(value, exported[name]) or (world == 2 and "lora" not in name), name
        for first, after, again in zip(
            result.extra["first"], result.extra["after"], result.extra["again"], strict=True
        ):
            assert after["reference_logprobs"] == pytest.approx(first["logprobs"], abs=1e-6)
            assert again["reference_logprobs"] == pytest.approx(first["logprobs"], abs=1e-6), "after a resume as well"
            assert abs(after["logprobs"] - first["logprobs"]).max() > 1e-4
        for name, value in result.extra["trained"].items():
            assert torch.equal(value, result.extra["loaded"][name]), name
            assert torch.equal(value, result.extra["adapter"][name]), "computing the reference changed nothing"
    weights = [tr.assemble([r.weights for r in each]) for each in ([alone["begun"]], results)]
    assert apart(*weights) < TIGHT


# --- checkpoints


def test_resume_is_bitwise_with_dropout(alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]) -> None:
    for result in (alone["resume"], *pair["resume"]):
        straight, resumed = result.extra["straight"], result.extra["resumed"]
        assert straight.metrics == resumed.metrics
        for name, part in straight.extra["adapter"].items():
            assert torch.equal(part, resumed.extra["adapter"][name]), name
            assert torch.equal(result.extra["adapter"][name], result.extra["loaded"][name]), name


def test_dropout_is_on_in_steps_and_equal_with_activation_checkpointing(
    kind: str, folder: Path, alone: dict[str, tr.Result]
) -> None:
    dry = ar.config(folder, "qwen2", "sft", ar.LORA, kind=kind)
    without = ar.adapter_train(ar.create(dry.policy), tr.batch_of(dry, 1, budget=60), 2)
    dropped, again = alone["resume"], alone["recomputed"]
    assert dropped.metrics[1]["loss"] == pytest.approx(again.metrics[1]["loss"], rel=1e-6)
    assert dropped.metrics[1]["grad_norm"] != pytest.approx(without.metrics[1]["grad_norm"], rel=0.02)
    for name, part in dropped.extra["adapter"].items():
        torch.testing.assert_close(part, again.extra["adapter"][name], rtol=1e-5, atol=1e-7)


def test_a_checkpoint_contains_the_adapter_and_a_digest_of_its_base_model(
    folder: Path, alone: dict[str, tr.Result]
) -> None:
    saved = folder / "saved" / "adapter-1"
    parts = alone["resume"].extra["adapter"]
    expected = {f"{what}.{name}" for what in ("parameter", "exp_avg", "exp_avg_sq") for name in parts}
    manifest = read_manifest(saved)
    assert set(manifest["tensors"]) == expected | {"random.cpu.0"}
    assert manifest["model"] == str(folder / "qwen2") and len(manifest["base"]) == 64


def test_a_checkpoint_of_one_rank_loads_at_two(alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]) -> None:
    for result in pair["reload"]:
        for name, part in alone["resume"].extra["loaded"].items():
            assert torch.equal(part, result.extra["adapter"][name]), name


def test_a_checkpoint_is_refused_on_another_model_or_adapter(
    kind: str, folder: Path, alone: dict[str, tr.Result]
) -> None:
    saved = folder / "saved" / "adapter-1"
    wider = ar.create(ar.config(folder, "qwen2", "sft", ar.DROPPING | {"r": 6}, kind=kind).policy)
    with pytest.raises(
        CheckpointError, match=r"belongs to another model: it has with shape \((5, 32|160,)\) .*expected shape \(6"
    ):
        wider.load(saved)
    more = ar.create(ar.config(folder, "qwen2", "sft", ar.DROPPING | {"target_modules": ["up_proj"]}, kind=kind).policy)
    with pytest.raises(CheckpointError, match=r"does not have .*up_proj.lora_A"):
        more.load(saved)
    make_tiny(folder / "other" / "qwen2", family="qwen2", tie_embeddings=True, seed=9, hidden=32, heads=4, ffn=51)
    other = ar.create(ar.config(folder / "other", "qwen2", "sft", ar.DROPPING, kind=kind).policy)
    with pytest.raises(CheckpointError, match=r"belongs to an earlier content of .*qwen2: "):
        other.load(saved)


# --- exports


def exported(folder: Path, prefix: str, world: int, results: list[tr.Result]) -> tuple[Any, PeftModel]:
    """The merged export, which must equal the trainer's weights bitwise, and the exported adapter on its base model."""
    merged = AutoModelForCausalLM.from_pretrained(folder / f"{prefix}merged-{world}")
    expected = tr.assemble([result.weights for result in results])
    assert apart({name: p.detach() for name, p in merged.named_parameters()}, expected) == 0
    base = AutoModelForCausalLM.from_pretrained(folder / "llama")
    return merged, PeftModel.from_pretrained(base, folder / f"{prefix}adapter-{world}")


@pytest.mark.parametrize("world", [1, 2])
def test_exports_load_with_transformers_and_with_peft(
    folder: Path, world: int, alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]
) -> None:
    results = [alone["export"]] if world == 1 else pair["export"]
    _, adapted = exported(folder, "", world, results)
    expected = tr.assemble([result.weights for result in results])
    found = {name: p.detach() for name, p in adapted.merge_and_unload().named_parameters()}  # type: ignore[operator]
    assert apart(found, expected) < 1e-6
    assert AutoTokenizer.from_pretrained(folder / f"adapter-{world}").eos_token_id is not None
    parts = load_file(folder / f"adapter-{world}" / "adapter_model.safetensors")
    assert parts.keys() == results[0].extra["adapter"].keys()
    assert not list(folder.glob("*.tmp-*"))


@pytest.mark.parametrize("world", [1, 2])
def test_modules_to_save_are_exported_with_the_adapter(
    folder: Path, world: int, alone: dict[str, tr.Result], pair: dict[str, list[tr.Result]]
) -> None:
    results = [alone["export_saved"]] if world == 1 else pair["export_saved"]
    merged, adapted = exported(folder, "saved-", world, results)
    adapted.eval()
    ids = torch.arange(20)[None] % 50 + 6
    with torch.no_grad():
        assert (adapted(ids).logits - merged(ids).logits).abs().max() < 1e-5
    parts = load_file(folder / f"saved-adapter-{world}" / "adapter_model.safetensors")
    fully_trained = [name.removeprefix("base_model.model.") for name in parts if "lora" not in name]
    assert sorted(fully_trained) == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
    ]


def test_an_adapter_is_exported_completely_or_not_at_all(kind: str, folder: Path, tmp_path: Path) -> None:
    trainer = ar.create(ar.config(folder, "llama", "sft", ar.LORA, kind=kind).policy)
    with tr.no_space(), pytest.raises(CheckpointError, match="the adapter could not be exported"):
        trainer.export_adapter(tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"model\.adapter"):
        ar.create(tr.config(folder, "llama", "sft", kind=kind).policy).export_adapter(tmp_path / "adapter")
