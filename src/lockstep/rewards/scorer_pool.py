"""The scorer pool: batches of completions go to a few scorer processes, and scores come back in order.

Whatever a user's function does, the pool's bounds hold.
"""

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lockstep.base import waits
from lockstep.cluster.protocol import Cluster
from lockstep.cluster.user_code import LOAD_STALL_S
from lockstep.config.reward import RewardConfig
from lockstep.data.samples import Completion, Group, Rollouts
from lockstep.rewards.reward_terms import weighted_rewards
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scorer import Scorer, ScorerLost
from lockstep.rewards.scoring_messages import RewardError, RewardSample, ScoringBatch, TermFailure, TermInfo, TermScores
from lockstep.watch.beacon.writer import current_beacon


def unscored_groups(rollouts: Rollouts) -> list[Group]:
    return [group for group in rollouts.groups if group.rewards is None]


def cut_batches(groups: Sequence[Group], step: int, size: int) -> list[ScoringBatch]:
    """Batches of at most `size` samples in the order of the groups. A group that fits into one batch is never cut,
    because functions may compare the completions of a prompt."""
    found: list[ScoringBatch] = []
    for group in groups:
        if not found or len(found[-1]) + len(group.completions) > size:
            found.append(ScoringBatch(step, [], []))
        for index, completion in enumerate(group.completions):
            if len(found[-1]) == size:
                found.append(ScoringBatch(step, [], []))
            last = found[-1]
            if index == 0 or not last.prompts:
                last.prompts.append(group.prompt)
            last.samples.append(_reward_sample(completion, len(last.prompts) - 1, index))
    return [batch for batch in found if len(batch)]


def _reward_sample(completion: Completion, prompt: int, index: int) -> RewardSample:
    return RewardSample(prompt, index, completion.text, completion.tokens, completion.generated, completion.episode)


def term_columns(name: str, scores: Sequence[TermScores], sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """The values of one term over all its batches, float64 `[samples]`, NaN where it does not apply; its extra
    numbers under `name/extra`, NaN where there are none."""
    extras = list(dict.fromkeys(extra for each in scores for extra in each.extras))
    found = {name: np.concatenate([_float_array(each.values) for each in scores])}
    for extra in extras:
        parts = (each.extras.get(extra) or [None] * size for each, size in zip(scores, sizes, strict=True))
        found[f"{name}/{extra}"] = np.concatenate([_float_array(part) for part in parts])
    return found


def with_rewards(rollouts: Rollouts, rewards: np.ndarray, breakdown: Mapping[str, np.ndarray]) -> Rollouts:
    """Rollouts in which unscored groups get their slice of the rewards (float32 `[samples]`). Scored groups stay the
    same objects."""
    groups, start = [], 0
    for group in rollouts.groups:
        if group.rewards is None:
            here = slice(start, start + len(group.completions))
            parts = {name: values[here].astype(np.float32) for name, values in breakdown.items()}
            groups.append(replace(group, rewards=rewards[here].copy(), breakdown=parts))
            start = here.stop
        else:
            groups.append(group)
    return replace(rollouts, groups=groups)


def _float_array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if each is None else each for each in values], np.float64)


log = logging.getLogger(__name__)

LOSSES_PER_SCORER = 4
"""Processes per scorer that one `score` may lose before it fails."""


@dataclass(frozen=True, slots=True)
class _WorkUnit:
    number: int
    term: int
    batch: ScoringBatch


@dataclass(slots=True)
class _ScoringJob:
    """The shared state of the threads of one `score`."""

    waiting: deque[_WorkUnit]
    units: int
    total: int
    """Samples times terms."""
    losses_left: int
    scores: dict[int, TermScores] = field(default_factory=dict)
    error: BaseException | None = None
    scored: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> _WorkUnit | None:
        with self.lock:
            return self.waiting.popleft() if self.waiting and self.error is None else None

    def finish(self, unit: _WorkUnit, scores: TermScores) -> None:
        with self.lock:
            self.scores[unit.number] = scores
            self.scored += len(unit.batch)
            current_beacon().progress("samples scored", self.scored, self.total)
            if len(self.scores) == self.units:
                self.over.set()

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error
            self.over.set()

    def lose(self) -> bool:
        """Whether one more process may be lost."""
        with self.lock:
            self.losses_left -= 1
            return self.losses_left >= 0


class ScorerPool:
    """Scores rollouts with the terms of the config. `base` is the folder that paths of functions are relative to,
    the current one when None."""

    def __init__(self, cluster: Cluster, cfg: RewardConfig, base: Path | None = None) -> None:
        self.cluster, self.cfg, self.base = cluster, cfg, (base or Path()).resolve()
        self.terms: list[TermInfo] = []
        self._scorers = [Scorer(cluster, cfg, self.base, rank) for rank in range(cfg.workers)]

    def start(self) -> list[TermInfo]:
        """Starts the processes and loads every function, so that unusable functions fail before the first rollout.
        Raises RewardError. Idempotent; `score` calls it if needed."""
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
        """Rollouts with rewards and breakdown in every group; scored groups keep theirs. Does not change its argument.
        Raises RewardError, after ending all calls."""
        cut = cut_batches(unscored_groups(rollouts), rollouts.step, self.cfg.batch_size)
        if not cut:
            return with_rewards(rollouts, np.zeros(0, np.float32), {})
        self.start()
        scores = self._run([_WorkUnit(i, i // len(cut), cut[i % len(cut)]) for i in range(len(self.terms) * len(cut))])
        sizes = [len(batch) for batch in cut]
        breakdown: dict[str, np.ndarray] = {}
        values: list[np.ndarray] = []
        for number, term in enumerate(self.terms):
            own = term_columns(term.name, scores[number * len(cut) : (number + 1) * len(cut)], sizes)
            breakdown |= own
            values.append(own[term.name])
        try:
            rewards = weighted_rewards(values, [term.weight for term in self.cfg.terms])
        except BadReward as error:
            raise self._nowhere(error, cut) from error
        return with_rewards(rollouts, rewards, breakdown)

    def close(self) -> None:
        """Stops the processes. Idempotent; a later `score` starts new ones."""
        for scorer in self._scorers:
            scorer.stop(grace_s=1.0)

    def _run(self, units: list[_WorkUnit]) -> list[TermScores]:
        """Scores all units, one thread per process. The first error (or Ctrl-C) ends the other calls."""
        samples = sum(len(unit.batch) for unit in units)
        job = _ScoringJob(deque(units), len(units), samples, LOSSES_PER_SCORER * len(self._scorers))
        current_beacon().progress("samples scored", 0, samples)
        threads = [
            threading.Thread(target=self._serve, args=(scorer, job), name=scorer.name, daemon=True)
            for scorer in self._scorers[: len(units)]
        ]
        # Each thread's waits end if nothing is scored for timeout_s; this is their largest possible sum.
        bound = (3 * samples + len(units)) * max(map(self._limit_s, self.terms)) + (1 + job.losses_left) * LOAD_STALL_S
        why = f"{samples} rewards of {len(self.terms)} terms"
        for thread in threads:
            thread.start()
        try:
            waits.event(
                job.over,
                waits_for="the scorers",
                why=why,
                timeout_s=bound,
                progress=lambda: job.scored,
                notice_after_s=None,
            )
        finally:
            if len(job.scores) < job.units:
                job.fail(RewardError("scoring", "was interrupted"))
                for scorer in self._scorers:
                    scorer.stop()
            for thread in threads:
                waits.join(thread, waits_for=thread.name, why="its last call was ended", timeout_s=60.0)
        if job.error is not None:
            raise job.error
        return [job.scores[unit.number] for unit in units]

    def _serve(self, scorer: Scorer, job: _ScoringJob) -> None:
        """Runs in each thread: scores unit after unit on its own process."""
        try:
            while (unit := job.take()) is not None:
                job.finish(unit, self._unit(scorer, unit, job))
        except BaseException as error:  # noqa: BLE001 - `score` raises it
            job.fail(error)

    def _unit(self, scorer: Scorer, unit: _WorkUnit, job: _ScoringJob) -> TermScores:
        """The scores of a unit. Raises RewardError, which names the sample at fault."""
        try:
            scores = self._call(scorer, unit.term, unit.batch)
            failure = scores.failure
            if failure is None:
                return scores
            if failure.position is not None or len(unit.batch) == 1 or failure.traceback is None:
                raise self._error(unit.term, unit.batch, failure)
            first = failure
        except ScorerLost as lost:
            first = TermFailure(lost.problem, traceback=lost.log_tail)
            if len(unit.batch) == 1:
                raise self._error(unit.term, unit.batch, first) from lost
            self._may_continue(unit.term, first, job)
        return self._one_by_one(scorer, unit, first, job)

    def _one_by_one(self, scorer: Scorer, unit: _WorkUnit, first: TermFailure, job: _ScoringJob) -> TermScores:
        """Finds the sample that fails on its own; if there is none, the batch is retried once."""
        for position in range(len(unit.batch)):
            if job.error is not None:
                raise job.error
            alone = unit.batch.alone(position)
            try:
                failure = self._call(scorer, unit.term, alone).failure
            except ScorerLost as lost:
                failure = TermFailure(lost.problem, traceback=lost.log_tail)
            if failure is not None:
                raise self._error(unit.term, alone, failure)
        term = self.terms[unit.term]
        try:
            again = self._call(scorer, unit.term, unit.batch)
        except ScorerLost as lost:
            again = TermScores(failure=TermFailure(lost.problem, traceback=lost.log_tail))
        if again.failure is None:
            log.warning("reward %s: %s; the retry succeeded", term.function, first.problem)
            return again
        problem = (
            f"{again.failure.problem}, twice, with {len(unit.batch)} samples in one call, but each of them succeeds on "
            "its own: lower reward.batch_size, or raise reward.timeout_s or reward.memory_mb"
        )
        raise self._error(unit.term, unit.batch, TermFailure(problem, None, None, again.failure.traceback))

    def _call(self, scorer: Scorer, term: int, batch: ScoringBatch) -> TermScores:
        info = self.terms[term]
        return scorer.score(term, batch, f"{info.name} of {batch.label()}", self._limit_s(info))

    def _limit_s(self, info: TermInfo) -> float:
        return max(self.cfg.timeout_s, info.limit_s)

    def _may_continue(self, term: int, failure: TermFailure, job: _ScoringJob) -> None:
        if not job.lose():
            problem = (
                f"{failure.problem}; too many processes were lost (limit: {LOSSES_PER_SCORER} per scorer and step)"
            )
            raise RewardError(self.terms[term].function, problem, traceback=failure.traceback)

    def _error(self, term: int, batch: ScoringBatch, failure: TermFailure) -> RewardError:
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

    def _nowhere(self, error: BadReward, cut: list[ScoringBatch]) -> RewardError:
        """The error of a sum that failed, with the uid of the sample at that position."""
        position = error.position or 0
        for batch in cut:
            if position < len(batch):
                sample = batch.samples[position]
                row = batch.prompts[sample.prompt].row
                names = " + ".join(term.name for term in self.terms)
                return RewardError(names, error.problem, batch.uid(position), row, sample.text)
            position -= len(batch)
        raise AssertionError("a position beyond the batches")
