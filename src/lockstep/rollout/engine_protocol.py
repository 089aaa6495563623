"""The interface of rollout engines, in process (`RolloutEngine`) and as a worker (`EngineAPI`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.cluster.protocol import concurrent
from lockstep.data.samples import Completion, FinishReason


@dataclass(slots=True)
class Request:
    """A request for one completion."""

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
    """Lower values are admitted first, equal ones in the order of submission."""
    keep: bool = False
    """Keep its keys and values when it ends: a prompt that begins with it may follow."""


@dataclass(slots=True)
class EngineProgress:
    """Counters of an engine; they can be read at any time."""

    tokens: int
    """Tokens generated since the engine started."""
    waiting: int
    running: int
    finished: int
    version: int
    paused: bool
    prefix_cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens whose keys and values were found there."""


class RolloutEngine(Protocol):
    """A continuous-batching engine. Not thread-safe: one thread calls it."""

    version: int
    """Weights version being served."""
    slower: str
    """Why it does not decode in the fastest possible way; "" if it does."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. ValueError names the request whose prompt and max_tokens exceed the context."""

    def step(self) -> list[Completion]:
        """Admits waiting requests (prefill), decodes one token of every running row, and returns completions. Returns
        at once when there is nothing to do or the engine is paused."""

    def abort(self, ids: Sequence[str] | None = None) -> list[Completion]:
        """Ends requests (all if None) and returns their partial completions, with `finish="abort"`."""

    def load_weights(self, source: Path, version: int) -> None:
        """Loads weights between two decode steps from the weight store at `source`.

        Running rows continue (their later tokens carry the new version); whether the KV cache of prompts is recomputed
        is documented by each engine."""

    def receive_weights(self, where: Mapping[str, Any], version: int) -> None:
        """Like `load_weights`, as a stream from the trainer's device; `where` describes the stream to the receiver.

        Raises:
            WeightsMismatch: the tensors are not the model's; nothing was changed.
            RuntimeError: the version did not arrive completely. The engine keeps its weights or, if it overwrites them
                bucket by bucket, serves no request until it has loaded a complete version."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def sleep(self, level: int = 1) -> None:
        """Releases device memory; the next call that needs it wakes the engine. At level 1 it keeps its weights (in
        host memory if they were on a GPU), at level 2 it may drop them: new ones must be loaded. ValueError if there
        are open requests."""

    def wake(self) -> None: ...

    def progress(self) -> EngineProgress: ...

    def close(self) -> None:
        """Ends the engine."""


ENGINE_SERVICE = "lockstep.rollout.engine_service:EngineService"


@dataclass(slots=True)
class CompletionBatch:
    """Completions that were not acknowledged yet, oldest first; in columns, as a step has thousands."""

    sequence: int
    """Number of the last one since the engine started; the next `collect` acknowledges it."""
    requests: list[str]
    finishes: list[FinishReason]
    texts: list[str]
    sizes: list[int]
    """The number of tokens of each completion."""
    tokens: bytes
    """int32, one completion after the other."""
    logprobs: bytes
    """float32."""
    versions: bytes
    """int32."""

    @classmethod
    def of(cls, sequence: int, completions: Sequence[Completion]) -> "CompletionBatch":
        """Raises ValueError for tokens of an environment, which no engine makes."""
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
        """Returns the completions. Each call copies the arrays."""
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
        """Queues all requests or none. Raises BadRequest for one that cannot be served."""

    def collect(self, ack: int = 0, hold_s: float = 0.0) -> CompletionBatch:
        """Completions after number `ack`, the `sequence` of the newest batch that has arrived (0: none). The answer
        comes when there are some, up to `hold_s` later while the engine has other requests that are as urgent.

        Completions are delivered at least once: they are kept until they are acknowledged, so a lost answer loses none.
        Raises the error that stopped the engine, if there is one.
        """

    def abort(self, ids: list[str] | None = None) -> None:
        """Ends requests (all if None); the next `collect` has their partial completions, with `finish="abort"`."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def renew(self) -> None:
        """Drops all requests and completions; the model stays loaded."""

    def sleep(self, level: int = 1) -> None:
        """Releases device memory (see `RolloutEngine.sleep`). ValueError if there are open requests."""

    def wake(self) -> None: ...

    def load_weights(self, source: str, version: int) -> None:
        """Loads a version from the weight store, between two decode steps."""

    def receive_weights(self, where: dict[str, Any], version: int) -> None:
        """Loads a version as a stream from the trainer's device (see `RolloutEngine.receive_weights`)."""

    def slower(self) -> str:
        """Why it does not decode in the fastest possible way; "" if it does."""

    @concurrent
    def progress(self) -> EngineProgress:
        """Counters; answers at any time."""
