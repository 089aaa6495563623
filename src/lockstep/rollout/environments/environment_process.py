"""The controller's handle of one environment process. No call blocks on the process; a stuck one is killed."""

import time
from pathlib import Path

from lockstep.base.errors import PicklableError
from lockstep.cluster.protocol import Cluster, PendingResult, Worker, WorkerDied, WorkerSpec, successor_name
from lockstep.cluster.user_code import DEATH_LOG_S, UserCodeNotLoaded, killed_process_log, wait_until_loaded
from lockstep.config.rollout import EnvironmentConfig as Config
from lockstep.rollout.environments.environment_protocol import (
    ENVIRONMENT_SERVICE,
    EnvironmentAPI,
    EnvironmentFailed,
    EnvironmentFailure,
    EnvironmentTask,
    LoadedEnvironment,
    TaskUpdate,
)

KILL_GRACE_S = 1.0
"""Async methods are cancelled at their time limit. A process with a task that runs this much longer is killed."""


class EnvironmentProcessLost(PicklableError):
    """An environment process ended, or was killed.

    Attributes:
        culprit: number of the task that is the cause, if known.
        with_node: whether the process was lost with its node or its node's agent, so that no task is the cause.
    """

    def __init__(self, failure: EnvironmentFailure, culprit: int | None, with_node: bool = False) -> None:
        super().__init__(failure.problem)
        self.failure, self.culprit, self.with_node = failure, culprit, with_node


class EnvironmentProcess:
    """One environment process at a time. The pool starts a new one when it is lost."""

    def __init__(self, cluster: Cluster, config: Config, base: Path, rank: int) -> None:
        self.cluster, self.config, self.base, self.rank = cluster, config, base, rank
        self.open: dict[int, EnvironmentTask] = {}
        """Tasks that have no result yet."""
        self.episodes: set[str] = set()
        """Episodes that have an environment in the process."""
        self._worker: Worker | None = None
        self._latest: str | None = None
        """Name of the latest process."""
        self._reset_state()

    def _reset_state(self) -> None:
        """Forgets what belongs to the previous process."""
        self._ack = 0
        self._collecting: PendingResult[TaskUpdate] | None = None
        """The `collect` call that is not answered yet."""
        self._collecting_since = 0.0
        self._calls: list[PendingResult[None]] = []
        self._holding: int | None = None
        """Number of the task that blocked the process at the last update."""
        self.episodes.clear()

    @property
    def missing(self) -> bool:
        return self._worker is None

    @property
    def name(self) -> str:
        """Name of the latest process."""
        return self._latest or f"environment-{self.rank}"

    def spec(self) -> WorkerSpec:
        """Returns the spec of the next process. It has a new name, so that the log of its predecessor stays."""
        self._latest = f"environment-{self.rank}" if self._latest is None else successor_name(self._latest)
        return WorkerSpec(
            name=self._latest,
            role="environment",
            rank=self.rank,
            service=ENVIRONMENT_SERVICE,
            arguments={"config": self.config.model_dump(mode="json"), "base": str(self.base)},
            environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
            preload=("lockstep.rollout.environments.environment_service",),
        )

    def use(self, worker: Worker) -> PendingResult[LoadedEnvironment]:
        """Uses a new process and makes it load the user's code."""
        self._worker = worker
        return worker.submit(EnvironmentAPI.prepare)

    def loaded(self, pending: PendingResult[LoadedEnvironment]) -> LoadedEnvironment:
        """Waits until the process has loaded the user's code.

        Raises:
            EnvironmentFailed: the code cannot be used.
            WorkerDied: the process was lost with its node.
        """
        path = self.config.path or ", ".join(self.config.tools)
        try:
            prepared = wait_until_loaded(pending, path, f"environment-{self.rank}", self.stop)
        except WorkerDied:
            self._take_worker()
            raise
        except UserCodeNotLoaded as error:
            self._take_worker()
            raise EnvironmentFailed(path, error.problem, traceback=error.log_tail) from error
        if prepared.failure is not None:
            raise EnvironmentFailed(path, prepared.failure.problem, traceback=prepared.failure.traceback)
        return prepared

    def send(self, tasks: list[EnvironmentTask]) -> None:
        """Sends tasks without waiting for the process."""
        if self._worker is not None and tasks:
            self._calls.append(self._worker.submit(EnvironmentAPI.submit, tasks))
            self.open.update((task.number, task) for task in tasks)
            self.episodes.update(task.episode for task in tasks)

    def forget(self, episodes: list[str]) -> None:
        """Closes the environments of ended episodes."""
        ended = [episode for episode in episodes if episode in self.episodes]
        self.episodes.difference_update(ended)
        if self._worker is not None and ended:
            self._calls.append(self._worker.submit(EnvironmentAPI.forget, ended))

    def collect(self) -> TaskUpdate | None:
        """Returns new results, or None if there are none. Does not wait.

        Raises:
            EnvironmentProcessLost: the process died, or a task in it exceeded its limit and the process was killed.
        """
        worker = self._worker
        if worker is None or not (self.open or self._calls):
            return None
        try:
            self._calls = [call for call in self._calls if not _call_succeeded(call)]
            if self._collecting is None:
                self._collecting = worker.submit(EnvironmentAPI.collect, self._ack)
                self._collecting_since = time.monotonic()
            if not self._collecting.done():
                self._check_responsive()
                return None
            pending, self._collecting = self._collecting, None
            update = pending.result(why="answers of environments")
        except WorkerDied as error:
            self.stop()
            if error.with_node:
                raise EnvironmentProcessLost(
                    EnvironmentFailure(f"its process {error.how}"), None, with_node=True
                ) from None
            holding = self._holding if self._holding in self.open else None
            culprit = next(iter(self.open)) if holding is None and len(self.open) == 1 else holding
            raise EnvironmentProcessLost(
                EnvironmentFailure(f"its process {error.how}", error.last_words or None), culprit
            ) from None
        self._ack = update.sequence
        self._check_limits(update)
        for result in update.answers:
            task = self.open.pop(result.number, None)
            if task is not None and result.failure is not None and task.prompt is not None:
                self.episodes.discard(task.episode)  # its environment may not have been made
        return update

    def _check_limits(self, update: TaskUpdate) -> None:
        """Kills the process if a task exceeds its limit. Raises EnvironmentProcessLost."""
        limit = self.config.timeout_s
        answered = {result.number for result in update.answers}
        late = [each for each in update.running if each.seconds > limit + KILL_GRACE_S and each.number not in answered]
        holding = [each.number for each in update.running if each.holding]
        self._holding = holding[0] if holding else None
        if late:
            culprit = self._holding if self._holding is not None else max(late, key=lambda each: each.seconds).number
            raise self._kill_for(culprit)

    def _check_responsive(self) -> None:
        """Kills a process that does not even answer `collect`, because C code holds the interpreter lock."""
        if time.monotonic() - self._collecting_since > self.config.timeout_s + KILL_GRACE_S + DEATH_LOG_S:
            raise self._kill_for(self._holding)

    def _kill_for(self, culprit: int | None) -> EnvironmentProcessLost:
        problem = (
            f"did not answer within {self.config.timeout_s:g} s (rollout.environment.timeout_s); its process was killed"
        )
        return EnvironmentProcessLost(self._kill(problem, self._calls[0] if self._calls else None), culprit)

    def stop(self, grace_s: float = 0.0) -> None:
        """Ends the process. Idempotent."""
        worker = self._take_worker()
        if worker is not None:
            self.cluster.stop(worker, grace_s=grace_s)

    def _take_worker(self) -> Worker | None:
        worker, self._worker = self._worker, None
        self._reset_state()
        return worker

    def _kill(self, problem: str, pending: PendingResult[object] | None) -> EnvironmentFailure:
        """Kills the process and reads the end of its log, which contains its last stack."""
        worker = self._worker
        if worker is None:
            return EnvironmentFailure(problem)
        pending = worker.submit(EnvironmentAPI.prepare) if pending is None else pending
        self.stop()
        return EnvironmentFailure(problem, killed_process_log(pending, worker.spec.name) or None)


def _call_succeeded(call: PendingResult[None]) -> bool:
    """Whether a call was answered. Raises the call's error if it failed."""
    if not call.done():
        return False
    call.result(why="hand over tasks")
    return True
