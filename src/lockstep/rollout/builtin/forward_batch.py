"""The batches of the engine's forwards: prompts to prefill, rows to decode."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.rollout.builtin.cached_attention import attend, mask_bias
from lockstep.rollout.builtin.kv_cache import KVCache

Masks = tuple[Tensor | None, Tensor | None]
_BLOCK = 128
"""Queries of a prompt in one block of attention."""


class PrefillBatch:
    """Prompts packed into one row. Their keys and values go to the slots `first`, `first + 1`, ... of the prompt
    tables.

    Args:
        starts: the number of tokens at each prompt's beginning whose keys and values are in its slot already.
        lengths: the number of tokens to compute after them.
        spans: `image_spans` of each prompt, if the tokens of a span see each other in both directions.
    """

    __slots__ = ("_masks", "_scatter", "_spans", "cache", "first", "lengths", "longest", "pad", "starts", "unpad",
                 "width", "windows")  # fmt: skip

    def __init__(
        self,
        cache: KVCache,
        first: int,
        starts: list[int],
        lengths: list[int],
        device: torch.device,
        spans: Sequence[np.ndarray] = (),
    ) -> None:
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
            is_token = column < sizes.unsqueeze(1)
            # Padding repeats the first token of the row; causal attention hides it from the tokens.
            self.pad = torch.where(is_token, before + column, before).flatten().to(device)
            self.unpad = is_token.flatten().nonzero().squeeze(1).to(device)
        self._scatter: tuple[Tensor, Tensor] | None = None
        """Slot and position of each token; None if all prompts start at 0."""
        if any(starts):
            slots = torch.arange(first, first + len(lengths)).repeat_interleave(sizes)
            self._scatter = slots.to(device), self.positions().to(device)
        self._spans = self._span_table(spans) if any((span >= 0).any() for span in spans) else None
        """Number of the span of each token, int64 `[prompts, longest]`; None if all attention is causal."""

    def _span_table(self, spans: Sequence[np.ndarray]) -> Tensor:
        table = torch.full((len(spans), self.longest), -1)
        for row, span in zip(table, spans, strict=True):
            tokens = min(len(span), self.longest)
            row[:tokens] = torch.from_numpy(span[:tokens])
        return table

    def positions(self) -> Tensor:
        """The number of each token in its prompt, int64 `[tokens]`."""
        return torch.cat([torch.arange(s, s + length) for s, length in zip(self.starts, self.lengths, strict=True)])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        keys, values = self._write(layer, k, v)
        if window is not None:
            self.windows[layer] = window
        limit = window if window is not None and window < self.longest else None
        plain = q.device.type == "cuda" and limit is None and self._scatter is None and self._spans is None
        compute = self._attend_causal if plain else self._attend_in_blocks
        out = compute(self._add_padding(q), keys, values, scaling, limit).flatten(0, 1)
        return out if self.unpad is None else out.index_select(0, self.unpad)

    def _attend_causal(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[2] != k.shape[1]
        )
        return out.transpose(1, 2).contiguous()

    def _attend_in_blocks(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """Attention of queries `[prompts, width, heads, dim]` in blocks, each over the keys up to its end: the CPU's
        kernel would compute the upper triangle as well."""
        prompts, width, heads, dim = q.shape
        kv_heads, shared = k.shape[1], heads // k.shape[1]
        grouped = q.view(prompts, width, kv_heads, shared, dim)
        out = q.new_empty(prompts, width, kv_heads, shared, v.shape[-1])
        for start in range(0, width, _BLOCK):
            stop = min(start + _BLOCK, width)
            keys = self._visible_keys(start, stop, window)
            folded = grouped[:, start:stop].permute(0, 2, 3, 1, 4).reshape(prompts, kv_heads, -1, dim)
            mask = self._mask(start, stop, keys, window, shared, q)
            block, _ = attend(folded, k[:, :, keys], v[:, :, keys], mask, scaling)
            out[:, start:stop] = block.view(prompts, kv_heads, shared, stop - start, -1).permute(0, 3, 1, 2, 4)
        return out.flatten(2, 3)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._write(layer, k, v)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new keys and values. Returns those of the whole prompts `[prompts, kv heads, longest, dim]`, views of
        the cache."""
        slots = slice(self.first, self.first + len(self.lengths))
        tables = self.cache.prompt_table(layer).ensure_allocated(k, v)
        keys, values = (table[slots, :, : self.longest] for table in tables)
        for table, prompts, new in zip(tables, (keys, values), (k, v), strict=True):
            if self._scatter is None:
                prompts.copy_(self._add_padding(new).transpose(1, 2))
            else:
                table[self._scatter[0], :, self._scatter[1]] = new
        return keys, values

    def _add_padding(self, x: Tensor) -> Tensor:
        """`[tokens, heads, dim]` to `[prompts, width, heads, dim]`."""
        rows = x if self.pad is None else x.index_select(0, self.pad)
        return rows.view(len(self.lengths), self.width, *rows.shape[1:])

    def _visible_keys(self, start: int, stop: int, window: int | None) -> slice:
        """The keys that are visible to any of the queries `start` to `stop`."""
        low = 0 if window is None else max(0, min(self.starts) + start - window + 1)
        high = self.longest if self._spans is not None else min(self.longest, max(self.starts) + stop)
        return slice(low, high)

    def _mask(self, start: int, stop: int, keys: slice, window: int | None, shared: int, like: Tensor) -> Tensor:
        """The bias for the scores of queries `start` to `stop` (for each of `shared` heads) and these keys."""
        if (start, window) not in self._masks:
            begins = torch.tensor([0] if self._scatter is None and self._spans is None else self.starts).unsqueeze(1)
            query = (begins + torch.arange(start, stop)).repeat(1, shared).unsqueeze(2)
            key = torch.arange(keys.start, keys.stop)
            visible = key <= query
            if self._spans is not None:
                of_key = self._spans[:, None, keys]
                # Padding may stand for queries after the end of the prompt; which keys these see does not matter.
                of_query = self._spans.gather(1, query[:, :, 0].clamp(max=self.longest - 1)).unsqueeze(2)
                visible = visible | ((of_query == of_key) & (of_key >= 0))
            if window is not None:
                visible = visible & (key > query - window)
            self._masks[start, window] = mask_bias(visible.unsqueeze(1).to(like.device), like.dtype)
        return self._masks[start, window]


@dataclass(slots=True)
class RowFold:
    """Arranges rows by group in a grid `[groups, width]`, so that the rows of a group read its prompt together.

    `width` is at least the number of rows of the largest group. Both maps are None if the rows are in this order
    already.
    """

    groups: int
    width: int
    row_of_cell: Tensor | None = None
    """int64 `[groups x width]`: the row in each cell of the grid; any row in free cells."""
    cell_of_row: Tensor | None = None
    """int64 `[rows]`: the cell of each row."""

    @classmethod
    def of(cls, group: np.ndarray, groups: int, device: torch.device) -> "RowFold":
        """Makes the smallest grid. `group` is the slot of each row's group, int64 `[rows]`."""
        width = int(np.bincount(group, minlength=groups).max())
        if width * groups == len(group) and np.array_equal(group, np.repeat(np.arange(groups), width)):
            return cls(groups, width)
        return cls.spread(group, groups, width, device)

    @classmethod
    def spread(cls, group: np.ndarray, groups: int, width: int, device: torch.device) -> "RowFold":
        """Makes a grid with `width` cells per group."""
        counts, rows = np.bincount(group, minlength=groups), len(group)
        order = np.argsort(group, kind="stable")
        starts = np.cumsum(counts) - counts
        cells = group[order] * width + np.arange(rows) - starts[group[order]]
        row_of_cell, cell_of_row = np.zeros(groups * width, np.int64), np.empty(rows, np.int64)
        row_of_cell[cells], cell_of_row[order] = order, cells
        return cls(groups, width, torch.from_numpy(row_of_cell).to(device), torch.from_numpy(cell_of_row).to(device))


@dataclass(slots=True)
class RowSet:
    """The part of decode batches that depends only on the set of rows, and not on how many tokens they have."""

    group: np.ndarray
    """int64 `[rows]`: slot of each row's group."""
    lengths: np.ndarray
    """int64 `[groups]`: tokens of each prompt in the cache."""
    device: torch.device
    dtype: torch.dtype
    prompt: int
    """Tokens of the longest prompt."""
    suffix_start: np.ndarray
    """int64 `[rows]`: number in its sequence of the first suffix token of each row."""
    first_position: np.ndarray
    """int64 `[rows]`: position of this token for the model. After images it may be smaller than its number."""
    fold: RowFold
    rows: Tensor
    """int64 `[rows]`: the slot of each row in the suffix tables."""
    prompt_mask: Tensor | None
    """Bias for the scores, `[groups, 1, 1, prompt]`; None if all prompts have the same length."""

    @classmethod
    def of(
        cls,
        group: np.ndarray,
        lengths: np.ndarray,
        device: torch.device,
        dtype: torch.dtype,
        offsets: np.ndarray | None = None,
    ) -> "RowSet":
        """Makes the row set. `offsets`: `CachedPrompt.position_offset` of each group, int64 `[groups]`."""
        start = lengths[group]
        first = start if offsets is None else start + offsets[group]
        prompt, mask = int(lengths.max()), None
        if int(lengths.min()) < prompt:
            visible = torch.arange(prompt) < torch.from_numpy(lengths).unsqueeze(1)
            mask = mask_bias(visible.to(device), dtype)[:, None, None, :]
        fold, rows = RowFold.of(group, len(lengths), device), torch.arange(len(group), device=device)
        return cls(group, lengths, device, dtype, prompt, start, first, fold, rows, mask)

    def decode(self, cache: KVCache, counts: np.ndarray) -> "DecodeBatch":
        """Makes the batch of the next token of each row. `counts` is the number of suffix tokens of each row in the
        cache, int64 `[rows]`."""
        longest, same_count = int(counts.max()) + 1, int(counts.min()) == int(counts.max())
        write_at = longest - 1 if same_count else torch.from_numpy(counts).to(self.device)
        return DecodeBatch(cache, self, counts, write_at, longest)

    def masks(self, counts: np.ndarray, longest: int, window: int | None, shared: int) -> Masks:
        """Masks of the prompt and the suffix, for `shared` query heads per kv head; None if all keys are visible."""
        windowed = window is not None and int((self.suffix_start + counts).max()) >= window
        if not windowed and int(counts.min()) == longest - 1:
            return self.prompt_mask, None
        key, query = torch.arange(longest), torch.from_numpy(counts).unsqueeze(1)
        suffix, prompt = key <= query, self.prompt_mask
        if windowed:
            assert window is not None
            suffix = suffix & (key > query - window)
            prompt = self._windowed_prompt(torch.from_numpy(self.suffix_start + counts).unsqueeze(1) - window, shared)
        return prompt, mask_bias(suffix.to(self.device), self.dtype)[:, None, None, :]

    def _windowed_prompt(self, after: Tensor, shared: int) -> Tensor:
        """The mask of the prompt for each cell of the grid: positions after `after`, int64 `[rows, 1]`, are visible."""
        key = torch.arange(self.prompt)
        rows = (key > after) & (key < torch.from_numpy(self.suffix_start).unsqueeze(1))
        if self.fold.row_of_cell is not None:
            rows = rows[self.fold.row_of_cell.cpu()]
        folded = rows.view(self.fold.groups, 1, self.fold.width, -1).repeat_interleave(shared, 2)
        return mask_bias(folded.to(self.device), self.dtype)


@dataclass(slots=True)
class DecodeBatch:
    """The next token of every row."""

    cache: KVCache
    row_set: RowSet
    counts: np.ndarray
    """int64 `[rows]`: suffix tokens of each row in the cache before this one."""
    write_at: int | Tensor
    """The position of the new token in the suffix table, per row if they differ."""
    longest: int
    """Tokens of the longest suffix, the new one included."""
    windows: dict[int, int] = field(default_factory=dict)
    _masks: dict[int | None, Masks] = field(default_factory=dict)

    def positions(self) -> np.ndarray:
        """The position of each row's token, int64 `[rows]`."""
        positions: np.ndarray = self.row_set.first_position + self.counts
        return positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        rows, heads, dim = q.shape
        kv_heads = k.shape[1]
        grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        prompt_mask, suffix_mask = self._mask(layer, window, heads // kv_heads)
        self.store(layer, k, v)
        keys, values = (x[:rows, :, : self.longest] for x in self.cache.suffix_table(layer).ensure_allocated(k, v))
        out, lse = attend(grouped, keys, values, suffix_mask, scaling)
        if self.row_set.prompt:
            keys, values = self.cache.prompt_table(layer).ensure_allocated(k, v)
            prompt_out, prompt_lse = self._attend_prompts(grouped, keys, values, prompt_mask, scaling)
            out.lerp_(prompt_out, torch.sub(prompt_lse, lse).sigmoid_().unsqueeze(-1).to(out.dtype))
        return out.reshape(rows, heads, -1)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self.cache.suffix_table(layer).ensure_allocated(k, v)
        rows = len(k)
        if isinstance(self.write_at, int):
            keys[:rows, :, self.write_at] = k
            values[:rows, :, self.write_at] = v
        else:
            keys[self.row_set.rows, :, self.write_at] = k
            values[self.row_set.rows, :, self.write_at] = v

    def _attend_prompts(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of `q [rows, kv heads, shared, dim]` over the prompts, and its log-sum-exp."""
        _, kv_heads, shared, dim = q.shape
        fold, prompt = self.row_set.fold, self.row_set.prompt
        groups, width = fold.groups, fold.width
        folded = q if fold.row_of_cell is None else q.index_select(0, fold.row_of_cell)
        folded = folded.view(groups, width, kv_heads, shared, dim).transpose(1, 2)
        folded = folded.reshape(groups, kv_heads, width * shared, dim)
        out, lse = attend(folded, keys[:groups, :, :prompt], values[:groups, :, :prompt], mask, scaling)
        out = out.view(groups, kv_heads, width, shared, -1).transpose(1, 2).flatten(0, 1)
        lse = lse.view(groups, kv_heads, width, shared).transpose(1, 2).flatten(0, 1)
        if fold.cell_of_row is None:
            return out, lse
        return out.index_select(0, fold.cell_of_row), lse.index_select(0, fold.cell_of_row)

    def _mask(self, layer: int, window: int | None, shared: int) -> Masks:
        if window is not None:
            self.windows[layer] = window
        if window not in self._masks:
            self._masks[window] = self.row_set.masks(self.counts, self.longest, window, shared)
        return self._masks[window]
