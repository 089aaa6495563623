"""What every rollout engine can do: one protocol for the builtin engine, vLLM and what may come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.data.samples import Completion


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
        """As `load_weights`, from the trainer's device, as `where` says (the weight room's word to its own end here).

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
