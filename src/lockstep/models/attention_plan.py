"""Plans which dense attention calls compute a packed row, once per row. The plan consists of indices only.

Every segment attends to itself, causally unless it is whole, and to all tokens of its ancestors; each of the two is a
dense call. All
descendants of an ancestor are in one call, so that its keys and values are read once. Consecutive segments of equal
length are one call on views. Short segments are gathered and padded into calls with others of similar length, because
every call has a fixed cost. The last layer computes only queries that predict a target (`QuerySubset`).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from lockstep.data.row_layout import RowLayout

Cached = TypeVar("Cached")


class QuerySubset:
    """The tokens of a row for which a layer computes its output: one span per segment, possibly empty.

    The last layer computes outputs only for tokens that predict a target. Of all others, such as a prompt's tokens
    before the last, it needs only keys and values. Not a dataclass, for the reason given in `RowLayout`.

    Args:
        layout: layout of the whole row.
        spans: (start, stop) in the row for each segment; equal if the span is empty.
    """

    __slots__ = ("_cache", "index", "layout", "places", "spans", "tokens")

    def __init__(self, layout: RowLayout, spans: Sequence[tuple[int, int]]) -> None:
        self.layout, self.spans = layout, spans
        self.places: list[int] = []
        """Where each span begins in the subset, which is the concatenation of the spans."""
        self.tokens = 0
        """Number of tokens in the subset."""
        for start, stop in spans:
            self.places.append(self.tokens)
            self.tokens += stop - start
        self.index = torch.cat([torch.arange(start, stop) for start, stop in spans])
        """int64 `[subset tokens]`: position of each token in the row."""
        self._cache: dict[Hashable, Any] = {}

    @classmethod
    def all_of(cls, layout: RowLayout) -> Self:
        """Returns the subset of all tokens. Cached."""
        return layout.cached("all", lambda row: cls(row, [(start, stop) for start, stop, _ in row.segments()]))

    @classmethod
    def of_sources(cls, layout: RowLayout, sources: Tensor) -> Self:
        """Returns the tokens of each segment from its first to its last source. `sources` are int64 positions in the
        row."""
        starts = torch.tensor(layout.starts)
        segments = torch.bucketize(sources.contiguous(), starts, right=True) - 1
        first = torch.full_like(starts, layout.tokens).scatter_reduce_(0, segments, sources, "amin")
        last = torch.full_like(starts, -1).scatter_reduce_(0, segments, sources, "amax")
        spans = zip(layout.starts, first.tolist(), last.tolist(), strict=True)
        return cls(layout, [(low, high + 1) if high >= 0 else (start, start) for start, low, high in spans])

    def places_of(self, sources: Tensor) -> Tensor:
        """Converts positions in the row to positions in the subset, int64."""
        places = torch.zeros(self.layout.tokens, dtype=torch.int64)
        places[self.index] = torch.arange(self.tokens)
        return places.index_select(0, sources)

    def range_of(self, segment: int) -> range:
        """Returns the positions of a segment's span in the subset."""
        start, stop = self.spans[segment]
        return range(self.places[segment], self.places[segment] + stop - start)

    def cached(self, name: Hashable, make: Callable[[Self], Cached]) -> Cached:
        """Returns the result of `make` for this subset. Computes it at the first call with that name."""
        if name not in self._cache:
            self._cache[name] = make(self)
        value: Cached = self._cache[name]
        return value


MIN_VIEW_QUERIES = 128
"""From this number of query tokens on, a call on views is cheaper than gathering (CPU, heads of 32 to 64)."""
MAX_CALL_QUERIES = 1024
"""Largest number of query tokens per call if the call can be divided: more would not fit into the cache."""
LONG_SEGMENT, CAUSAL_STEP = 384, 128
"""Segments of at least LONG_SEGMENT tokens attend to themselves in several calls of CAUSAL_STEP queries."""


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """`[count, length]` tokens of a row at equal distances, accessed as a view."""

    start: int
    count: int
    length: int
    stride: int

    def take(self, row: Tensor) -> Tensor:
        """Returns the view `[count, heads, length, ...]` of a row `[tokens, heads, ...]`."""
        token, heads, *rest = row.stride()
        shape = (self.count, row.shape[1], self.length, *row.shape[2:])
        return row.as_strided(
            shape, (self.stride * token, heads, token, *rest), row.storage_offset() + self.start * token
        )

    def put(self, row: Tensor, values: Tensor) -> None:
        """Writes values `[count, heads, length, ...]` to the row."""
        self.take(row).copy_(values)

    def add(self, row: Tensor, values: Tensor) -> None:
        self.take(row).add_(values)


@dataclass(frozen=True, slots=True)
class GatheredTokens:
    """`[count, length]` tokens at any positions of a row, some of them padding."""

    index: Tensor
    """int64 `[count * length]`: position of each token; of padding, the position of an arbitrary token."""
    count: int
    length: int
    hidden: Tensor | None
    """float32 `[count, 1, length]`: infinite for padding, else 0; None without padding."""
    real: Tensor | None
    """int64: indices in `index` that are not padding; None without padding."""
    tokens: Tensor
    """int64: positions of the tokens that are not padding."""

    def take(self, row: Tensor) -> Tensor:
        """Gathers `[count, heads, length, ...]` from a row `[tokens, heads, ...]`."""
        picked = row.index_select(0, self.index)
        return picked.view(self.count, self.length, *row.shape[1:]).transpose(1, 2)

    def put(self, row: Tensor, values: Tensor) -> None:
        """Writes values `[count, heads, length, ...]` to the row, except padding."""
        row.index_copy_(0, self.tokens, self._flat(values))

    def add(self, row: Tensor, values: Tensor) -> None:
        row.index_add_(0, self.tokens, self._flat(values))

    def _flat(self, values: Tensor) -> Tensor:
        flat = values.transpose(1, 2).flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)


TokenSelection = TokenBlock | GatheredTokens


QueriesAndKeys = tuple[Sequence[int], Sequence[int]]
"""(queries, keys)."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One dense attention call: row i of the queries attends to row i of the keys."""

    queries: TokenSelection
    """Positions in the subset."""
    keys: TokenSelection
    """Positions in the row."""
    is_self: bool
    """Whether segments attend to themselves: causally, when the queries are the last of the keys, unless `is_whole`.
    Otherwise queries attend to all keys, which are those of ancestors."""
    is_whole: bool = False
    """Whether segments attend to themselves in both directions."""

    @property
    def causal(self) -> bool:
        """Whether the kernel's causal flag expresses the mask: there are as many queries as keys."""
        return self.is_self and not self.is_whole and self.queries.length == self.keys.length

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Returns `[count or 1, 1, queries or 1, keys]` to add to the scores, which masks padding and later keys."""
        if self.is_self and not self.is_whole:
            return None if self.causal else _causal_mask(self.queries.length, self.keys.length, dtype)
        if isinstance(self.keys, TokenBlock) or self.keys.hidden is None:
            return None
        return -self.keys.hidden[:, :, None, :].to(dtype)


@lru_cache(maxsize=64)
def _causal_mask(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return torch.zeros(1, 1, queries, keys, dtype=dtype).masked_fill_(later, float("-inf"))


def plan_attention_calls(subset: QuerySubset) -> list[AttentionCall]:
    """Returns calls that compute every (query, key) pair whose query is in the subset exactly once. Calls of segments
    over themselves come first. A call has every query at most once."""
    return subset.cached("calls", lambda row: [*_self_calls(row), *_ancestor_calls(row)])


def _self_calls(subset: QuerySubset) -> Iterator[AttentionCall]:
    small: list[QueriesAndKeys] = []
    for run in _equal_runs(subset):
        if run[0] in subset.layout.whole:
            continue
        (start, stop), place, distance = subset.spans[run[0]], subset.places[run[0]], subset.layout.lengths[run[0]]
        length = stop - start
        if len(run) * length < MIN_VIEW_QUERIES:
            small += [(subset.range_of(segment), range(*subset.spans[segment])) for segment in run if length]
            continue
        share = max(1, MAX_CALL_QUERIES // length)
        for first in range(0, len(run), share):
            count = min(share, len(run) - first)
            queries = TokenBlock(place + first * length, count, length, length)
            yield from _causal_calls(queries, TokenBlock(start + first * distance, count, length, distance))
    for bucket in _length_buckets(small):
        yield AttentionCall(
            _select_tokens([queries for queries, _ in bucket]), _select_tokens([keys for _, keys in bucket]), True
        )
    yield from _whole_calls(subset)


def _whole_calls(subset: QuerySubset) -> Iterator[AttentionCall]:
    """Yields the calls of segments that attend to themselves in both directions."""
    small: list[QueriesAndKeys] = []
    for segment in sorted(subset.layout.whole):
        start, queries = subset.layout.starts[segment], subset.range_of(segment)
        keys = range(start, start + subset.layout.lengths[segment])
        if len(queries) >= MIN_VIEW_QUERIES:
            yield AttentionCall(_contiguous_block(queries), _contiguous_block(keys), True, True)
        elif queries:
            small.append((queries, keys))
    for bucket in _length_buckets(small):
        queries_, keys_ = ([pair[side] for pair in bucket] for side in (0, 1))
        yield AttentionCall(_select_tokens(queries_), _select_tokens(keys_), True, True)


def _equal_runs(subset: QuerySubset) -> Iterator[range]:
    """Yields runs of consecutive segments with equal lengths and spans."""
    row = subset.layout
    shapes = [
        (length, first - start, last - first, segment in row.whole)
        for segment, (start, length, (first, last)) in enumerate(
            zip(row.starts, row.lengths, subset.spans, strict=True)
        )
    ]
    edges = [i for i in range(1, len(shapes)) if shapes[i] != shapes[i - 1]]
    for first, last in pairwise([0, *edges, len(shapes)]):
        yield range(first, last)


def _causal_calls(queries: TokenBlock, keys: TokenBlock) -> Iterator[AttentionCall]:
    """Splits long segments into steps that attend to the keys up to their end, because the kernel also computes masked
    scores."""
    if queries.length < LONG_SEGMENT:
        yield AttentionCall(queries, keys, True)
        return
    for done in range(0, queries.length, CAUSAL_STEP):
        end = min(done + CAUSAL_STEP, queries.length)
        part = TokenBlock(queries.start + done, queries.count, end - done, queries.stride)
        yield AttentionCall(part, TokenBlock(keys.start, keys.count, end, keys.stride), True)


def _ancestor_calls(subset: QuerySubset) -> Iterator[AttentionCall]:
    for level in ancestor_levels(subset):
        small: list[QueriesAndKeys] = []
        for keys, queries in level:
            if isinstance(queries, range) and len(queries) >= MIN_VIEW_QUERIES:
                yield AttentionCall(_contiguous_block(queries), _contiguous_block(keys), False)
            else:
                small.append((queries, keys))
        for bucket in _length_buckets(small):
            yield AttentionCall(
                _select_tokens([queries for queries, _ in bucket]), _select_tokens([keys for _, keys in bucket]), False
            )


def ancestor_levels(subset: QuerySubset) -> list[list[tuple[range, Sequence[int]]]]:
    """Returns the ancestors of each depth: tokens of each ancestor, and of its descendants in the subset. Tokens at the
    beginning of a segment that are not in the subset are treated as an ancestor of the others. Ancestors of one depth
    share no descendants."""
    layout = subset.layout
    depth: list[int] = []
    below: dict[int, list[int]] = {}
    for segment, parent in enumerate(layout.parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        for above in layout.ancestors(segment) if subset.range_of(segment) else ():
            below.setdefault(above, []).append(segment)
    levels: list[list[tuple[range, Sequence[int]]]] = [[] for _ in range(max(depth) + 1)]
    for segment, start in enumerate(layout.starts):
        if segment in below:
            levels[depth[segment]].append(
                (range(start, start + layout.lengths[segment]), _query_tokens(subset, below[segment]))
            )
        if subset.range_of(segment) and subset.spans[segment][0] > start and segment not in layout.whole:
            levels[depth[segment]].append((range(start, subset.spans[segment][0]), subset.range_of(segment)))
    return [level for level in levels if level]


def _query_tokens(subset: QuerySubset, segments: Sequence[int]) -> Sequence[int]:
    """Returns the positions of the segments' tokens in the subset, as a range if they are consecutive."""
    spans = [subset.range_of(segment) for segment in segments]
    if all(one.stop == next_.start for one, next_ in pairwise(spans)):
        return range(spans[0].start, spans[-1].stop)
    return [token for span in spans for token in span]


def _length_buckets(pairs: Sequence[QueriesAndKeys]) -> Iterator[list[QueriesAndKeys]]:
    """Groups (queries, keys) of similar lengths."""
    bucket: list[QueriesAndKeys] = []
    for queries, keys in sorted(pairs, key=lambda pair: (-len(pair[1]), -len(pair[0]))):
        if bucket and not (
            _similar_length(len(keys), len(bucket[0][1]))
            and _similar_length(len(queries), max(len(other) for other, _ in bucket))
            and (len(bucket) + 1) * len(bucket[0][0]) <= MAX_CALL_QUERIES
        ):
            yield bucket
            bucket = []
        bucket.append((queries, keys))
    if bucket:
        yield bucket


def _similar_length(shorter: int, longer: int) -> bool:
    """Returns whether padding the shorter to the longer wastes little."""
    return abs(longer - shorter) * 4 <= longer + 8


def _contiguous_block(tokens: range) -> TokenBlock:
    return TokenBlock(tokens.start, 1, len(tokens), len(tokens))


def _select_tokens(rows: Sequence[Sequence[int]]) -> TokenSelection:
    if len(rows) == 1 and isinstance(rows[0], range):
        return _contiguous_block(rows[0])
    longest = max(len(row) for row in rows)
    lengths = torch.tensor([len(row) for row in rows])
    index = torch.cat([torch.tensor([*row, *[row[0]] * (longest - len(row))]) for row in rows])
    real = torch.arange(longest) < lengths[:, None]
    if bool(real.all()):
        return GatheredTokens(index, len(rows), longest, None, None, index)
    hidden = torch.zeros(real.shape).masked_fill_(~real, float("inf"))[:, None]
    places = real.flatten().nonzero()[:, 0]
    return GatheredTokens(index, len(rows), longest, hidden, places, index[places])
