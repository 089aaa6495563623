"""What only the DeepSpeed trainer has, and short cases of the contract at all its stages, on two ranks."""

from pathlib import Path

import deepspeed_ranks
import pytest
import reformed_ranks
import torch
import trainer_ranks as tr
from safetensors.torch import load_file
from test_trainer import NEEDS_DEEPSPEED, TIGHT, apart, assert_resumed, assert_same_rows, weights_of

from lockstep.train.deepspeed.deepspeed_library import require_deepspeed

pytestmark = [
    *NEEDS_DEEPSPEED,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("trainer-deepspeed-short"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepspeed")
    tr.make_models(made)
    return made


@pytest.fixture(scope="module")
def pair(folder: Path) -> dict[str, list[tr.Result]]:
    return tr.launch(folder, 2, deepspeed_ranks.TWO, module="deepspeed_ranks", limit_s=500)


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, list[tr.Result]]:
    return tr.launch(folder, 4, deepspeed_ranks.FOUR, module="deepspeed_ranks", limit_s=500)


@pytest.fixture(scope="module")
def float32_adapter(folder: Path) -> tr.Result:
    """Of the FSDP2 trainer, whose adapters equal peft's (test_adapters)."""
    return deepspeed_ranks.some_steps(folder, {"adapter": deepspeed_ranks.SAVED}, tr.alone(), kind="fsdp2")


@pytest.mark.parametrize("kind", deepspeed_ranks.KINDS)
def test_steps_compute_what_torch_and_transformers_do(
    kind: str, folder: Path, pair: dict[str, list[tr.Result]]
) -> None:
    truth, ranks = tr.truth(folder, tr.config(folder, "qwen2", "grpo")), pair[f"{kind}:qwen2-grpo-split"]
    assert apart(weights_of(ranks), weights_of([truth])) < TIGHT
    for found, expected in zip(ranks[0].metrics, truth.metrics, strict=True):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=TIGHT)


@pytest.mark.parametrize("kind", [*deepspeed_ranks.KINDS, *deepspeed_ranks.SUMS])
def test_a_step_that_is_not_finite_leaves_nothing_behind(kind: str, pair: dict[str, list[tr.Result]]) -> None:
    for result in pair[f"{kind}:non_finite"]:
        assert result.extra["error"][1:] == (1, "loss", [(1, 1)])
        assert result.extra["untouched"]
        assert result.metrics == result.extra["without"].metrics
        assert_same_rows(result.weights, result.extra["without"].weights)


@pytest.mark.parametrize("kind", [*deepspeed_ranks.KINDS, *deepspeed_ranks.SUMS])
def test_resume_is_bitwise(kind: str, pair: dict[str, list[tr.Result]]) -> None:
    assert_resumed(pair[f"{kind}:resume"])


@pytest.mark.parametrize("kind", deepspeed_ranks.BFLOAT16)
def test_bfloat16_is_near_float32(kind: str, folder: Path, pair: dict[str, list[tr.Result]]) -> None:
    """bfloat16 has 8 bits of precision: 2^-8 is 0.4 %."""
    truth, ranks = tr.truth(folder, tr.config(folder, "llama", "sft")), pair[f"{kind}:bfloat16"]
    assert ranks[0].metrics == ranks[1].metrics
    for found, expected in zip(ranks[0].metrics, truth.metrics, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=2**-8)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
        assert found["lr"] == expected["lr"]
    assert ranks[0].metrics[-1]["loss"] < ranks[0].metrics[0]["loss"]


@pytest.mark.parametrize("kind", deepspeed_ranks.BFLOAT16)
def test_an_adapter_in_bfloat16_is_near_float32(
    kind: str, folder: Path, pair: dict[str, list[tr.Result]], float32_adapter: tr.Result
) -> None:
    ranks = pair[f"{kind}:bfloat16_adapter"]
    assert ranks[0].metrics == ranks[1].metrics
    for found, expected in zip(ranks[0].metrics, float32_adapter.metrics, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=2**-8)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
    assert ranks[0].metrics[-1]["loss"] < ranks[0].metrics[0]["loss"]


@pytest.fixture(scope="module")
def exported_by_fsdp2(folder: Path) -> dict[str, torch.Tensor]:
    deepspeed_ranks.bfloat16_export("fsdp2", folder, tr.alone(), 0)
    return load_file(folder / "bfloat16-adapter-fsdp2" / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", deepspeed_ranks.BFLOAT16)
def test_an_adapter_is_exported_in_the_precision_of_fsdp2s(
    kind: str, folder: Path, pair: dict[str, list[tr.Result]], exported_by_fsdp2: dict[str, torch.Tensor]
) -> None:
    """Master weights. With gradients of 8 bits, the first steps from zero (`lora_B`) differ the most."""
    assert f"{kind}:bfloat16_export" in pair
    found = load_file(folder / f"bfloat16-adapter-{kind}" / "adapter_model.safetensors")
    expected = exported_by_fsdp2
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, each.shape) for name, each in expected.items()
    }
    for name, each in found.items():
        assert not torch.equal(each, each.bfloat16().float()), f"{name} has more digits than bfloat16"
        distance = float((each - expected[name]).norm() / expected[name].norm())
        assert distance < (0.1 if "lora_B" in name else 2**-7), name


@pytest.mark.parametrize("kind", deepspeed_ranks.DAMAGED)
def test_a_memory_checkpoint_that_one_rank_cannot_read_is_refused_by_all(
    kind: str, pair: dict[str, list[tr.Result]]
) -> None:
    messages = [result.extra["error"] for result in pair[f"{kind}:damaged"]]
    assert all("no copy of version 2 of rank 1's state" in message for message in messages)
    assert "its content is damaged" in messages[1]
    for result in pair[f"{kind}:damaged"]:
        assert_same_rows(result.weights, result.extra["first"])


@pytest.mark.parametrize("kind", deepspeed_ranks.PUBLISHED)
def test_weight_sync_gathers_buckets_and_never_single_parameters(kind: str, pair: dict[str, list[tr.Result]]) -> None:
    """Below stage 3 every rank has all weights. At stage 3, the rows that cannot be divided evenly are one more bucket;
    with an adapter, its own are another, and the adapter itself is gathered at once."""
    for result in pair[f"{kind}:published"]:
        assert result.extra["weights"] > 20
        found = result.extra["plain"], result.extra["adapter"]
        assert found == ((0, 0) if kind == "deepspeed-2" else (2 + 1, 2 + 1 + 2))


@pytest.mark.parametrize("kind", deepspeed_ranks.REFORMED)
def test_a_survivor_forms_new_communicators_and_continues_from_the_memory_checkpoint(
    kind: str, folder: Path, pair: dict[str, list[tr.Result]]
) -> None:
    """Rank 1 is killed after the first step. Its peer's engine is destroyed and built again in the same process."""
    place = folder / f"reformed-{kind}"
    place.mkdir()
    for model in tr.FAMILIES:
        (place / model).symlink_to(folder / model)
    for result, undisturbed in zip(reformed_ranks.run(place, kind), pair[f"{kind}:memory"], strict=True):
        assert result.metrics == [undisturbed.metrics[1]]
        assert_same_rows(result.weights, undisturbed.weights)
        assert result.rank or result.extra["lost"]


@pytest.mark.slow
def test_compiled_layers_compute_the_same_with_an_empty_micro_batch_on_one_rank(folder: Path) -> None:
    for ranks in tr.launch(folder, 2, deepspeed_ranks.SLOW, module="deepspeed_ranks", limit_s=500).values():
        for result in ranks:
            plain_losses, plain = result.extra["plain"]
            for name in ("compiled", "recomputed"):
                losses, weights = result.extra[name]
                assert losses == pytest.approx(plain_losses, rel=TIGHT)
                for weight, (_, rows) in weights.items():
                    torch.testing.assert_close(rows, plain[weight][1], rtol=1e-5, atol=2e-6, msg=weight)


def test_a_second_copy_on_neighbouring_ranks_changes_no_result(folder: Path, four: dict[str, list[tr.Result]]) -> None:
    """ZeRO++'s hpZ: the first pass after a step gathers from all ranks, the following ones within half of them."""
    truth, ranks = tr.truth(folder, tr.config(folder, "qwen2", "grpo")), four["deepspeed-3-hpz:second_copy"]
    assert apart(weights_of(ranks), weights_of([truth])) < TIGHT
    for result in ranks:
        assert result.extra["members"] == ([0, 1] if result.rank < 2 else [2, 3]) and result.extra["within"] > 20
        for found, expected in zip(result.metrics, truth.metrics, strict=True):
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=TIGHT)
        assert_same_rows(result.extra["again"], result.weights)


def test_frozen_weights_have_a_second_copy_too(folder: Path, four: dict[str, list[tr.Result]]) -> None:
    role = tr.config(folder, "llama", "grpo", {"adapter": deepspeed_ranks.SAVED}).policy
    expected = tr.train(tr.create(role), tr.batch_of(role, 1, budget=60), role)  # FSDP2, equal to peft (test_adapters)
    ranks = four["deepspeed-3-hpz:second_copy_adapter"]
    assert apart(weights_of(ranks), weights_of([expected])) < TIGHT
    assert [each["loss"] for each in ranks[0].metrics] == pytest.approx(
        [m["loss"] for m in expected.metrics], rel=TIGHT
    )


def test_the_installed_version_is_supported() -> None:
    require_deepspeed("trainer.kind")
