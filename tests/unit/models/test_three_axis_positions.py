"""Positions of a layout may have three axes, as multimodal rotary embeddings need them."""

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from lockstep.data.row_layout import RowLayout
from lockstep.models.forest_attention import FOREST_ATTENTION
from lockstep.models.policy_model import PolicyModel

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}


def test_a_forest_with_three_axes_of_positions_equals_separate_sequences() -> None:
    torch.manual_seed(0)
    kinds = ["full_attention", "full_attention"]
    config = Qwen3_5TextConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=2, layer_types=kinds)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=FOREST_ATTENTION).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    policy = PolicyModel(lm)
    tokens, path = torch.randint(0, 64, (17,)), RowLayout([6, 5, 6], [-1, 0, 0]).positions()
    positions = torch.stack([path, path // 2, path % 3])
    layout = RowLayout([6, 5, 6], [-1, 0, 0], positions)
    for start, stop in ((6, 11), (11, 17)):
        places = torch.tensor([*range(6), *range(start, stop)])
        sources, targets = places[5:-1], tokens[start:stop]
        packed = policy(tokens, layout, sources, targets)[0]
        logits = lm(tokens[places][None], position_ids=positions[:, places][:, None]).logits[0]
        alone = logits.log_softmax(-1)[5:-1].gather(-1, targets[:, None])[:, 0]
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
        plain = policy(tokens, RowLayout([6, 5, 6], [-1, 0, 0]), sources, targets)[0]
        assert (plain - alone).abs().max() > 1e-3
