"""A scorer process: runs verifiers and users' functions, isolated from the rest of the run.

Calls run in the process's main thread, so that functions may use signals (math-verify's limits do). Output of
users' functions goes to the worker's log. The module does not import torch, so that a scorer process is small and
quick to replace.
"""

import logging
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from lockstep.cluster.user_code import UserCodeError, Watchdog
from lockstep.config import reward as config
from lockstep.rewards.reward_terms import RewardTerm, build_term, term_names
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scoring_messages import (
    DataColumns,
    PreparedTerms,
    ScoringBatch,
    TermFailure,
    TermInfo,
    TermScores,
)
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)

NICENESS = 5
"""Gives the trainer and engines priority on shared cores."""


class ScorerService:
    """Implements `lockstep.rewards.scoring_messages.ScorerAPI`."""

    def __init__(
        self,
        terms: list[dict[str, Any]],
        base: str,
        memory_mb: int | None,
        timeout_s: float,
        share: tuple[int, int] = (0, 1),
        data: Sequence[dict[str, Any]] = (),
        images: str | None = None,
    ) -> None:
        """
        Args:
            base: the folder that paths in the config are relative to.
            share: the index of this scorer and the number of scorers, which share a term's concurrent requests.
            data: the fields of `DataColumns` of each dataset whose prompts are scored.
            images: the folder of the run's `ImageStore`, if its prompts have images.
        """
        adapter: TypeAdapter[tuple[config.RewardTerm, ...]] = TypeAdapter(tuple[config.RewardTerm, ...])
        self._configs = adapter.validate_python(terms)
        self._base, self._memory_mb, self._timeout_s = Path(base), memory_mb, timeout_s
        self._rank, self._scorers = share
        self._data = [DataColumns(**each) for each in data]
        self._images = None if images is None else Path(images)
        self._terms: list[RewardTerm] = []
        self._prepared: PreparedTerms | None = None
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(NICENESS)

    def prepare(self) -> PreparedTerms:
        """Loads the terms, including users' modules, and applies the memory limit. Further calls, such as those of the
        run's next controller, return the same result."""
        if self._prepared is not None:
            return self._prepared
        self._terms = []
        for term, name in zip(self._configs, term_names(self._configs), strict=True):
            current_beacon().stage(f"loading {name}")
            try:
                requests = self._concurrent_requests(term)
                self._terms.append(build_term(term, name, self._base, requests, self._data, self._images))
            except UserCodeError as error:
                problem = f"{error.problem}; {error.remedy}" if error.remedy else error.problem
                return PreparedTerms(function=error.path, failure=TermFailure(problem, traceback=error.traceback))
        too_small = self._limit_memory()
        if too_small is not None:
            return PreparedTerms(function="memory_mb", failure=TermFailure(too_small))
        current_beacon().stage("ready")
        infos = [
            TermInfo(each.name, each.function, each.signature, each.per_sample, each.limit_s) for each in self._terms
        ]
        self._prepared = PreparedTerms(infos)
        return self._prepared

    def renew(self) -> None:
        """Nothing to reset: a scorer has no state but its terms, which stay loaded."""

    def score(self, term: int, batch: ScoringBatch) -> TermScores:
        """Scores a batch with one term, and reports progress after each sample."""
        beacon, scored_term = current_beacon(), self._terms[term]
        beacon.stage(f"scoring {scored_term.name}")

        # Before the pool kills the process, the watchdog writes its stack to the log.
        watchdog = Watchdog(0.8 * max(self._timeout_s, scored_term.limit_s))

        def advance(samples: int) -> None:
            beacon.add("samples scored", samples)
            watchdog.pat()

        watchdog.start()
        try:
            return scored_term.score(batch, advance)
        except BadReward as error:
            return TermScores(
                failure=TermFailure(error.problem, error.position, error.returned, error.traceback, error.count)
            )
        finally:
            watchdog.stop()
            beacon.stage("ready")

    def _concurrent_requests(self, term: config.RewardTerm) -> int:
        """How many concurrent requests this scorer may send for a term."""
        allowed = term.concurrency if config.is_remote(term) else 1
        return allowed // self._scorers + (self._rank < allowed % self._scorers)

    def _limit_memory(self) -> str | None:
        """Limits the address space, after loading. Returns an error if the limit is too small: exceeding it would fail
        at an unrelated line later."""
        if self._memory_mb is None:
            return None
        used_mb = psutil.Process().memory_info().vms / 2**20
        if used_mb + 32 > self._memory_mb:
            return (
                f"the scorer process uses {used_mb:.0f} MiB of address space before its first sample; "
                f"set reward.memory_mb to at least {used_mb + 256:.0f} (it is {self._memory_mb})"
            )
        limit = self._memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return None
