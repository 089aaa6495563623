"""An engine as the controller sees it: typed calls, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lockstep.cluster.protocol import concurrent
from lockstep.data.samples import Completion, FinishReason
from lockstep.rollout.protocol import EngineProgress, Request

SERVICE = "lockstep.rollout.service:EngineService"


@dataclass(slots=True)
class Collected:
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
    def of(cls, sequence: int, completions: Sequence[Completion]) -> "Collected":
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
    """Calls to a `lockstep.rollout.service:EngineService` worker."""

    def submit(self, requests: list[Request]) -> None:
        """Queues requests, all or none. ValueError (BadRequest) names the one that cannot be served."""

    def collect(self, ack: int = 0, hold_s: float = 0.0) -> Collected:
        """What finished since `ack`, the `sequence` of the newest `Collected` that has arrived safely (0: none). The
        answer comes when something has; up to `hold_s` later where the engine still has requests that are as urgent.

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
