"""The fused forward of known decoder layers equals that of transformers."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from test_forest_attention import SIZES, WINDOW
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lockstep.data.row_layout import RowLayout
from lockstep.models.forest_attention import FOREST_ATTENTION
from lockstep.models.fused_decoder import add_linear, apply_rotary, linear_projections, rms_norm, swiglu
from lockstep.models.packing_probe import probe_fused_decoder
from lockstep.models.policy_model import PolicyModel

KNOWN = {
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES),
    "mistral, window": MistralConfig(**SIZES, **WINDOW),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, last layer with a window": Qwen2Config(**SIZES, **WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
}
LAYOUT = RowLayout([9, 5, 4, 1, 6, 3, 5], [-1, 0, 0, -1, 3, 4, 4])
SOURCES = torch.tensor([8, 9, 10, 11, 12, 8, 14, 16, 19, 20, 24, 25, 26, 24, 29])
"""Sources in the first tree: the prompt's last token and tokens of its completions, with gaps; of a middle turn, all
tokens except the first ones."""


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PolicyModel:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=FOREST_ATTENTION, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    return PolicyModel(lm)


def outcome(
    policy: PolicyModel, layout: RowLayout = LAYOUT, sources: Tensor = SOURCES
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the hidden states of the sources, and the gradient of their weighted sum by parameter."""
    policy.zero_grad()
    tokens = torch.arange(layout.tokens) * 7 % 90 + 2
    subset = policy._query_subset(layout, sources)
    hidden = policy._hidden({"input_ids": tokens[None]}, layout, subset)
    hidden = hidden[sources if subset is None else subset.places_of(sources)]
    (hidden * torch.linspace(-1, 2, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def assert_equal(policy: PolicyModel) -> None:
    """Compares in float64, with all tokens in the subset and with few."""
    assert policy.fuse_layers() is None and policy.fused_decoder is not None
    for sources in (torch.arange(LAYOUT.tokens), SOURCES):
        policy.fused_decoder.enabled = True
        assert (policy._query_subset(LAYOUT, sources) is None) == (sources is not SOURCES)
        hidden, gradients = outcome(policy, sources=sources)
        policy.fused_decoder.enabled = False
        expected, expected_gradients = outcome(policy, sources=sources)
        torch.testing.assert_close(hidden, expected)
        assert gradients.keys() == expected_gradients.keys() and gradients
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, expected_gradients[name], msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("config", KNOWN.values(), ids=KNOWN)
def test_fused_layers_equal_transformers_own(config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # RMSNorm's own forward computes in float32 whatever its input is.
    monkeypatch.setattr(Tensor, "to", _never_lower(Tensor.to))
    assert_equal(build(config))


def _never_lower(plain):
    def to(self, *args, **kwargs):
        return self if self.dtype == torch.float64 and torch.float32 in args else plain(self, *args, **kwargs)

    return to


def test_adapted_layers_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA's layers compute their own products; frozen weights get no gradient."""
    monkeypatch.setattr(Tensor, "to", _never_lower(Tensor.to))
    policy = build(KNOWN["qwen2"])
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False), policy.lm)
    policy.double()
    assert_equal(policy)
    assert all("lora" in name for name in outcome(policy)[1])


def test_the_last_layer_computes_only_the_subset() -> None:
    policy = build(KNOWN["llama, biases"], torch.float32)
    policy.fuse_layers()
    layout = RowLayout([64, 4, 4], [-1, 0, 0])
    subset = policy._query_subset(layout, torch.tensor([63, 64, 65, 63, 68]))
    assert subset is not None and subset.index.tolist() == [63, 64, 65, 68]
    assert policy._hidden({"input_ids": torch.arange(72)[None]}, layout, subset).shape[0] == 4


def test_unknown_layers_keep_their_forward() -> None:
    gemma = build(Gemma2Config(**SIZES, head_dim=8), torch.float32)
    assert "Gemma2DecoderLayer" in (gemma.fuse_layers() or "") and gemma.fused_decoder is None
    assert probe_fused_decoder(gemma) == "the model's own forward"
    gelu = build(LlamaConfig(**SIZES, hidden_act="gelu"), torch.float32)
    assert "gelu" in (gelu.fuse_layers() or "")

    class Other(torch.nn.Module):
        weight = torch.ones(32)

    changed = build(KNOWN["qwen3"], torch.float32)
    changed.layers[1].input_layernorm = Other()
    assert "Other is not transformers' Qwen3RMSNorm" in (changed.fuse_layers() or "")


def test_the_probe_disables_a_forward_that_disagrees() -> None:
    policy = build(KNOWN["qwen2"], torch.float32)
    policy.fuse_layers()
    assert "agrees" in probe_fused_decoder(policy) and policy.fused_decoder.enabled
    with torch.no_grad():
        policy.layers[1].self_attn.scaling *= 1.5  # both forwards read it
    assert "agrees" in probe_fused_decoder(policy)
    policy.layers[1].mlp.forward = lambda x: 2 * x  # only the model's own calls it
    assert "differs" in probe_fused_decoder(policy) and not policy.fused_decoder.enabled


@pytest.mark.parametrize("shape", [(7, 6), (5, 3, 4)], ids=["rows", "heads"])
def test_gradients_of_the_parts(shape: tuple[int, ...]) -> None:
    """Checks in float64 by finite differences. Gradients may have any memory layout."""
    generator = torch.Generator().manual_seed(1)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).requires_grad_()

    x, weight = random(*shape), random(shape[-1])
    plain = weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2)
    torch.testing.assert_close(rms_norm(x, weight, 1e-2), plain)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2).transpose(0, 1) * x.transpose(0, 1), (x, weight))
    assert torch.autograd.gradcheck(lambda a, b: swiglu(a, b) * b, (random(*shape), random(*shape)))
    if len(shape) == 3:
        cos, sin = random(5, 1, 4).detach(), random(5, 1, 4).detach()
        assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos, sin), (x,))
        return
    first, second, last = torch.nn.Linear(6, 4), torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(6, 6, bias=False)
    for module in (first, second, last):
        module.double()
    inputs = (x, first.weight, first.bias, second.weight)
    assert torch.autograd.gradcheck(lambda x, *_: linear_projections([first, second], x), inputs)
    assert torch.autograd.gradcheck(lambda x, total, _: add_linear(total, last, x), (x, random(7, 6), last.weight))
