"""Which tokens of a row somebody asks the last layer for: those that predict a target.

All others (a prompt's tokens but the last) give that layer their keys and values and nothing else.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from lockstep.data.layout import Layout

Made = TypeVar("Made")


class Asked:
    """Of each segment one span of tokens, perhaps empty; `Layout` says why this is an opaque class.

    Args:
        layout: of the whole row.
        spans: (start, stop) in the row, by segment; start equals stop where nobody asks.
    """

    __slots__ = ("_kept", "index", "layout", "places", "spans", "tokens")

    def __init__(self, layout: Layout, spans: Sequence[tuple[int, int]]) -> None:
        self.layout, self.spans = layout, spans
        self.places: list[int] = []
        """Where each span begins among the asked tokens, which stand one behind the other."""
        self.tokens = 0
        """How many are asked for."""
        for start, stop in spans:
            self.places.append(self.tokens)
            self.tokens += stop - start
        self.index = torch.cat([torch.arange(start, stop) for start, stop in spans])
        """int64 `[asked]`: their places in the row."""
        self._kept: dict[Hashable, Any] = {}

    @classmethod
    def everything(cls, layout: Layout) -> Self:
        """The whole row; made once."""
        return layout.kept("everything", lambda row: cls(row, [(start, stop) for start, stop, _ in row.segments()]))

    @classmethod
    def by(cls, layout: Layout, sources: Tensor) -> Self:
        """Of each segment its first to its last source; `sources` are int64 places in the row."""
        starts = torch.tensor(layout.starts)
        segments = torch.bucketize(sources.contiguous(), starts, right=True) - 1
        first = torch.full_like(starts, layout.tokens).scatter_reduce_(0, segments, sources, "amin")
        last = torch.full_like(starts, -1).scatter_reduce_(0, segments, sources, "amax")
        spans = zip(layout.starts, first.tolist(), last.tolist(), strict=True)
        return cls(layout, [(low, high + 1) if high >= 0 else (start, start) for start, low, high in spans])

    def among(self, sources: Tensor) -> Tensor:
        """int64 places in the row to places among the asked tokens."""
        places = torch.zeros(self.layout.tokens, dtype=torch.int64)
        places[self.index] = torch.arange(self.tokens)
        return places.index_select(0, sources)

    def of(self, segment: int) -> range:
        """The places of a segment's span among the asked tokens."""
        start, stop = self.spans[segment]
        return range(self.places[segment], self.places[segment] + stop - start)

    def kept(self, name: Hashable, make: Callable[[Self], Made]) -> Made:
        """What `make` makes of this, made at the first call of that name only."""
        if name not in self._kept:
            self._kept[name] = make(self)
        made: Made = self._kept[name]
        return made
