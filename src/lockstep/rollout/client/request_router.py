"""Routes requests to engines by load: whole groups are dispatched together, and every completion counts once."""

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lockstep.cluster.protocol import PendingResult, Worker
from lockstep.data.samples import Completion
from lockstep.rollout.engine_protocol import CompletionBatch, EngineAPI, EngineProgress, Request

_HELD_BACK_LOAD = 1 << 40
"""More than anybody owes."""


class EngineLoad:
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
        self._owed[rank] = count = count + _HELD_BACK_LOAD * (rank in self.held)
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


HOLD_PER_ENGINE_S = 1e-3
"""Times the number of engines: how long an engine may hold completions back while it has others as urgent to make.
Whoever waits for a thousand engines hears of several completions at a time."""
MAX_HOLD_S = 1.0
"""Finished completions are made durable once a second."""


@dataclass(slots=True)
class EngineSlot:
    """An engine, whichever process it is now, and what it owes us."""

    rank: int
    worker: Worker | None
    """None while it is replaced."""
    acknowledged: int = 0
    asked: PendingResult[CompletionBatch] | None = None
    """Our question for completions, not answered or not read yet."""
    counters: PendingResult[EngineProgress] | None = None
    """Our question for its counters; nobody waits for the answer."""
    left: PendingResult[None] | None = None
    """What it was told last to leave."""
    open: dict[str, Request] = field(default_factory=dict)

    @property
    def deaf(self) -> bool:
        """Whether it has not heard yet that it shall leave something."""
        return self.left is not None and not self.left.done()


Dispatch = tuple[EngineSlot, Worker, PendingResult[None]]
"""Requests that an engine was given, and its answer to that."""


class RequestRouter:
    """Requests and who has them. Not thread-safe but for `answers`: the fleet's lock is held.

    Args:
        choose: which engine gets a group, by what those that live owe.
        news: set when an engine has told something.
    """

    def __init__(
        self,
        places: Sequence[EngineSlot],
        choose: Callable[[Sequence[Request], EngineLoad], int],
        news: threading.Event,
    ) -> None:
        self.places, self._choose, self._news = places, choose, news
        self.owed = EngineLoad()
        self.homeless: list[Request] = []
        """Requests that no engine has."""
        self.ready: list[Completion] = []
        self.answers: deque[tuple[EngineSlot, PendingResult[CompletionBatch]]] = deque()
        """Questions for completions that were answered, and by whom: of a thousand engines few have news at a time."""
        self._twice: dict[str, set[int]] = {}
        """Of requests that were issued again: the engines that have them."""
        self._hold_s = min(MAX_HOLD_S, HOLD_PER_ENGINE_S * len(places))
        for place in places:
            self.owed.set(place.rank, 0)

    def share_out(self) -> list[Dispatch]:
        """Hands what is homeless to those that live."""
        if not self.owed or not self.homeless:
            return []
        groups: dict[str, list[Request]] = {}
        for request in self.homeless:
            groups.setdefault(request.group, []).append(request)
        batches: dict[int, list[Request]] = {}
        for group in groups.values():
            place = self.places[self._choose(group, self.owed)]
            batches.setdefault(place.rank, []).extend(group)
            place.open.update((request.id, request) for request in group)
            self.owed.set(place.rank, len(place.open))
        self.homeless = []
        handed = []
        for rank, batch in batches.items():
            place = self.places[rank]
            assert place.worker is not None  # it owes, so it lives
            for request in batch:
                if request.id in self._twice:
                    self._twice[request.id].add(rank)
            handed.append((place, place.worker, place.worker.submit(EngineAPI.submit, batch)))
            self.ask(place)
        return handed

    def ask(self, place: EngineSlot) -> None:
        """Asks once for completions; the answer comes when there are some."""
        if place.worker is None or not place.open or place.asked is not None:
            return
        place.asked = asked = place.worker.submit(EngineAPI.collect, place.acknowledged, self._hold_s)

        def answered() -> None:
            self.answers.append((place, asked))
            self._news.set()

        asked.on_done(answered)

    def take(self, place: EngineSlot, collected: CompletionBatch) -> None:
        """What an engine has told. Of a request that two have, the first completion counts, and the other engine is
        told to leave it."""
        place.acknowledged = collected.sequence
        fresh = [each for each in collected.completions if place.open.pop(each.request, None) is not None]
        self.ready += fresh
        self.owed.set(place.rank, len(place.open))
        needless: dict[int, list[str]] = {}
        for each in fresh:
            for other in self._twice.pop(each.request, set()) - {place.rank}:
                needless.setdefault(other, []).append(each.request)
        for rank, ids in needless.items():
            self._leave(self.places[rank], ids)

    def waited_for(self, step: int) -> set[int]:
        """Engines that alone have a request of a step up to `step`."""
        return {
            place.rank
            for place in self.places
            if any(request.priority <= step and id not in self._twice for id, request in place.open.items())
        }

    def issue_again(self, rank: int, step: int) -> tuple[list[Dispatch], int]:
        """Gives what an engine owes of steps up to `step` to others as well; how many requests these are. From now on
        it gets nothing as long as others can have it."""
        place = self.places[rank]
        self.owed.held.add(rank)
        self.owed.set(rank, len(place.open))
        again = [
            request for request in place.open.values() if request.priority <= step and request.id not in self._twice
        ]
        self._twice.update((request.id, {rank}) for request in again)
        self.homeless += again
        return self.share_out(), len(again)

    def forgive(self, rank: int) -> None:
        """It gets requests again like all others."""
        self.owed.held.discard(rank)
        if self.places[rank].worker is not None:
            self.owed.set(rank, len(self.places[rank].open))

    def empty(self, place: EngineSlot) -> int:
        """Takes everything from a place whose engine lives no more; how many requests it had that no other has."""
        self.owed.drop(place.rank)
        left = [request for request in place.open.values() if not self._elsewhere(request.id, place.rank)]
        place.open, place.acknowledged, place.counters, place.left = {}, 0, None, None
        self.homeless += left
        return len(left)

    def _elsewhere(self, id: str, rank: int) -> bool:
        """Whether another engine has a request, which then is the only one."""
        others = self._twice.pop(id, set()) - {rank}
        return bool(others)

    def _leave(self, place: EngineSlot, ids: Sequence[str]) -> None:
        """Another was first. What the engine had of them comes with its next answer, and is nobody's."""
        left = [id for id in ids if place.open.pop(id, None) is not None]
        if place.worker is not None and left:
            self.owed.set(place.rank, len(place.open))
            place.left = place.worker.submit(EngineAPI.abort, left)
