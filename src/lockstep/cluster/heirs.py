"""Workers that an earlier generation has left, until this one asks for such workers."""

import logging
from collections.abc import Callable, Mapping, Sequence

from lockstep.cluster.calls import settle
from lockstep.cluster.charge import Charge
from lockstep.cluster.node import Node
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.remote import RemoteWorker
from lockstep.watch.agent_client import WorkerFacts
from lockstep.watch.errors import first_line

log = logging.getLogger(__name__)

ADOPTION_S = 10.0
"""Who makes no progress for so long on the way to us is replaced."""


class Heirs:
    """Those that are left.

    Args:
        handle: makes the handle on a worker that somebody else has started, on a node.
        end: ends workers at once.
    """

    def __init__(
        self,
        handle: Callable[[WorkerSpec, Node], RemoteWorker],
        end: Callable[[Sequence[RemoteWorker]], None],
    ) -> None:
        self._handle, self._end = handle, end
        self._left: dict[RemoteWorker, str] = {}
        """With what each is fit for."""

    def meet(self, node: Node, workers: Sequence[WorkerFacts]) -> None:
        """Takes those of a node that live and that somebody can go on with; ends the others."""
        others: list[RemoteWorker] = []
        for facts in workers:
            if facts.alive:
                charge = Charge.of(facts.note)
                worker = self._handle(WorkerSpec(facts.name, "", 0, "") if charge is None else charge.spec, node)
                worker.pid = facts.pid
                if charge is not None and charge.fitness:
                    self._left[worker] = charge.fitness
                else:
                    others.append(worker)
        self._end(others)

    def claim(self, specs: Sequence[WorkerSpec], fitness: Callable[[WorkerSpec, Node], str]) -> dict[int, RemoteWorker]:
        """Those that do for some of these, by their numbers. Others whose places are asked for end."""
        if not self._left:
            return {}
        found: dict[int, RemoteWorker] = {}
        for number, spec in enumerate(specs):
            fit = next((w for w, what in self._left.items() if self._fits(w, what, spec, fitness)), None)
            if fit is not None:
                del self._left[fit]
                found[number] = fit
        places = {(spec.role, spec.rank) for spec in specs}
        self._give_up([worker for worker in self._left if (worker.spec.role, worker.spec.rank) in places])
        return found

    @staticmethod
    def _fits(worker: RemoteWorker, what: str, spec: WorkerSpec, fitness: Callable[[WorkerSpec, Node], str]) -> bool:
        place = worker.spec.role, worker.spec.rank
        fits = spec.adoptable and not worker.dead and place == (spec.role, spec.rank)
        return fits and what == fitness(spec, worker.node)

    def lost(self, claimed: Mapping[int, RemoteWorker]) -> list[int]:
        """Those that do not come over to us, or that cannot be used again after all; they have ended."""
        outcomes = settle([worker.started for worker in claimed.values()], why="adoption", stall_s=ADOPTION_S)
        lost: list[int] = []
        for (number, worker), outcome in zip(claimed.items(), outcomes, strict=True):
            if outcome is None:
                log.info("%s (pid %d) is adopted", worker.name, worker.pid)
            else:
                log.info("%s (pid %d) is replaced: %s", worker.name, worker.pid, first_line(outcome))
                lost.append(number)
        self._end([claimed[number] for number in lost])
        return lost

    def release(self) -> None:
        """Ends those that nobody has asked for."""
        self._give_up(list(self._left))

    def _give_up(self, workers: Sequence[RemoteWorker]) -> None:
        for worker in workers:
            del self._left[worker]
        self._end(workers)
