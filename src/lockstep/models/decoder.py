"""The forward of known decoder layers on the CPU: fewer passes over memory, and nothing in the last layer that nobody
asks for.

A layer's `forward` is replaced, not the layer, so that names, sharding and recomputation stay as they are. All other
models keep transformers' own layers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lockstep.data.layout import Layout
from lockstep.models import attention
from lockstep.models.asked import Asked
from lockstep.models.elementwise import added, projections, rms_norm, rotated, swiglu

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


class KnownLayers:
    """Gives the layers of a backbone the forward of this module, and its last norm a faster one.

    Raises:
        UnknownLayers: they are not those of `FAMILIES`, to the letter.
    """

    def __init__(self, layers: list[nn.Module], norm: Any) -> None:
        for layer in layers:
            _check(layer, norm)
        self.on = True
        """Otherwise transformers' own forward is used."""
        for layer in layers:
            layer.forward = self._replaced(layer, layer.forward, layer is layers[-1])
        plain = norm.forward
        norm.forward = lambda x: rms_norm(x, norm.weight, norm.variance_epsilon) if self.on else plain(x)

    def _replaced(self, layer: Any, plain: Callable[..., Tensor], last: bool) -> Callable[..., Tensor]:
        def forward(
            hidden_states: Tensor, *args: Any, layout: Layout | None = None, asked: Asked | None = None, **kwargs: Any
        ) -> Tensor:
            # A compiler makes of the model's own what it makes of ours, and once for all layers.
            compiled = torch.compiler.is_compiling() and (asked is None or not last)
            if layout is None or not self.on or compiled:
                return plain(hidden_states, *args, layout=layout, **kwargs)
            return _forward(layer, hidden_states[0], layout, asked if last else None, **kwargs)[None]

        return forward


class UnknownLayers(ValueError):
    """Layers that keep their own forward, and why."""


def _check(layer: Any, norm: nn.Module) -> None:
    family = type(layer).__name__.removesuffix("DecoderLayer")
    if family not in FAMILIES:
        raise UnknownLayers(f"there is no forward of ours for {type(layer).__name__}")
    parts = {
        "DecoderLayer": [layer],
        "Attention": [layer.self_attn],
        "MLP": [layer.mlp],
        "RMSNorm": [layer.input_layernorm, layer.post_attention_layernorm, norm],
    }
    home = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    for suffix, modules in parts.items():
        for module in modules:
            if type(module).__name__ != family + suffix or type(module).__module__ != home:
                raise UnknownLayers(f"{type(module).__name__} is not transformers' {family}{suffix}")
    if layer.self_attn.config.hidden_act != "silu":
        raise UnknownLayers(f"its activation is {layer.self_attn.config.hidden_act}, not silu")


def _forward(
    layer: Any,
    x: Tensor,
    layout: Layout,
    asked: Asked | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """`x [tokens, hidden]` to `[asked tokens, hidden]`."""
    heads, mlp = layer.self_attn, layer.mlp
    normed = _norm(layer.input_layernorm, x)
    mixed = _attention(heads, normed, layout, asked, attention_mask, position_embeddings)
    x = added(x if asked is None else x.index_select(0, asked.index), heads.o_proj, mixed)
    gate, up = projections([mlp.gate_proj, mlp.up_proj], _norm(layer.post_attention_layernorm, x))
    return added(x, mlp.down_proj, swiglu(gate, up))


def _attention(
    heads: Any,
    x: Tensor,
    layout: Layout,
    asked: Asked | None,
    mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
) -> Tensor:
    """Everything before the output's projection: `[tokens, hidden]` to `[asked tokens, heads * size]`."""
    cos, sin = (table[0].unsqueeze(1) for table in position_embeddings)
    # Qwen's layers know their window; Mistral's is one for all.
    own = heads if hasattr(heads, "sliding_window") else heads.config
    window = getattr(own, "sliding_window", None)
    hides = attention.sliding_window(heads, mask, {"sliding_window": window}, layout) is not None
    few = None if hides else asked
    if few is None:
        q, k, v = projections([heads.q_proj, heads.k_proj, heads.v_proj], x)
        q_cos, q_sin = cos, sin
    else:
        (q,) = projections([heads.q_proj], x.index_select(0, few.index))
        k, v = projections([heads.k_proj, heads.v_proj], x)
        q_cos, q_sin = (table.index_select(0, few.index) for table in (cos, sin))
    q, k, v = (x.view(len(x), -1, heads.head_dim) for x in (q, k, v))
    if hasattr(heads, "q_norm"):
        q, k = _norm(heads.q_norm, q), _norm(heads.k_norm, k)
    q, k = rotated(q, q_cos, q_sin), rotated(k, cos, sin)
    mixed, _ = ALL_ATTENTION_FUNCTIONS[attention.NAME](
        heads,
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        mask,
        scaling=heads.scaling,
        layout=layout,
        asked=few,
        sliding_window=window,
    )
    every: Tensor = mixed[0].flatten(1)
    return every if asked is None or few is not None else every.index_select(0, asked.index)


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)
