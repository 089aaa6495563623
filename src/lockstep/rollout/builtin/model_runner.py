"""Runs prefill and decode with the engine's KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.data.images.image_store import PreparedImage
from lockstep.data.samples import PlacedImage
from lockstep.rollout.builtin.cuda_graphs import Capture, CudaGraphs
from lockstep.rollout.builtin.forward_batch import PrefillBatch, RowSet
from lockstep.rollout.builtin.fused_forward import FusedForward
from lockstep.rollout.builtin.kv_cache import KVCache, PrefixCache, index_tensor
from lockstep.rollout.builtin.model_forward import ForwardFunction
from lockstep.rollout.builtin.prompt_images import ImageSource, MergedImages, decode_offset, image_spans
from lockstep.rollout.builtin.scheduler import CachedPrompt, DecodeRows

_PREFILL_TOKENS = 8192
"""Tokens of one packed prefill; a longer prompt is prefilled alone."""
_PREFILL_TOKENS_CPU = 1024
"""The same on a CPU: activations of so many tokens fit into its caches."""


class ModelRunner(Protocol):
    """Runs the model: prefills prompts and computes the logits of rows."""

    def prefill(self, groups: Sequence[CachedPrompt], first: int) -> None:
        """Prefills the prompts of new groups, whose slots are `first`, `first + 1`, ..."""

    def decode(self, rows: DecodeRows, groups: Sequence[CachedPrompt]) -> Tensor:
        """Returns the float32 logits `[rows, vocabulary]` of each row's next token."""

    prefixes: PrefixCache
    """Keys and values of ended sequences."""

    def keep(self, rows: DecodeRows, groups: Sequence[CachedPrompt], ended: Sequence[int]) -> None:
        """Adds the keys and values of rows that are about to end to `prefixes`."""

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copies the caches of rows to other slots."""

    def move_groups(self, sources: list[int], targets: list[int]) -> None:
        """Copies the caches of groups to other slots."""

    def forget(self) -> None:
        """Drops what was computed with weights that are about to be replaced, except the caches of groups and rows."""

    def free(self) -> None:
        """Frees the caches. There must be no rows."""


class CachedRunner:
    """Runs a forward with the engine's KV cache: each token is computed once, each prompt once per group."""

    def __init__(
        self,
        forward: ForwardFunction,
        device: torch.device,
        dtype: torch.dtype,
        budget: int | None = None,
        capture: Capture | None = None,
        prefix_cache: float = 0.0,
        images: ImageSource | None = None,
    ) -> None:
        """
        Args:
            budget: limit of the KV cache in tokens; the cache grows as needed if None.
            capture: makes CUDA graphs of decode steps. There are no graphs if it is None, with a `budget`, or with
                sliding windows.
            prefix_cache: size of the prefix cache as a share of `budget`, or of what all rows can use if that is None.
            images: computes the features of images; prompts have none if it is None.
        """
        self.forward, self.device, self.dtype = forward, device, dtype
        self.cache, self.prefixes, self.prefix_cache = KVCache(budget), PrefixCache(), prefix_cache
        self.images, self._capture = images, capture
        self._graphs = self._new_graphs()
        self.windows: dict[int, int] = {}
        """Size of the sliding window by layer, for layers that have one."""
        self._max_prefill_tokens = _PREFILL_TOKENS_CPU if device.type == "cpu" else _PREFILL_TOKENS
        self._row_set: RowSet | None = None
        self._longest_suffix = 0
        """Suffix tokens of the longest row in the cache."""

    def prefill(self, groups: Sequence[CachedPrompt], first: int) -> None:
        """Prefills all but the last token of each prompt: that token is the first input of every row."""
        longest = max((group.cached_tokens for group in groups), default=0)
        slots = max(first + len(groups), self.cache.prompt_size.slots)
        self.cache.reserve(slots, longest, self.cache.suffix_size.slots, self.cache.suffix_size.tokens)
        batch: list[_PrefillItem] = []
        for slot, group in enumerate(groups, start=first):
            item = self._prefill_item(group, self._copy_prefix(group, slot))
            if not len(item.tokens):
                self._prefill(batch, slot - len(batch))
                batch = []
                continue
            if batch and sum(len(each.tokens) for each in batch) + len(item.tokens) > self._max_prefill_tokens:
                self._prefill(batch, slot - len(batch))
                batch = []
            batch.append(item)
        self._prefill(batch, first + len(groups) - len(batch))

    def _prefill(self, batch: list["_PrefillItem"], first: int) -> None:
        if batch:
            lengths = [len(each.tokens) for each in batch]
            starts, spans = [each.start for each in batch], [each.spans for each in batch if each.spans is not None]
            prefill = PrefillBatch(self.cache, first, starts, lengths, self.device, spans)
            tokens = torch.from_numpy(np.concatenate([each.tokens for each in batch]).astype(np.int64))
            positions = _three_axes(batch) if any(each.positions is not None for each in batch) else prefill.positions()
            inputs = tokens.to(self.device), positions.to(self.device), prefill.longest, prefill
            self.forward.fill(*inputs, *self._merged_images(batch))
            self.windows |= prefill.windows

    def _prefill_item(self, group: CachedPrompt, start: int) -> "_PrefillItem":
        """What remains of a prompt after the first `start` tokens. Sets the offset of the group's later positions."""
        item = _PrefillItem(start, group.prompt[start:-1])
        if self.images is None:
            return item
        if group.images:
            item.prepared = self.images.read(group.images)
            positions = self.images.positions(group.prompt, group.images, item.prepared)
            group.position_offset = decode_offset(positions)
            item.positions = None if positions is None else positions[:, start:-1]
            item.choose_images(group.images)
        if self.images.bidirectional:
            item.spans = image_spans(group.images, len(group.prompt))
        return item

    def _merged_images(self, batch: list["_PrefillItem"]) -> list[MergedImages]:
        """The images of a batch, with their places in the batch; nothing if it has none."""
        placed, before = [], 0
        for item in batch:
            placed += [image.moved(before - item.start) for image in item.images]
            before += len(item.tokens)
        if not placed:
            return []
        assert self.images is not None
        return [self.images.features(placed, [prepared for item in batch for prepared in item.prepared])]

    def _copy_prefix(self, group: CachedPrompt, slot: int) -> int:
        """Copies the keys and values of a cached prefix to the prompt's slot. Returns the number of tokens."""
        layers, count = self.prefixes.find(group.prompt[:-1], group.images)
        for layer, (k, v) in layers.items():
            keys, values = self.cache.prompt_table(layer).ensure_allocated(k.transpose(0, 1), v.transpose(0, 1))
            keys[slot, :, :count], values[slot, :, :count] = k[:, :count], v[:, :count]
        return count

    def keep(self, rows: DecodeRows, groups: Sequence[CachedPrompt], ended: Sequence[int]) -> None:
        """Adds the keys and values of ended rows to `prefixes`, except for the last token, which was never an input."""
        tokens_per_row = self.cache.prompt_size.tokens + self.cache.suffix_size.tokens
        limit = int(self.prefix_cache * (self.cache.budget or rows.capacity * tokens_per_row))
        for row in ended:
            slot, count = int(rows.group_slot[row]), int(rows.counts[row])
            tokens = np.concatenate([rows.requests[row].prompt, rows.tokens[row, : count - 1]])
            if len(tokens) <= limit:
                copied = self.cache.copy_sequence(slot, groups[slot].cached_tokens, row, count)
                self.prefixes.keep(tokens, copied, limit, rows.requests[row].images)

    def decode(self, rows: DecodeRows, groups: Sequence[CachedPrompt]) -> Tensor:
        count = len(rows)
        if rows.changed or self._row_set is None:
            lengths = np.array([each.cached_tokens for each in groups])
            offsets = np.array([each.position_offset for each in groups])
            self._row_set = RowSet.of(rows.group_slot[:count].copy(), lengths, self.device, self.dtype, offsets)
            rows.changed = False
        counts = rows.counts[:count].copy()
        budgeted = self.cache.budget is not None
        suffix = int(rows.limit[:count].max()) if budgeted else int(counts.max()) + 1
        self.cache.reserve(len(groups), self._row_set.prompt, count, suffix)
        batch = self._row_set.decode(self.cache, counts)
        self._longest_suffix = batch.longest
        last_positions = batch.positions()
        longest = int(last_positions.max()) + 1
        tokens = torch.from_numpy(rows.last[:count].copy()).to(self.device)
        positions = torch.from_numpy(last_positions).to(self.device)
        if self._graphs is not None:
            return self._graphs(self._row_set, counts, tokens, positions).float()
        logits = self.forward(tokens, positions, longest, batch)
        self.windows |= batch.windows
        return logits.float()

    def forget(self) -> None:
        self.prefixes.clear()

    def free(self) -> None:
        self.forget()
        self.cache, self._row_set, self._longest_suffix = KVCache(self.cache.budget), None, 0
        self._graphs = self._new_graphs()

    def _new_graphs(self) -> CudaGraphs | None:
        forward = self.forward
        if self._capture is None or self.cache.budget is not None or not isinstance(forward, FusedForward):
            return None
        return None if forward.windows else CudaGraphs(forward, self.cache, self.device, self.dtype, self._capture)

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            rows = index_tensor(sources, self.device), index_tensor(targets, self.device)
            self.cache.move_rows(*rows, self._longest_suffix)

    def move_groups(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            self.cache.move_groups(index_tensor(sources, self.device), index_tensor(targets, self.device))


@dataclass(slots=True)
class _PrefillItem:
    """The part of a prompt to prefill: its tokens from number `start` on, without the last one."""

    start: int
    tokens: np.ndarray
    positions: np.ndarray | None = None
    """int64 `[3, tokens]`; None if positions count tokens."""
    images: tuple[PlacedImage, ...] = ()
    """The images in this part, with places in the whole prompt."""
    prepared: list[PreparedImage] = field(default_factory=list)
    """The same images."""
    spans: np.ndarray | None = None
    """`image_spans` of the whole prompt, if attention has two directions there."""

    def choose_images(self, images: Sequence[PlacedImage]) -> None:
        """Sets the images of this part, given all images of the prompt; `prepared` are all of them before."""
        # A cached prefix has no part of an image.
        chosen = [number for number, image in enumerate(images) if image.places[0] >= self.start]
        self.images = tuple(images[number] for number in chosen)
        self.prepared = [self.prepared[number] for number in chosen]


def _three_axes(batch: Sequence[_PrefillItem]) -> Tensor:
    """The positions of a batch, int64 `[3, tokens]`, for a model whose positions have three axes."""
    parts = []
    for item in batch:
        positions = item.positions
        if positions is None:
            positions = np.broadcast_to(np.arange(item.start, item.start + len(item.tokens)), (3, len(item.tokens)))
        parts.append(positions)
    return torch.from_numpy(np.concatenate(parts, 1))
