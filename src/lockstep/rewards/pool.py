"""The scorer pool: many completions over a few processes, in order, and never at the mercy of a user's function.

The unit of work is one term over one batch, so that an error knows its function. A unit whose process dies or is
stuck is tried again sample by sample in a new process: the sample that does it alone is bad data, and named. Where
none does, the whole batch gets one more try.
"""

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.cluster.protocol import Cluster
from lockstep.cluster.user_process import LOADING_S
from lockstep.config.reward import Reward
from lockstep.data.samples import Rollouts
from lockstep.rewards.api import Batch, Failure, RewardError, Scores, TermInfo
from lockstep.rewards.batches import batches, columns, unscored, with_rewards
from lockstep.rewards.scorer import Lost, Scorer
from lockstep.rewards.terms import weighted_sum
from lockstep.rewards.values import BadReward
from lockstep.watch import beacon, waits

log = logging.getLogger(__name__)

LOSSES_PER_SCORER = 4
"""Processes that one `score` may lose per scorer before it gives up."""


@dataclass(frozen=True, slots=True)
class _Unit:
    number: int
    term: int
    batch: Batch


@dataclass(slots=True)
class _Job:
    """What the threads of one `score` share."""

    waiting: deque[_Unit]
    units: int
    total: int
    """Samples times terms."""
    losses_left: int
    scores: dict[int, Scores] = field(default_factory=dict)
    error: BaseException | None = None
    scored: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> _Unit | None:
        with self.lock:
            return self.waiting.popleft() if self.waiting and self.error is None else None

    def finish(self, unit: _Unit, scores: Scores) -> None:
        with self.lock:
            self.scores[unit.number] = scores
            self.scored += len(unit.batch)
            beacon.current().progress("samples scored", self.scored, self.total)
            if len(self.scores) == self.units:
                self.over.set()

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error
            self.over.set()

    def lose(self) -> bool:
        """Whether another process may be lost."""
        with self.lock:
            self.losses_left -= 1
            return self.losses_left >= 0


class ScorerPool:
    """Scores rollouts with the terms of the config. `base` is the folder that paths of functions are relative to,
    the current one when None."""

    def __init__(self, cluster: Cluster, cfg: Reward, base: Path | None = None) -> None:
        self.cluster, self.cfg, self.base = cluster, cfg, (base or Path()).resolve()
        self.terms: list[TermInfo] = []
        self._scorers = [Scorer(cluster, cfg, self.base, rank) for rank in range(cfg.workers)]

    def start(self) -> list[TermInfo]:
        """Starts the processes and loads every function, so that what cannot be used is refused before the first
        rollout. Raises RewardError. Idempotent; `score` does it where it was not done."""
        missing = [scorer for scorer in self._scorers if scorer.missing()]
        if missing:
            for scorer in missing:
                scorer.allow()
            workers = self.cluster.start([scorer.spec() for scorer in missing])
            try:
                for scorer, worker in zip(missing, workers, strict=True):
                    scorer.use(worker)
                pendings = [scorer.begin_loading() for scorer in missing]
                for scorer, pending in zip(missing, pendings, strict=True):
                    self.terms = scorer.loaded(pending).terms
            except BaseException:
                self.close()
                raise
        return self.terms

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Rollouts with rewards and breakdown in every group; groups that had rewards keep them. The argument is
        not changed. Raises RewardError, and then leaves no call under way."""
        cut = batches(unscored(rollouts), rollouts.step, self.cfg.batch_size)
        if not cut:
            return with_rewards(rollouts, np.zeros(0, np.float32), {})
        self.start()
        scores = self._run([_Unit(i, i // len(cut), cut[i % len(cut)]) for i in range(len(self.terms) * len(cut))])
        sizes = [len(batch) for batch in cut]
        breakdown: dict[str, np.ndarray] = {}
        values: list[np.ndarray] = []
        for number, term in enumerate(self.terms):
            own = columns(term.name, scores[number * len(cut) : (number + 1) * len(cut)], sizes)
            breakdown |= own
            values.append(own[term.name])
        try:
            rewards = weighted_sum(values, [term.weight for term in self.cfg.terms])
        except BadReward as error:
            raise self._nowhere(error, cut) from error
        return with_rewards(rollouts, rewards, breakdown)

    def close(self) -> None:
        """Stops the processes. Idempotent; a later `score` starts new ones."""
        for scorer in self._scorers:
            scorer.stop(grace_s=1.0)

    def _run(self, units: list[_Unit]) -> list[Scores]:
        """All units, one thread per process. On the first error (or Ctrl-C) what still runs is ended."""
        samples = sum(len(unit.batch) for unit in units)
        job = _Job(deque(units), len(units), samples, LOSSES_PER_SCORER * len(self._scorers))
        beacon.current().progress("samples scored", 0, samples)
        threads = [
            threading.Thread(target=self._serve, args=(scorer, job), name=scorer.name, daemon=True)
            for scorer in self._scorers[: len(units)]
        ]
        # Each thread's waits end when nothing is scored for timeout_s; this is the most that they add up to.
        bound = (3 * samples + len(units)) * max(map(self._limit_s, self.terms)) + (1 + job.losses_left) * LOADING_S
        why = f"{samples} rewards of {len(self.terms)} terms"
        for thread in threads:
            thread.start()
        try:
            waits.event(
                job.over, whom="the scorers", why=why, timeout_s=bound, progress=lambda: job.scored, notice_after_s=None
            )
        finally:
            if len(job.scores) < job.units:
                job.fail(RewardError("scoring", "was interrupted"))
                for scorer in self._scorers:
                    scorer.stop()
            for thread in threads:
                waits.join(thread, whom=thread.name, why="its last call was ended", timeout_s=60.0)
        if job.error is not None:
            raise job.error
        return [job.scores[unit.number] for unit in units]

    def _serve(self, scorer: Scorer, job: _Job) -> None:
        """A thread's life: unit after unit on its own process."""
        try:
            while (unit := job.take()) is not None:
                job.finish(unit, self._unit(scorer, unit, job))
        except BaseException as error:  # noqa: BLE001 - handed to the caller of `score`, who raises it
            job.fail(error)

    def _unit(self, scorer: Scorer, unit: _Unit, job: _Job) -> Scores:
        """The scores of a unit, or a RewardError that names the sample to blame."""
        try:
            scores = self._call(scorer, unit.term, unit.batch)
            failure = scores.failure
            if failure is None:
                return scores
            if failure.position is not None or len(unit.batch) == 1 or failure.traceback is None:
                raise self._error(unit.term, unit.batch, failure)
            first = failure
        except Lost as lost:
            first = Failure(lost.problem, traceback=lost.log_tail)
            if len(unit.batch) == 1:
                raise self._error(unit.term, unit.batch, first) from lost
            self._may_continue(unit.term, first, job)
        return self._one_by_one(scorer, unit, first, job)

    def _one_by_one(self, scorer: Scorer, unit: _Unit, first: Failure, job: _Job) -> Scores:
        """Looks for the sample that fails alone; where there is none, the batch gets its second try."""
        for position in range(len(unit.batch)):
            if job.error is not None:
                raise job.error
            alone = unit.batch.alone(position)
            try:
                failure = self._call(scorer, unit.term, alone).failure
            except Lost as lost:
                failure = Failure(lost.problem, traceback=lost.log_tail)
            if failure is not None:
                raise self._error(unit.term, alone, failure)
        term = self.terms[unit.term]
        try:
            again = self._call(scorer, unit.term, unit.batch)
        except Lost as lost:
            again = Scores(failure=Failure(lost.problem, traceback=lost.log_tail))
        if again.failure is None:
            log.warning("reward %s: %s; the second try went well", term.function, first.problem)
            return again
        problem = (
            f"{again.failure.problem}, twice, with {len(unit.batch)} samples in one call; each of them alone is fine: "
            "lower reward.batch_size, or raise reward.timeout_s or reward.memory_mb"
        )
        raise self._error(unit.term, unit.batch, Failure(problem, None, None, again.failure.traceback))

    def _call(self, scorer: Scorer, term: int, batch: Batch) -> Scores:
        info = self.terms[term]
        return scorer.score(term, batch, f"{info.name} of {batch.label()}", self._limit_s(info))

    def _limit_s(self, info: TermInfo) -> float:
        return max(self.cfg.timeout_s, info.limit_s)

    def _may_continue(self, term: int, failure: Failure, job: _Job) -> None:
        if not job.lose():
            problem = f"{failure.problem}; that was one process too many ({LOSSES_PER_SCORER} per scorer and step)"
            raise RewardError(self.terms[term].function, problem, traceback=failure.traceback)

    def _error(self, term: int, batch: Batch, failure: Failure) -> RewardError:
        function = self.terms[term].function
        position = 0 if len(batch) == 1 else failure.position
        if position is None or failure.count > 1:
            concerned = batch if position is None else batch.part(position, failure.count)
            problem = f"{failure.problem} ({concerned.label()})"
            return RewardError(function, problem, returned=failure.returned, traceback=failure.traceback)
        sample = batch.samples[position]
        row = batch.prompts[sample.prompt].row
        return RewardError(
            function, failure.problem, batch.uid(position), row, sample.text, failure.returned, failure.traceback
        )

    def _nowhere(self, error: BadReward, cut: list[Batch]) -> RewardError:
        """A sum that failed: the sample's uid from its position among all."""
        position = error.position or 0
        for batch in cut:
            if position < len(batch):
                sample = batch.samples[position]
                row = batch.prompts[sample.prompt].row
                names = " + ".join(term.name for term in self.terms)
                return RewardError(names, error.problem, batch.uid(position), row, sample.text)
            position -= len(batch)
        raise AssertionError("a position beyond the batches")
