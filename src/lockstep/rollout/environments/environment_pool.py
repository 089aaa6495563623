"""The environments of all open conversations, spread over a few processes."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.cluster.protocol import Cluster
from lockstep.cluster.user_code import MAX_LOST_NODES, retry_lost_nodes
from lockstep.config.rollout import EnvironmentConfig as Config
from lockstep.data.samples import Prompt
from lockstep.rollout.environments.environment_messages import (
    EnvironmentFailure,
    EnvironmentTask,
    LoadedEnvironment,
    ReplayedAction,
    TaskResult,
)
from lockstep.rollout.environments.environment_process import EnvironmentProcess, EnvironmentProcessLost
from lockstep.rollout.environments.environment_protocol import Observation

log = logging.getLogger(__name__)

MAX_LOST_PROCESSES = 3
"""Number of processes that may be lost while they run a task, before the task is taken to be the cause."""


@dataclass(slots=True)
class EpisodeReply:
    """The reply of an environment."""

    episode: str
    observation: Observation | None
    failure: EnvironmentFailure | None
    """The failure that the environment had instead of replying; None if it replied."""


@dataclass(slots=True)
class _Episode:
    prompt: Prompt
    host: EnvironmentProcess
    begun: int | None = None
    history: list[ReplayedAction] = field(default_factory=list)
    action: str | None = None
    """The action of the running task."""
    lost: int = 0
    """Number of processes that were lost while they ran the task."""
    nodes: int = 0
    """Number of nodes that were lost while they ran the task."""


class EnvironmentPool:
    """The environments of episodes. `base` is the folder that paths are relative to; the current one if None."""

    def __init__(self, cluster: Cluster, config: Config, base: Path | None = None) -> None:
        self.cluster, self.config = cluster, config
        self.path = config.path or ", ".join(config.tools)
        where = (base or Path()).resolve()
        self._hosts = [EnvironmentProcess(cluster, config, where, rank) for rank in range(config.workers)]
        self._episodes: dict[str, _Episode] = {}
        self._asked: dict[int, str] = {}
        self._outgoing: dict[str, None] = {}
        """Episodes whose next task has not been sent yet."""
        self._number = 0
        self._prepared = LoadedEnvironment()
        self.answers = 0
        """Replies since the pool was made: grows as long as environments answer."""

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
        missing = [host for host in self._hosts if host.missing]
        if not missing:
            return
        workers = self.cluster.start([host.spec() for host in missing])
        try:
            pendings = [host.use(worker) for host, worker in zip(missing, workers, strict=True)]
            for host, pending in zip(missing, pendings, strict=True):
                self._prepared = host.loaded(pending)
        except BaseException:
            self.close()
            raise

    def begin(self, episode: str, prompt: Prompt) -> None:
        """Makes an environment. If it has a `reset`, `collect` returns its reply."""
        host = min(self._hosts, key=lambda each: sum(found.host is each for found in self._episodes.values()))
        self._episodes[episode] = _Episode(prompt, host)
        if self.resets:
            self._outgoing[episode] = None

    def step(self, episode: str, action: str) -> None:
        """Sends a turn of the model to its environment; `collect` returns the reply."""
        self._episodes[episode].action = action
        self._outgoing[episode] = None

    def branch(self, episode: str, into: str) -> None:
        """Copies a conversation between two turns: its actions are repeated in a new environment."""
        one = self._episodes[episode]
        self.begin(into, one.prompt)
        self._outgoing.pop(into, None)
        other = self._episodes[into]
        other.begun, other.history = one.begun, list(one.history)

    def forget(self, episodes: Iterable[str]) -> None:
        """Closes ended conversations. Replies that they still wait for are dropped."""
        gone = {episode: self._episodes.pop(episode) for episode in episodes if episode in self._episodes}
        for host in self._hosts:
            host.forget([episode for episode, each in gone.items() if each.host is host])
        for episode in gone:
            self._outgoing.pop(episode, None)

    def collect(self) -> list[EpisodeReply]:
        """The replies since the last call; also sends new tasks. Returns at once, except while it replaces a lost
        process.

        Raises:
            EnvironmentFailed: the code cannot be loaded again.
            WorkerDied: a process does not start, or is lost with its node again and again.
        """
        self._send()
        replies: list[EpisodeReply] = []
        for host in self._hosts:
            try:
                news = host.collect()
            except EnvironmentProcessLost as lost:
                replies += self._recover(host, lost)
                continue
            for answer in news.answers if news is not None else []:
                replies += self._answered(answer)
        self.answers += len(replies)
        return replies

    def close(self) -> None:
        """Stops the processes. Idempotent."""
        for host in self._hosts:
            host.stop(grace_s=1.0)
            host.open.clear()
        self._episodes.clear()
        self._asked.clear()
        self._outgoing.clear()

    def _send(self) -> None:
        tasks: dict[int, list[EnvironmentTask]] = {}
        for episode in self._outgoing:
            each = self._episodes[episode]
            self._number += 1
            task = EnvironmentTask(self._number, episode, each.action)
            if episode not in each.host.known:
                task.prompt, task.history, task.begun = each.prompt, each.history, each.begun
            self._asked[task.number] = episode
            tasks.setdefault(each.host.rank, []).append(task)
        self._outgoing.clear()
        for rank, batch in tasks.items():
            self._running_process(self._hosts[rank]).send(batch)

    def _running_process(self, host: EnvironmentProcess) -> EnvironmentProcess:
        if host.missing:
            retry_lost_nodes(lambda: self._start(host), "starts")
        return host

    def _start(self, host: EnvironmentProcess) -> None:
        (worker,) = self.cluster.start([host.spec()])
        self._prepared = host.loaded(host.use(worker))

    def _answered(self, answer: TaskResult) -> list[EpisodeReply]:
        episode = self._asked.pop(answer.number, None)
        each = self._episodes.get(episode or "")
        if episode is None or each is None:
            return []
        if answer.failure is None:
            if each.action is None:
                each.begun = answer.digest
            else:
                each.history.append(ReplayedAction(each.action, answer.digest))
        each.lost = each.nodes = 0
        return [EpisodeReply(episode, answer.observation, answer.failure)]

    def _recover(self, host: EnvironmentProcess, lost: EnvironmentProcessLost) -> list[EpisodeReply]:
        """Fails the task that is the cause, and repeats the others in a new process."""
        replies = []
        log.warning("environment %s: %s", self.path, lost.failure.problem)
        for number in host.open:
            episode = self._asked.pop(number, None)
            each = self._episodes.get(episode or "")
            if episode is None or each is None:
                continue
            each.lost += not lost.with_node
            each.nodes += lost.with_node
            if number == lost.culprit or each.lost >= MAX_LOST_PROCESSES or each.nodes >= MAX_LOST_NODES:
                each.lost = each.nodes = 0
                replies.append(EpisodeReply(episode, None, lost.failure))
            else:
                self._outgoing[episode] = None
        host.open.clear()
        return replies
