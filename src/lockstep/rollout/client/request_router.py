"""Routes requests to engines by load. Requests of a group go to the same engine, and every completion is used once.

The router only keeps records, without workers and locks; the engine pool sends the requests.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

from lockstep.data.samples import Completion
from lockstep.rollout.engine_protocol import RequestGroup

_HELD_BACK_LOAD = 1 << 40
"""A number greater than any engine's load."""


class EngineLoad:
    """The number of open requests of each live engine. A heap finds the least loaded engine, because there may be a
    thousand engines and each group of a step needs one."""

    def __init__(self) -> None:
        self._load: dict[int, int] = {}
        """Load by rank. The load of engines that are held back is increased, so that they come last in the heap."""
        self._heap: list[tuple[int, int]] = []
        """(load, rank), including outdated entries."""
        self._changed: set[int] = set()
        """Engines whose loads are not in the heap."""
        self.held_back: set[int] = set()
        """Engines that get no requests as long as another engine is live."""

    def __contains__(self, rank: int) -> bool:
        """Whether the engine is live and not held back."""
        return rank in self._load and rank not in self.held_back

    def __len__(self) -> int:
        """The number of live engines."""
        return len(self._load)

    @property
    def live(self) -> set[int]:
        """Ranks of the live engines."""
        return set(self._load)

    def set(self, rank: int, count: int) -> None:
        """Sets the load of a live engine."""
        self._load[rank] = count + _HELD_BACK_LOAD if rank in self.held_back else count
        self._changed.add(rank)

    def remove(self, rank: int) -> None:
        """Removes a lost engine. Its successor is not held back."""
        self._load.pop(rank, None)
        self.held_back.discard(rank)

    def least_loaded(self) -> int:
        """The engine with the smallest load, the lowest rank among equals. Raises IndexError if no engine is live."""
        load, heap = self._load, self._heap
        if self._changed:
            if len(heap) + len(self._changed) > 64 + 4 * len(load):
                heap[:] = [(count, rank) for rank, count in load.items()]
                heapq.heapify(heap)
            else:
                for rank in self._changed & load.keys():
                    heapq.heappush(heap, (load[rank], rank))
            self._changed.clear()
        while load.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][1]


class RequestRouter:
    """Records which engine has which requests. Not thread-safe.

    Args:
        ranks: the engines, all live.
        choose_engine: picks the engine for a group, given the load of the live engines.
    """

    def __init__(self, ranks: Iterable[int], choose_engine: Callable[[RequestGroup, EngineLoad], int]) -> None:
        self.choose_engine, self.load = choose_engine, EngineLoad()
        self._open: dict[int, dict[str, RequestGroup]] = {rank: {} for rank in ranks}
        """The ids of each engine's requests that have no completion yet, and their groups."""
        self._unassigned: list[RequestGroup] = []
        self._copies: dict[str, set[int]] = {}
        """The engines that have each reissued request, by request id."""
        for rank in self._open:
            self.load.set(rank, 0)

    def open_requests(self, rank: int) -> Mapping[str, RequestGroup]:
        """The ids of an engine's requests that have no completion yet, and their groups."""
        return self._open[rank]

    def busy_engines(self) -> list[int]:
        """The engines that have requests."""
        return [rank for rank, requests in self._open.items() if requests]

    def add(self, groups: Sequence[RequestGroup]) -> None:
        """Accepts requests; the next `assign` gives them to engines."""
        self._unassigned += groups

    def assign(self) -> dict[int, list[RequestGroup]]:
        """Assigns requests to live engines, whole groups at a time. Returns the new requests of each engine."""
        if not self.load or not self._unassigned:
            return {}
        assigned: dict[int, list[RequestGroup]] = {}
        for group in self._unassigned:
            rank = self.choose_engine(group, self.load)
            assigned.setdefault(rank, []).append(group)
            requests = self._open[rank]
            requests.update(dict.fromkeys(group.ids, group))
            self.load.set(rank, len(requests))
            for id in group.ids if self._copies else ():
                if id in self._copies:
                    self._copies[id].add(rank)
        self._unassigned = []
        return assigned

    def complete(self, rank: int, completions: Sequence[Completion]) -> tuple[list[Completion], dict[int, list[str]]]:
        """Closes the requests that an engine has completed. If several engines have a request, its first completion is
        used.

        Returns:
            The completions to use, and by engine the requests to abort because another engine has completed them.
        """
        requests = self._open[rank]
        fresh = [each for each in completions if requests.pop(each.request, None) is not None]
        self.load.set(rank, len(requests))
        if not self._copies:  # as usual
            return fresh, {}
        duplicates: dict[int, list[str]] = {}
        for each in fresh:
            for other in self._copies.pop(each.request, set()) - {rank}:
                if self._open[other].pop(each.request, None) is not None:
                    duplicates.setdefault(other, []).append(each.request)
        for other in duplicates:
            if other in self.load.live:
                self.load.set(other, len(self._open[other]))
        return fresh, duplicates

    def blocking_engines(self, step: int) -> set[int]:
        """Engines that hold the only copy of a request of a step up to `step`."""
        return {
            rank
            for rank, requests in self._open.items()
            if any(group.settings.priority <= step and id not in self._copies for id, group in requests.items())
        }

    def reissue(self, rank: int, step: int) -> int:
        """Makes the next `assign` give the open requests of an engine, of steps up to `step`, to other engines as well.
        The engine is held back from now on. Returns the number of requests."""
        self.load.held_back.add(rank)
        requests = self._open[rank]
        self.load.set(rank, len(requests))
        reissued = [id for id, group in requests.items() if group.settings.priority <= step and id not in self._copies]
        self._unassigned += _parts(requests, reissued)
        self._copies.update((id, {rank}) for id in reissued)
        return len(reissued)

    def release(self, rank: int) -> None:
        """Stops holding an engine back."""
        self.load.held_back.discard(rank)
        if rank in self.load.live:
            self.load.set(rank, len(self._open[rank]))

    def add_engine(self, rank: int) -> None:
        """Makes an engine without requests available."""
        self.load.set(rank, 0)

    def remove_engine(self, rank: int) -> int:
        """Takes all requests from a lost engine. Returns how many of them no other engine has."""
        self.load.remove(rank)
        requests, self._open[rank] = self._open[rank], {}
        unfinished = [id for id in requests if not self._copies.pop(id, set()) - {rank}]
        self._unassigned += _parts(requests, unfinished)
        return len(unfinished)


def _parts(groups: Mapping[str, RequestGroup], ids: Sequence[str]) -> list[RequestGroup]:
    """The requests with these ids, of the group of each."""
    parts = {id(group): group for group in map(groups.__getitem__, ids)}
    kept = set(ids)
    return [group.only(kept) for group in parts.values()]
