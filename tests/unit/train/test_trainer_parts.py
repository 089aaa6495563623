"""Parts of the trainer: rows, optimizer, activation checkpointing, retention of checkpoints."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.trainer_pt_utils import get_parameter_names

from lockstep.config.model import ModelConfig
from lockstep.config.trainer import AdamWConfig
from lockstep.data.row_layout import RowLayout
from lockstep.models.model_loader import load_policy
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.model_parts import ModelPart
from lockstep.models.weight_conversion import CheckpointGroup
from lockstep.train.checkpoints.checkpoint_retention import checkpoint_bytes, checkpoints_to_keep
from lockstep.train.decoder_layers import checkpoint_activations
from lockstep.train.distributed import shard_rows
from lockstep.train.model_export import _plan_files
from lockstep.train.optimizer import ShardedAdamW, clip_gradients, is_decayed, norm_parameter_ids, square_norm
from lockstep.train.rank_service import choose_device


@given(world=st.integers(1, 9), rows=st.integers(1, 40))
def test_rows_are_chunked_as_torch_chunks_them(world: int, rows: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(world)]
    chunks += [[]] * (world - len(chunks))
    assert [list(range(*shard_rows(rank, world, rows))) for rank in range(world)] == chunks


def test_biases_and_norms_are_not_decayed() -> None:
    names = {
        "model.embed_tokens.weight": True,
        "model.layers.0.self_attn.q_proj.weight": True,
        "model.layers.0.self_attn.q_proj.bias": False,
        "model.layers.0.self_attn.q_norm.weight": False,
        "model.layers.0.input_layernorm.weight": False,
        "model.norm.weight": False,
        "transformer.h.0.mlp.c_proj.weight": True,
        "lm_head.weight": True,
    }
    assert {name: is_decayed(name) for name in names} == names


def _one_part(tensors: dict[str, torch.Tensor]) -> dict[str, ModelPart]:
    return dict.fromkeys(tensors, "language")


def test_norms_of_any_name_are_not_decayed() -> None:
    """The rule equals that of transformers' Trainer for a model whose norms have other names."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    model = GPT2LMHeadModel(config)
    expected = set(get_parameter_names(model, [torch.nn.LayerNorm], ["bias"]))
    norms = norm_parameter_ids(model)
    found = {name for name, parameter in model.named_parameters() if is_decayed(name) and id(parameter) not in norms}
    assert found == expected & dict(model.named_parameters()).keys()
    assert "transformer.h.0.ln_1.weight" not in found

    tensors = {"ln_1.weight": torch.ones(3), "c_attn.weight": torch.ones(3)}
    optimizer = ShardedAdamW(tensors, AdamWConfig(weight_decay=0.5), _one_part(tensors), norms=["ln_1.weight"])
    optimizer.step(tensors, {name: torch.zeros(3) for name in tensors}, {"language": 0.1})
    assert tensors["ln_1.weight"].tolist() == [1.0] * 3
    assert tensors["c_attn.weight"][0].item() == pytest.approx(0.95)


def test_the_optimizer_is_torchs_adamw_and_takes_empty_rows() -> None:
    torch.manual_seed(0)
    config = AdamWConfig(betas=(0.8, 0.95), weight_decay=0.1)
    tensors = {"a.weight": torch.randn(5, 3), "b.bias": torch.randn(4), "c.weight": torch.empty(0, 3)}
    tensors |= {"d.weight": torch.randn(2, 3), "d.bias": torch.randn(2)}
    parts: dict[str, ModelPart] = {**_one_part(tensors), "d.weight": "tower", "d.bias": "tower"}
    expected = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
    groups = [
        {"params": [expected["a.weight"]], "weight_decay": 0.1},
        {"params": [expected["b.bias"]], "weight_decay": 0.0},
        {"params": [expected["d.weight"]], "weight_decay": 0.1, "share": 0.3},
        {"params": [expected["d.bias"]], "weight_decay": 0.0, "share": 0.3},
    ]
    reference = torch.optim.AdamW(groups, betas=config.betas, fused=True)
    sharded = ShardedAdamW(tensors, config, parts)
    for lr in (1e-2, 3e-3, 1e-3):
        gradients = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
        sharded.step(tensors, gradients, {"language": lr, "tower": 0.3 * lr})
        for name, parameter in expected.items():
            parameter.grad = gradients[name].clone()
        for group in reference.param_groups:
            group["lr"] = lr * group.get("share", 1)
        reference.step()
    assert sharded.steps == 3
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=0)


def test_clipping_is_torchs() -> None:
    torch.manual_seed(1)
    gradients = {"a": torch.randn(7, 3), "b": torch.randn(5), "none": torch.empty(0, 2)}
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(parameters, 0.7))
    norm = float(square_norm(gradients)) ** 0.5
    assert norm == pytest.approx(expected, rel=1e-6)
    clip_gradients(gradients, norm, 0.7)
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    assert float(square_norm(gradients)) ** 0.5 == pytest.approx(0.7, rel=1e-5)
    before = gradients["a"].clone()
    clip_gradients(gradients, 0.7, 0.8)
    clip_gradients(gradients, 0.7, None)
    assert torch.equal(before, gradients["a"])
    assert float(square_norm({})) == 0.0
    assert not torch.isfinite(square_norm({"a": torch.tensor([1.0, torch.inf])}))


def test_the_norm_of_bfloat16_gradients_is_computed_in_float32() -> None:
    gradients = {"a": torch.full((1000,), 1.0078125, dtype=torch.bfloat16)}  # the next number after 1
    assert float(square_norm(gradients)) == pytest.approx(1000 * 1.0078125**2, rel=1e-6)


def test_activation_checkpointing_runs_layers_again_in_backward_only(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", hidden=16, ffn=16, heads=2, kv_heads=1)
    policy = load_policy(ModelConfig(path=str(tmp_path / "model")), "cpu")
    names = [name for name, _ in policy.named_parameters()]
    checkpoint_activations(policy)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for layer in policy.layers:
        layer.mlp.register_forward_pre_hook(count)  # type: ignore[union-attr]
    tokens = torch.arange(5, 11)
    row = (tokens, RowLayout([6], [-1]), torch.arange(5), tokens[1:])
    with torch.no_grad():
        policy(*row)
    assert calls == 2
    policy(*row)[0].sum().backward()
    assert calls == 2 + 4
    assert [name for name, _ in policy.named_parameters()] == names


@pytest.mark.parametrize(
    ("steps", "last", "best", "expected"),
    [
        ({1: None, 2: None, 3: None}, 2, True, {2, 3}),
        ({1: 0.9, 2: 0.1, 3: 0.2}, 2, True, {1, 2, 3}),
        ({1: 0.9, 2: 0.9, 3: 0.2, 4: 0.1}, 1, True, {2, 4}),
        ({1: 0.9, 2: 0.1, 3: 0.2}, 2, False, {2, 3}),
        ({}, 2, True, set()),
    ],
)
def test_which_checkpoints_are_kept(steps: dict[int, float | None], last: int, best: bool, expected: set[int]) -> None:
    assert checkpoints_to_keep(steps, last, best) == expected


def test_export_files_are_cut_by_size_and_named_as_transformers_names_them() -> None:
    a, b, c, d = (CheckpointGroup((name,), {name: (size,)}) for name, size in {"a": 4, "b": 4, "c": 12, "d": 1}.items())
    assert _plan_files([a, b, c, d], torch.uint8, 100) == {"model.safetensors": [a, b, c, d]}
    assert _plan_files([a, b, c, d], torch.uint8, 10) == {
        "model-00001-of-00003.safetensors": [a, b],
        "model-00002-of-00003.safetensors": [c],
        "model-00003-of-00003.safetensors": [d],
    }


def test_a_missing_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has GPUs")
    assert choose_device("auto", 3) == torch.device("cpu")
    with pytest.raises(ValueError, match="this host has 0 GPUs"):
        choose_device("cuda", 0)


def test_progress_is_counted_while_a_checkpoint_gets_its_name(tmp_path: Path) -> None:
    """The controller measures the size while a rank renames the folder, so files may disappear meanwhile."""
    draft, final = tmp_path / "00000003.tmp-1-1", tmp_path / "00000003"
    draft.mkdir()
    (draft / "weights").write_bytes(b"12345")
    assert checkpoint_bytes(tmp_path) == 5
    over = threading.Event()

    def rename() -> None:
        while not over.is_set():
            draft.rename(final)
            final.rename(draft)

    thread = threading.Thread(target=rename)
    thread.start()
    try:
        assert {checkpoint_bytes(tmp_path) for _ in range(3000)} <= {0, 5, 10}
    finally:
        over.set()
        thread.join()
