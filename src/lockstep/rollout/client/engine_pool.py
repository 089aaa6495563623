"""All engine workers: requests are spread over the live engines, and lost engines are replaced.

Finished completions of a lost engine are kept; its unfinished requests go to the other engines at once, or to its
successor if it was the only one. Completions depend on the seeds of their requests, not on the engine that makes
them.
"""

import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from lockstep.base.bounded_wait import Stalled
from lockstep.cluster.protocol import PendingResult, RemoteError, Worker, WorkerDied
from lockstep.cluster.rpc.futures import CallError, call_duration_s, gather_outcomes
from lockstep.config.rollout import ReissueConfig
from lockstep.data.samples import Completion
from lockstep.rollout.client.engine_failover import EngineFailover, EngineLauncher
from lockstep.rollout.client.request_router import EngineLoad, EngineSlot, RequestRouter
from lockstep.rollout.client.stragglers import StragglerDetector
from lockstep.rollout.engine_protocol import CompletionBatch, EngineAPI, EngineProgress, Request
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.weights.weight_transport import WeightSource

T = TypeVar("T")

log = logging.getLogger(__name__)

COUNTERS_INTERVAL_S = 1.0
"""How often engines are asked for their counters while they are waited for; up to 64 of them, more less often."""


class EnginePool:
    """All engines. The run's thread submits and collects; losses are seen to by threads of their own, so that an engine
    comes back while the run waits for something else.

    Args:
        news: set when there is something to look at.
        choose: which engine gets a group, by what those that live owe; from any thread.
        hires: without, the first loss is an error.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        news: threading.Event,
        choose: Callable[[Sequence[Request], EngineLoad], int],
        hires: EngineLauncher | None = None,
        recovery: RecoveryManager | None = None,
        reissue: ReissueConfig | None = None,
    ) -> None:
        self._places = [EngineSlot(rank, worker) for rank, worker in enumerate(workers)]
        self._lock = threading.RLock()
        self._desk = RequestRouter(self._places, choose, news)
        self._laggards = StragglerDetector(reissue or ReissueConfig())
        self._count_at = 0.0
        self._returning = EngineFailover(self._desk, self._laggards, self._lock, news, hires, recovery)
        self.reissued = 0
        """Requests that were issued again, as the engine that had them was far behind."""
        for place, worker in zip(self._places, workers, strict=True):
            self._returning.watch(place, worker)

    @property
    def workers(self) -> list[Worker]:
        """Those that live."""
        return [place.worker for place in self._places if place.worker is not None]

    def submit(self, requests: Sequence[Request]) -> None:
        """Hands requests over, whole groups to the engine that `choose` names.

        Raises:
            RemoteError: BadRequest.
        """
        self._raise()
        with self._lock:
            self._desk.homeless += requests
            asked = self._desk.share_out()
        for place, worker, outcome in self._without_silent(asked, "hand over requests"):
            if isinstance(outcome, RemoteError):
                raise outcome
            if isinstance(outcome, WorkerDied | Stalled):
                self._returning.lose(place, worker, outcome)
        self._raise()

    def collect(self) -> list[Completion]:
        """What finished since the last call; returns at once. Raises what could not be healed."""
        self._raise()
        while self._desk.answers:
            self._fetch(*self._desk.answers.popleft())
        self._raise()
        with self._lock:
            ready, self._desk.ready = self._desk.ready, []
        return ready

    def load_weights(self, source: WeightSource, version: int, having: Collection[Worker] = ()) -> None:
        """Every engine but those `having` them takes the weights of `version_numbers`; one that is replaced meanwhile
        begins with them, and one whose node does not have them gives its requests to others and comes back when it
        has."""
        folders: dict[str, str] = {}
        with self._lock:
            self._returning.weights = source, version
            for place in self._places:
                if place.worker is not None and place.worker not in having:
                    folder = source.where(place.worker, version)
                    if folder is None:
                        self._returning.bench(place, place.worker, "until its node has the weights")
                    elif place.deaf:
                        self._returning.bench(place, place.worker, "until it answers")
                    else:
                        folders[place.worker.spec.name] = folder
            self._returning.listen(self._desk.share_out())
        self._all(
            lambda worker: worker.submit(EngineAPI.load_weights, folders[worker.spec.name], version),
            f"weights of version {version}", folders,
        )  # fmt: skip

    @property
    def changes(self) -> int:
        """Engines lost and come back: moves while nothing else does."""
        return self._returning.changes

    @property
    def moves(self) -> int:
        """Changes as those that owe something get on, as they say by themselves: nobody is asked."""
        return sum(place.worker.moves for place in self._places if place.open and place.worker is not None)

    def sleep(self) -> None:
        """Engines that owe nothing leave the devices to the trainer, and wake when something is wanted of them."""
        if not any(place.open for place in self._places):
            self._all(lambda worker: worker.submit(EngineAPI.sleep), "sleep")

    def progress(self) -> list[EngineProgress]:
        """Counters of those that live and answer."""
        names = {place.worker.spec.name for place in self._places if place.worker is not None and not place.deaf}
        return self._all(lambda worker: worker.submit(EngineAPI.progress), "progress", names)

    def begin_wait(self) -> None:
        """Somebody begins to wait for completions: how engines get on counts from now on."""
        self._laggards.begin(time.monotonic())

    def hurry(self, step: int) -> None:
        """Issues again what only engines far behind their peers still owe of steps up to `step`. Returns at once."""
        now = time.monotonic()
        if now < self._count_at or not self._laggards.config.enable:
            return
        with self._lock:
            living = [place for place in self._places if place.worker is not None]
            self._count_at = now + max(COUNTERS_INTERVAL_S, COUNTERS_INTERVAL_S * len(living) / 64)
            for place in living:
                self._count(place, now)
            waited = self._desk.waited_for(step)
            if not waited or self._desk.owed.held.issuperset(self._desk.owed.living - waited):
                return
            for rank, behind in self._laggards.behind(waited, now).items():
                self._laggards.punish(rank, behind, now)
                handed, count = self._desk.issue_again(rank, step)
                self._returning.listen(handed)
                self.reissued += count
                log.warning("engine-%d %s: %d requests are issued again to others", rank, behind.why, count)

    def _count(self, place: EngineSlot, now: float) -> None:
        """Asks for an engine's counters, and looks at what it said when it was asked last. Needs the lock."""
        (self._laggards.owes if place.open else self._laggards.rests)(place.rank, now)
        if place.counters is not None and place.counters.done():
            with contextlib.suppress(RemoteError, WorkerDied):  # whoever needs it hears of that
                self._laggards.observe(place.rank, now, place.counters.result(why="counters"))
                if not place.open and not place.deaf and self._laggards.pardoned(place.rank, now):
                    self._desk.forgive(place.rank)
            place.counters = None
        held = place.rank in self._desk.owed.held
        if place.counters is None and place.worker is not None and (place.open or held):
            place.counters = place.worker.submit(EngineAPI.progress)

    def stalled(self, error: Stalled) -> bool:
        """Nothing has moved: who owes something is lost. Whether that helps."""
        owing = [(place, place.worker) for place in self._places if place.worker is not None and place.open]
        for place, worker in owing:
            self._returning.lose(place, worker, error)
        return bool(owing) and self._returning.error is None

    def moves_of(self, chosen: Callable[[Worker], bool]) -> dict[str, int]:
        """How far engines are, by name, those that are in no place included."""
        return self._returning.moves(self._places, chosen)

    def end(self, chosen: Callable[[Worker], bool], why: str) -> bool:
        """Ends engines, those that are in no place included; whether there was one."""
        return self._returning.end(self._places, chosen, why)

    def close(self) -> None:
        """Nobody is replaced any more."""
        with self._lock:
            self._returning.closed = True

    # --- requests

    def _fetch(self, place: EngineSlot, asked: PendingResult[CompletionBatch]) -> None:
        """Takes what an engine has told, and asks for more."""
        with self._lock:
            worker = place.worker
            if place.asked is not asked or worker is None:
                return
        try:
            collected = asked.result(why="completions")
        except (RemoteError, WorkerDied) as error:
            self._returning.lose(place, worker, error)
            return
        with self._lock:
            if place.asked is asked:
                place.asked = None
                self._desk.take(place, collected)
                self._desk.ask(place)

    # --- losses

    def _all(
        self, ask: Callable[[Worker], PendingResult[T]], why: str, names: Collection[str] | None = None
    ) -> list[T]:
        """The answers of all (of those names) that live to the end of the call."""
        self._raise()
        with self._lock:
            living = [(place, place.worker) for place in self._places if place.worker is not None]
            asked = [
                (place, worker, ask(worker)) for place, worker in living if names is None or worker.spec.name in names
            ]
        found = []
        for place, worker, outcome in self._without_silent(asked, why):
            if isinstance(outcome, RemoteError | WorkerDied | Stalled):
                self._returning.lose(place, worker, outcome)
            else:
                found.append(outcome)
        self._raise()
        return found

    def _without_silent(
        self, asked: Sequence[tuple[EngineSlot, Worker, PendingResult[T]]], why: str
    ) -> list[tuple[EngineSlot, Worker, T | CallError]]:
        """What was answered. Who is silent for long, while another engine is not, is left out until it answers: for
        `after_s`, and for as long as one takes that does it at the slowest speed that is not far behind."""
        config, pendings = self._laggards.config, [pending for _, _, pending in asked]
        patience_s = config.after_s if config.enable and len(self.workers) > 1 else None
        outcomes = gather_outcomes(pendings, why, patience_s)
        if patience_s is not None and sum(isinstance(each, Stalled) for each in outcomes) == len(self.workers):
            outcomes = gather_outcomes(pendings, why)  # nobody is faster, so this takes as long as it takes
        elif patience_s is not None and any(isinstance(each, Stalled) for each in outcomes):
            took = [call_duration_s(pending) for pending in pendings if pending.done()]
            usual_s = statistics.median(took) if took else 0.0
            if usual_s > config.slower_than * patience_s:
                outcomes = gather_outcomes(pendings, why, usual_s / config.slower_than)
            with self._lock:
                for (place, worker, _), outcome in zip(asked, outcomes, strict=True):
                    if isinstance(outcome, Stalled):
                        self._returning.bench(place, worker, "until it answers")
                self._returning.listen(self._desk.share_out())
        # whoever is benched has no worker: losing it changes nothing
        return [(place, worker, outcome) for (place, worker, _), outcome in zip(asked, outcomes, strict=True)]

    def _raise(self) -> None:
        if self._returning.error is not None:
            raise self._returning.error
