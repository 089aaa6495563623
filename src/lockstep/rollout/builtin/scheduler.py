"""Who runs and who waits: requests by priority, then in order of submission; groups that share a prompt."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lockstep.rollout.builtin.rows import Rows, moves
from lockstep.rollout.protocol import Request


@dataclass(slots=True)
class Group:
    """A prompt in the cache."""

    name: str
    prompt: np.ndarray
    version: int
    """Weights version that made its keys and values."""
    running: int = 0

    @property
    def cached(self) -> int:
        """Tokens in the cache: the last one of the prompt is decoded by each row, as its first input."""
        return len(self.prompt) - 1


class Scheduler:
    """The queue of waiting requests and the table of groups, dense like the rows."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.waiting: deque[Request] = deque()
        self.groups: list[Group] = []
        self._wanted: Counter[str] = Counter()

    def add(self, requests: Iterable[Request]) -> None:
        new = list(requests)
        self._wanted.update(request.group for request in new)
        self.waiting = deque(sorted([*self.waiting, *new], key=lambda request: request.priority))

    def admit(self, rows: Rows, version: int) -> list[Group]:
        """Moves waiting requests into free rows; returns the new groups, which are the last ones of `groups`.

        A group whose prompt was prefilled with older weights is not joined: a second one is made.
        """
        if not self._worthwhile(rows):
            return []
        slots = {group.name: slot for slot, group in enumerate(self.groups) if group.version == version}
        first = len(self.groups)
        longest = int(rows.limit[: len(rows)].max(initial=0))
        prompt = max((group.cached for group in self.groups), default=0)
        while self.waiting and rows.free:
            request = self.waiting[0]
            longest, prompt = max(longest, request.max_tokens), max(prompt, len(request.prompt) - 1)
            groups = len(self.groups) + (request.group not in slots)
            if self.budget is not None and (len(rows) + 1) * longest + groups * prompt > self.budget:
                if len(rows) or not self.groups:
                    break
                # Nobody runs: prompts that are kept for later requests would keep the first one waiting for ever.
                self.groups.clear()
                slots.clear()
                first = prompt = 0
                continue
            self._take(self.waiting.popleft(), rows, slots, version)
        return self.groups[first:]

    def _take(self, request: Request, rows: Rows, slots: dict[str, int], version: int) -> None:
        self._wanted[request.group] -= 1
        if request.group not in slots:
            slots[request.group] = len(self.groups)
            self.groups.append(Group(request.group, request.prompt, version))
        slot = slots[request.group]
        self.groups[slot].running += 1
        rows.enter(request, slot)

    def _worthwhile(self, rows: Rows) -> bool:
        """Small refills cost a forward each and decode no faster: several free rows are filled together."""
        return bool(self.waiting) and rows.free >= min(len(self.waiting), max(1, rows.capacity // 16))

    def left(self, slots: Iterable[int], rows: Rows, version: int) -> tuple[list[int], list[int]]:
        """Rows of these groups' slots have left. Drops groups that nobody reads or waits for, renumbers the
        rows' groups, and returns (sources, targets) of the slots to move."""
        for slot in slots:
            self.groups[slot].running -= 1
        gone = [
            slot
            for slot, group in enumerate(self.groups)
            if not group.running and (group.version != version or not self._wanted[group.name])
        ]
        if not gone:
            return [], []
        rows.changed = True
        sources, targets = moves(len(self.groups), gone)
        for source, target in zip(sources, targets, strict=True):
            self.groups[target] = self.groups[source]
            rows.group[: len(rows)][rows.group[: len(rows)] == source] = target
        del self.groups[len(self.groups) - len(gone) :]
        return sources, targets

    def withdraw(self, ids: set[str] | None) -> list[Request]:
        """Takes requests (all when None) out of the queue."""
        taken = [request for request in self.waiting if ids is None or request.id in ids]
        self.waiting = deque(request for request in self.waiting if ids is not None and request.id not in ids)
        for request in taken:
            self._wanted[request.group] -= 1
        self._wanted += Counter()  # drops the zeros
        return taken
