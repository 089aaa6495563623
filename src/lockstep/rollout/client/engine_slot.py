"""The slot of an engine in the pool: the current worker, and the calls to it that no thread waits for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.cluster.protocol import PendingResult, Worker
from lockstep.cluster.rpc.futures import on_answers
from lockstep.cluster.rpc.group_calls import submit_all, submit_in_turn
from lockstep.rollout.engine_protocol import CompletionBatch, EngineAPI, EngineProgress, RequestGroup

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
    collecting: "CollectCall | None" = None
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
        self.counters = self.aborting = None


class CollectCall:
    """A `collect` call of several engines.

    Args:
        answered: called in any thread with an `Answer`, whenever some of these engines have answered.
    """

    def __init__(self, slots: Sequence[EngineSlot], hold_s: float, answered: "Callable[[Answer], None]") -> None:
        filled = [slot for slot in slots if slot.worker is not None]
        self._workers = [slot.worker for slot in slots if slot.worker is not None]
        self.slots: Mapping[Worker, EngineSlot] = dict(zip(self._workers, filled, strict=True))
        """The slot of each worker when it was called."""
        for slot in filled:
            slot.collecting = self
        self._answered = answered
        self._arguments = [(hold_s,)] * len(filled)

    def submit(self) -> None:
        """Calls the engines."""
        self._watch(submit_all(self._workers, EngineAPI.collect, self._arguments))

    def submit_requests(self, requests: Sequence[list[RequestGroup]]) -> Sequence[PendingResult[None]]:
        """Sends requests to these engines, and calls them with the same message. Returns the calls that sent them."""
        submitted, calls = submit_in_turn(
            self._workers,
            (EngineAPI.submit, [(each,) for each in requests]),
            (EngineAPI.collect, self._arguments),
        )
        self._watch(calls)
        return submitted

    def _watch(self, calls: Sequence[PendingResult[CompletionBatch]]) -> None:
        self._calls = calls
        on_answers(self._workers, calls, self._on_answers)

    def of(self, worker: Worker) -> PendingResult[CompletionBatch]:
        """The call of one engine."""
        return self._calls[self._workers.index(worker)]

    def _on_answers(self, workers: Sequence[Worker], read: Callable[[], list[CompletionBatch]]) -> None:
        """Decodes answers in the thread that receives them, whose processor has them in its cache."""
        outcome: list[CompletionBatch] | Exception
        try:
            outcome = read()
        except Exception as error:  # noqa: BLE001 - the run's thread handles it
            outcome = error
        self._answered((self, workers, outcome))


Answer = tuple[CollectCall, Sequence[Worker], list[CompletionBatch] | Exception]
"""A call, the workers that have answered, and their completions, or why a single one has failed."""


def request_counters(slots: Iterable[EngineSlot]) -> None:
    """Calls `progress` of the engines in these slots."""
    filled = [(slot, slot.worker) for slot in slots if slot.worker is not None]
    calls = submit_all([worker for _, worker in filled], EngineAPI.progress, [()] * len(filled))
    for (slot, _), pending in zip(filled, calls, strict=True):
        slot.counters = pending
