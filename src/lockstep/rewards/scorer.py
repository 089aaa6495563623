"""The controller's handle of one scorer process: calls it, kills it if it hangs, and replaces it."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import (
    Cluster,
    PendingResult,
    RemoteError,
    Worker,
    WorkerDied,
    WorkerSpec,
    successor_name,
)
from lockstep.cluster.user_code import UserCodeNotLoaded, killed_process_log, retry_lost_nodes, wait_until_loaded
from lockstep.config.reward import MathReward, RewardConfig
from lockstep.rewards.scoring_messages import (
    DataColumns,
    PreparedTerms,
    RewardError,
    ScorerAPI,
    ScoringBatch,
    TermScores,
)

PROGRESS_DELAY_S = 1.5
"""Added to the limit: progress is reported about once a second, so it may arrive this late."""

log = logging.getLogger(__name__)


class ScorerLost(Exception):
    """The process died or was killed while it scored."""

    def __init__(self, problem: str, log_tail: str) -> None:
        super().__init__(problem)
        self.problem, self.log_tail = problem, log_tail


class Scorer:
    """One scorer process at a time. The next call replaces a lost one."""

    def __init__(
        self,
        cluster: Cluster,
        cfg: RewardConfig,
        base: Path,
        rank: int,
        data: Sequence[DataColumns] = (),
        images: Path | None = None,
    ) -> None:
        self.cluster, self.cfg, self.base, self.rank, self.data = cluster, cfg, base, rank, data
        self.images = images
        self.name = f"scorer-{rank}"
        self._worker: Worker | None = None
        self._latest: str | None = None
        """Name of the latest process."""
        self._stopped = False
        self._lock = threading.Lock()
        """Guards `_worker`, which one thread uses and another may stop."""

    def spec(self) -> WorkerSpec:
        """Returns the spec of the next process. It has a new name, so that beacon and log of its predecessor stay."""
        self._latest = self.name if self._latest is None else successor_name(self._latest)
        has_math = any(isinstance(term, MathReward) for term in self.cfg.terms)
        return WorkerSpec(
            name=self._latest,
            role="reward",
            rank=self.rank,
            service="lockstep.rewards.scorer_service:ScorerService",
            arguments={
                "terms": [term.model_dump(mode="json") for term in self.cfg.terms],
                "base": str(self.base),
                "memory_mb": self.cfg.memory_mb,
                "timeout_s": self.cfg.timeout_s,
                "share": (self.rank, self.cfg.workers),
                "data": [asdict(each) for each in self.data],
                "images": None if self.images is None else str(self.images),
            },
            # One thread each, because many scorers run at the same time. Few malloc arenas, because arenas reserve
            # address space, which `memory_mb` limits.
            environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
            preload=("lockstep.rewards.scorer_service", *(("math_verify",) if has_math else ())),
            adoptable=True,
        )

    def use(self, worker: Worker) -> None:
        """Uses a new process. If `stop` was called meanwhile, stops the process and raises ScorerLost."""
        with self._lock:
            stopped = self._stopped
            self._worker, self._latest = None if stopped else worker, worker.spec.name
        if stopped:
            self.cluster.stop(worker, grace_s=0.0)
            raise ScorerLost("was stopped", "")

    @property
    def process_name(self) -> str:
        """Name of the latest process."""
        return self._latest or self.name

    def missing(self) -> bool:
        return self._worker is None

    def allow_restart(self) -> None:
        """Lets `score` start processes again after `stop`."""
        self._stopped = False

    def begin_loading(self) -> PendingResult[PreparedTerms]:
        return self._running().submit(ScorerAPI.prepare)

    def loaded(self, pending: PendingResult[PreparedTerms]) -> PreparedTerms:
        """Waits until the process has loaded the terms. Raises RewardError if one cannot be used."""
        functions = ", ".join(term.path for term in self.cfg.terms if term.kind == "function") or "the verifiers"
        try:
            prepared = wait_until_loaded(pending, functions, self.name, self._kill)
        except WorkerDied:
            self._forget()
            raise
        except UserCodeNotLoaded as error:
            self._forget()
            raise RewardError(functions, error.problem, traceback=error.log_tail) from error
        if prepared.failure is not None:
            failure = prepared.failure
            raise RewardError(prepared.function or functions, failure.problem, traceback=failure.traceback)
        return prepared

    def score(self, term: int, batch: ScoringBatch, why: str, limit_s: float) -> TermScores:
        """Scores one batch. If the process is lost with its node or its node's agent, another process scores the batch.

        Raises:
            ScorerLost: the process died, or finished no sample for `limit_s`. The next call starts another process.
            WorkerDied: processes were repeatedly lost with their nodes.
        """
        return retry_lost_nodes(lambda: self._score(term, batch, why, limit_s), "scores")

    def _score(self, term: int, batch: ScoringBatch, why: str, limit_s: float) -> TermScores:
        if self.missing():
            (worker,) = self.cluster.start([self.spec()])
            self.use(worker)
            self.loaded(self.begin_loading())
        pending = self._running().submit(ScorerAPI.score, term, batch)
        try:
            return pending.result(why=why, stall_s=limit_s + PROGRESS_DELAY_S)
        except Stalled:
            problem = f"did not finish a sample for {limit_s:g} s (reward.timeout_s); its process was killed"
            raise self._kill_and_report(problem, pending) from None
        except WorkerDied as error:
            self._kill()
            if error.with_node and not self._stopped:
                raise
            raise ScorerLost(f"its process {error.how}", error.last_words) from None
        except RemoteError as error:
            if error.kind != "MemoryError":
                raise
            raise self._kill_and_report(
                "its process ran out of memory (reward.memory_mb)", None, error.traceback
            ) from None

    def stop(self, grace_s: float = 0.0) -> None:
        """Stops the process. A running call raises ScorerLost in the thread that waits for it."""
        self._stopped = True
        self._kill(grace_s)

    def _kill(self, grace_s: float = 0.0) -> None:
        worker = self._forget()
        if worker is not None:
            self.cluster.stop(worker, grace_s=grace_s)

    def _forget(self) -> Worker | None:
        with self._lock:
            worker, self._worker = self._worker, None
        return worker

    def _running(self) -> Worker:
        worker = self._worker
        if worker is None:
            raise ScorerLost("was stopped", "")
        return worker

    def _kill_and_report(self, problem: str, pending: PendingResult[Any] | None, log_tail: str = "") -> ScorerLost:
        """Kills the process. Returns an error with the end of its log, which contains its stack."""
        self._kill()
        if pending is not None:
            log_tail = killed_process_log(pending, self.name)
        return ScorerLost(problem, log_tail)
