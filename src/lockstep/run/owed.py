"""How much each engine owes."""

import heapq

_HELD = 1 << 40
"""More than anybody owes."""


class Owed:
    """Completions that each living engine owes. Who owes least is found without looking at all of them: there may be a
    thousand, and every group of a step asks."""

    def __init__(self) -> None:
        self._owed: dict[int, int] = {}
        """What counts in the heap: of those that are held back more than of any other."""
        self._heap: list[tuple[int, int]] = []
        """(owed, rank), outdated entries included."""
        self.held: set[int] = set()
        """Those that get nothing as long as another can have it."""

    def __contains__(self, rank: int) -> bool:
        """Whether it lives and is not held back."""
        return rank in self._owed and rank not in self.held

    def __len__(self) -> int:
        """Engines that live."""
        return len(self._owed)

    @property
    def living(self) -> set[int]:
        """Ranks of those that live."""
        return set(self._owed)

    def set(self, rank: int, count: int) -> None:
        """The engine lives and owes so many."""
        self._owed[rank] = count = count + _HELD * (rank in self.held)
        heapq.heappush(self._heap, (count, rank))
        if len(self._heap) > 64 + 4 * len(self._owed):
            self._heap = [(count, rank) for rank, count in self._owed.items()]
            heapq.heapify(self._heap)

    def drop(self, rank: int) -> None:
        """The engine lives no more; who comes in its place is not held back."""
        self._owed.pop(rank, None)
        self.held.discard(rank)

    def least(self) -> int:
        """Who owes least, of equals the first; IndexError where nobody lives."""
        while self._owed.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]
