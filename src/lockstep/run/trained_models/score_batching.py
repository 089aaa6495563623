"""Scores texts of many requests together.

While the model computes a batch, requests collect for the next one. The number of texts that wait is bounded.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.base.text import count_noun

log = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60


class QueueFull(Exception):
    """So many texts wait that no more are accepted."""

    def __init__(self, waiting: int, after_s: int) -> None:
        super().__init__(f"no more texts are accepted now: {count_noun(waiting, 'text')} waiting to be scored")
        self.after_s = after_s
        """When to try again."""


@dataclass(slots=True, eq=False)
class _ScoreRequest:
    texts: list[np.ndarray]
    scores: "asyncio.Future[np.ndarray]"


@dataclass(slots=True)
class BatchingCounters:
    """What a batcher has done."""

    batches: int = 0
    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Time in which the model computed."""
    refused: int = 0
    """Requests that found the queue full."""


@dataclass(slots=True)
class ScoreBatcher:
    """Collects requests while the model computes. Lives in one event loop.

    Args:
        score: computes the scores of texts; it is called in a thread, by one at a time.
        max_waiting: the most texts that wait, besides those being computed.
        batch_tokens: a batch gets no further request once it has this many tokens.
    """

    score: Callable[[Sequence[np.ndarray]], np.ndarray]
    max_waiting: int
    batch_tokens: int
    counters: BatchingCounters = field(default_factory=BatchingCounters)
    waiting: int = 0
    """Texts that wait."""
    _requests: deque[_ScoreRequest] = field(default_factory=deque)
    _work: "asyncio.Task[None] | None" = None
    """Computes batches until no request waits."""

    async def scores(self, texts: list[np.ndarray]) -> np.ndarray:
        """Returns the scores of the texts, float `[texts]`, when a batch with them is computed. A request that is
        cancelled leaves the queue.

        Raises:
            QueueFull: too many texts are waiting.
            Exception: the model failed.
        """
        if self.waiting + len(texts) > self.max_waiting:
            self.counters.refused += 1
            raise QueueFull(self.waiting, self._retry_after_s())
        request = _ScoreRequest(texts, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self.waiting += len(texts)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._compute())
        try:
            return await request.scores
        finally:
            if request in self._requests:  # cancelled
                self._requests.remove(request)
                self.waiting -= len(texts)

    async def _compute(self) -> None:
        while batch := self._take():
            await self._score_together(batch)

    async def _score_together(self, batch: list[_ScoreRequest]) -> None:
        """If that fails, each request is computed alone: what is wrong with one is not the fault of the others."""
        texts = [text for request in batch for text in request.texts]
        began = time.monotonic()
        try:
            scores = await asyncio.to_thread(self.score, texts)
        except Exception as error:
            log.exception(
                "%s of %s could not be scored", count_noun(len(texts), "text"), count_noun(len(batch), "request")
            )
            if len(batch) == 1:
                if not batch[0].scores.done():
                    batch[0].scores.set_exception(error)
                return
            for request in batch:
                if not request.scores.done():
                    await self._score_together([request])
            return
        self._count(texts, time.monotonic() - began)
        start = 0
        for request in batch:
            if not request.scores.done():  # its client may be gone
                request.scores.set_result(scores[start : start + len(request.texts)])
            start += len(request.texts)

    def _take(self) -> list[_ScoreRequest]:
        """The requests of the next batch; those whose clients are gone are left out."""
        batch: list[_ScoreRequest] = []
        tokens = 0
        while self._requests and (not batch or tokens < self.batch_tokens):
            request = self._requests.popleft()
            self.waiting -= len(request.texts)
            if not request.scores.done():
                batch.append(request)
                tokens += sum(text.size for text in request.texts)
        return batch

    def _count(self, texts: Sequence[np.ndarray], seconds: float) -> None:
        self.counters.batches += 1
        self.counters.texts += len(texts)
        self.counters.tokens += sum(text.size for text in texts)
        self.counters.seconds += seconds

    def _retry_after_s(self) -> int:
        """When half of the texts that wait should be done, in whole seconds."""
        if not self.counters.texts:
            return 1
        expected = self.waiting / 2 * self.counters.seconds / self.counters.texts
        return int(min(max(1.0, np.ceil(expected)), MAX_RETRY_AFTER_S))
