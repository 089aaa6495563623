"""The scorer pool: sends batches of completions to a few scorer processes and collects their scores in order.

The pool's time limits hold whatever a user's function does.
"""

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lockstep.base import waits
from lockstep.base.text import count_noun
from lockstep.cluster.protocol import Cluster
from lockstep.cluster.user_code import LOAD_STALL_S, NoteRecovery, note_nothing, recorded_loss
from lockstep.config.reward import RewardConfig
from lockstep.data.samples import Completion, Group, Rollouts
from lockstep.rewards.model_reward import PendingScores, ServedModelTerm
from lockstep.rewards.reward_terms import term_names, weighted_rewards
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scorer import Scorer, ScorerLost
from lockstep.rewards.scoring_messages import (
    DataColumns,
    RewardError,
    RewardSample,
    ScoringBatch,
    TermFailure,
    TermInfo,
    TermScores,
)
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)

MAX_LOSSES_PER_SCORER = 4
"""Number of processes per scorer that one call of `score` may lose before it fails."""


def unscored_groups(rollouts: Rollouts) -> list[Group]:
    return [group for group in rollouts.groups if group.rewards is None]


def cut_batches(groups: Sequence[Group], step: int, size: int) -> list[ScoringBatch]:
    """Divides groups into batches of at most `size` samples, in order. A group that fits into a batch is never divided,
    because functions may compare the completions of a prompt."""
    batches: list[ScoringBatch] = []
    for group in groups:
        if not batches or len(batches[-1]) + len(group.completions) > size:
            batches.append(ScoringBatch(step, [], []))
        for index, completion in enumerate(group.completions):
            if len(batches[-1]) == size:
                batches.append(ScoringBatch(step, [], []))
            last = batches[-1]
            if index == 0 or not last.prompts:
                last.prompts.append(group.prompt)
            last.samples.append(_reward_sample(completion, len(last.prompts) - 1, index))
    return [batch for batch in batches if len(batch)]  # a group without completions may leave one empty


def _reward_sample(completion: Completion, prompt: int, index: int) -> RewardSample:
    return RewardSample(prompt, index, completion.text, completion.tokens, completion.generated, completion.episode)


def term_columns(name: str, scores: Sequence[TermScores], sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """Concatenates the scores of one term over all batches to float64 `[samples]`: its values under `name`, NaN where
    the term does not apply, and its extra numbers under `name/extra`, NaN where there are none."""
    extras = list(dict.fromkeys(extra for each in scores for extra in each.extras))
    columns = {name: np.concatenate([_float_array(each.values) for each in scores])}
    for extra in extras:
        parts = (each.extras.get(extra) or [None] * size for each, size in zip(scores, sizes, strict=True))
        columns[f"{name}/{extra}"] = np.concatenate([_float_array(part) for part in parts])
    return columns


def with_rewards(rollouts: Rollouts, rewards: np.ndarray, breakdown: Mapping[str, np.ndarray]) -> Rollouts:
    """Rollouts in which unscored groups get their slice of the rewards (float32 `[samples]`). Scored groups stay the
    same objects."""
    groups, start = [], 0
    for group in rollouts.groups:
        if group.rewards is None:
            samples = slice(start, start + len(group.completions))
            parts = {name: values[samples].astype(np.float32) for name, values in breakdown.items()}
            groups.append(replace(group, rewards=rewards[samples].copy(), breakdown=parts))
            start = samples.stop
        else:
            groups.append(group)
    return replace(rollouts, groups=groups)


def _float_array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if each is None else each for each in values], np.float64)


@dataclass(frozen=True, slots=True)
class _WorkUnit:
    """A batch to be scored with a term."""

    number: int
    """Position in the results: by term, then by batch."""
    term_index: int
    batch: ScoringBatch


@dataclass(slots=True)
class _ScoringJob:
    """The state that the threads of one call of `score` share."""

    waiting: deque[_WorkUnit]
    unit_count: int
    total_samples: int
    """Samples times terms."""
    losses_left: int
    """Number of processes that may still be lost."""
    scores: dict[int, TermScores] = field(default_factory=dict)
    error: BaseException | None = None
    scored: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> _WorkUnit | None:
        with self.lock:
            return self.waiting.popleft() if self.waiting and self.error is None else None

    def record_scores(self, unit: _WorkUnit, scores: TermScores) -> None:
        with self.lock:
            self.scores[unit.number] = scores
            self.scored += len(unit.batch)
            current_beacon().progress("samples scored", self.scored, self.total_samples)
            if len(self.scores) == self.unit_count:
                self.over.set()

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error
            self.over.set()

    def record_loss(self) -> bool:
        """Records the loss of a process. Returns whether the job may continue."""
        with self.lock:
            self.losses_left -= 1
            return self.losses_left >= 0


class ScorerPool:
    """Scores rollouts with the terms of the config.

    Args:
        base: the folder that paths of functions are relative to; the current one if None.
        data: the datasets whose prompts are scored; functions that require other columns are refused.
        note: records lost processes in the run's history.
        served: the terms that reward models in the run's ranks compute, by their index.
        images: the folder of the run's `ImageStore`, if its prompts have images.
    """

    def __init__(
        self,
        cluster: Cluster,
        cfg: RewardConfig,
        base: Path | None = None,
        data: Sequence[DataColumns] = (),
        note: NoteRecovery = note_nothing,
        served: Mapping[int, ServedModelTerm] | None = None,
        images: Path | None = None,
    ) -> None:
        self.cluster, self.cfg, self.base = cluster, cfg, (base or Path()).resolve()
        self._note, self._served = note, served or {}
        self.terms = [
            TermInfo(name, each.kind, None, False) for name, each in zip(term_names(cfg.terms), cfg.terms, strict=True)
        ]
        self._scorers = [Scorer(cluster, cfg, self.base, rank, data, images) for rank in range(cfg.scorers)]

    def start(self) -> list[TermInfo]:
        """Starts the processes and loads the terms, so that unusable functions fail before the first rollout. Raises
        RewardError. Idempotent; `score` calls it."""
        missing = [scorer for scorer in self._scorers if scorer.missing()]
        if missing:
            for scorer in missing:
                scorer.allow_restart()
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
        """Returns the rollouts with rewards and breakdown in every group. Groups that are scored already stay the same.
        Raises RewardError after stopping all calls."""
        batches = cut_batches(unscored_groups(rollouts), rollouts.step, self.cfg.batch_size)
        if not batches:
            return with_rewards(rollouts, np.zeros(0, np.float32), {})
        self.start()
        columns = self._score_terms(batches)
        values = [columns[index][term.name] for index, term in enumerate(self.terms)]
        try:
            rewards = weighted_rewards(values, [term.weight for term in self.cfg.terms])
        except BadReward as error:
            names = " + ".join(term.name for term in self.terms)
            raise self._position_error(names, error, batches) from error
        breakdown = {name: column for index in range(len(self.terms)) for name, column in columns[index].items()}
        return with_rewards(rollouts, rewards, breakdown)

    def _score_terms(self, batches: list[ScoringBatch]) -> dict[int, dict[str, np.ndarray]]:
        """Returns what `term_columns` returns for each term, by its index. Reward models compute at the same time as
        the scorers."""
        index = 0
        try:
            pending: dict[int, PendingScores] = {}
            for index, model in self._served.items():
                pending[index] = model.begin(batches)
            others = [number for number in range(len(self.terms)) if number not in self._served]
            scores = self._run(
                [
                    _WorkUnit(position * len(batches) + batch_index, term_index, batch)
                    for position, term_index in enumerate(others)
                    for batch_index, batch in enumerate(batches)
                ]
            )
            sizes = [len(batch) for batch in batches]
            columns: dict[int, dict[str, np.ndarray]] = {}
            for position, term_index in enumerate(others):
                of_term = scores[position * len(batches) : (position + 1) * len(batches)]
                columns[term_index] = term_columns(self.terms[term_index].name, of_term, sizes)
            for index, model in self._served.items():
                found = model.finish(pending[index])
                columns[index] = term_columns(self.terms[index].name, [found], [sum(sizes)])
            return columns
        except BadReward as error:
            raise self._position_error(self.terms[index].name, error, batches) from error

    def close(self) -> None:
        """Stops the processes. Idempotent; a later `score` starts new ones."""
        for scorer in self._scorers:
            scorer.stop(grace_s=1.0)

    def _run(self, units: list[_WorkUnit]) -> list[TermScores]:
        """Scores all units, with one thread per process. The first error, or Ctrl-C, stops the other calls."""
        if not units:
            return []
        samples = sum(len(unit.batch) for unit in units)
        job = _ScoringJob(deque(units), len(units), samples, MAX_LOSSES_PER_SCORER * len(self._scorers))
        current_beacon().progress("samples scored", 0, samples)
        threads = [
            threading.Thread(target=self._score_units, args=(scorer, job), name=scorer.name, daemon=True)
            for scorer in self._scorers[: len(units)]
        ]
        # A call ends if no sample is scored for the time limit of its term. Per unit there are at most a call, one call
        # per sample, and a retry, so each sample is scored at most 3 times. `len(units)` allows for the calls
        # themselves. Processes load the terms once, and again after each loss.
        waits_for_samples = 3 * samples + len(units)
        loads = 1 + job.losses_left
        bound = waits_for_samples * max(map(self._limit_s, self.terms)) + loads * LOAD_STALL_S
        why = f"{count_noun(samples, 'reward')} of {count_noun(len(self.terms), 'term')}"
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
            if len(job.scores) < job.unit_count:
                job.fail(RewardError("scoring", "was interrupted"))
                for scorer in self._scorers:
                    scorer.stop()
            for thread in threads:
                waits.join(thread, waits_for=thread.name, why="its last call was stopped", timeout_s=60.0)
        if job.error is not None:
            raise job.error
        return [job.scores[unit.number] for unit in units]

    def _score_units(self, scorer: Scorer, job: _ScoringJob) -> None:
        """The body of each thread: scores units on its process until none is left."""
        try:
            while (unit := job.take()) is not None:
                job.record_scores(unit, self._score_unit(scorer, unit, job))
        except BaseException as error:  # noqa: BLE001 - `score` raises it
            job.fail(error)

    def _score_unit(self, scorer: Scorer, unit: _WorkUnit, job: _ScoringJob) -> TermScores:
        """Scores a unit. Raises a RewardError that names the failing sample."""
        try:
            scores = self._call(scorer, unit.term_index, unit.batch)
            failure = scores.failure
            if failure is None:
                return scores
            # Without a traceback nothing was raised: the term's result for the whole batch is unusable.
            if failure.position is not None or len(unit.batch) == 1 or failure.traceback is None:
                raise self._failure_error(unit.term_index, unit.batch, failure)
        except ScorerLost as lost:
            if job.error is not None:  # the pool has stopped all scorers
                raise
            with recorded_loss(self._note, scorer.process_name, "reward", lost.problem):
                return self._score_after_loss(scorer, unit, lost, job)
        return self._score_one_by_one(scorer, unit, failure, job)

    def _score_after_loss(self, scorer: Scorer, unit: _WorkUnit, lost: ScorerLost, job: _ScoringJob) -> TermScores:
        """Scores a unit whose process was lost, with another one."""
        failure = TermFailure(lost.problem, traceback=lost.log_tail)
        if len(unit.batch) == 1:
            raise self._failure_error(unit.term_index, unit.batch, failure) from lost
        self._count_loss(unit.term_index, failure, job)
        return self._score_one_by_one(scorer, unit, failure, job)

    def _score_one_by_one(self, scorer: Scorer, unit: _WorkUnit, first: TermFailure, job: _ScoringJob) -> TermScores:
        """Scores each sample of a failed batch alone to find the failing one. If none fails, retries the batch once."""
        for position in range(len(unit.batch)):
            if job.error is not None:
                raise job.error
            single = unit.batch.single(position)
            try:
                failure = self._call(scorer, unit.term_index, single).failure
            except ScorerLost as lost:
                failure = TermFailure(lost.problem, traceback=lost.log_tail)
            if failure is not None:
                raise self._failure_error(unit.term_index, single, failure)
        term = self.terms[unit.term_index]
        try:
            again = self._call(scorer, unit.term_index, unit.batch)
        except ScorerLost as lost:
            again = TermScores(failure=TermFailure(lost.problem, traceback=lost.log_tail))
        if again.failure is None:
            log.warning("reward %s: %s; the retry succeeded", term.function, first.problem)
            return again
        problem = (
            f"{again.failure.problem}, twice, with {len(unit.batch)} samples in one call, but each of them succeeds on "
            "its own: lower reward.batch_size, or raise reward.timeout_s or reward.memory_mb"
        )
        raise self._failure_error(unit.term_index, unit.batch, TermFailure(problem, traceback=again.failure.traceback))

    def _call(self, scorer: Scorer, term_index: int, batch: ScoringBatch) -> TermScores:
        info = self.terms[term_index]
        return scorer.score(term_index, batch, f"{info.name} of {batch.label()}", self._limit_s(info))

    def _limit_s(self, info: TermInfo) -> float:
        return max(self.cfg.timeout_s, info.limit_s)

    def _count_loss(self, term_index: int, failure: TermFailure, job: _ScoringJob) -> None:
        """Records the loss of a process. Raises RewardError after too many."""
        if not job.record_loss():
            problem = (
                f"{failure.problem}; too many processes were lost (limit: {MAX_LOSSES_PER_SCORER} per scorer and step)"
            )
            raise RewardError(self.terms[term_index].function, problem, traceback=failure.traceback)

    def _failure_error(self, term_index: int, batch: ScoringBatch, failure: TermFailure) -> RewardError:
        """Returns the error for a failure, which names the sample if it is known, and otherwise the batch."""
        function = self.terms[term_index].function
        position = 0 if len(batch) == 1 else failure.position
        if position is None or failure.count > 1:
            failed = batch if position is None else batch.part(position, failure.count)
            problem = f"{failure.problem} ({failed.label()})"
            return RewardError(function, problem, returned=failure.returned, traceback=failure.traceback)
        return _sample_error(function, failure.problem, batch, position, failure.returned, failure.traceback)

    def _position_error(self, function: str, error: BadReward, batches: list[ScoringBatch]) -> RewardError:
        """Returns the error for a sample whose position counts over all batches."""
        position = error.position or 0
        for batch in batches:
            if position < len(batch):
                return _sample_error(function, error.problem, batch, position, error.returned)
            position -= len(batch)
        raise AssertionError("the position is beyond the batches")


def _sample_error(
    function: str,
    problem: str,
    batch: ScoringBatch,
    position: int,
    returned: str | None = None,
    traceback: str | None = None,
) -> RewardError:
    sample = batch.samples[position]
    row = batch.prompts[sample.prompt].row
    return RewardError(function, problem, batch.uid(position), row, sample.text, returned, traceback)
