"""Loading on the meta device and loading at once yield the same model; errors name the cause."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_policy_model import make_row
from transformers import AutoConfig, GPT2Config, MambaConfig

from lockstep.config.model import ModelConfig
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import SafetensorsCheckpoint, compare_names, fill_policy, named_state, named_weights
from lockstep.models.model_loader import (
    context_length,
    load_model_config,
    load_policy,
    load_tokenizer,
    resolve_dtype,
    usable_context,
)


def logprobs(policy):
    row = make_row()
    return policy(row.tokens, row.layout, row.sources, row.targets)[0]


def test_meta_then_fill_is_the_same_model(folder) -> None:
    cfg = ModelConfig(path=str(folder))
    whole, empty = load_policy(cfg, "cpu"), load_policy(cfg, "cpu", meta=True)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not any(buffer.is_meta for buffer in empty.buffers()) and list(empty.buffers())
    assert not empty.training
    report = fill_policy(empty, folder, "cpu")
    assert report.missing == report.unexpected == []
    filled = dict(empty.named_parameters())
    assert filled.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(filled[name], parameter) for name, parameter in whole.named_parameters())
    assert (empty.head.weight is empty.lm.get_input_embeddings().weight) == (
        whole.head.weight is whole.lm.get_input_embeddings().weight
    )
    assert torch.equal(logprobs(empty), logprobs(whole))


def test_each_parameter_can_be_freed_before_the_next_is_read(folder) -> None:
    cfg = ModelConfig(path=str(folder))
    expected, policy = dict(named_weights(load_policy(cfg, "cpu"))), load_policy(cfg, "cpu", meta=True)
    freed = []

    def free(parameter) -> None:
        held = {name: each for name, each in named_weights(policy) if not each.is_meta and each.numel()}
        ((name, only),) = held.items()
        assert only is parameter and torch.equal(parameter, expected[name])
        parameter.data = torch.empty(0)
        freed.append(name)

    fill_policy(policy, folder, "cpu", on_filled=free)
    assert sorted(freed) == sorted(expected)


def test_another_dtype_for_master_weights(folder) -> None:
    cfg = ModelConfig(path=str(folder), dtype="bfloat16")
    assert next(load_policy(cfg, "cpu").parameters()).dtype == torch.bfloat16
    assert next(load_policy(cfg, "cpu", dtype=torch.float32).parameters()).dtype == torch.float32
    empty = load_policy(cfg, "cpu", meta=True)
    fill_policy(empty, folder, "cpu")
    assert {parameter.dtype for parameter in empty.parameters()} == {torch.bfloat16}
    assert torch.isfinite(logprobs(empty)).all()


def test_names_are_the_checkpoints(folder) -> None:
    policy = load_policy(ModelConfig(path=str(folder)), "cpu")
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert sorted(name for name, _ in named_weights(policy)) == checkpoint.names
        assert [name for name, _ in named_state(policy)] == [name for name, _ in named_weights(policy)]
        assert {name: tensor.shape for name, tensor in checkpoint} == {
            name: parameter.shape for name, parameter in named_weights(policy)
        }


def test_rows_are_slices(folder) -> None:
    with SafetensorsCheckpoint(folder) as checkpoint:
        name = "model.layers.1.mlp.down_proj.weight"
        whole = checkpoint.read(name)
        assert checkpoint.shape(name) == tuple(whole.shape)
        assert torch.equal(checkpoint.rows(name, 3, 9), whole[3:9])
        assert checkpoint.rows(name, 32, 32).shape == (0, 48)


def test_a_checkpoint_in_several_files(folder, tmp_path) -> None:
    copy, tensors = _copy(folder, tmp_path)
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, copy / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model.safetensors").unlink()
    policy = load_policy(ModelConfig(path=str(copy)), "cpu", meta=True)
    fill_policy(policy, copy, "cpu")
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in named_weights(policy))
    (copy / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        SafetensorsCheckpoint(copy)


def test_missing_and_unexpected_weights(folder, tmp_path) -> None:
    copy, tensors = _copy(folder, tmp_path)
    gone = "model.layers.0.self_attn.q_proj.weight"
    tensors["surplus.weight"] = torch.zeros(2)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    cfg = ModelConfig(path=str(copy))
    policy = load_policy(cfg, "cpu", meta=True)
    assert fill_policy(policy, copy, "cpu").unexpected == ["surplus.weight"]
    del tensors[gone]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=gone):
        load_policy(cfg, "cpu")
    policy = load_policy(cfg, "cpu", meta=True)
    with SafetensorsCheckpoint(copy) as checkpoint:
        assert compare_names(policy, checkpoint).missing == [gone]
    with pytest.raises(ModelError, match=gone):
        fill_policy(policy, copy, "cpu")
    assert all(parameter.is_meta for parameter in policy.parameters())


def test_a_weight_of_another_shape(folder, tmp_path) -> None:
    copy, tensors = _copy(folder, tmp_path)
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    for meta in (True, False):
        with pytest.raises(ModelError, match=r"model\.norm\.weight"):
            fill_policy(load_policy(ModelConfig(path=str(copy)), "cpu", meta=meta), copy, "cpu")


def test_a_tied_weight_saved_under_its_other_name(tiny_folders, tmp_path) -> None:
    copy, tensors = _copy(tiny_folders["llama", True], tmp_path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    policy = load_policy(ModelConfig(path=str(copy)), "cpu", meta=True)
    assert fill_policy(policy, copy, "cpu").unexpected == []
    assert torch.equal(policy.head.weight, tensors["lm_head.weight"])


def _copy(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return copy, load_file(copy / "model.safetensors")


def test_tokenizer(folder, tmp_path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=str(template)))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    with pytest.raises(ModelError, match=r"model\.chat_template"):
        load_tokenizer(ModelConfig(path=str(folder), chat_template=str(tmp_path / "none.jinja")))


def test_a_tokenizer_without_eos_is_refused(tiny_folders, tmp_path) -> None:
    copy, _ = _copy(tiny_folders["llama", True], tmp_path)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="end-of-sequence"):
        load_tokenizer(ModelConfig(path=str(copy)))


@pytest.mark.parametrize("path", ["./none", "/no/such/folder", "a/b/c"])
def test_no_such_folder(path: str) -> None:
    for load in (load_tokenizer, load_model_config):
        with pytest.raises(ModelError, match=r"model\.path.*no such folder"):
            load(ModelConfig(path=path))


def test_the_hub_offline(monkeypatch, tmp_path) -> None:
    """Without a network, loading fails immediately and names the model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="nobody/nothing-here"):
        load_model_config(ModelConfig(path="nobody/nothing-here"))


def test_not_a_language_model(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match="not a causal language model"):
        load_policy(ModelConfig(path=str(tmp_path)), "cpu", meta=True)


def test_dtype_and_context(folder) -> None:
    assert resolve_dtype("auto", "cpu") == torch.float32
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    assert resolve_dtype("float16", "cpu") == torch.float16
    assert context_length(AutoConfig.from_pretrained(folder)) == 128
    assert context_length(GPT2Config(n_positions=77)) == 77
    with pytest.raises(ModelError, match=r"model\.max_length"):
        context_length(MambaConfig())


def test_the_usable_context_is_the_smaller_limit(folder) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert [usable_context(ModelConfig(path="m", max_length=limit), config) for limit in (None, 64, 999)] == [
        128,
        64,
        128,
    ]
    assert usable_context(ModelConfig(path="m", max_length=64), MambaConfig()) == 64
    with pytest.raises(ModelError, match=r"model\.max_length"):
        usable_context(ModelConfig(path="m"), MambaConfig())
