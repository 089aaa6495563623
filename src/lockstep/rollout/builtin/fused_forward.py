"""A faster forward for Llama-type decoders, with fused projections and without module calls.

One matrix product computes queries, keys and values, another gate and up. The rotary table is read once per forward,
and a prefill stops after the keys and values of its last layer. The model's parameters become views of the fused
tensors: writing a parameter writes the fused tensor, and no weight is stored twice.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.rollout.builtin.cached_attention import ForwardBatch
from lockstep.rollout.builtin.prompt_images import MergedImages

FUSED_FAMILIES = (
    "LlamaModel",
    "MistralModel",
    "Qwen2Model",
    "Qwen2VLTextModel",
    "Qwen2_5_VLTextModel",
    "Qwen3Model",
    "Qwen3VLTextModel",
)
"""The decoders, which may be parts of vision-language models."""

_MAX_TRANSPOSED_BYTES = 16 << 20
"""A layer whose matrices have fewer bytes stores them transposed."""
_SILU = functools.partial(F.silu, inplace=True)


class NotFusible(ValueError):
    """The fused forward does not support the model."""


@dataclass(slots=True)
class FusedProjection:
    """Linear layers with the same input, concatenated."""

    weight: Tensor
    """`[inputs, outputs]`: stored in this layout, or a view of a tensor `[outputs, inputs]`."""
    bias: Tensor | None

    @classmethod
    def of(cls, modules: Sequence[Any], transposed: bool) -> "FusedProjection":
        """Fuses the modules, whose parameters become views. Raises NotFusible unless they are plain linear layers.

        Args:
            transposed: whether to store the weight as `[inputs, outputs]`.
        """
        for module in modules:
            if type(module) is not nn.Linear:
                raise NotFusible(f"{type(module).__name__} is not a plain linear layer")
        # Inference tensors could not be written outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            weight = torch.cat([module.weight for module in modules])
            stored = weight.t().contiguous() if transposed else weight.t()
            biases = [module.bias for module in modules]
            if any(bias is None for bias in biases) and not all(bias is None for bias in biases):
                raise NotFusible("some projections have a bias and some have none")
            bias = None if biases[0] is None else torch.cat(biases)
            sizes = [module.out_features for module in modules]
            for module, part in zip(modules, torch.split_with_sizes(stored.t(), sizes), strict=True):
                module.weight.data = part
            if bias is not None:
                for module, part in zip(modules, torch.split_with_sizes(bias, sizes), strict=True):
                    module.bias.data = part
        return cls(stored, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """`total += self(x)`."""
        total.addmm_(x, self.weight)
        if self.bias is not None:
            total.add_(self.bias)

    def tail(self, start: int) -> "FusedProjection":
        """The projection to the outputs from `start` on."""
        return FusedProjection(self.weight[:, start:], None if self.bias is None else self.bias[start:])


@dataclass(slots=True)
class FusedNorm:
    """Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    weight: Tensor
    eps: float
    _eps: Tensor
    _few_passes: bool
    """Whether to compute with few passes over memory, because the CPU has no fused kernel."""

    @classmethod
    def of(cls, module: Any) -> "FusedNorm":
        weight, eps = module.weight, float(module.variance_epsilon)
        few_passes = weight.device.type == "cpu" and weight.dtype == torch.float32
        return cls(weight, eps, torch.tensor(eps, device=weight.device), few_passes)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._few_passes:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self._eps, size, size, value=1 / x.shape[-1]).rsqrt_()).mul_(self.weight)


class FusedHeadNorm:
    """Qwen3's norms of queries and keys, computed in one pass over both."""

    def __init__(self, attention: Any) -> None:
        self.heads = attention.q_proj.out_features // attention.head_dim
        self.query, self.key = attention.q_norm.weight, attention.k_norm.weight
        self.eps = attention.q_norm.variance_epsilon

    def __call__(self, x: Tensor, heads: int) -> Tensor:
        """Normalises `x [tokens, heads + kv heads, dim]`, whose first `heads` are queries."""
        normed = F.rms_norm(x, x.shape[-1:], None, self.eps)
        normed[:, :heads].mul_(self.query)
        normed[:, heads:].mul_(self.key)
        return normed


class FusedRotary:
    """Cosines and signed sines of positions, computed by the model's own module, so that every kind of scaling
    works."""

    def __init__(self, module: Any, like: Tensor) -> None:
        self.module, self.like = module, like
        # The frequencies of the other kinds depend on the length, so there is no table for them.
        self._has_table = "dynamic" not in module.rope_type and module.rope_type != "longrope"
        self._cos = self._sin = like.new_empty(0, 1, 0)

    def __call__(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """`[tokens, 1, dim]` each, for int64 positions `[tokens]` below `longest`, or `[3, tokens]`."""
        if not self._has_table or positions.ndim == 2:
            return self._compute(positions)
        if longest > len(self._cos):
            every = torch.arange(max(256, 1 << (longest - 1).bit_length()), device=self.like.device)
            self._cos, self._sin = self._compute(every)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.module(self.like, positions.unsqueeze(-2))
        if cos.ndim != 3:
            raise NotFusible(f"{type(self.module).__name__} leaves the axes of positions apart")
        sin = torch.cat([-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]], -1)
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding (Su et al. 2021, arXiv:2104.09864) to `[tokens, heads, dim]`. Dimension i of
    the first half is paired with dimension i of the second."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class FusedLayer:
    """One decoder layer."""

    def __init__(self, index: int, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.index, self.dim, self.scaling = index, int(attention.head_dim), float(attention.scaling)
        self.heads = attention.q_proj.out_features // self.dim
        self.kv_heads = attention.k_proj.out_features // self.dim
        self.window = _window(attention)
        self.attention_norm = FusedNorm.of(module.input_layernorm)
        self.mlp_norm = FusedNorm.of(module.post_attention_layernorm)
        self.head_norm = FusedHeadNorm(attention) if hasattr(attention, "q_norm") else None
        fused = (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        )
        transposed = _store_transposed([part for parts in fused for part in parts])
        self.qkv, self.out, self.gate_up, self.down = (FusedProjection.of(parts, transposed) for parts in fused)
        self.kv = self.qkv.tail(self.heads * self.dim)
        self.activation = _SILU if attention.config.hidden_act == "silu" else mlp.act_fn

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> None:
        """Adds the layer's output to `x [tokens, hidden]`."""
        q, k, v = self._heads(self.qkv(self.attention_norm(x)), self.heads, cos, sin)
        mixed = batch.attend(self.index, q, k, v, self.scaling, self.window)
        self.out.add_to(x, mixed.view(len(x), -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        self.down.add_to(x, self.activation(gate).mul_(up))

    def store(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> None:
        """Computes and stores only the layer's keys and values."""
        _, k, v = self._heads(self.kv(self.attention_norm(x)), 0, cos, sin)
        batch.store(self.index, k, v)

    def _heads(self, projected: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the output of a projection with that many query heads into queries, keys and values
        `[tokens, heads, dim]`, with rotary embedding."""
        every = projected.view(len(projected), -1, self.dim)
        rotated = every[:, : heads + self.kv_heads]
        if self.head_norm is not None:
            rotated = self.head_norm(rotated, heads)
        rotated = rotate_heads(rotated, cos, sin)
        return rotated[:, :heads], rotated[:, heads:], every[:, heads + self.kv_heads :]


def _store_transposed(linear: Sequence[Any]) -> bool:
    """Whether to store a layer's matrices as `[inputs, outputs]`. For small ones on a CPU, products are up to twice as
    fast in MKL; for large ones they take as long either way, and transposing new weights takes three times as long as
    copying them."""
    weights = [module.weight for module in linear]
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    return on_cpu and sum(weight.nbytes for weight in weights) < _MAX_TRANSPOSED_BYTES


class FusedForward:
    """The forward of `lm`, whose parameters become views of fused tensors. Raises NotFusible."""

    def __init__(self, lm: Any) -> None:
        decoder = lm.get_decoder()
        ours = (type(each).__module__.startswith("transformers.") for each in (lm, decoder))
        if type(decoder).__name__ not in FUSED_FAMILIES or not all(ours):
            raise NotFusible(f"there is no fused forward for {type(lm).__name__}")
        self.embedding = decoder.embed_tokens.weight
        self.rotary = FusedRotary(decoder.rotary_emb, self.embedding)
        self.layers = [FusedLayer(index, module) for index, module in enumerate(decoder.layers)]
        self.norm, self.head = FusedNorm.of(decoder.norm), lm.get_output_embeddings()
        self.windows = {layer.index: layer.window for layer in self.layers if layer.window is not None}

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch) -> Tensor:
        """Returns the logits `[tokens, vocabulary]`; `positions` are below `longest`."""
        x, cos, sin = self._start(tokens, positions, longest)
        for layer in self.layers:
            layer(x, cos, sin, batch)
        return F.linear(self.norm(x), self.head.weight, self.head.bias)

    def fill(
        self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch, images: MergedImages | None = None
    ) -> None:
        """Computes only the keys and values of the tokens, and so skips the last layer's attention and MLP."""
        x, cos, sin = self._start(tokens, positions, longest)
        if images is not None:
            images.merge(x)
        for layer in self.layers[:-1]:
            layer(x, cos, sin, batch)
            if images is not None:
                images.add_deepstack(layer.index, x)
        self.layers[-1].store(x, cos, sin, batch)

    def _start(self, tokens: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        return F.embedding(tokens, self.embedding), *self.rotary(positions, longest)


def _window(attention: Any) -> int | None:
    """The size of the sliding window: an attribute of Qwen's layers, a config value of Mistral."""
    source = attention if hasattr(attention, "sliding_window") else attention.config
    window: int | None = getattr(source, "sliding_window", None)
    return window
