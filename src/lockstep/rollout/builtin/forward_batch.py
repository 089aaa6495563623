"""What one forward of the engine reads and writes: prompts to prefill, rows to decode."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.rollout.builtin.cached_attention import attend, mask_bias
from lockstep.rollout.builtin.kv_cache import KVCache

Masks = tuple[Tensor | None, Tensor | None]
_BLOCK = 128  # queries of a prompt in one block of attention


class PrefillBatch:
    """A forward of prompts packed into one row; their keys and values go to slots `first`, `first + 1`, ...

    Args:
        starts: tokens at each prompt's beginning whose keys and values are in its slot already.
        lengths: tokens of each prompt after them.
    """

    __slots__ = ("_masks", "_places", "cache", "first", "lengths", "longest", "pad", "starts", "unpad", "width",
                 "windows")  # fmt: skip

    def __init__(self, cache: KVCache, first: int, starts: list[int], lengths: list[int], device: torch.device) -> None:
        self.cache, self.first, self.starts, self.lengths, self.width = cache, first, starts, lengths, max(lengths)
        self.longest = max(start + length for start, length in zip(starts, lengths, strict=True))
        self.windows: dict[int, int] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self.pad: Tensor | None = None
        self.unpad: Tensor | None = None
        sizes = torch.tensor(lengths)
        if min(lengths) < self.width:
            before = (torch.cumsum(sizes, 0) - sizes).unsqueeze(1)
            column = torch.arange(self.width)
            real = column < sizes.unsqueeze(1)
            # Padding repeats the first token of the row; causal attention hides it from the real ones.
            self.pad = torch.where(real, before + column, before).flatten().to(device)
            self.unpad = real.flatten().nonzero().squeeze(1).to(device)
        self._places: tuple[Tensor, Tensor] | None = None
        if any(starts):
            slots = torch.arange(first, first + len(lengths)).repeat_interleave(sizes)
            self._places = slots.to(device), self.positions().to(device)

    def positions(self) -> Tensor:
        """int64 `[tokens]`."""
        return torch.cat([torch.arange(s, s + length) for s, length in zip(self.starts, self.lengths, strict=True)])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        keys, values = self._write(layer, k, v)
        if window is not None:
            self.windows[layer] = window
        reach = window if window is not None and window < self.longest else None
        plain = q.device.type == "cuda" and reach is None and self._places is None
        whole = self._causal if plain else self._blocks
        out = whole(self._padded(q), keys, values, scaling, reach).flatten(0, 1)
        return out if self.unpad is None else out.index_select(0, self.unpad)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[2] != k.shape[1]
        )
        return out.transpose(1, 2).contiguous()

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """Queries `[prompts, width, heads, dim]` in blocks, each over the keys up to its end: the CPU's kernel
        would compute the upper triangle as well."""
        prompts, width, heads, dim = q.shape
        kv_heads, shared = k.shape[1], heads // k.shape[1]
        grouped = q.view(prompts, width, kv_heads, shared, dim)
        out = q.new_empty(prompts, width, kv_heads, shared, v.shape[-1])
        for start in range(0, width, _BLOCK):
            stop = min(start + _BLOCK, width)
            keys = self._reached(start, stop, window)
            folded = grouped[:, start:stop].permute(0, 2, 3, 1, 4).reshape(prompts, kv_heads, -1, dim)
            mask = self._mask(start, stop, keys, window, shared, q)
            made, _ = attend(folded, k[:, :, keys], v[:, :, keys], mask, scaling)
            out[:, start:stop] = made.view(prompts, kv_heads, shared, stop - start, -1).permute(0, 3, 1, 2, 4)
        return out.flatten(2, 3)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._write(layer, k, v)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The prompts' keys and values `[prompts, kv heads, longest, dim]`, in the cache."""
        slots = slice(self.first, self.first + len(self.lengths))
        tables = self.cache.prompt(layer).open(k, v)
        keys, values = (table[slots, :, : self.longest] for table in tables)
        for table, whole, new in zip(tables, (keys, values), (k, v), strict=True):
            if self._places is None:
                whole.copy_(self._padded(new).transpose(1, 2))
            else:
                table[self._places[0], :, self._places[1]] = new
        return keys, values

    def _padded(self, x: Tensor) -> Tensor:
        """`[tokens, heads, dim]` to `[prompts, width, heads, dim]`."""
        rows = x if self.pad is None else x.index_select(0, self.pad)
        return rows.view(len(self.lengths), self.width, *rows.shape[1:])

    def _reached(self, start: int, stop: int, window: int | None) -> slice:
        """The keys that any of the queries `start` to `stop` sees."""
        low = 0 if window is None else max(0, min(self.starts) + start - window + 1)
        return slice(low, min(self.longest, max(self.starts) + stop))

    def _mask(self, start: int, stop: int, keys: slice, window: int | None, shared: int, like: Tensor) -> Tensor:
        """Added to the scores of queries `start` to `stop`, `shared` times, and these keys."""
        if (start, window) not in self._masks:
            begins = torch.tensor([0] if self._places is None else self.starts).unsqueeze(1)
            of = (begins + torch.arange(start, stop)).repeat(1, shared).unsqueeze(2)
            at = torch.arange(keys.start, keys.stop)
            visible = (at <= of) if window is None else (at <= of) & (at > of - window)
            self._masks[start, window] = mask_bias(visible.unsqueeze(1).to(like.device), like.dtype)
        return self._masks[start, window]


@dataclass(slots=True)
class RowFold:
    """Which rows read which prompt: rows sorted into `[groups, most rows of a group]`, and back."""

    groups: int
    width: int
    into: Tensor | None = None
    """int64 `[groups x width]`: the row in each place; None if the rows are in this order already."""
    out: Tensor | None = None
    """int64 `[rows]`: the place of each row."""

    @classmethod
    def of(cls, group: np.ndarray, groups: int, device: torch.device) -> "RowFold":
        """`group` int64 `[rows]`: slot of each row's group."""
        width = int(np.bincount(group, minlength=groups).max())
        if width * groups == len(group) and np.array_equal(group, np.repeat(np.arange(groups), width)):
            return cls(groups, width)
        return cls.spread(group, groups, width, device)

    @classmethod
    def spread(cls, group: np.ndarray, groups: int, width: int, device: torch.device) -> "RowFold":
        """With `width` places per group, at least its number of rows."""
        counts, rows = np.bincount(group, minlength=groups), len(group)
        order = np.argsort(group, kind="stable")
        starts = np.cumsum(counts) - counts
        place = group[order] * width + np.arange(rows) - starts[group[order]]
        into, out = np.zeros(groups * width, np.int64), np.empty(rows, np.int64)
        into[place], out[order] = order, place
        return cls(groups, width, torch.from_numpy(into).to(device), torch.from_numpy(out).to(device))


@dataclass(slots=True)
class RowSet:
    """The part of decode batches that only depends on the set of rows."""

    group: np.ndarray
    """int64 `[rows]`: slot of each row's group."""
    lengths: np.ndarray
    """int64 `[groups]`: tokens of each prompt in the cache."""
    device: torch.device
    dtype: torch.dtype
    prompt: int
    """Tokens of the longest prompt."""
    start: np.ndarray
    """int64 `[rows]`: position of each row's first token in its suffix."""
    fold: RowFold
    rows: Tensor
    """int64 `[rows]`: their slots."""
    prompt_mask: Tensor | None
    """Added to the scores, `[groups, 1, 1, prompt]`."""

    @classmethod
    def of(cls, group: np.ndarray, lengths: np.ndarray, device: torch.device, dtype: torch.dtype) -> "RowSet":
        prompt, mask = int(lengths.max()), None
        if int(lengths.min()) < prompt:
            visible = torch.arange(prompt) < torch.from_numpy(lengths).unsqueeze(1)
            mask = mask_bias(visible.to(device), dtype)[:, None, None, :]
        fold, rows = RowFold.of(group, len(lengths), device), torch.arange(len(group), device=device)
        return cls(group, lengths, device, dtype, prompt, lengths[group], fold, rows, mask)

    def decode(self, cache: KVCache, counts: np.ndarray) -> "DecodeBatch":
        """The forward of rows that have `counts` int64 `[rows]` tokens in the cache."""
        longest, level = int(counts.max()) + 1, int(counts.min()) == int(counts.max())
        at = longest - 1 if level else torch.from_numpy(counts).to(self.device)
        return DecodeBatch(cache, self, counts, at, longest)

    def masks(self, counts: np.ndarray, longest: int, window: int | None, shared: int) -> Masks:
        """Masks of the prompt and the suffix, for `shared` query heads per kv head; None if all keys are visible."""
        reached = window is not None and int((self.start + counts).max()) >= window
        if not reached and int(counts.min()) == longest - 1:
            return self.prompt_mask, None
        at, own = torch.arange(longest), torch.from_numpy(counts).unsqueeze(1)
        suffix, prompt = at <= own, self.prompt_mask
        if reached:
            assert window is not None
            suffix = suffix & (at > own - window)
            prompt = self._windowed(torch.from_numpy(self.start + counts).unsqueeze(1) - window, shared)
        return prompt, mask_bias(suffix.to(self.device), self.dtype)[:, None, None, :]

    def _windowed(self, after: Tensor, shared: int) -> Tensor:
        """The part of the prompt that each folded query sees: positions after `after`, int64 `[rows, 1]`."""
        at = torch.arange(self.prompt)
        rows = (at > after) & (at < torch.from_numpy(self.start).unsqueeze(1))
        if self.fold.into is not None:
            rows = rows[self.fold.into.cpu()]
        folded = rows.view(self.fold.groups, 1, self.fold.width, -1).repeat_interleave(shared, 2)
        return mask_bias(folded.to(self.device), self.dtype)


@dataclass(slots=True)
class DecodeBatch:
    """A forward of one token of every row."""

    cache: KVCache
    among: RowSet
    counts: np.ndarray
    """int64 `[rows]`: tokens of each row in the cache before this one."""
    at: int | Tensor
    """The position of the new token in the suffix, per row if they differ."""
    longest: int
    windows: dict[int, int] = field(default_factory=dict)
    _masks: dict[int | None, Masks] = field(default_factory=dict)

    def positions(self) -> np.ndarray:
        """int64 `[rows]`: position of each row's token in its sequence."""
        made: np.ndarray = self.among.start + self.counts
        return made

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        rows, heads, dim = q.shape
        kv_heads = k.shape[1]
        grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        prompt_mask, suffix_mask = self._mask(layer, window, heads // kv_heads)
        self.store(layer, k, v)
        keys, values = (x[:rows, :, : self.longest] for x in self.cache.suffix(layer).open(k, v))
        out, lse = attend(grouped, keys, values, suffix_mask, scaling)
        if self.among.prompt:
            keys, values = self.cache.prompt(layer).open(k, v)
            above, above_lse = self._over_prompts(grouped, keys, values, prompt_mask, scaling)
            out.lerp_(above, torch.sub(above_lse, lse).sigmoid_().unsqueeze(-1).to(out.dtype))
        return out.reshape(rows, heads, -1)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self.cache.suffix(layer).open(k, v)
        rows = len(k)
        if isinstance(self.at, int):
            keys[:rows, :, self.at] = k
            values[:rows, :, self.at] = v
        else:
            keys[self.among.rows, :, self.at] = k
            values[self.among.rows, :, self.at] = v

    def _over_prompts(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Attention `[rows, kv heads, shared, dim]` and log-sum-exp of `q [rows, kv heads, shared, dim]`."""
        _, kv_heads, shared, dim = q.shape
        fold, prompt = self.among.fold, self.among.prompt
        groups, width = fold.groups, fold.width
        folded = q if fold.into is None else q.index_select(0, fold.into)
        folded = folded.view(groups, width, kv_heads, shared, dim).transpose(1, 2)
        folded = folded.reshape(groups, kv_heads, width * shared, dim)
        out, lse = attend(folded, keys[:groups, :, :prompt], values[:groups, :, :prompt], mask, scaling)
        out = out.view(groups, kv_heads, width, shared, -1).transpose(1, 2).flatten(0, 1)
        lse = lse.view(groups, kv_heads, width, shared).transpose(1, 2).flatten(0, 1)
        if fold.out is None:
            return out, lse
        return out.index_select(0, fold.out), lse.index_select(0, fold.out)

    def _mask(self, layer: int, window: int | None, shared: int) -> Masks:
        if window is not None:
            self.windows[layer] = window
        if window not in self._masks:
            self._masks[window] = self.among.masks(self.counts, self.longest, window, shared)
        return self._masks[window]
