"""Requests on their way through vLLM: those that wait here, and what those within it have so far."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from lockstep.data.samples import Completion, FinishReason
from lockstep.rollout.protocol import Request


@dataclass(slots=True)
class Row:
    """A request and its tokens."""

    request: Request
    number: int
    """The order in which requests came."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def append(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)

    def completion(self, finish: FinishReason, text: str) -> Completion:
        return Completion(
            request=self.request.id,
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish=finish,
            text=text,
        )


class Waiting:
    """Requests by priority, then in the order in which they came. They wait here and not within vLLM, so that what
    prefix cache they may use is settled when they enter: of the weights that are served then."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Row]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.put_back(Row(request, self._count))
            self._count += 1

    def put_back(self, row: Row) -> None:
        """One that has no tokens yet, to the place that it had."""
        heapq.heappush(self._heap, (row.request.priority, row.number, row))

    def pop(self) -> Row:
        return heapq.heappop(self._heap)[2]

    def withdraw(self, ids: set[str] | None) -> list[Request]:
        """Takes requests (all when None) out."""
        taken = [row.request for _, _, row in self._heap if ids is None or row.request.id in ids]
        self._heap = [entry for entry in self._heap if ids is not None and entry[2].request.id not in ids]
        heapq.heapify(self._heap)
        return taken
