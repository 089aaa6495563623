"""The KV cache of the running sequences, and the prefix cache of ended ones that later prompts may begin with."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from lockstep.data.samples import PlacedImage
from lockstep.rollout.builtin.cached_attention import uses_matmul_attention
from lockstep.rollout.engine_protocol import same_images


@dataclass(slots=True)
class KVTableSize:
    """The size of a table: slots, and tokens per slot."""

    slots: int = 0
    tokens: int = 0

    @property
    def total(self) -> int:
        return self.slots * self.tokens


class KVTable:
    """Keys and values `[slots, kv heads, tokens, head dim]` of one layer, allocated at the first write.

    Args:
        keys_transposed: store keys as `[slots, kv heads, head dim, tokens]` if attention is computed by matrix
            products, which are faster for long prompts in this layout.
    """

    __slots__ = ("keys", "keys_transposed", "size", "values")

    def __init__(self, size: KVTableSize, keys_transposed: bool = False) -> None:
        self.size, self.keys_transposed = size, keys_transposed
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def ensure_allocated(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tensors of keys and values, reallocated if the size has changed. `keys`, `values`
        `[..., kv heads, head dim]` give the shape, type and device of new tensors."""
        allocated = () if self.keys is None else (self.keys.shape[0], self.keys.shape[2])
        if self.keys is None or self.values is None or allocated != (self.size.slots, self.size.tokens):
            transposed = self.keys_transposed and uses_matmul_attention(keys)
            self.keys = _reallocate(self.keys, keys, self.size, transposed)
            self.values = _reallocate(self.values, values, self.size, transposed=False)
        return self.keys, self.values

    def copy_slots(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copies the first `tokens` of slots `sources` over slots `targets`."""
        if self.keys is not None and self.values is not None:
            self.keys[targets, :, :tokens] = self.keys[sources, :, :tokens]
            self.values[targets, :, :tokens] = self.values[sources, :, :tokens]


def _reallocate(old: Tensor | None, like: Tensor, size: KVTableSize, transposed: bool) -> Tensor:
    """Returns a tensor of this size with the contents of the old one."""
    heads, dim = like.shape[-2:]
    # Zeros, because a masked value is multiplied by weight 0, and 0 times garbage may be NaN.
    if transposed:
        new = like.new_zeros(size.slots, heads, dim, size.tokens).transpose(2, 3)
    else:
        new = like.new_zeros(size.slots, heads, size.tokens, dim)
    if old is not None:
        slots, tokens = min(size.slots, old.shape[0]), min(size.tokens, old.shape[2])
        new[:slots, :, :tokens] = old[:slots, :, :tokens]
    return new


class KVCache:
    """The keys and values of all layers.

    Each layer has two tables. A slot of the prompt table holds the prompt of a group, which all its completions share;
    a slot of the suffix table holds the generated tokens of a row. Tables grow by doubling. With a `budget` of tokens
    they have exactly the needed size, and may shrink to stay within the budget.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.prompt_tables: dict[int, KVTable] = {}
        self.suffix_tables: dict[int, KVTable] = {}
        self.prompt_size = KVTableSize()
        self.suffix_size = KVTableSize()

    def prompt_table(self, layer: int) -> KVTable:
        if layer not in self.prompt_tables:
            self.prompt_tables[layer] = KVTable(self.prompt_size, keys_transposed=True)
        return self.prompt_tables[layer]

    def suffix_table(self, layer: int) -> KVTable:
        if layer not in self.suffix_tables:
            self.suffix_tables[layer] = KVTable(self.suffix_size)
        return self.suffix_tables[layer]

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return self.prompt_size.total + self.suffix_size.total

    def reserve(self, groups: int, prompt_tokens: int, rows: int, suffix_tokens: int) -> None:
        """Makes room for that many groups and rows of these lengths, and keeps the contents."""
        exact = self.budget is not None
        prompt = _enlarge(self.prompt_size, groups, prompt_tokens, exact)
        suffix = _enlarge(self.suffix_size, rows, suffix_tokens, exact)
        if self.budget is not None and prompt.total + suffix.total > self.budget:
            prompt, suffix = KVTableSize(groups, prompt_tokens), KVTableSize(rows, suffix_tokens)
        if prompt != self.prompt_size:
            self.prompt_size = prompt
            for table in self.prompt_tables.values():
                table.size = prompt
        if suffix != self.suffix_size:
            self.suffix_size = suffix
            for table in self.suffix_tables.values():
                table.size = suffix

    def copy_sequence(self, group: int, prompt_tokens: int, row: int, suffix_tokens: int) -> "LayerKV":
        """Copies the keys and values of a row: the first `prompt_tokens` of its group, and its first
        `suffix_tokens`."""
        layers = {}
        for layer, suffix in self.suffix_tables.items():
            assert suffix.keys is not None and suffix.values is not None
            keys, values = [suffix.keys[row, :, :suffix_tokens]], [suffix.values[row, :, :suffix_tokens]]
            prompt = self.prompt_tables.get(layer)
            if prompt_tokens and prompt is not None and prompt.keys is not None and prompt.values is not None:
                keys.insert(0, prompt.keys[group, :, :prompt_tokens])
                values.insert(0, prompt.values[group, :, :prompt_tokens])
            layers[layer] = torch.cat(keys, 1), torch.cat(values, 1)
        return layers

    def move_rows(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copies rows over others. `tokens` is the length of the longest row in the cache."""
        for table in self.suffix_tables.values():
            table.copy_slots(sources, targets, tokens)

    def move_groups(self, sources: Tensor, targets: Tensor) -> None:
        """Copies the prompts of groups over others."""
        for table in self.prompt_tables.values():
            table.copy_slots(sources, targets, self.prompt_size.tokens)


def _enlarge(size: KVTableSize, slots: int, tokens: int, exact: bool) -> KVTableSize:
    def grow(current: int, needed: int, least: int) -> int:
        if needed <= current:
            return current
        return needed if exact else max(least, 1 << (needed - 1).bit_length())

    return KVTableSize(grow(size.slots, slots, 16), grow(size.tokens, tokens, 32))


def index_tensor(values: list[int], device: torch.device) -> Tensor:
    """int64 `[values]` on the device."""
    return torch.tensor(values, dtype=torch.int64, device=device)


_MIN_SHARED_TOKENS = 16
"""The least number of tokens that a prompt must share with a kept sequence. For fewer, recomputing is as fast as
copying."""

LayerKV = dict[int, tuple[Tensor, Tensor]]
"""Keys and values `[kv heads, tokens, head dim]` by layer."""


@dataclass(slots=True)
class CachedSequence:
    """A sequence, int `[tokens]`, with its images, and its keys and values."""

    tokens: np.ndarray
    images: Sequence[PlacedImage]
    layers: LayerKV

    def shared_tokens(self, tokens: np.ndarray, images: Sequence[PlacedImage]) -> int:
        """The length of the longest common prefix with another sequence. It has no part of an image."""
        length = _common_prefix(self.tokens, tokens)
        for one, other in zip_longest(self.images, images):
            pair = [image for image in (one, other) if image is not None]
            first = min(int(image.places[0]) for image in pair)
            if not same_images(pair[:1], pair[1:]) or first < length <= int(pair[0].places[-1]):
                return min(length, first)
        return length


class PrefixCache:
    """Keys and values of ended sequences, evicted in LRU order. All were computed with the same weights: `clear` the
    cache when new weights are loaded."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, CachedSequence] = OrderedDict()
        self._next_number = 0
        self.tokens = 0
        """Tokens in all kept sequences."""
        self.queries = 0
        """Prompt tokens that were looked up."""
        self.hits = 0
        """Prompt tokens that were found."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: np.ndarray, images: Sequence[PlacedImage] = ()) -> tuple[LayerKV, int]:
        """Returns the keys and values of the kept sequence with the longest common prefix, and the prefix's length."""
        self.queries += len(prompt)
        shared = {number: kept.shared_tokens(prompt, images) for number, kept in self._kept.items()}
        best = max(shared, key=shared.__getitem__, default=None)
        if best is None or shared[best] < _MIN_SHARED_TOKENS:
            return {}, 0
        self._kept.move_to_end(best)
        self.hits += shared[best]
        return self._kept[best].layers, shared[best]

    def keep(self, tokens: np.ndarray, layers: LayerKV, limit: int, images: Sequence[PlacedImage] = ()) -> None:
        """Adds a sequence in place of those that it continues, and evicts old ones until at most `limit` tokens are
        kept."""
        for number, kept in list(self._kept.items()):
            if kept.shared_tokens(tokens, images) == len(kept.tokens):
                self._drop(number)
        self._kept[self._next_number] = CachedSequence(tokens, images, layers)
        self._next_number += 1
        self.tokens += len(tokens)
        while self.tokens > limit:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept.clear()
        self.tokens = 0

    def _drop(self, number: int) -> None:
        self.tokens -= len(self._kept.pop(number).tokens)


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
