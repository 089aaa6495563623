"""Model families load new weights correctly: those whose tensors vLLM uses unchanged, and those that it rearranges."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from test_vllm import ask, changed, error, publish, run, start  # noqa: F401 - a fixture

from lockstep.config.model import ModelConfig
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.tiny_model import make_tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra `vllm`: script/test --vllm"),
]
CLOSE = 1e-3
"""For Gemma 2, vLLM and transformers differ by 2e-4, for others by less; with any old weight by far more."""
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
USUAL = SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 160}
FAMILIES = {
    "llama": ("Llama", USUAL, True),
    "llama-tied": ("Llama", USUAL | {"tie_word_embeddings": True, "attention_bias": True}, True),
    "mistral": ("Mistral", USUAL | {"head_dim": 32}, True),
    "qwen2": ("Qwen2", USUAL, True),
    "qwen3": ("Qwen3", USUAL | {"head_dim": 32, "tie_word_embeddings": True}, True),
    # The output layer is tied to the embedding.
    "gemma2": ("Gemma2", USUAL | {"head_dim": 32, "query_pre_attn_scalar": 32}, False),
    "cohere": ("Cohere", USUAL, False),
    "cohere2": ("Cohere2", USUAL, False),
    # The checkpoint interleaves query, key and value per head; vLLM stores them one after the other.
    "bloom": ("Bloom", {"hidden_size": 128, "n_layer": 2, "n_head": 4, "max_position_embeddings": 160}, False),
    "falcon": ("Falcon", SIZES | {"multi_query": False, "max_position_embeddings": 160}, False),
    "falcon-new": (
        "Falcon",
        SIZES | {"num_kv_heads": 2, "new_decoder_architecture": True, "max_position_embeddings": 160},
        False,
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A folder with a tiny model of the family, and whether its layers are known."""
    name, fields, known = FAMILIES[request.param]
    folder = make_tiny(tmp_path / "m", hidden=64, heads=2, kv_heads=1, ffn=32, max_length=160)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = {"bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer), **fields, **ids)
    torch.manual_seed(3)
    lm = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    lm.save_pretrained(folder)
    return folder, known


def test_a_family_loads_new_weights_correctly(start, family, tmp_path, monkeypatch):  # noqa: F811
    from lockstep.rollout.vllm import weight_transfer

    folder, known = family
    carried, apply_tensor_moves = [], weight_transfer.apply_tensor_moves

    def carry(tensor_moves, tensors):
        carried.append(len(tensor_moves))
        apply_tensor_moves(tensor_moves, tensors)

    monkeypatch.setattr(weight_transfer, "apply_tensor_moves", carry)
    engine, requests, new = start(folder), ask(count=2, length=40), changed(folder)
    old = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert error(old, requests, run(engine, requests)) < CLOSE
    for version in (4, 5):  # the second time the layers have been packed already
        engine.load_weights(publish(new, tmp_path / "store", version), version)
        assert error(new, requests, run(engine, requests)) < CLOSE
        assert error(old, requests, run(engine, requests)) > 1e-2
        old, new = new, changed(folder)
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.mul_(1.1)
    assert bool(carried) == known
