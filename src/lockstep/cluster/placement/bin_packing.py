"""Computes how many bundles of each kind each node gets. Sizes are vectors of integers.

Vector bin packing is NP-hard (Garey and Johnson 1979, SR1), but a run has few kinds of bundles: largest-first is
tried, and where it fails, the patterns of kinds that fill a node are searched within `SEARCH_BUDGET` steps.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SizeVector = tuple[int, ...]
KindCounts = tuple[int, ...]

SEARCH_BUDGET = 10_000
"""Patterns that a search tries; up to ten nodes with five kinds of bundles need hundreds."""


@dataclass(frozen=True, slots=True)
class BundleKind:
    """A number of equal bundles."""

    size: SizeVector
    count: int
    one_per_node: bool = False
    """At most one per node."""


def pack_bundles(
    kinds: Sequence[BundleKind], rooms: Sequence[SizeVector], spread: bool = False, budget: int = SEARCH_BUDGET
) -> list[KindCounts] | None:
    """Returns `[nodes][kinds]`, how many bundles each node gets; None if no solution was found within the budget.

    Args:
        rooms: the free resources of each node, in the order in which nodes are filled.
        spread: distribute evenly over the nodes, instead of filling one before the next.
    """
    order = sorted(range(len(kinds)), key=lambda k: (not kinds[k].one_per_node, tuple(-n for n in kinds[k].size), k))
    sorted_kinds = [kinds[k] for k in order]
    if not rooms:
        return [] if not any(kind.count for kind in kinds) else None
    if not _may_fit(sorted_kinds, rooms):
        return None
    counts, left = largest_first(sorted_kinds, rooms, spread)
    found = counts if not any(left) else _search_patterns(sorted_kinds, rooms, budget)
    if found is None:
        return None
    back = [order.index(k) for k in range(len(kinds))]
    return [tuple(row[k] for k in back) for row in found]


def largest_first(
    kinds: Sequence[BundleKind], rooms: Sequence[SizeVector], spread: bool
) -> tuple[list[KindCounts], list[int]]:
    """Places kinds in the given order. Returns `[nodes][kinds]`, and how many of each kind did not fit."""
    left = [list(room) for room in rooms]
    counts = [[0] * len(kinds) for _ in rooms]
    over = []
    for k, kind in enumerate(kinds):
        place = _spread_evenly if spread else _fill_nodes
        over.append(place(kind, k, left, counts))
    return [tuple(row) for row in counts], over


def _fill_nodes(kind: BundleKind, k: int, left: list[list[int]], counts: list[list[int]]) -> int:
    remaining = kind.count
    for room, row in zip(left, counts, strict=True):
        if not remaining:
            break
        taken = min(remaining, _room_for(kind, room))
        row[k] = taken
        _subtract(room, kind.size, taken)
        remaining -= taken
    return remaining


def _spread_evenly(kind: BundleKind, k: int, left: list[list[int]], counts: list[list[int]]) -> int:
    """Prefers the node with the fewest bundles of the kind, then with the fewest bundles."""
    remaining = kind.count
    heap = [(0, sum(row), number) for number, row in enumerate(counts) if _room_for(kind, left[number])]
    heapq.heapify(heap)
    while remaining and heap:
        of_kind, of_all, number = heapq.heappop(heap)
        counts[number][k] += 1
        _subtract(left[number], kind.size, 1)
        remaining -= 1
        if not kind.one_per_node and _room_for(kind, left[number]):
            heapq.heappush(heap, (of_kind + 1, of_all + 1, number))
    return remaining


def _room_for(kind: BundleKind, room: Sequence[int]) -> int:
    """How many bundles of a kind fit into the rest of a node."""
    many = min((has // needs for has, needs in zip(room, kind.size, strict=True) if needs), default=kind.count)
    return min(max(many, 0), 1) if kind.one_per_node else max(many, 0)


def _subtract(room: list[int], size: SizeVector, many: int) -> None:
    for axis, needs in enumerate(size):
        room[axis] -= many * needs


def _may_fit(kinds: Sequence[BundleKind], rooms: Sequence[SizeVector]) -> bool:
    """Necessary conditions: each kind fits alone, and all fit if nodes could be divided freely."""
    if any(sum(_room_for(kind, room) for room in rooms) < kind.count for kind in kinds):
        return False
    return _fits_in_total([kind.count for kind in kinds], kinds, [sum(axis) for axis in zip(*rooms, strict=True)])


def _fits_in_total(remaining: Sequence[int], kinds: Sequence[BundleKind], room: Sequence[int]) -> bool:
    needs = [sum(n * kind.size[axis] for n, kind in zip(remaining, kinds, strict=True)) for axis in range(len(room))]
    return all(need <= has for need, has in zip(needs, room, strict=True))


def _search_patterns(kinds: Sequence[BundleKind], rooms: Sequence[SizeVector], budget: int) -> list[KindCounts] | None:
    """Depth-first search over the nodes, and over the patterns that fill each node: filling a node never makes the rest
    harder. A remainder that failed once after some node fails again."""
    after = [[0] * len(rooms[0])]
    for room in reversed(rooms):
        after.append([sum(pair) for pair in zip(after[-1], room, strict=True)])
    after.reverse()
    first = tuple(kind.count for kind in kinds)
    stack: list[tuple[KindCounts, Iterator[KindCounts | None]]] = [(first, _patterns(kinds, first, rooms[0]))]
    chosen: list[KindCounts] = []
    dead: set[tuple[int, KindCounts]] = set()
    for _ in range(budget):
        remaining, options = stack[-1]
        try:
            pattern = next(options)
        except StopIteration:
            dead.add((len(stack), remaining))
            stack.pop()
            if not stack:
                return None
            chosen.pop()
            continue
        if pattern is None:
            continue
        rest = tuple(w - p for w, p in zip(remaining, pattern, strict=True))
        depth = len(stack)
        if not any(rest):
            return [*chosen, pattern, *[(0,) * len(kinds)] * (len(rooms) - depth)]
        if depth < len(rooms) and (depth + 1, rest) not in dead and _fits_in_total(rest, kinds, after[depth]):
            chosen.append(pattern)
            stack.append((rest, _patterns(kinds, rest, rooms[depth])))
    return None


def _patterns(kinds: Sequence[BundleKind], remaining: KindCounts, room: SizeVector) -> Iterator[KindCounts | None]:
    """Yields combinations of kinds that fill a node, most of the first kind first; None for one that leaves room."""
    counts = [0] * len(kinds)

    def below(k: int, left: list[int]) -> Iterator[KindCounts | None]:
        if k == len(kinds):
            full = not any(
                counts[j] < remaining[j] and not (kind.one_per_node and counts[j]) and _room_for(kind, left)
                for j, kind in enumerate(kinds)
            )
            yield tuple(counts) if full else None
            return
        for many in range(min(remaining[k], _room_for(kinds[k], left)), -1, -1):
            counts[k] = many
            rest = left.copy()
            _subtract(rest, kinds[k].size, many)
            yield from below(k + 1, rest)
        counts[k] = 0

    return below(0, list(room))
