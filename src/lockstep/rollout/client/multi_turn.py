"""Multi-turn rollouts: conversations between the model and an environment.

Engines and environments work at the same time: each conversation proceeds when its own turn or reply has arrived.
"""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from lockstep.cluster.protocol import Cluster, Worker, WorkerLauncher
from lockstep.cluster.user_code import NoteRecovery, note_nothing
from lockstep.config.rollout import ReissueConfig, RolloutConfig, SamplingConfig
from lockstep.data.images.image_loader import LoadedImage
from lockstep.data.images.observation_images import UnusableObservation
from lockstep.data.samples import Completion, EpisodeEnd, FinishReason, Prompt
from lockstep.data.turn_tokenizer import TurnTokenizer, TurnTokens
from lockstep.rollout.client.conversation import ConversationSegment, OpenConversation
from lockstep.rollout.client.engine_failover import EngineRecovery
from lockstep.rollout.client.request_router import EngineLoad
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import Request, RequestGroup, prompt_key, request_seed
from lockstep.rollout.environments.environment_pool import EnvironmentPool, EpisodeReply
from lockstep.rollout.environments.environment_protocol import EnvironmentFailed, EnvironmentFailure, Observation

log = logging.getLogger(__name__)

_TURN_QUEUE = "turns"
"""The queue of the requests for single turns."""
ENVIRONMENT_POLL_S = 0.01
"""How often the replies of environments are polled."""
_MAX_LOGGED_FAILURES = 5
"""This many failures of environments are logged; further ones are only counted."""


_ReadObservation = tuple[TurnTokens, Sequence[dict[str, Any]]]
"""The tokens of an observation, and its messages."""


class MultiTurnClient(RolloutClient):
    """A rollout client whose completions are whole conversations with an environment.

    Args:
        pool: the environments.
        turns: makes the tokens between two turns.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        sampling: SamplingConfig,
        seed: int,
        stall_s: float = 900.0,
        launcher: WorkerLauncher | None = None,
        recovery: EngineRecovery | None = None,
        reissue: ReissueConfig | None = None,
        *,
        pool: EnvironmentPool,
        turns: TurnTokenizer,
    ) -> None:
        # While environments reply, engines may generate no tokens.
        super().__init__(workers, sampling, seed, max(stall_s, 2 * pool.config.timeout_s), launcher, recovery, reissue)
        self.poll_interval_s = ENVIRONMENT_POLL_S  # completions of engines wake a wait, but environments are polled
        self.pool, self.turns, self.config = pool, turns, pool.config
        self._prompts: dict[str, Prompt] = {}
        self._conversations: dict[str, OpenConversation] = {}
        """Open conversations by name."""
        self._outgoing: list[Request] = []
        """Requests for turns that were not submitted yet."""
        self._ended: list[str] = []
        """Ended conversations whose environments are not closed yet."""
        self._finished: dict[str, list[Completion]] = {}
        """Completions that were not collected yet, by queue."""
        self._failures = 0
        self._prefix_cache = (0, 0)
        """Hits and queries of the engines' prefix caches at the last call of `metrics`."""

    def submit(self, groups: Sequence[RequestGroup], queue: str = "") -> None:
        """Starts a conversation for each request, or for several requests of a group if conversations branch.
        `max_tokens` of a request limits the whole conversation."""
        requests = [request for group in groups for request in group.requests]
        for conversation in self._make_conversations(requests, queue):
            self._conversations[conversation.name] = conversation
            self.pool.begin(conversation.name, conversation.prompt)
            if not self.pool.resets:
                self._open(conversation, self._read(conversation, Observation()) if self.config.path else None)
        self._advance()

    def collect(self, queue: str = "") -> list[Completion]:
        """Returns the conversations of a queue that ended since the last call, without waiting.

        Raises:
            EnvironmentFailed: an environment or tool failed, and by the config this ends the run.
        """
        self._advance()
        return self._finished.pop(queue, [])

    def metrics(self) -> dict[str, float]:
        """`rollout/prefix_cache_hit_rate`: the share of prompt tokens, in all turns since the last call, whose keys and
        values were still cached. The prompt of a group of first turns is counted once."""
        now = [(each.prefix_cache_hits, each.prefix_cache_queries) for each in self.counters()]
        hits, queries = (sum(column) for column in zip(*now, strict=True))
        before, self._prefix_cache = self._prefix_cache, (hits, queries)
        queried, metrics = queries - before[1], super().metrics()
        rate = {"rollout/prefix_cache_hit_rate": max(0.0, (hits - before[0]) / queried)} if queried > 0 else {}
        return metrics | rate

    def _progress(self) -> object:
        return super()._progress(), self.pool.answers

    def _choose_engine(self, group: RequestGroup, load: EngineLoad) -> int:
        """A conversation stays with the engine that has its earlier turns cached, as long as that engine is live."""
        conversations = list(map(self._conversation_of, group.ids))
        engine = conversations[0].engine
        if engine is None or engine not in load:
            engine = super()._choose_engine(group, load)
        for conversation in conversations:
            conversation.engine = engine
        return engine

    def _conversation_of(self, request: str) -> OpenConversation:
        """The conversation that a turn's request belongs to."""
        return self._conversations[request.rpartition("/turn")[0]]

    def requests(
        self,
        step: int,
        prompt: Prompt,
        numbers: Mapping[str, int],
        sampling: SamplingConfig | None = None,
        suffix: str = "",
    ) -> RequestGroup:
        self._prompts |= dict.fromkeys(numbers, prompt)
        return super().requests(step, prompt, numbers, sampling, suffix)

    def _make_conversations(self, requests: Sequence[Request], queue: str) -> list[OpenConversation]:
        paths = math.prod(self.config.branches)
        shared: dict[tuple[str, int], list[Request]] = {}
        for request in requests:
            node = _completion_number(request) // paths if paths > 1 else len(shared)
            shared.setdefault((request.group, node), []).append(request)
        prompts = {request.id: self._prompts.pop(request.id) for request in requests}
        return [
            OpenConversation(
                group_requests,
                prompts[group_requests[0].id],
                queue,
                # Depends on the number in the group, because a resumed step has only some of the requests.
                group_requests[0].seed if paths == 1 else request_seed(self.seed, 0, f"{group}/branch", node),
            )
            for (group, node), group_requests in shared.items()
        ]

    def _advance(self) -> None:
        """Processes turns and replies that have arrived, and submits the turns that follow."""
        for turn in super().collect(_TURN_QUEUE):
            self._on_turn(self._conversation_of(turn.request), turn)
        replies = self.pool.collect()
        if self.turns.images is not None:
            for reply in replies:
                conversation = self._conversations[reply.episode]
                if reply.observation is not None and self._reads(conversation, reply.observation):
                    self.turns.images.prefetch(conversation.turn_name, reply.observation.messages or ())
        for reply in replies:
            self._on_reply(self._conversations[reply.episode], reply)
        if self._ended:
            self.pool.forget(self._ended)
            self._ended.clear()
        outgoing, self._outgoing = self._outgoing, []
        names: dict[tuple[bytes, ...], str] = {}
        for request in outgoing:
            request.group = names.setdefault(prompt_key(request), request.id)
        if outgoing:
            super().submit(RequestGroup.all_of(outgoing), _TURN_QUEUE)

    def _open(self, conversation: OpenConversation, added: _ReadObservation | None) -> None:
        """Requests the model's first turn, after the environment's first messages."""
        if added is not None:
            conversation.add_environment_tokens(*added)
        self._request_turn(conversation)

    def _read(self, conversation: OpenConversation, observation: Observation) -> _ReadObservation | None:
        """Returns the tokens with which a conversation continues after an observation, and its messages with empty
        parts for images; None if the model does not read it. Raises UnusableObservation."""
        if not self._reads(conversation, observation):
            return None
        messages = observation.turns(self.pool.role)
        images: Sequence[LoadedImage] = ()
        if self.turns.images is not None:
            messages, images = self.turns.images.load(conversation.turn_name, messages, len(conversation.images))
        if not conversation.segments:
            return self.turns.opening(conversation.prompt, messages, images), messages
        return self.turns.reply(conversation.prompt, messages, conversation.last_token, images), messages

    def _reads(self, conversation: OpenConversation, observation: Observation) -> bool:
        """Whether another turn of the model follows an observation, unless its tokens leave no room for one."""
        is_last = bool(conversation.segments) and conversation.turns + 1 >= self.config.max_turns
        return not (observation.done or is_last)

    def _request_turn(self, conversation: OpenConversation) -> None:
        """Queues the model's next turn."""
        request, prompt = conversation.requests[0], conversation.prompt.tokens
        left = request.max_tokens - conversation.size
        if left < 1:
            self._finish(conversation, "length", "tokens")
            return
        turn = conversation.turns
        self._outgoing.append(
            msgspec.structs.replace(
                request,
                id=f"{conversation.name}/turn{turn}",
                prompt=np.concatenate([prompt, *(segment.tokens for segment in conversation.segments)]),
                images=(*request.images, *(image.moved(prompt.size) for image in conversation.images)),
                seed=request_seed(conversation.seed, 0, "turn", turn) if turn else conversation.seed,
                max_tokens=min(left, self.config.max_turn_tokens or left),
                keep=turn + 1 < self.config.max_turns,
            )
        )

    def _on_turn(self, conversation: OpenConversation, turn: Completion) -> None:
        conversation.add_turn(turn)
        if turn.finish != "stop":
            self._finish(conversation, turn.finish, "tokens" if turn.finish == "length" else "abort")
        else:
            self.pool.step(conversation.name, turn.text)

    def _on_reply(self, conversation: OpenConversation, reply: EpisodeReply) -> None:
        is_reset = not conversation.segments
        observation, failure, added = reply.observation, reply.failure, None
        if observation is not None:
            try:
                added = self._read(conversation, observation)
            except UnusableObservation as error:
                observation, failure = None, EnvironmentFailure(str(error))
        if observation is None:
            assert failure is not None
            observation = self._on_failure(conversation, failure, is_reset)
            added = self._read(conversation, observation)
        conversation.add_metrics(observation.metrics)
        if is_reset:
            if observation.done:
                raise EnvironmentFailed(self.pool.path, "reset returned an observation that is done", conversation.name)
            self._open(conversation, added)
            return
        conversation.turns += 1
        conversation.episode.rewards.append(observation.reward)
        if observation.done:
            self._finish(conversation, *self._end_reason(conversation))
        elif conversation.turns >= self.config.max_turns:
            self._finish(conversation, "length", "turns")
        elif added is not None:
            self._continue(conversation, *added)

    def _continue(self, conversation: OpenConversation, added: TurnTokens, messages: Sequence[dict[str, Any]]) -> None:
        """Adds the environment's reply and requests the next turn, of each branch if the conversation branches."""
        if conversation.size + added.tokens.size >= conversation.requests[0].max_tokens:
            self._finish(conversation, "length", "tokens")  # the reply leaves no room for another turn
            return
        conversation.add_environment_tokens(added, messages)
        for branch in self._branches(conversation):
            self._request_turn(branch)

    def _branches(self, conversation: OpenConversation) -> list[OpenConversation]:
        """Returns the conversations that continue this one after a reply: itself, or its branches."""
        after = conversation.turns - 1
        if after >= len(self.config.branches) or self.config.branches[after] == 1:
            return [conversation]
        below = math.prod(self.config.branches[after + 1 :])
        branches: dict[int, list[Request]] = {}
        for request in conversation.requests:
            branches.setdefault(_completion_number(request) // below % self.config.branches[after], []).append(request)
        continued = []
        for number, requests in branches.items():
            seed = request_seed(conversation.seed, 0, "branch", number)
            branch = replace(
                conversation,
                requests=requests,
                seed=seed,
                segments=list(conversation.segments),
                episode=copy.deepcopy(conversation.episode),
            )
            if branch.name != conversation.name:
                self.pool.branch(conversation.name, branch.name)
            continued.append(branch)
        self._conversations.update((branch.name, branch) for branch in continued)
        return continued

    def _on_failure(self, conversation: OpenConversation, failure: EnvironmentFailure, is_reset: bool) -> Observation:
        """Returns an observation in place of the failed one: an error message, or the end of the conversation. Raises
        EnvironmentFailed if the failure ends the run."""
        if is_reset or self.config.on_error == "stop":
            raise EnvironmentFailed(
                self.pool.path, failure.problem, conversation.name, conversation.turns, failure.traceback
            )
        self._failures += 1
        if self._failures <= _MAX_LOGGED_FAILURES:
            trace = f"\n{failure.traceback}" if failure.traceback else ""
            log.warning(
                "%s, sample %s, turn %d: %s%s",
                self.pool.path,
                conversation.name,
                conversation.turns,
                failure.problem,
                trace,
            )
        if self.config.on_error == "end":
            conversation.episode.ended = "error"
            return Observation(done=True, metrics={"errors": 1.0})
        message = {"role": self.pool.role, "content": f"error: {failure.problem}"}
        return Observation(messages=[message], metrics={"errors": 1.0})

    def _end_reason(self, conversation: OpenConversation) -> tuple[FinishReason, EpisodeEnd]:
        if conversation.episode.ended == "error":
            return "abort", "error"
        return "stop", "answer" if self.config.path is None else "environment"

    def _finish(self, conversation: OpenConversation, finish: FinishReason, ended: EpisodeEnd) -> None:
        """Ends the conversation for all its requests."""
        del self._conversations[conversation.name]
        self._ended.append(conversation.name)
        segments = conversation.segments or [
            ConversationSegment(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), True)
        ]
        turns = [message["content"] for message in conversation.episode.messages if message["role"] == "assistant"]
        conversation.episode.ended = ended
        for request in conversation.requests:
            completion = Completion(
                request=request.id,
                tokens=np.concatenate([segment.tokens for segment in segments]),
                logprobs=np.concatenate([segment.logprobs for segment in segments]),
                versions=np.concatenate([segment.versions for segment in segments]),
                finish=finish,
                text=turns[-1] if turns else "",
                mask=np.concatenate([np.full(segment.tokens.size, segment.by_model) for segment in segments]),
                episode=copy.deepcopy(conversation.episode),
                images=conversation.images,
            )
            self._finished.setdefault(conversation.queue, []).append(completion)


def _completion_number(request: Request) -> int:
    """The number of a request's completion in its group."""
    last = request.id.rpartition("/")[2]
    return int(last) if last.isdecimal() else 0


def make_client(
    cluster: Cluster,
    workers: Sequence[Worker],
    rollout: RolloutConfig,
    seed: int,
    stall_s: float,
    turns: TurnTokenizer | None = None,
    launcher: WorkerLauncher | None = None,
    recovery: EngineRecovery | None = None,
    note: NoteRecovery = note_nothing,
) -> RolloutClient:
    """The client of started engines: a multi-turn one, with its environments started, if the config has any.

    Args:
        turns: makes the tokens between two turns; None without an environment.
        recovery: without it, an engine that fails ends the work, and no request is reissued.
    """
    reissue = rollout.reissue if recovery is not None else None
    common = workers, rollout.sampling, seed, stall_s, launcher, recovery, reissue
    if turns is None or rollout.environment is None:
        return RolloutClient(*common)
    pool = EnvironmentPool(cluster, rollout.environment, note=note)
    pool.start()
    return MultiTurnClient(*common, pool=pool, turns=turns)
