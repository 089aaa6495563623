"""Attention over shared prompts: every query meets its group's prompt and its own suffix, merged exactly.

The prompt part folds the rows of a group into the query axis against one copy of the prompt's keys and values;
the suffix part runs per row; the two are merged by their log-sum-exps (cascade attention; the identity of online
softmax, Milakov & Gimelshein 2018, arXiv:1805.02867). Registered as `lockstep_decode` in transformers'
`AttentionInterface`: a model that uses the interface hands each layer's queries, keys and values to the `turn`
that was given to its forward.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from lockstep.rollout.builtin.cache import Cache

NAME = "lockstep_decode"


class UnsupportedAttention(ValueError):
    """A model's attention wants something this one does not compute."""


class Turn(Protocol):
    """One forward of the engine: knows which tokens are in it and where their keys and values belong."""

    windows: set[int]
    """Sliding windows that layers asked for."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """`q [heads, tokens, dim]`, `k, v [kv heads, tokens, dim]` to `[tokens, heads, dim]`."""


def interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    turn: Turn | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """The function in transformers' registry. Raises UnsupportedAttention for soft caps, sinks, biases."""
    if turn is None:
        raise UnsupportedAttention(f"{NAME} was called without a turn: the model does not pass it down")
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise UnsupportedAttention(f"{NAME} does not compute {name}")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedAttention(f"{type(module).__name__} has no layer_idx")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return turn.attend(layer, query[0], key[0], value[0], scale, sliding_window).unsqueeze(0), None


AttentionInterface.register(NAME, interface)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp.

    Args:
        q: `[batch, kv heads, queries, dim]`, the query heads of a kv head folded into the queries.
        k, v: `[batch, kv heads, keys, dim]`.
        mask: added to the scores, `[batch, 1, 1 or queries, keys]`.

    Returns:
        `[batch, kv heads, queries, dim]` and float32 `[batch, kv heads, queries]`.
    """
    if mask is not None:
        mask = mask.expand(q.shape[0], 1, q.shape[2], k.shape[2])
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, v, attn_mask=mask, scale=scale)
        return out, lse
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, -1)
    return torch.matmul(torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype), v), lse


def bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """bool to what is added to scores. Finite: a query that sees nothing gets weight 0 in the merge, not NaN."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min / 2
    )


class Prefill:
    """A forward of whole prompts, packed one behind the other; their keys and values go to slots `first`..."""

    __slots__ = ("cache", "first", "lengths", "longest", "pad", "unpad", "windows")

    def __init__(self, cache: Cache, first: int, lengths: list[int], device: torch.device) -> None:
        self.cache, self.first, self.lengths, self.longest = cache, first, lengths, max(lengths)
        self.windows: set[int] = set()
        sizes = torch.tensor(lengths)
        starts = torch.cumsum(sizes, 0) - sizes
        column = torch.arange(self.longest)
        real = column < sizes.unsqueeze(1)
        # Padding repeats the first token of the row; causal attention keeps it from the real ones.
        self.pad = torch.where(real, starts.unsqueeze(1) + column, starts.unsqueeze(1)).flatten().to(device)
        self.unpad = real.flatten().nonzero().squeeze(1).to(device)

    def positions(self) -> Tensor:
        """int64 `[tokens]`."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        q, k, v = (self._padded(x) for x in (q, k, v))
        keys, values = self.cache.prompt(layer).open(k, v)
        last = self.first + len(self.lengths)
        keys[self.first : last, :, : self.longest] = k
        values[self.first : last, :, : self.longest] = v
        mask = None
        if window is not None:
            self.windows.add(window)
            if window < self.longest:
                at = torch.arange(self.longest, device=q.device)
                mask = (at <= at.unsqueeze(1)) & (at > at.unsqueeze(1) - window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.unpad)

    def _padded(self, x: Tensor) -> Tensor:
        """`[heads, tokens, dim]` to `[prompts, heads, longest, dim]`."""
        rows = x.transpose(0, 1).index_select(0, self.pad)
        return rows.view(len(self.lengths), self.longest, *rows.shape[1:]).transpose(1, 2)


class Fold:
    """Which rows read which prompt: rows sorted into `[groups, most rows of a group]`, and back."""

    __slots__ = ("groups", "into", "out", "width")

    def __init__(self, group: Tensor, groups: int) -> None:
        """`group` int64 `[rows]` on the CPU: slot of each row's group."""
        order = torch.argsort(group, stable=True)
        counts = torch.bincount(group, minlength=groups)
        self.groups, self.width = groups, int(counts.max())
        starts = torch.cumsum(counts, 0) - counts
        sorted_group = group[order]
        place = sorted_group * self.width + torch.arange(len(group)) - starts[sorted_group]
        self.into = torch.zeros(groups * self.width, dtype=torch.int64)
        self.into[place] = order
        self.out = torch.empty(len(group), dtype=torch.int64)
        self.out[order] = place

    def to(self, device: torch.device) -> "Fold":
        self.into, self.out = self.into.to(device), self.out.to(device)
        return self


class Decode:
    """A forward of one token of every row."""

    __slots__ = (
        "_at",
        "_masks",
        "_rows",
        "cache",
        "counts",
        "fold",
        "group",
        "lengths",
        "longest",
        "prompt",
        "windows",
    )

    def __init__(
        self, cache: Cache, fold: Fold, group: Tensor, lengths: Tensor, counts: Tensor, device: torch.device
    ) -> None:
        """
        Args:
            fold: which rows read which prompt.
            group: int64 `[rows]`: slot of each row's group.
            lengths: int64 `[groups]`: tokens of each prompt in the cache.
            counts: int64 `[rows]`: tokens of each row in the cache before this one.
            All on the CPU.
        """
        self.cache, self.fold, self.group, self.lengths, self.counts = cache, fold, group, lengths, counts
        self.longest, self.prompt = int(counts.max()) + 1, int(lengths.max())
        self.windows: set[int] = set()
        self._rows, self._at = torch.arange(len(counts), device=device), counts.to(device)
        self._masks: dict[int | None, tuple[Tensor | None, Tensor | None]] = {}

    def positions(self) -> Tensor:
        """int64 `[rows]`: position of each row's token in its sequence."""
        return self.lengths[self.group] + self.counts

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        heads, rows, dim = q.shape
        kv_heads = k.shape[0]
        grouped = q.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
        prompt_mask, suffix_mask = self._mask(window, grouped)
        keys, values = self.cache.suffix(layer).open(k, v)
        keys[self._rows, :, self._at] = k.transpose(0, 1)
        values[self._rows, :, self._at] = v.transpose(0, 1)
        keys, values = keys[:rows, :, : self.longest], values[:rows, :, : self.longest]
        out, lse = attend(grouped, keys, values, suffix_mask, scaling)
        if self.prompt:
            keys, values = self.cache.prompt(layer).open(k, v)
            above, above_lse = self._over_prompts(grouped, keys, values, prompt_mask, scaling)
            out = torch.lerp(out, above, torch.sigmoid(above_lse - lse).unsqueeze(-1).to(out.dtype))
        return out.reshape(rows, heads, v.shape[-1])

    def _over_prompts(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor]:
        _, kv_heads, shared, dim = q.shape
        groups, width = self.fold.groups, self.fold.width
        folded = q.index_select(0, self.fold.into).view(groups, width, kv_heads, shared, dim)
        folded = folded.transpose(1, 2).reshape(groups, kv_heads, width * shared, dim)
        out, lse = attend(folded, keys[:groups, :, : self.prompt], values[:groups, :, : self.prompt], mask, scaling)
        out = out.reshape(groups, kv_heads, width, shared, -1).transpose(1, 2).flatten(0, 1)
        lse = lse.reshape(groups, kv_heads, width, shared).transpose(1, 2).flatten(0, 1)
        return out.index_select(0, self.fold.out), lse.index_select(0, self.fold.out)

    def _mask(self, window: int | None, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Masks of the prompt and the suffix part, made once per turn and kind of layer; None: all is seen."""
        if window is not None:
            self.windows.add(window)
            window = window if int(self.positions().max()) >= window else None
        if window not in self._masks:
            at = torch.arange(self.longest)
            suffix = at <= self.counts.unsqueeze(1)
            prompt = torch.arange(self.prompt) < self.lengths.unsqueeze(1)
            if window is not None:
                suffix = suffix & (at > self.counts.unsqueeze(1) - window)
            prompt = prompt[:, None, :] if window is None else self._windowed(prompt, window, q.shape[2])
            self._masks[window] = (
                None if bool(prompt.all()) else bias(prompt.to(q.device), q.dtype).unsqueeze(1),
                None if bool(suffix.all()) else bias(suffix.to(q.device), q.dtype)[:, None, None, :],
            )
        return self._masks[window]

    def _windowed(self, prompt: Tensor, window: int, shared: int) -> Tensor:
        """bool `[groups, width x shared, prompt]`: what each folded query sees of its prompt."""
        rows = prompt[self.group] & (torch.arange(self.prompt) > self.positions().unsqueeze(1) - window)
        folded = rows[self.fold.into.cpu()].view(self.fold.groups, self.fold.width, -1)
        return folded.repeat_interleave(shared, dim=1)
