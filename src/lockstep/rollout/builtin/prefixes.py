"""Keys and values of sequences that ended, for prompts that begin with them: the next turn of a conversation."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from torch import Tensor

_LEAST = 16
"""Tokens that a prompt must share with a kept sequence; fewer are computed as fast as found."""

Layers = dict[int, tuple[Tensor, Tensor]]
"""By layer: keys and values `[kv heads, tokens, head dim]`."""


@dataclass(slots=True)
class Kept:
    """A sequence, int `[tokens]`, and its keys and values."""

    tokens: np.ndarray
    layers: Layers


class Prefixes:
    """Kept sequences, the least recently used out first. All are of the same weights: whoever loads new ones clears."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._number = 0
        self.tokens = 0
        """In all kept sequences."""
        self.queries = 0
        """Tokens of prompts that were looked up."""
        self.hits = 0
        """Those of them that were found."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: np.ndarray) -> tuple[Layers, int]:
        """The layers of the kept sequence that has most in common with the prompt's beginning, and how many tokens."""
        self.queries += len(prompt)
        shared = {number: _common(kept.tokens, prompt) for number, kept in self._kept.items()}
        best = max(shared, key=shared.__getitem__, default=None)
        if best is None or shared[best] < _LEAST:
            return {}, 0
        self._kept.move_to_end(best)
        self.hits += shared[best]
        return self._kept[best].layers, shared[best]

    def keep(self, tokens: np.ndarray, layers: Layers, limit: int) -> None:
        """Adds a sequence, in place of those that it continues, and drops old ones until `limit` tokens are left."""
        for number, kept in list(self._kept.items()):
            if _common(kept.tokens, tokens) == len(kept.tokens):
                self._drop(number)
        self._kept[self._number] = Kept(tokens, layers)
        self._number += 1
        self.tokens += len(tokens)
        while self.tokens > limit:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept.clear()
        self.tokens = 0

    def _drop(self, number: int) -> None:
        self.tokens -= len(self._kept.pop(number).tokens)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
