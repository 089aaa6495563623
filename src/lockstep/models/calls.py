"""Which attention calls compute a packed row: indices only, made once per row.

Every segment attends to itself causally and to each of its ancestors wholly; each of the two is a dense call. The
descendants of an ancestor are its queries together, so that its keys and values are read once for all of them.
Segments of equal length that lie one behind the other are a call on views; short ones are gathered into a padded
call with others of about their length, because a call has a price of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.models.asked import Asked

ALONE = 128
"""Query tokens from which a call on views is cheaper than gathering (CPU, heads of 32 to 64)."""
TOGETHER = 1024
"""Query tokens of a call at most, where it can be smaller: more than this leaves the cache."""
LONG, STEP = 384, 128
"""Tokens from which a segment over itself goes step by step, and of a step."""


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


Pair = tuple[Sequence[int], Sequence[int]]
"""(queries, keys)."""


@dataclass(frozen=True, slots=True)
class Call:
    """One dense attention: queries of some tokens over keys of some tokens, row by row of the two."""

    queries: Where
    """Among the asked tokens."""
    keys: Where
    """In the whole row."""
    own: bool
    """Segments over themselves, causally, the queries being the last of the keys; otherwise wholly over what is before
    them."""

    @property
    def causal(self) -> bool:
        """Whether it is what the kernel calls causal."""
        return self.own and self.queries.length == self.keys.length

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """`[count or 1, 1, queries or 1, keys]`, added to the scores: hides keys that are padding or come later."""
        if self.own:
            return None if self.causal else _staircase(self.queries.length, self.keys.length, dtype)
        if isinstance(self.keys, Block) or self.keys.hidden is None:
            return None
        return -self.keys.hidden[:, :, None, :].to(dtype)


@lru_cache(maxsize=64)
def _staircase(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return torch.zeros(1, 1, queries, keys, dtype=dtype).masked_fill_(later, float("-inf"))


def calls(asked: Asked) -> list[Call]:
    """Every (query, key) pair of a row whose query is asked for, in exactly one call; those of segments over
    themselves come first, and no token is twice among the queries of a call."""
    return asked.kept("calls", lambda row: [*_over_themselves(row), *_over_ancestors(row)])


def _over_themselves(asked: Asked) -> Iterator[Call]:
    small: list[Pair] = []
    for run in _runs(asked):
        (start, stop), place, distance = asked.spans[run[0]], asked.places[run[0]], asked.layout.lengths[run[0]]
        length = stop - start
        if len(run) * length < ALONE:
            small += [(asked.of(segment), range(*asked.spans[segment])) for segment in run if length]
            continue
        share = max(1, TOGETHER // length)
        for first in range(0, len(run), share):
            count = min(share, len(run) - first)
            queries = Block(place + first * length, count, length, length)
            yield from _causal(queries, Block(start + first * distance, count, length, distance))
    for bucket in _buckets(small):
        yield Call(_where([queries for queries, _ in bucket]), _where([keys for _, keys in bucket]), True)


def _runs(asked: Asked) -> Iterator[range]:
    """Segments of equal length, asked for alike, one behind the other."""
    row = asked.layout
    shapes = [
        (length, first - start, last - first)
        for start, length, (first, last) in zip(row.starts, row.lengths, asked.spans, strict=True)
    ]
    edges = [i for i in range(1, len(shapes)) if shapes[i] != shapes[i - 1]]
    for first, last in pairwise([0, *edges, len(shapes)]):
        yield range(first, last)


def _causal(queries: Block, keys: Block) -> Iterator[Call]:
    """The kernel computes the half that nobody sees too: long segments go step by step, each over the keys up to it."""
    if queries.length < LONG:
        yield Call(queries, keys, True)
        return
    for done in range(0, queries.length, STEP):
        upto = min(done + STEP, queries.length)
        part = Block(queries.start + done, queries.count, upto - done, queries.stride)
        yield Call(part, Block(keys.start, keys.count, upto, keys.stride), True)


def _over_ancestors(asked: Asked) -> Iterator[Call]:
    for level in families(asked):
        small: list[Pair] = []
        for keys, queries in level:
            if isinstance(queries, range) and len(queries) >= ALONE:
                yield Call(_whole(queries), _whole(keys), False)
            else:
                small.append((queries, keys))
        for bucket in _buckets(small):
            yield Call(_where([queries for queries, _ in bucket]), _where([keys for _, keys in bucket]), False)


def families(asked: Asked) -> list[list[tuple[range, Sequence[int]]]]:
    """By depth: each ancestor's tokens, and what is asked for of its descendants; what nobody asks for at the beginning
    of a segment is an ancestor of the rest. Those of one depth have none in common."""
    layout = asked.layout
    depth: list[int] = []
    below: dict[int, list[int]] = {}
    for segment, parent in enumerate(layout.parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        for above in layout.ancestors(segment) if asked.of(segment) else ():
            below.setdefault(above, []).append(segment)
    levels: list[list[tuple[range, Sequence[int]]]] = [[] for _ in range(max(depth) + 1)]
    for segment, start in enumerate(layout.starts):
        if segment in below:
            levels[depth[segment]].append(
                (range(start, start + layout.lengths[segment]), _tokens(asked, below[segment]))
            )
        if asked.of(segment) and asked.spans[segment][0] > start:
            levels[depth[segment]].append((range(start, asked.spans[segment][0]), asked.of(segment)))
    return [level for level in levels if level]


def _tokens(asked: Asked, segments: Sequence[int]) -> Sequence[int]:
    """The segments' asked tokens: a range where they lie one behind the other."""
    spans = [asked.of(segment) for segment in segments]
    if all(one.stop == next_.start for one, next_ in pairwise(spans)):
        return range(spans[0].start, spans[-1].stop)
    return [token for span in spans for token in span]


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
