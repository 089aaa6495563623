"""What every rollout engine can do, in process (`RolloutEngine`) and as a worker (`EngineAPI`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.cluster.protocol import concurrent
from lockstep.data.samples import Completion, FinishReason


@dataclass(slots=True)
class Request:
    """One completion that is wanted."""

    id: str
    group: str
    """Requests of one group have the same prompt: it is prefilled once and its K/V is shared."""
    prompt: np.ndarray
    """int32 `[prompt tokens]`."""
    seed: int
    """The completion depends on this seed and on nothing else in the batch (up to floating point)."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    """Lower ones are admitted first; those of equal priority in the order in which they came."""
    keep: bool = False
    """Its keys and values are worth keeping when it ends: a prompt that begins with it may follow."""


@dataclass(slots=True)
class EngineProgress:
    """Counters that move while an engine works; readable at any time."""

    tokens: int
    """Generated since the engine started."""
    waiting: int
    running: int
    finished: int
    version: int
    paused: bool
    prefix_cache_queries: int = 0
    """Tokens of prompts that were looked up among what is kept of sequences that ended."""
    prefix_cache_hits: int = 0
    """Those of them whose keys and values were there, and were not computed again."""


class RolloutEngine(Protocol):
    """A continuous-batching engine. Not thread-safe: one thread calls it."""

    version: int
    """Weights version being served."""
    slower: str
    """Why it does not decode by the fastest way there is; empty where it does."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. ValueError names the request whose prompt and max_tokens exceed the context."""

    def step(self) -> list[Completion]:
        """One turn: admits waiting requests (prefill), decodes one token of every running row, and returns
        what finished. Returns at once when there is nothing to do or the engine is paused."""

    def abort(self, ids: Sequence[str] | None = None) -> list[Completion]:
        """Ends the given requests (all when None) and returns what they had, with `finish="abort"`."""

    def load_weights(self, source: Path, version: int) -> None:
        """Takes weights between two decode steps from the weight room's store at `source`.

        Running rows go on (their later tokens carry the new version); prompts' K/V is recomputed or kept as
        the engine documents it."""

    def receive_weights(self, where: Mapping[str, Any], version: int) -> None:
        """As `load_weights`, from the trainer's device, as `user_code_line` says (the weight room's word to its own
        end here).

        Raises:
            WeightsMismatch: other tensors than the model's; nothing was touched.
            RuntimeError: the version did not come, or not whole. The engine goes on with the weights it has, or, where
                it overwrites them bucket by bucket, serves nobody until it has taken a version whole."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def sleep(self, level: int = 1) -> None:
        """Gives memory back while others need it; whatever needs it wakes the engine. At level 1 it keeps its weights
        (in host memory, where they were on a GPU), at level 2 it may forget them: new ones must be loaded.
        ValueError where requests are under way."""

    def wake(self) -> None: ...

    def progress(self) -> EngineProgress: ...

    def close(self) -> None:
        """Ends the engine."""


ENGINE_SERVICE = "lockstep.rollout.engine_service:EngineService"


@dataclass(slots=True)
class CompletionBatch:
    """Finished completions that were not acknowledged yet, oldest first. In columns: a step has thousands."""

    sequence: int
    """Number of the last of them since the engine started; acknowledge with it."""
    requests: list[str]
    finishes: list[FinishReason]
    texts: list[str]
    sizes: list[int]
    """Tokens of each."""
    tokens: bytes
    """int32, of one after the other."""
    logprobs: bytes
    """float32."""
    versions: bytes
    """int32."""

    @classmethod
    def of(cls, sequence: int, completions: Sequence[Completion]) -> "CompletionBatch":
        """ValueError for what no engine makes: tokens of an environment."""
        if any(each.mask is not None or each.episode is not None for each in completions):
            raise ValueError("an engine's completions have neither a mask nor an episode")
        return cls(
            sequence,
            [each.request for each in completions],
            [each.finish for each in completions],
            [each.text for each in completions],
            [len(each.tokens) for each in completions],
            b"".join(np.asarray(each.tokens, np.int32).tobytes() for each in completions),
            b"".join(np.asarray(each.logprobs, np.float32).tobytes() for each in completions),
            b"".join(np.asarray(each.versions, np.int32).tobytes() for each in completions),
        )

    @property
    def completions(self) -> list[Completion]:
        """Of their own memory, each call."""
        tokens = np.frombuffer(bytearray(self.tokens), np.int32)
        logprobs = np.frombuffer(bytearray(self.logprobs), np.float32)
        versions = np.frombuffer(bytearray(self.versions), np.int32)
        found, begin = [], 0
        for request, finish, text, size in zip(self.requests, self.finishes, self.texts, self.sizes, strict=True):
            end = begin + size
            found.append(Completion(request, tokens[begin:end], logprobs[begin:end], versions[begin:end], finish, text))
            begin = end
        return found


class EngineAPI(Protocol):
    """Calls to a `lockstep.rollout.engine_service:EngineService` worker."""

    def submit(self, requests: list[Request]) -> None:
        """Queues requests, all or none. ValueError (BadRequest) names the one that cannot be served."""

    def collect(self, ack: int = 0, hold_s: float = 0.0) -> CompletionBatch:
        """What finished since `ack`, the `sequence` of the newest `CompletionBatch` that has arrived safely (0:
        none). The answer comes when something has; up to `hold_s` later where the engine still has requests that are
        as urgent.

        At least once: completions stay until they are acknowledged, so a lost answer loses nothing; who asks
        again with the same `ack` gets them again. Raises what stopped the engine, if something did.
        """

    def abort(self, ids: list[str] | None = None) -> None:
        """Ends requests (all when None); what they had comes with the next `collect`, as `finish="abort"`."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def renew(self) -> None:
        """Forgets all requests, finished ones included; the model stays loaded."""

    def sleep(self, level: int = 1) -> None:
        """Gives memory back while others need it (see `RolloutEngine.sleep`); whatever needs it wakes the engine.
        ValueError where requests are under way."""

    def wake(self) -> None: ...

    def load_weights(self, source: str, version: int) -> None:
        """Takes a version from the weight room's store, between two decode steps."""

    def receive_weights(self, where: dict[str, Any], version: int) -> None:
        """Takes a version as it comes from the trainer's device (see `RolloutEngine.receive_weights`)."""

    def slower(self) -> str:
        """Why it does not decode by the fastest way there is; empty where it does."""

    @concurrent
    def progress(self) -> EngineProgress:
        """Counters; answers at any time."""
