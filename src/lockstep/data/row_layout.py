"""The layout of a packed row: the positions of its segments, and which segments they attend to.

The segments of a row form trees. A segment attends to itself (causally) and to all tokens of its ancestors. A document
is a root; the parent of a completion is its prompt; the parent of a turn is the turn before it. In some models, the
tokens of an image attend to each other in both directions: such an image is a segment of its own.
"""

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

Cached = TypeVar("Cached")


class RowLayout:
    """Start, length and parent of each segment of a packed row.

    Not a dataclass, because FSDP2's mixed precision copies dataclasses for every layer and would cast their tensors.
    All indices are Python ints or int64 tensors.

    Args:
        lengths: number of tokens of each segment, in the order of the row.
        parents: index of each segment's parent, smaller than the segment's own; -1 for a root.
        positions: int64 `[tokens]`, or `[3, tokens]` for a model with multimodal rotary positions (time, height, width;
            M-RoPE, Wang et al. 2024): what the model's position embedding gets. The path from the root if None.
        whole: indices of the segments whose tokens attend to each other in both directions.

    Raises:
        ValueError: the row is empty, a length is below 1, a parent does not precede its child, or the positions have
            another shape.
    """

    __slots__ = ("_cache", "_positions", "lengths", "parents", "starts", "tokens", "whole")

    def __init__(
        self,
        lengths: list[int],
        parents: list[int],
        positions: Tensor | None = None,
        whole: Collection[int] = (),
    ) -> None:
        if not lengths or len(lengths) != len(parents):
            raise ValueError(f"a layout needs as many parents as lengths, got {len(parents)} and {len(lengths)}")
        self.lengths = lengths
        self.parents = parents
        self.whole = frozenset(whole)
        self.starts: list[int] = []
        position = 0
        for index, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
            if length < 1:
                raise ValueError(f"segment {index} has length {length}, expected at least 1")
            if not -1 <= parent < index:
                raise ValueError(f"segment {index} has parent {parent}, expected -1 or an earlier segment")
            self.starts.append(position)
            position += length
        self.tokens = position
        if positions is not None and tuple(positions.shape) not in ((position,), (3, position)):
            raise ValueError(
                f"positions have shape {list(positions.shape)}, expected [{position}] or [3, {position}]: one per token"
            )
        self._positions = positions
        self._cache: dict[Hashable, Any] = {}

    def cached(self, name: Hashable, make: Callable[["RowLayout"], Cached]) -> Cached:
        """Returns the result of `make` for this layout. Computes it at the first call with that name, so that it is
        computed once per row and not once per layer."""
        if name not in self._cache:
            self._cache[name] = make(self)
        value: Cached = self._cache[name]
        return value

    def ancestors(self, segment: int) -> list[int]:
        """Returns the segment's ancestors, nearest first."""
        found = []
        while (segment := self.parents[segment]) >= 0:
            found.append(segment)
        return found

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """Yields (start, stop, parent) of each segment."""
        for start, length, parent in zip(self.starts, self.lengths, self.parents, strict=True):
            yield start, start + length, parent

    def positions(self) -> Tensor:
        """Returns what the model's position embedding gets for each token, int64 `[tokens]` or `[3, tokens]`."""
        return self.path_positions() if self._positions is None else self._positions

    def path_positions(self) -> Tensor:
        """Returns the position of each token in its sequence (the path from the root), int64 `[tokens]`."""
        offsets: list[int] = []
        parts = []
        for length, parent in zip(self.lengths, self.parents, strict=True):
            offset = 0 if parent < 0 else offsets[parent] + self.lengths[parent]
            offsets.append(offset)
            parts.append(torch.arange(offset, offset + length))
        return torch.cat(parts)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest path from a root."""
        ends: list[int] = []
        for length, parent in zip(self.lengths, self.parents, strict=True):
            ends.append(length + (0 if parent < 0 else ends[parent]))
        return max(ends)

    def pairs(self) -> int:
        """Returns the number of (query, key) pairs, the cost of attention."""
        total = 0
        depth: list[int] = []
        for segment, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            above = 0 if parent < 0 else depth[parent] + self.lengths[parent]
            depth.append(above)
            total += length * above + (length * length if segment in self.whole else length * (length + 1) // 2)
        return total

    def mask(self, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        """Returns a bool `[tokens, tokens]`: True where the query (row) may attend to the key (column). Cached.

        Args:
            window: size of a sliding window: also masks keys `window` or more tokens before the query on its path.
        """
        return self.cached(("mask", torch.device(device), window), lambda layout: layout._mask(window).to(device))

    def _mask(self, window: int | None) -> Tensor:
        mask = torch.zeros(self.tokens, self.tokens, dtype=torch.bool)
        for segment, (start, stop, _) in enumerate(self.segments()):
            own = torch.ones(stop - start, stop - start, dtype=torch.bool)
            mask[start:stop, start:stop] = own if segment in self.whole else own.tril()
            for above in self.ancestors(segment):
                mask[start:stop, self.starts[above] : self.starts[above] + self.lengths[above]] = True
        if window is not None:
            positions = self.path_positions()
            mask &= positions[:, None] - positions[None, :] < window
        return mask

    def parts(self, tokens: int = 256) -> list[tuple[int, int, "RowLayout"]]:
        """Returns (start, stop, layout) of independent pieces of the row: no token attends to another piece.

        Consecutive trees form one piece of up to `tokens`, because a call of attention costs more than the pairs of a
        small tree; a larger tree is a piece of its own. Cached.
        """
        bounds = self._piece_bounds
        return self.cached(("parts", tokens), lambda layout: [layout._slice(*piece) for piece in bounds(tokens)])

    def _piece_bounds(self, tokens: int) -> list[tuple[int, int]]:
        """Returns the segment ranges of the pieces. A piece can begin where no later segment has an earlier parent."""
        count = len(self.lengths)
        lowest = count
        begins = []
        for segment in range(count - 1, -1, -1):
            lowest = min(lowest, self.parents[segment] if self.parents[segment] >= 0 else segment)
            if lowest >= segment:
                begins.append(segment)
        begins.reverse()
        bounds: list[tuple[int, int]] = []
        size = 0
        for first, last in zip(begins, [*begins[1:], count], strict=True):
            length = sum(self.lengths[first:last])
            if bounds and size + length <= tokens:
                bounds[-1] = (bounds[-1][0], last)
                size += length
            else:
                bounds.append((first, last))
                size = length
        return bounds

    def _slice(self, first: int, last: int) -> tuple[int, int, "RowLayout"]:
        if (first, last) == (0, len(self.lengths)):
            return 0, self.tokens, self
        parents = [parent if parent < 0 else parent - first for parent in self.parents[first:last]]
        start = self.starts[first]
        whole = [segment - first for segment in self.whole if first <= segment < last]
        piece = RowLayout(self.lengths[first:last], parents, whole=whole)
        return start, start + piece.tokens, piece
