"""Models that cannot be trained are refused when a run is planned, with field, value and remedy."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import BartConfig, BertConfig, PretrainedConfig, T5Config

from lockstep.config.model import ModelConfig
from lockstep.models.errors import ModelError
from lockstep.models.model_facts import model_facts


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (T5Config(num_layers=2), "t5 is an encoder-decoder model; use a causal language model"),
        (BartConfig(encoder_layers=1), "bart is an encoder-decoder model; use a causal language model"),
        (BertConfig(num_hidden_layers=1), "bert attends in both directions; use a causal language model"),
    ],
    ids=["t5", "bart", "bert"],
)
def test_an_architecture_is_refused(config: PretrainedConfig, why: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"model\.path = '{tmp_path}': {why}"):
        model_facts(ModelConfig(path=str(tmp_path)), "cpu")


def test_a_quantized_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (copy / "config.json").write_text(json.dumps(config))
    tensors = load_file(copy / "model.safetensors")
    save_file(
        tensors | {"model.norm.weight_scale_inv": tensors["model.norm.weight"].clone()}, copy / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"model\.path.*quantized \(fp8\).*give the unquantized checkpoint"):
        model_facts(ModelConfig(path=str(copy)), "cpu")


def test_a_model_that_cannot_be_exported_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter

    class OneWay(Chunk):
        @property
        def reverse_op(self) -> ConversionOps:
            raise NotImplementedError("there is no way back")

    converter = WeightConverter("norm.both", "norm.weight", [OneWay(dim=0)])
    monkeypatch.setattr("lockstep.models.weight_conversion.get_model_conversion_mapping", lambda *_, **__: [converter])
    with pytest.raises(ModelError, match=r"model\.path.*there is no way back.*use another model"):
        model_facts(ModelConfig(path=str(folder)), "cpu")
