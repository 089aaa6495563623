"""The pool of environments: those of all open conversations, in a few processes."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.cluster.protocol import Cluster
from lockstep.cluster.user_code import MAX_LOST_NODES, NoteRecovery, note_nothing, recorded_loss, retry_lost_nodes
from lockstep.config.rollout import EnvironmentConfig as Config
from lockstep.data.samples import Prompt
from lockstep.rollout.environments.environment_process import EnvironmentProcess, EnvironmentProcessLost
from lockstep.rollout.environments.environment_protocol import (
    EnvironmentFailure,
    EnvironmentTask,
    LoadedEnvironment,
    Observation,
    ReplayedAction,
    TaskResult,
)

log = logging.getLogger(__name__)

MAX_LOST_PROCESSES = 3
"""After this many processes were lost while they ran the same task, the task is taken to be the cause."""


@dataclass(slots=True)
class EpisodeReply:
    """The reply of a conversation's environment."""

    episode: str
    observation: Observation | None
    failure: EnvironmentFailure | None
    """None if there is an observation."""


@dataclass(slots=True)
class _Episode:
    """The state of an open conversation: everything that is needed to repeat it in another process."""

    prompt: Prompt
    process: EnvironmentProcess
    reset_digest: int | None = None
    """Digest of the observation of `reset`; None before `reset`."""
    history: list[ReplayedAction] = field(default_factory=list)
    action: str | None = None
    """The action of the running task; None for `reset`."""
    lost_processes: int = 0
    """Number of processes that were lost while they ran the task."""
    lost_nodes: int = 0
    """Number of nodes that were lost while they ran the task."""


class EnvironmentPool:
    """The environments of all open conversations, called episodes, spread over a few processes.

    Args:
        base: the folder that paths in the config are relative to; the current one if None.
        note: records lost processes in the run's history.
    """

    def __init__(
        self, cluster: Cluster, config: Config, base: Path | None = None, note: NoteRecovery = note_nothing
    ) -> None:
        self.cluster, self.config, self._note = cluster, config, note
        self.path = config.path or ", ".join(config.tools)
        folder = (base or Path()).resolve()
        self._processes = [EnvironmentProcess(cluster, config, folder, rank) for rank in range(config.workers)]
        self._episodes: dict[str, _Episode] = {}
        self._episode_of: dict[int, str] = {}
        """The episode of each task that has no result yet, by task number."""
        self._outgoing: dict[str, None] = {}
        """Episodes whose next task has not been sent yet."""
        self._tasks_sent = 0
        self._prepared = LoadedEnvironment()
        self.answers = 0
        """Number of replies since the pool was made: progress while it waits."""

    @property
    def resets(self) -> bool:
        """Whether environments have a `reset`."""
        return self._prepared.resets

    @property
    def role(self) -> str:
        """The role of the environment's messages."""
        return self._prepared.role

    def start(self) -> None:
        """Starts the processes and loads the user's code, so that unusable code is refused before the first rollout.
        Raises EnvironmentFailed. Idempotent."""
        missing = [process for process in self._processes if process.missing]
        if not missing:
            return
        workers = self.cluster.start([process.spec() for process in missing])
        try:
            pendings = [process.use(worker) for process, worker in zip(missing, workers, strict=True)]
            for process, pending in zip(missing, pendings, strict=True):
                self._prepared = process.loaded(pending)
        except BaseException:
            self.close()
            raise

    def begin(self, episode: str, prompt: Prompt) -> None:
        """Begins a conversation. If environments have a `reset`, `collect` returns its reply."""
        episodes = self._episodes.values()
        process = min(self._processes, key=lambda candidate: sum(each.process is candidate for each in episodes))
        self._episodes[episode] = _Episode(prompt, process)
        if self.resets:
            self._outgoing[episode] = None

    def step(self, episode: str, action: str) -> None:
        """Sends a turn of the model to its environment; `collect` returns the reply."""
        self._episodes[episode].action = action
        self._outgoing[episode] = None

    def branch(self, episode: str, into: str) -> None:
        """Copies a conversation between two turns: its actions are repeated in a new environment."""
        original = self._episodes[episode]
        self.begin(into, original.prompt)
        self._outgoing.pop(into, None)
        copied = self._episodes[into]
        copied.reset_digest, copied.history = original.reset_digest, list(original.history)

    def forget(self, episodes: Iterable[str]) -> None:
        """Closes ended conversations. Replies to them that arrive later are dropped."""
        ended = {episode: self._episodes.pop(episode) for episode in episodes if episode in self._episodes}
        for process in self._processes:
            process.forget([episode for episode, each in ended.items() if each.process is process])
        for episode in ended:
            self._outgoing.pop(episode, None)

    def collect(self) -> list[EpisodeReply]:
        """Sends new tasks and returns the replies since the last call, without waiting for any. It waits only while it
        replaces a lost process.

        Raises:
            EnvironmentFailed: the code cannot be loaded again.
            WorkerDied: a process does not start, or was repeatedly lost with its node.
        """
        self._send()
        replies: list[EpisodeReply] = []
        for process in self._processes:
            try:
                update = process.collect()
            except EnvironmentProcessLost as lost:
                replies += self._recover(process, lost)
                continue
            for result in update.answers if update is not None else []:
                replies += self._record_result(result)
        self.answers += len(replies)
        return replies

    def close(self) -> None:
        """Stops the processes. Idempotent."""
        for process in self._processes:
            process.stop(grace_s=1.0)
            process.open.clear()
        self._episodes.clear()
        self._episode_of.clear()
        self._outgoing.clear()

    def _send(self) -> None:
        tasks: dict[int, list[EnvironmentTask]] = {}
        for episode in self._outgoing:
            each = self._episodes[episode]
            self._tasks_sent += 1
            task = EnvironmentTask(self._tasks_sent, episode, each.action)
            if episode not in each.process.episodes:
                task.prompt, task.history, task.begun = each.prompt, each.history, each.reset_digest
            self._episode_of[task.number] = episode
            tasks.setdefault(each.process.rank, []).append(task)
        self._outgoing.clear()
        for rank, batch in tasks.items():
            self._ensure_started(self._processes[rank]).send(batch)

    def _ensure_started(self, process: EnvironmentProcess) -> EnvironmentProcess:
        if process.missing:
            retry_lost_nodes(lambda: self._start(process), "starts")
        return process

    def _start(self, process: EnvironmentProcess) -> None:
        (worker,) = self.cluster.start([process.spec()])
        self._prepared = process.loaded(process.use(worker))

    def _record_result(self, result: TaskResult) -> list[EpisodeReply]:
        """Records the result of a task and returns the reply to its conversation; none if that has ended."""
        episode = self._episode_of.pop(result.number, None)
        each = self._episodes.get(episode or "")
        if episode is None or each is None:
            return []
        if result.failure is None:
            if each.action is None:
                each.reset_digest = result.digest
            else:
                each.history.append(ReplayedAction(each.action, result.digest))
        each.lost_processes = each.lost_nodes = 0
        return [EpisodeReply(episode, result.observation, result.failure)]

    def _recover(self, process: EnvironmentProcess, lost: EnvironmentProcessLost) -> list[EpisodeReply]:
        """Fails the task that caused the loss, and starts a new process for the others unless the failure ends the
        run."""
        log.warning("environment %s: %s", self.path, lost.failure.problem)
        replies = self._requeue_tasks(process, lost)
        if lost.with_node:
            return replies
        if any(self._ends_run(reply) for reply in replies):
            problem = lost.failure.problem
            self._note("gave up", worker=process.name, role="environment", what=problem, reason=problem)
            return replies
        with recorded_loss(self._note, process.name, "environment", lost.failure.problem):
            self._ensure_started(process)
        return replies

    def _ends_run(self, failed: EpisodeReply) -> bool:
        """Whether the client ends the run because of this failure."""
        return self.config.on_error == "stop" or self._episodes[failed.episode].action is None

    def _requeue_tasks(self, process: EnvironmentProcess, lost: EnvironmentProcessLost) -> list[EpisodeReply]:
        """Queues the tasks of a lost process again; returns the failures of those that are taken to be the cause."""
        replies = []
        for number in process.open:
            episode = self._episode_of.pop(number, None)
            each = self._episodes.get(episode or "")
            if episode is None or each is None:
                continue
            each.lost_processes += not lost.with_node
            each.lost_nodes += lost.with_node
            too_many = each.lost_processes >= MAX_LOST_PROCESSES or each.lost_nodes >= MAX_LOST_NODES
            if number == lost.culprit or too_many:
                each.lost_processes = each.lost_nodes = 0
                replies.append(EpisodeReply(episode, None, lost.failure))
            else:
                self._outgoing[episode] = None
        process.open.clear()
        return replies
