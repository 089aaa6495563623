"""The slot of an engine in the pool: the current worker, and the calls to it that no thread waits for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from lockstep.cluster.protocol import PendingResult, Worker
from lockstep.cluster.rpc.group_calls import submit_all
from lockstep.rollout.engine_protocol import CompletionBatch, EngineAPI, EngineProgress

HOLD_PER_ENGINE_S = 1e-3
"""Times the number of engines: how long an engine may hold completions back while it has other requests that are as
urgent. So the controller of a thousand engines gets several completions per answer."""
MAX_HOLD_S = 1.0
"""The longest hold: finished completions are saved once a second."""


@dataclass(slots=True, eq=False)
class EngineSlot:
    """The slot of one engine. It gets another worker when the engine is replaced."""

    rank: int
    worker: Worker | None
    """None while the engine is being replaced or is excluded."""
    acknowledged: int = 0
    """Sequence number of the newest completion that arrived."""
    collecting: PendingResult[CompletionBatch] | None = None
    """The `collect` call that is not answered, or whose answer is not read yet."""
    counters: PendingResult[EngineProgress] | None = None
    """The newest `progress` call, until its answer is read."""
    aborting: PendingResult[None] | None = None
    """The newest `abort` call."""

    @property
    def silent(self) -> bool:
        """Whether the engine has not answered its newest `abort` call."""
        return self.aborting is not None and not self.aborting.done()

    def reset(self) -> None:
        """Prepares the slot for the next worker."""
        self.acknowledged, self.counters, self.aborting = 0, None, None


def request_completions(
    slots: Iterable[EngineSlot], hold_s: float, answered: Callable[[EngineSlot, PendingResult[CompletionBatch]], None]
) -> None:
    """Calls `collect` of the engines in these slots. When one answers, `answered` is called in any thread."""
    filled = [(slot, slot.worker) for slot in slots if slot.worker is not None]
    arguments = ((slot.acknowledged, hold_s) for slot, _ in filled)
    calls = submit_all([worker for _, worker in filled], EngineAPI.collect, arguments)
    for (slot, _), pending in zip(filled, calls, strict=True):
        slot.collecting = pending
        pending.on_done(partial(answered, slot, pending))


def request_counters(slots: Iterable[EngineSlot]) -> None:
    """Calls `progress` of the engines in these slots."""
    filled = [(slot, slot.worker) for slot in slots if slot.worker is not None]
    calls = submit_all([worker for _, worker in filled], EngineAPI.progress, [()] * len(filled))
    for (slot, _), pending in zip(filled, calls, strict=True):
        slot.counters = pending
