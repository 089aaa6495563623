"""Which attention calls compute a packed row: indices only, made once per row.

Every segment attends to itself causally and to each of its ancestors wholly; each of the two is a dense call. The
descendants of an ancestor are its queries together, so that its keys and values are read once for all of them.
Segments of equal length that lie one behind the other are a call on views; short ones are gathered into a padded
call with others of about their length, because a call has a price of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.data.layout import Layout

ALONE = 128
"""Query tokens from which a call on views is cheaper than gathering (CPU, heads of 32 to 64)."""
TOGETHER = 1024
"""Query tokens of a call at most, where it can be smaller: more than this leaves the cache."""


@dataclass(frozen=True, slots=True)
class Block:
    """`[count, length]` tokens of a row at equal distances: a view."""

    start: int
    count: int
    length: int
    stride: int

    def of(self, row: Tensor) -> Tensor:
        """`[tokens, heads, ...]` to the view `[count, heads, length, ...]`."""
        token, heads, *rest = row.stride()
        shape = (self.count, row.shape[1], self.length, *row.shape[2:])
        return row.as_strided(
            shape, (self.stride * token, heads, token, *rest), row.storage_offset() + self.start * token
        )

    def put(self, row: Tensor, values: Tensor) -> None:
        """Writes `[count, heads, length, ...]`."""
        self.of(row).copy_(values)

    def add(self, row: Tensor, values: Tensor) -> None:
        self.of(row).add_(values)


@dataclass(frozen=True, slots=True)
class Picked:
    """`[count, length]` tokens of a row anywhere in it, some of them padding."""

    index: Tensor
    """int64 `[count * length]`; padding points to some token."""
    count: int
    length: int
    hidden: Tensor | None
    """float32 `[count, 1, length]`: infinite at padding; None without padding."""
    real: Tensor | None
    """int64: the places in `index` that are no padding."""
    tokens: Tensor
    """int64: the tokens at those places."""

    def of(self, row: Tensor) -> Tensor:
        """`[tokens, heads, ...]` to `[count, heads, length, ...]`."""
        picked = row.index_select(0, self.index)
        return picked.view(self.count, self.length, *row.shape[1:]).transpose(1, 2)

    def put(self, row: Tensor, values: Tensor) -> None:
        """Writes `[count, heads, length, ...]`, padding left out."""
        row.index_copy_(0, self.tokens, self._flat(values))

    def add(self, row: Tensor, values: Tensor) -> None:
        row.index_add_(0, self.tokens, self._flat(values))

    def _flat(self, values: Tensor) -> Tensor:
        flat = values.transpose(1, 2).flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)


Where = Block | Picked


@dataclass(frozen=True, slots=True)
class Call:
    """One dense attention: queries of some tokens over keys of some tokens, row by row of the two."""

    queries: Where
    keys: Where
    causal: bool
    """Segments over themselves; otherwise descendants over an ancestor."""

    @property
    def mask(self) -> Tensor | None:
        """float32 `[count, 1, 1, keys]`, added to the scores: hides padded keys. Causality hides them already."""
        if self.causal or isinstance(self.keys, Block) or self.keys.hidden is None:
            return None
        return -self.keys.hidden[:, :, None, :]


def calls(layout: Layout) -> list[Call]:
    """Every (query, key) pair of the layout in exactly one call; those of segments over themselves come first, and no
    token is twice among the queries of a call."""
    return layout.kept("calls", lambda row: [*_over_themselves(row), *_over_ancestors(row)])


def _over_themselves(layout: Layout) -> Iterator[Call]:
    small: list[range] = []
    for run in _runs(layout.lengths):
        length, start = layout.lengths[run[0]], layout.starts[run[0]]
        if len(run) * length < ALONE:
            small += [range(layout.starts[segment], layout.starts[segment] + length) for segment in run]
            continue
        share = max(1, TOGETHER // length)
        for first in range(0, len(run), share):
            block = Block(start + first * length, min(share, len(run) - first), length, length)
            yield Call(block, block, True)
    for bucket in _buckets([(segment, segment) for segment in small]):
        where = _where([tokens for tokens, _ in bucket])
        yield Call(where, where, True)


def _runs(lengths: Sequence[int]) -> Iterator[range]:
    """Segments of equal length, one behind the other."""
    edges = [i for i in range(1, len(lengths)) if lengths[i] != lengths[i - 1]]
    for first, last in pairwise([0, *edges, len(lengths)]):
        yield range(first, last)


def _over_ancestors(layout: Layout) -> Iterator[Call]:
    for level in families(layout):
        small: list[tuple[Sequence[int], range]] = []
        for keys, queries in level:
            if isinstance(queries, range) and len(queries) >= ALONE:
                yield Call(_whole(queries), _whole(keys), False)
            else:
                small.append((queries, keys))
        for bucket in _buckets(small):
            yield Call(_where([queries for queries, _ in bucket]), _where([keys for _, keys in bucket]), False)


def families(layout: Layout) -> list[list[tuple[range, Sequence[int]]]]:
    """By depth: each ancestor's tokens, and those of its descendants. Those of one depth have none in common."""
    depth: list[int] = []
    below: dict[int, list[int]] = {}
    for segment, parent in enumerate(layout.parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        for above in layout.ancestors(segment):
            below.setdefault(above, []).append(segment)
    levels: list[list[tuple[range, Sequence[int]]]] = [[] for _ in range(max(depth))]
    for above in sorted(below):
        keys = range(layout.starts[above], layout.starts[above] + layout.lengths[above])
        levels[depth[above]].append((keys, _tokens(layout, below[above])))
    return levels


def _tokens(layout: Layout, segments: Sequence[int]) -> Sequence[int]:
    """The segments' tokens: a range where they lie one behind the other."""
    spans = [range(layout.starts[s], layout.starts[s] + layout.lengths[s]) for s in segments]
    if all(one.stop == next_.start for one, next_ in pairwise(spans)):
        return range(spans[0].start, spans[-1].stop)
    return [token for span in spans for token in span]


Pair = tuple[Sequence[int], Sequence[int]]


def _buckets(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """(queries, keys) of about equal lengths together."""
    bucket: list[Pair] = []
    for queries, keys in sorted(pairs, key=lambda pair: (-len(pair[1]), -len(pair[0]))):
        if bucket and not (
            _alike(len(keys), len(bucket[0][1]))
            and _alike(len(queries), max(len(held) for held, _ in bucket))
            and (len(bucket) + 1) * len(bucket[0][0]) <= TOGETHER
        ):
            yield bucket
            bucket = []
        bucket.append((queries, keys))
    if bucket:
        yield bucket


def _alike(shorter: int, longer: int) -> bool:
    """Whether padding the one to the other wastes little."""
    return abs(longer - shorter) * 4 <= longer + 8


def _whole(tokens: range) -> Block:
    return Block(tokens.start, 1, len(tokens), len(tokens))


def _where(rows: Sequence[Sequence[int]]) -> Where:
    if len(rows) == 1 and isinstance(rows[0], range):
        return _whole(rows[0])
    longest = max(len(row) for row in rows)
    lengths = torch.tensor([len(row) for row in rows])
    index = torch.cat([torch.tensor([*row, *[row[0]] * (longest - len(row))]) for row in rows])
    real = torch.arange(longest) < lengths[:, None]
    if bool(real.all()):
        return Picked(index, len(rows), longest, None, None, index)
    hidden = torch.zeros(real.shape).masked_fill_(~real, float("inf"))[:, None]
    places = real.flatten().nonzero()[:, 0]
    return Picked(index, len(rows), longest, hidden, places, index[places])
