"""The probe detects whether a model respects row layouts."""

import pytest
import torch
from test_forest_attention import SIZES
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    RecurrentGemmaConfig,
)

from lockstep.data.row_layout import RowLayout
from lockstep.models import forest_attention
from lockstep.models.cascade_attention import CUDA_KERNELS
from lockstep.models.packing_probe import probe_packing
from lockstep.models.policy_model import PolicyModel, supports_forest_attention

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 1}


def build(config, forced: bool = False) -> PolicyModel:
    lm_class = AutoModelForCausalLM._model_mapping[type(config)]
    name = forest_attention.FOREST_ATTENTION if forced or supports_forest_attention(lm_class) else None
    torch.manual_seed(0)
    return PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation=name).eval())


def test_forest(policy) -> None:
    result = probe_packing(policy)
    assert result.mode == "forest" and "agree" in result.reason


def test_a_freshly_initialised_model_can_be_probed(tiny_folders) -> None:
    assert probe_packing(build(LlamaConfig(**SIZES))).mode == "forest"


def test_bfloat16() -> None:
    policy = build(LlamaConfig(**SIZES))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    assert probe_packing(policy.to(torch.bfloat16)).mode == "forest"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MambaConfig(**SMALL, state_size=4), "AttentionInterface"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "AttentionInterface"),
        (Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=2, intermediate_size_mlp=32), "chunked_attention"),
    ],
    ids=["state space", "alibi", "chunked attention"],
)
def test_an_architecture_without_the_interface_is_single_and_refuses_packed_rows(config, why: str) -> None:
    policy = build(config)
    result = probe_packing(policy)
    assert result.mode == "single" and why in result.reason
    tokens = torch.arange(2, 8)
    with pytest.raises(ValueError, match=why):
        policy(tokens, RowLayout([3, 3], [-1, -1]), torch.tensor([0]), torch.tensor([3]))
    # One sample per row is what is left, and it is transformers' own forward.
    logprobs, _ = policy(tokens, RowLayout([6], [-1]), torch.arange(5), tokens[1:])
    expected = policy.lm(tokens[None]).logits[0].float().log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_layers_that_ignore_the_layout_are_detected() -> None:
    """RecurrentGemma has attention layers that use the interface, and recurrent layers that run across segments."""
    sizes = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"}
    policy = build(RecurrentGemmaConfig(**sizes, attention_window_size=32), forced=True)
    policy.layout_refusal = None  # where transformers names the kinds of layers, they are refused unprobed
    result = probe_packing(policy)
    assert result.mode == "single" and "ignores the layout" in result.reason


def test_segments_kept_apart_but_not_branches_is_block(policy, monkeypatch) -> None:
    """An attention that separates trees, but lets a branch attend to its siblings."""
    plain = RowLayout.mask

    def leaky(self, device="cpu", window=None):
        return plain(self, device, window) | _same_tree(self)

    monkeypatch.setattr(RowLayout, "mask", leaky)
    monkeypatch.setattr(
        "lockstep.models.forest_attention.CPU_KERNELS", CUDA_KERNELS
    )  # they do not fit on a CPU, so masks are used
    result = probe_packing(policy)
    assert result.mode == "block" and "branches" in result.reason


def _same_tree(layout: RowLayout) -> torch.Tensor:
    roots: list[int] = []
    for segment, parent in enumerate(layout.parents):
        roots.append(segment if parent < 0 else roots[parent])
    of_token = torch.repeat_interleave(torch.tensor(roots), torch.tensor(layout.lengths))
    return (of_token[:, None] == of_token[None]).tril()


def test_a_model_without_context_cannot_be_probed(policy) -> None:
    """If all attention outputs are zero, the mask has no effect, so the probe cannot tell and must not answer
    `forest`."""
    with torch.no_grad():
        for layer in policy.layers:
            layer.self_attn.o_proj.weight.zero_()
    result = probe_packing(policy)
    assert result.mode == "single" and "cannot tell" in result.reason
