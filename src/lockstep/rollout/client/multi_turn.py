"""Multi-turn rollouts: alternates between engine turns and environment replies, each as soon as it arrives.

Engines and environments work side by side: a conversation proceeds to its next turn as soon as its own reply has
come.
"""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.cluster.protocol import Worker
from lockstep.config.rollout import ReissueConfig, SamplingConfig
from lockstep.data.chat_templates import TurnTokenizer
from lockstep.data.samples import Completion, Episode, EpisodeEnd, FinishReason, Prompt
from lockstep.rollout.client.engine_failover import EngineLauncher
from lockstep.rollout.client.request_router import EngineLoad
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import Request
from lockstep.rollout.environments.environment_messages import EnvironmentFailed, EnvironmentFailure
from lockstep.rollout.environments.environment_pool import EnvironmentPool, EpisodeReply
from lockstep.rollout.environments.environment_protocol import Observation
from lockstep.rollout.requests import request_seed
from lockstep.run.recovery.recovery_manager import RecoveryManager

log = logging.getLogger(__name__)

_TURN_QUEUE = "turns"
"""The queue in which single turns come back."""
ENVIRONMENT_POLL_S = 0.01
"""How often environments are asked for their answers."""
_MAX_LOGGED_FAILURES = 5
"""Failures of environments that are logged with their traceback; the others are counted."""


@dataclass(slots=True)
class _Segment:
    """Tokens that one side wrote: tokens, log-probabilities, versions, all `[tokens]`."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    own: bool


@dataclass(slots=True)
class _Conversation:
    """A conversation under way; before it branches, that of several requests."""

    leaves: list[Request]
    prompt: Prompt
    queue: str
    seed: int
    parts: list[_Segment] = field(default_factory=list)
    episode: Episode = field(default_factory=lambda: Episode([], [], "abort"))
    turns: int = 0
    """Turns of the model that were answered."""
    engine: int | None = None
    """The one that has the keys and values of its turns."""

    @property
    def name(self) -> str:
        return self.leaves[0].id

    @property
    def size(self) -> int:
        return sum(part.tokens.size for part in self.parts)

    def heard(self, tokens: np.ndarray, messages: Sequence[dict[str, Any]]) -> None:
        """What the environment wrote."""
        count = tokens.size
        if count:
            zeros, never = np.zeros(count, np.float32), np.full(count, -1, np.int32)
            self.parts.append(_Segment(tokens, zeros, never, False))
        self.episode.messages += messages

    def said(self, turn: Completion) -> None:
        """What the model wrote."""
        self.parts.append(_Segment(turn.tokens, turn.logprobs, turn.versions, True))
        self.episode.messages.append({"role": "assistant", "content": turn.text})

    def count(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.episode.metrics[name] = self.episode.metrics.get(name, 0.0) + value


class MultiTurnClient(RolloutClient):
    """Engines whose completions are whole conversations with an environment.

    Args:
        pool: the environments.
        turns: the tokens between two turns.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        sampling: SamplingConfig,
        seed: int,
        stall_s: float = 900.0,
        hires: EngineLauncher | None = None,
        recovery: RecoveryManager | None = None,
        reissue: ReissueConfig | None = None,
        *,
        pool: EnvironmentPool,
        turns: TurnTokenizer,
    ) -> None:
        # An answer may take its time without any token being made.
        super().__init__(workers, sampling, seed, max(stall_s, 2 * pool.config.timeout_s), hires, recovery, reissue)
        self.look_s = ENVIRONMENT_POLL_S  # engines wake who waits, environments are looked after
        self.pool, self.turns, self.config = pool, turns, pool.config
        self._prompts: dict[str, Prompt] = {}
        self._talks: dict[str, _Conversation] = {}
        self._outgoing: list[Request] = []
        self._over: list[str] = []
        self._finished: dict[str, list[Completion]] = {}
        self._failures = 0
        self._cached = (0, 0)
        """Hits and queries of the engines' prefix caches when metrics were asked for."""

    def submit(self, requests: Sequence[Request], queue: str = "") -> None:
        """Begins conversations, one for each request (before they branch, one for several of a group). `max_tokens`
        of a request bounds the conversation as a whole."""
        for talk in self._first_turns(requests, queue):
            self._talks[talk.name] = talk
            self.pool.begin(talk.name, talk.prompt)
            if not self.pool.resets:
                self._open(talk, [])
        self._advance()

    def collect(self, queue: str = "") -> list[Completion]:
        """The conversations of a queue that are over since the last call; returns at once.

        Raises:
            EnvironmentFailed: an environment or tool failed, where the config says that this stops the run.
        """
        self._advance()
        return self._finished.pop(queue, [])

    def metrics(self) -> dict[str, float]:
        """`rollout/prefix_cache_hit_rate`: the share of prompt tokens, of all turns since the last call, whose keys and
        values were still there. (The prompt of a group of first turns counts once.)"""
        now = [(each.prefix_cache_hits, each.prefix_cache_queries) for each in self.progress()]
        hits, queries = (sum(column) for column in zip(*now, strict=True))
        before, self._cached = self._cached, (hits, queries)
        asked, found = queries - before[1], super().metrics()
        rate = {"rollout/prefix_cache_hit_rate": max(0.0, (hits - before[0]) / asked)} if asked > 0 else {}
        return found | rate

    def _moves(self) -> object:
        return super()._moves(), self.pool.answers

    def _place(self, group: Sequence[Request], owed: EngineLoad) -> int:
        """A conversation stays with the engine that has its beginning, as long as that lives."""
        talks = [self._talk(request.id) for request in group]
        engine = talks[0].engine
        if engine is None or engine not in owed:
            engine = super()._place(group, owed)
        for talk in talks:
            talk.engine = engine
        return engine

    def _talk(self, request: str) -> _Conversation:
        """The conversation that a turn's request is of."""
        return self._talks[request.rpartition("/turn")[0]]

    def request(
        self, id: str, step: int, prompt: Prompt, k: int, sampling: SamplingConfig | None = None, suffix: str = ""
    ) -> Request:
        self._prompts[id] = prompt
        return super().request(id, step, prompt, k, sampling, suffix)

    def _first_turns(self, requests: Sequence[Request], queue: str) -> list[_Conversation]:
        paths = math.prod(self.config.branches)
        shared: dict[tuple[str, int], list[Request]] = {}
        for request in requests:
            node = _completion_number(request) // paths if paths > 1 else len(shared)
            shared.setdefault((request.group, node), []).append(request)
        prompts = {request.id: self._prompts.pop(request.id) for request in requests}
        return [
            _Conversation(
                leaves,
                prompts[leaves[0].id],
                queue,
                # Of the place in the group, not of the requests: a resumed step lacks those that are finished.
                leaves[0].seed if paths == 1 else request_seed(self.seed, 0, f"{group}/branch", node),
            )
            for (group, node), leaves in shared.items()
        ]

    def _advance(self) -> None:
        """Takes what has come, and hands over what follows from it."""
        for turn in super().collect(_TURN_QUEUE):
            self._said(self._talk(turn.request), turn)
        for reply in self.pool.collect():
            self._answered(self._talks[reply.episode], reply)
        if self._over:
            self.pool.forget(self._over)
            self._over.clear()
        outgoing, self._outgoing = self._outgoing, []
        groups: dict[bytes, str] = {}
        for request in outgoing:
            request.group = groups.setdefault(request.prompt.tobytes(), request.id)
        if outgoing:
            super().submit(outgoing, _TURN_QUEUE)

    def _open(self, talk: _Conversation, messages: Sequence[dict[str, Any]]) -> None:
        """What comes before the model's first turn: prompts of environments end before it begins."""
        if self.config.path is not None:
            talk.heard(self.turns.opening(talk.prompt, messages), messages)
        self._ask(talk)

    def _ask(self, talk: _Conversation) -> None:
        """The model's next turn."""
        of = talk.leaves[0]
        left = of.max_tokens - talk.size
        if left < 1:
            self._finish(talk, "length", "tokens")
            return
        turn = talk.turns
        self._outgoing.append(
            replace(
                of,
                id=f"{talk.name}/turn{turn}",
                prompt=np.concatenate([talk.prompt.tokens, *(part.tokens for part in talk.parts)]),
                seed=request_seed(talk.seed, 0, "turn", turn) if turn else talk.seed,
                max_tokens=min(left, self.config.max_turn_tokens or left),
                keep=turn + 1 < self.config.max_turns,
            )
        )

    def _said(self, talk: _Conversation, turn: Completion) -> None:
        talk.said(turn)
        if turn.finish != "stop":
            self._finish(talk, turn.finish, "tokens" if turn.finish == "length" else "abort")
        else:
            self.pool.step(talk.name, turn.text)

    def _answered(self, talk: _Conversation, reply: EpisodeReply) -> None:
        begins = not talk.parts
        found = reply.observation
        if found is None:
            assert reply.failure is not None
            found = self._failed(talk, reply.failure, begins)
        talk.count(found.metrics)
        if begins:
            if found.done:
                raise EnvironmentFailed(self.pool.path, "reset says that the conversation is over", talk.name)
            self._open(talk, found.turns())
            return
        talk.turns += 1
        talk.episode.rewards.append(found.reward)
        if found.done:
            self._finish(talk, *self._end_of(talk))
        elif talk.turns >= self.config.max_turns:
            self._finish(talk, "length", "turns")
        else:
            self._go_on(talk, found.turns(self.pool.role))

    def _go_on(self, talk: _Conversation, messages: Sequence[dict[str, Any]]) -> None:
        tokens = self.turns.reply(talk.prompt, messages, int(talk.parts[-1].tokens[-1]))
        if talk.size + tokens.size >= talk.leaves[0].max_tokens:
            self._finish(talk, "length", "tokens")  # the answer leaves no room for a word about it
            return
        talk.heard(tokens, messages)
        for branch in self._branches(talk):
            self._ask(branch)

    def _branches(self, talk: _Conversation) -> list[_Conversation]:
        """The conversations that one goes on as after an answer."""
        after = talk.turns - 1
        if after >= len(self.config.branches) or self.config.branches[after] == 1:
            return [talk]
        below = math.prod(self.config.branches[after + 1 :])
        parts: dict[int, list[Request]] = {}
        for leaf in talk.leaves:
            parts.setdefault(_completion_number(leaf) // below % self.config.branches[after], []).append(leaf)
        found = []
        for number, leaves in parts.items():
            seed = request_seed(talk.seed, 0, "branch", number)
            branch = replace(
                talk, leaves=leaves, seed=seed, parts=list(talk.parts), episode=copy.deepcopy(talk.episode)
            )
            if branch.name != talk.name:
                self.pool.branch(talk.name, branch.name)
            found.append(branch)
        self._talks.update((branch.name, branch) for branch in found)
        return found

    def _failed(self, talk: _Conversation, failure: EnvironmentFailure, begins: bool) -> Observation:
        """What a failure means: an answer that tells the model of it, or the end. Raises EnvironmentFailed."""
        if begins or self.config.on_error == "stop":
            raise EnvironmentFailed(self.pool.path, failure.problem, talk.name, talk.turns, failure.traceback)
        self._failures += 1
        if self._failures <= _MAX_LOGGED_FAILURES:
            trace = f"\n{failure.traceback}" if failure.traceback else ""
            log.warning("%s, sample %s, turn %d: %s%s", self.pool.path, talk.name, talk.turns, failure.problem, trace)
        if self.config.on_error == "end":
            talk.episode.ended = "error"
            return Observation(done=True, metrics={"errors": 1.0})
        told = {"role": self.pool.role, "content": f"error: {failure.problem}"}
        return Observation(messages=[told], metrics={"errors": 1.0})

    def _end_of(self, talk: _Conversation) -> tuple[FinishReason, EpisodeEnd]:
        if talk.episode.ended == "error":
            return "abort", "error"
        return "stop", "answer" if self.config.path is None else "environment"

    def _finish(self, talk: _Conversation, finish: FinishReason, ended: EpisodeEnd) -> None:
        """The conversation is over, for every request that it was of."""
        del self._talks[talk.name]
        self._over.append(talk.name)
        parts = talk.parts or [_Segment(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), True)]
        said = [message["content"] for message in talk.episode.messages if message["role"] == "assistant"]
        talk.episode.ended = ended
        for leaf in talk.leaves:
            completion = Completion(
                request=leaf.id,
                tokens=np.concatenate([part.tokens for part in parts]),
                logprobs=np.concatenate([part.logprobs for part in parts]),
                versions=np.concatenate([part.versions for part in parts]),
                finish=finish,
                text=said[-1] if said else "",
                mask=np.concatenate([np.full(part.tokens.size, part.own) for part in parts]),
                episode=copy.deepcopy(talk.episode),
            )
            self._finished.setdefault(talk.queue, []).append(completion)


def _completion_number(request: Request) -> int:
    """Which completion of its group a request is of."""
    last = request.id.rpartition("/")[2]
    return int(last) if last.isdecimal() else 0
