"""The KV cache of everything that is being generated, and of ended sequences whose prefix may be reused."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.rollout.builtin.cached_attention import uses_matmul_attention


@dataclass(slots=True)
class KVTableSize:
    """Slots and tokens per slot."""

    slots: int = 0
    tokens: int = 0

    @property
    def total(self) -> int:
        return self.slots * self.tokens


class KVTable:
    """Keys and values `[slots, kv heads, tokens, head dim]` of one layer, allocated at the first write.

    `turned`: stores keys as `[slots, kv heads, head dim, tokens]` for attention by matrix products, which read long
    ones faster in this layout."""

    __slots__ = ("keys", "size", "turned", "values")

    def __init__(self, size: KVTableSize, turned: bool = False) -> None:
        self.size, self.turned = size, turned
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def open(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The two tensors, of at least the needed size; `keys`, `values` `[..., kv heads, head dim]` give the shape,
        type and device of new ones."""
        have = () if self.keys is None else (self.keys.shape[0], self.keys.shape[2])
        if self.keys is None or self.values is None or have != (self.size.slots, self.size.tokens):
            turned = self.turned and uses_matmul_attention(keys)
            self.keys = _grown(self.keys, keys, self.size, turned)
            self.values = _grown(self.values, values, self.size, turned=False)
        return self.keys, self.values

    def move(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copies the first `tokens` of slots `sources` over slots `targets`."""
        if self.keys is not None and self.values is not None:
            self.keys[targets, :, :tokens] = self.keys[sources, :, :tokens]
            self.values[targets, :, :tokens] = self.values[sources, :, :tokens]


def _grown(old: Tensor | None, like: Tensor, size: KVTableSize, turned: bool) -> Tensor:
    heads, dim = like.shape[-2:]
    # Zeros: a masked value is multiplied by weight 0, and 0 x garbage may be NaN.
    if turned:
        new = like.new_zeros(size.slots, heads, dim, size.tokens).transpose(2, 3)
    else:
        new = like.new_zeros(size.slots, heads, size.tokens, dim)
    if old is not None:
        slots, tokens = min(size.slots, old.shape[0]), min(size.tokens, old.shape[2])
        new[:slots, :, :tokens] = old[:slots, :, :tokens]
    return new


class KVCache:
    """Both tables of every layer. Grows by doubling; with a `budget` of tokens exactly and within it."""

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.prompts: dict[int, KVTable] = {}
        self.suffixes: dict[int, KVTable] = {}
        self.prompt_size = KVTableSize()
        self.suffix_size = KVTableSize()

    def prompt(self, layer: int) -> KVTable:
        if layer not in self.prompts:
            self.prompts[layer] = KVTable(self.prompt_size, turned=True)
        return self.prompts[layer]

    def suffix(self, layer: int) -> KVTable:
        if layer not in self.suffixes:
            self.suffixes[layer] = KVTable(self.suffix_size)
        return self.suffixes[layer]

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return self.prompt_size.total + self.suffix_size.total

    def reserve(self, groups: int, prompt_tokens: int, rows: int, suffix_tokens: int) -> None:
        """Makes room for that many groups and rows of these lengths; contents are kept."""
        exact = self.budget is not None
        prompt = _larger(self.prompt_size, groups, prompt_tokens, exact)
        suffix = _larger(self.suffix_size, rows, suffix_tokens, exact)
        if self.budget is not None and prompt.total + suffix.total > self.budget:
            prompt, suffix = KVTableSize(groups, prompt_tokens), KVTableSize(rows, suffix_tokens)
        if prompt != self.prompt_size:
            self.prompt_size = prompt
            for table in self.prompts.values():
                table.size = prompt
        if suffix != self.suffix_size:
            self.suffix_size = suffix
            for table in self.suffixes.values():
                table.size = suffix

    def sequence(self, group: int, prompt: int, row: int, suffix: int) -> dict[int, tuple[Tensor, Tensor]]:
        """By layer: a copy of the first `prompt` keys and values of a group and the first `suffix` of a row,
        `[kv heads, tokens, head dim]`."""
        made = {}
        for layer, own in self.suffixes.items():
            assert own.keys is not None and own.values is not None
            keys, values = [own.keys[row, :, :suffix]], [own.values[row, :, :suffix]]
            above = self.prompts.get(layer)
            if prompt and above is not None and above.keys is not None and above.values is not None:
                keys.insert(0, above.keys[group, :, :prompt])
                values.insert(0, above.values[group, :, :prompt])
            made[layer] = torch.cat(keys, 1), torch.cat(values, 1)
        return made

    def move_rows(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """`tokens`: the length of the longest row in the cache."""
        for table in self.suffixes.values():
            table.move(sources, targets, tokens)

    def move_groups(self, sources: Tensor, targets: Tensor) -> None:
        for table in self.prompts.values():
            table.move(sources, targets, self.prompt_size.tokens)


def _larger(size: KVTableSize, slots: int, tokens: int, exact: bool) -> KVTableSize:
    def grow(have: int, want: int, least: int) -> int:
        if want <= have:
            return have
        return want if exact else max(least, 1 << (want - 1).bit_length())

    return KVTableSize(grow(size.slots, slots, 16), grow(size.tokens, tokens, 32))


def index_tensor(values: list[int], device: torch.device) -> Tensor:
    """int64 `[values]` on the device."""
    return torch.tensor(values, dtype=torch.int64, device=device)


_MIN_SHARED_TOKENS = 16
"""The least number of tokens that a prompt must share with a kept sequence; fewer are computed as fast as found."""

LayerKV = dict[int, tuple[Tensor, Tensor]]
"""By layer: keys and values `[kv heads, tokens, head dim]`."""


@dataclass(slots=True)
class CachedSequence:
    """A sequence, int `[tokens]`, and its keys and values."""

    tokens: np.ndarray
    layers: LayerKV


class PrefixCache:
    """Kept sequences, evicted in LRU order. All are of the same weights: `clear` them when new ones are loaded."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, CachedSequence] = OrderedDict()
        self._number = 0
        self.tokens = 0
        """Tokens in all kept sequences."""
        self.queries = 0
        """Prompt tokens that were looked up."""
        self.hits = 0
        """Prompt tokens that were found."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: np.ndarray) -> tuple[LayerKV, int]:
        """The layers of the kept sequence with the longest common prefix, and its length."""
        self.queries += len(prompt)
        shared = {number: _common_prefix(kept.tokens, prompt) for number, kept in self._kept.items()}
        best = max(shared, key=shared.__getitem__, default=None)
        if best is None or shared[best] < _MIN_SHARED_TOKENS:
            return {}, 0
        self._kept.move_to_end(best)
        self.hits += shared[best]
        return self._kept[best].layers, shared[best]

    def keep(self, tokens: np.ndarray, layers: LayerKV, limit: int) -> None:
        """Adds a sequence, replaces those that it continues, and evicts old ones until `limit` tokens are left."""
        for number, kept in list(self._kept.items()):
            if _common_prefix(kept.tokens, tokens) == len(kept.tokens):
                self._drop(number)
        self._kept[self._number] = CachedSequence(tokens, layers)
        self._number += 1
        self.tokens += len(tokens)
        while self.tokens > limit:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept.clear()
        self.tokens = 0

    def _drop(self, number: int) -> None:
        self.tokens -= len(self._kept.pop(number).tokens)


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """The length of the common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
