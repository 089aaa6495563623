"""A fused forward for known decoder layers on the CPU. It makes fewer passes over memory than autograd of the
plain formulas, and its last layer computes only the tokens that predict a target.

Only the `forward` of a layer is replaced, so that names, sharding and recomputation do not change. Other models keep
the forward of transformers. torch.compile gets the plain formulas, which it fuses itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lockstep.data.row_layout import RowLayout
from lockstep.models import forest_attention
from lockstep.models.attention_plan import QuerySubset

_silu_backward = torch.ops.aten.silu_backward


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension."""
    if torch.compiler.is_compiling():
        return torch.mul(weight, x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """y = w x r with r = 1 / sqrt(mean(x^2) + eps), so dx = w g r - x r^3 mean(w g x) and dw = sum(g x r)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        products = (grad * x).reshape(-1, size)
        grad_weight = products.t().mv(inverse.view(-1)) if ctx.needs_input_grad[1] else None
        pull = products.mv(weight).view_as(inverse).mul_(inverse.pow(3))
        grad_x = torch.mul(grad, weight, out=products.view(x.shape)).mul_(inverse).addcmul_(x, pull, value=-1 / size)
        return grad_x, grad_weight, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        activated = F.silu(gate)
        ctx.save_for_backward(gate, up, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, activated = ctx.saved_tensors
        grad_silu = grad * up
        grad_gate = _silu_backward.grad_input(grad_silu, gate, grad_input=grad_silu)
        return grad_gate, grad * activated


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of `[tokens, heads, size]`, halves paired; cos
    and sin are `[tokens, 1, size]`."""
    if torch.compiler.is_compiling():
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
    out: Tensor = _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        out = grad * cos
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out, None, None


def linear_projections(modules: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """Computes the outputs of several linear layers for the same `[tokens, size]`, with one backward for all. Calls the
    modules one by one if they are not plain linear layers."""
    if torch.compiler.is_compiling() or any(type(module) is not nn.Linear for module in modules):
        return tuple(module(x) for module in modules)
    parts = [part for module in modules for part in (module.weight, module.bias)]
    outputs: tuple[Tensor, ...] = _Projections.apply(x, *parts)  # type: ignore[no-untyped-call]
    return outputs


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parts[::2], parts[1::2]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad
        grad_x: Tensor | None = None
        if wants_x:
            grad_x = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
        found: list[Tensor | None] = []
        for grad, wants_weight, wants_bias in zip(grads, wants[::2], wants[1::2], strict=True):
            found += [grad.t() @ x if wants_weight else None, grad.sum(0) if wants_bias else None]
        return grad_x, *found


def normed_projections(norm: Any, modules: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """Returns `x [tokens, size]` for the residual connection, and the outputs of several linear layers for its norm.
    The gradients of both are added in the pass that computes the norm's."""
    if torch.compiler.is_compiling() or any(type(module) is not nn.Linear for module in modules):
        return x, *linear_projections(modules, _apply_norm(norm, x))
    parts = [part for module in modules for part in (module.weight, module.bias)]
    outputs: tuple[Tensor, ...] = _NormedProjections.apply(x, norm.weight, norm.variance_epsilon, *parts)  # type: ignore[no-untyped-call]
    return outputs


class _NormedProjections(torch.autograd.Function):
    """y = u (W diag(w))^T + b with u = x r and r as in `_RMSNorm`. The norm's weight w is multiplied into W, which is
    smaller than x. With g = dL/du: dx = r (g - u mean(u g)), and dW = D diag(w), dw = sum(D W) for D = dy^T u."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, *parts: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parts[::2], parts[1::2]
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, norm, *weights)
        outputs = (F.linear(unit, weight * norm, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[operator]
        return x.view_as(x), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, norm, *weights = ctx.saved_tensors
        wants_x, wants_norm, _, *wants = ctx.needs_input_grad
        found: list[Tensor | None] = []
        grad_norm = torch.zeros_like(norm) if wants_norm else None
        for grad, weight, wants_weight, wants_bias in zip(grads, weights, wants[::2], wants[1::2], strict=True):
            product = grad.t() @ unit if wants_weight or wants_norm else None
            if grad_norm is not None and product is not None:
                grad_norm += (product * weight).sum(0)
            found += [product.mul_(norm) if wants_weight and product is not None else None]
            found += [grad.sum(0) if wants_bias else None]
        if not wants_x:
            return None, grad_norm, None, *found
        pull = grads[0] @ (weights[0] * norm)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            pull.addmm_(grad, weight * norm)
        mean = (pull * unit).sum(-1, keepdim=True)
        pull.addcmul_(unit, mean, value=-1 / unit.shape[-1])
        return torch.addcmul(grad_x, pull, inverse), grad_norm, None, *found


def add_linear(total: Tensor, module: nn.Module, x: Tensor) -> Tensor:
    """Computes `total + module(x)`, in one operation if the module is a plain linear layer."""
    if type(module) is nn.Linear and getattr(module, "bias", None) is None:
        return torch.addmm(total, x, module.weight.t())
    found: Tensor = total + module(x)
    return found


FUSED_FAMILIES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen2VL": "qwen2_vl",
    "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3VLText": "qwen3_vl",
}
"""transformers' modules, by the prefix of their classes."""
_SHARED_MLP = {"Qwen2VL": "Qwen2MLP", "Qwen2_5_VL": "Qwen2MLP"}
"""The class of the feed-forward part of families that have another family's."""


class FusedDecoder:
    """Replaces the forward of a backbone's decoder layers and of its last norm.

    Raises:
        UnsupportedLayers: the layers differ from those of `FUSED_FAMILIES`.
    """

    def __init__(self, layers: list[nn.Module], norm: Any) -> None:
        for layer in layers:
            _check_supported(layer, norm)
        self.enabled = True
        """If False, transformers' own forward is used."""
        for layer in layers:
            layer.forward = self._make_forward(layer, layer.forward, layer is layers[-1])
        original_forward = norm.forward
        norm.forward = lambda x: (
            rms_norm(x, norm.weight, norm.variance_epsilon) if self.enabled else original_forward(x)
        )

    def _make_forward(self, layer: Any, original_forward: Callable[..., Tensor], last: bool) -> Callable[..., Tensor]:
        def forward(
            hidden_states: Tensor,
            *args: Any,
            layout: RowLayout | None = None,
            subset: QuerySubset | None = None,
            **kwargs: Any,
        ) -> Tensor:
            # torch.compile optimizes the plain forward as well, and compiles it once for all layers.
            compiled = torch.compiler.is_compiling() and (subset is None or not last)
            if layout is None or not self.enabled or compiled:
                return original_forward(hidden_states, *args, layout=layout, **kwargs)
            # squeeze(0) and not [0], whose gradient is copied into zeros
            hidden = hidden_states.squeeze(0)
            return _layer_forward(layer, hidden, layout, subset if last else None, **kwargs)[None]

        return forward


class UnsupportedLayers(ValueError):
    """The layers have no fused forward; the message says why."""


def _check_supported(layer: Any, norm: nn.Module) -> None:
    family = type(layer).__name__.removesuffix("DecoderLayer")
    if family not in FUSED_FAMILIES:
        raise UnsupportedLayers(f"there is no fused forward for {type(layer).__name__}")
    parts = {
        "DecoderLayer": [layer],
        "Attention": [layer.self_attn],
        "MLP": [layer.mlp],
        "RMSNorm": [layer.input_layernorm, layer.post_attention_layernorm, norm],
    }
    module_name = "transformers.models.{0}.modeling_{0}".format(FUSED_FAMILIES[family])
    names = {suffix: family + suffix for suffix in parts}
    names["MLP"] = _SHARED_MLP.get(family, names["MLP"])
    for suffix, modules in parts.items():
        for module in modules:
            if type(module).__name__ != names[suffix] or type(module).__module__ != module_name:
                raise UnsupportedLayers(f"{type(module).__name__} is not transformers' {names[suffix]}")
    if layer.self_attn.config.hidden_act != "silu":
        raise UnsupportedLayers(f"its activation is {layer.self_attn.config.hidden_act}, not silu")


def _layer_forward(
    layer: Any,
    x: Tensor,
    layout: RowLayout,
    subset: QuerySubset | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """Computes a layer: `x [tokens, hidden]` to `[subset tokens, hidden]`."""
    attention, mlp = layer.self_attn, layer.mlp
    x, mixed = _layer_attention(
        attention, layer.input_layernorm, x, layout, subset, attention_mask, position_embeddings
    )
    x = add_linear(x if subset is None else x.index_select(0, subset.index), attention.o_proj, mixed)
    x, gate, up = normed_projections(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], x)
    return add_linear(x, mlp.down_proj, swiglu(gate, up))


def _layer_attention(
    attention: Any,
    norm: Any,
    x: Tensor,
    layout: RowLayout,
    subset: QuerySubset | None,
    mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Computes attention over the norm of `x [tokens, hidden]`, without the output projection. Returns x for the
    residual connection, and `[subset tokens, heads * size]`."""
    cos, sin = (table[0].unsqueeze(1) for table in position_embeddings)
    # Qwen's layers have the window as an attribute; Mistral's is in the config.
    window_owner = attention if hasattr(attention, "sliding_window") else attention.config
    window = getattr(window_owner, "sliding_window", None)
    has_window = forest_attention.effective_window(attention, mask, {"sliding_window": window}, layout) is not None
    queried = None if has_window else subset
    if queried is None:
        x, q, k, v = normed_projections(norm, [attention.q_proj, attention.k_proj, attention.v_proj], x)
        q_cos, q_sin = cos, sin
    else:
        normed = _apply_norm(norm, x)
        (q,) = linear_projections([attention.q_proj], normed.index_select(0, queried.index))
        k, v = linear_projections([attention.k_proj, attention.v_proj], normed)
        q_cos, q_sin = (table.index_select(0, queried.index) for table in (cos, sin))
    q, k, v = (each.view(len(each), -1, attention.head_dim) for each in (q, k, v))
    if hasattr(attention, "q_norm"):
        q, k = _apply_norm(attention.q_norm, q), _apply_norm(attention.k_norm, k)
    q, k = apply_rotary(q, q_cos, q_sin), apply_rotary(k, cos, sin)
    mixed, _ = ALL_ATTENTION_FUNCTIONS[forest_attention.FOREST_ATTENTION](
        attention,
        *(each.transpose(0, 1)[None] for each in (q, k, v)),
        mask,
        scaling=attention.scaling,
        layout=layout,
        subset=queried,
        sliding_window=window,
    )
    output: Tensor = mixed.squeeze(0).flatten(1)
    return x, output if subset is None or queried is not None else output.index_select(0, subset.index)


def _apply_norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)
