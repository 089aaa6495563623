"""Weights are read from checkpoints with other names and groups, by rows where the conversion allows it."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from lockstep.config.model import ModelConfig
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import SafetensorsCheckpoint, check_weights, fill_policy
from lockstep.models.model_loader import load_policy
from lockstep.models.weight_conversion import CheckpointMapping, CheckpointNames, checkpoint_groups, to_checkpoint

EXPERTS = 4
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


class CountedCheckpoint(SafetensorsCheckpoint):
    """Counts the elements that are read."""

    elements = 0

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        found = super().rows(name, start, stop)
        self.elements += found.numel()
        return found

    def read(self, name: str) -> Tensor:
        found = super().read(name)
        self.elements += found.numel()
        return found


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral as transformers saves it: one tensor per expert."""
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(1)
    config = MixtralConfig(vocab_size=48, intermediate_size=24, num_local_experts=EXPERTS, **SMALL)
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_model_with_one_tensor_per_expert_is_loaded(mixtral: Path) -> None:
    policy = load_policy(ModelConfig(path=str(mixtral)), "cpu", meta=True)
    report = fill_policy(policy, mixtral, "cpu")
    assert report.missing == report.unexpected == []
    expected = AutoModelForCausalLM.from_pretrained(mixtral).state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in policy.lm.state_dict().items())


def test_only_the_experts_of_the_requested_rows_are_read(mixtral: Path) -> None:
    lm = load_policy(ModelConfig(path=str(mixtral)), "cpu").lm
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = lm.state_dict()[name]
    with CountedCheckpoint(mixtral) as checkpoint:
        weight = CheckpointMapping(lm, lm.state_dict(), checkpoint, "folder").sources[name]
        assert checkpoint.elements == 0
        for start, stop in [(0, 1), (1, 3), (0, EXPERTS), (2, 2)]:
            checkpoint.elements = 0
            assert torch.equal(weight.rows(checkpoint, start, stop), whole[start:stop])
            assert checkpoint.elements == whole[start:stop].numel()


def test_a_checkpoint_with_the_modules_own_names_is_loaded_and_written_with_them(mixtral: Path, tmp_path: Path) -> None:
    lm = load_policy(ModelConfig(path=str(mixtral)), "cpu").lm
    shutil.copy(mixtral / "config.json", tmp_path)
    save_file({name: tensor.clone() for name, tensor in lm.state_dict().items()}, tmp_path / "model.safetensors")
    policy = load_policy(ModelConfig(path=str(tmp_path)), "cpu", meta=True)
    assert fill_policy(policy, tmp_path, "cpu").unexpected == []
    assert all(torch.equal(tensor, policy.lm.state_dict()[name]) for name, tensor in lm.state_dict().items())
    groups = checkpoint_groups(policy.lm, {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()})
    assert [list(group.tensors) for group in groups] == [[name] for name in lm.state_dict()]


def test_groups_become_the_tensors_that_transformers_saves(mixtral: Path) -> None:
    lm = load_policy(ModelConfig(path=str(mixtral)), "cpu").lm
    weights = lm.state_dict()
    expected = load_file(mixtral / "model.safetensors")
    found: dict[str, Tensor] = {}
    for group in checkpoint_groups(lm, {name: tuple(tensor.shape) for name, tensor in weights.items()}):
        made = to_checkpoint(lm, {name: weights[name] for name in group.weights})
        assert {name: tuple(tensor.shape) for name, tensor in made.items()} == group.tensors
        found |= made
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_engine_gets_the_tensors_of_a_checkpoint_group_by_group(mixtral: Path) -> None:
    lm = load_policy(ModelConfig(path=str(mixtral)), "cpu", meta=True).lm
    names = pickle.loads(pickle.dumps(CheckpointNames(lm)))
    weights = AutoModelForCausalLM.from_pretrained(mixtral).state_dict()
    found = dict(names.convert(weights.items()))
    expected = load_file(mixtral / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert found["lm_head.weight"] is weights["lm_head.weight"]


class Halves(nn.Module):
    """A module with two weights that a checkpoint has as one tensor."""

    config, _weight_conversions = None, (WeightConverter("w.both", ["w.a", "w.b"], [Chunk(dim=0)]),)

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterDict({name: torch.randn(2, 3) for name in ("a", "b", "other")})


def test_weights_that_become_one_tensor_are_one_group() -> None:
    lm = Halves()
    weights = {name: parameter.data for name, parameter in lm.named_parameters()}
    groups = checkpoint_groups(lm, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    assert [(sorted(group.weights), group.tensors) for group in groups] == [
        (["w.a", "w.b"], {"w.both": (4, 3)}),
        (["w.other"], {"w.other": (2, 3)}),
    ]
    arriving = [(name, weights[name]) for name in ("w.b", "w.other", "w.a")]
    found = list(CheckpointNames(lm).convert(arriving))
    assert [name for name, _ in found] == ["w.other", "w.both"]
    assert torch.equal(found[1][1], torch.cat([weights["w.a"], weights["w.b"]]))


def test_weights_that_a_checkpoint_has_too_are_not_touched(folder: Path) -> None:
    names = CheckpointNames(load_policy(ModelConfig(path=str(folder)), "cpu", meta=True).lm)
    weights = load_file(folder / "model.safetensors")
    assert all(weights[name] is tensor for name, tensor in names.convert(weights.items()))


@pytest.mark.parametrize("gone", ["experts.3.w1", "experts.3.w", "experts.0.w2"])
def test_missing_experts_are_refused_before_anything_is_read(mixtral: Path, tmp_path: Path, gone: str) -> None:
    copy = shutil.copytree(mixtral, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if gone not in name}, copy / "model.safetensors")
    policy = load_policy(ModelConfig(path=str(copy)), "cpu", meta=True)
    with pytest.raises(ModelError, match=r"model\.path.*experts\.(gate_up|down)_proj"):
        check_weights(policy, copy)


CONVERTERS = {
    "expert by expert": ("w.*.a", "w.t", [MergeModulelist(dim=0), Transpose(1, 2)]),
    "concatenated": (["w.a", "w.b"], "w.t", [Concatenate(dim=0)]),
    "concatenated columns": (["w.a", "w.b"], "w.t", [Concatenate(dim=1)]),
    "cut": ("w.a", ["w.t", "w.u"], [Chunk(dim=0)]),
    "interleaved columns": ("w.a", "w.t", [Interleave(dim=1)]),
    "interleaved rows": ("w.a", "w.t", [Interleave(dim=0)]),
    "transposed": ("w.a", "w.t", [Transpose(0, 1)]),
}


@pytest.mark.parametrize("case", CONVERTERS)
def test_rows_of_each_operation(case: str, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, targets, operations = CONVERTERS[case]
    torch.manual_seed(2)
    tensors = {f"w.{kind}": torch.randn(6, 4) for kind in ("a", "b")} | {
        f"w.{i}.a": torch.randn(4, 5) for i in range(6)
    }
    converter = WeightConverter(sources, targets, operations)
    used = {name: each for name, each in tensors.items() if converter.rename_source_key(name)[1]}
    save_file(used, tmp_path / "model.safetensors")
    lm = load_policy(ModelConfig(path=str(mixtral)), "cpu", meta=True).lm
    monkeypatch.setattr("lockstep.models.weight_conversion.get_model_conversion_mapping", lambda _: [converter])
    with CountedCheckpoint(tmp_path) as checkpoint:
        state = {name: torch.empty(0) for name in ("w.t", "w.u")}
        mapping = CheckpointMapping(lm, state, checkpoint, "folder")
        for name, weight in mapping.sources.items():
            whole = weight.rows(checkpoint, 0, weight.shape[0])
            assert tuple(whole.shape) == weight.shape
            checkpoint.elements = 0
            assert torch.equal(weight.rows(checkpoint, 1, 3), whole[1:3]), name
            assert (checkpoint.elements > whole[1:3].numel()) == (case in ("interleaved rows", "transposed"))
    assert sorted(mapping.sources) == (["w.t", "w.u"] if case == "cut" else ["w.t"])
