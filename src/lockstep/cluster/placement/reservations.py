"""Keeps the resources that are reserved for each process of a run, and reserves new ones after the loss of a node."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lockstep.base import waits
from lockstep.cluster.placement.assignment import Assignment, DoesNotFit, NodesBusy, assign, relax_placement
from lockstep.cluster.placement.bundles import NodeResources, PlacementError, ProcessRequest, make_bundles
from lockstep.config.cluster import PlacementConfig
from lockstep.config.roles import ROLES_WITHOUT_RANKS

log = logging.getLogger(__name__)

POLL_S = 0.5
UNBOUNDED_S = 10 * 365 * 86400.0
"""Ten years: a wait for other runs has no bound, but notices show it."""


class ReservationConflict(PlacementError):
    """Resources that were free a moment ago are no longer free."""


class AllocatorUnavailable(ConnectionError):
    """The resource manager cannot report or reserve resources at the moment."""


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """The node and GPUs of a process."""

    node: str
    """Id of the node."""
    gpus: tuple[str, ...] = ()
    """In the form of CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Resources that are reserved together on one node."""

    group: str
    """Id of the placement group, by which the reservation is released."""
    node: str
    """Id of the node."""
    gpus: dict[str, tuple[str, ...]]
    """GPUs by process, in the form of CUDA_VISIBLE_DEVICES."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """From the JSON of `asdict`."""
        return cls(data["group"], data["node"], {name: tuple(gpus) for name, gpus in data["gpus"].items()})


ReserveFunction = Callable[[Assignment], list[Reservation]]
"""Reserves all of an assignment or nothing. Raises ReservationConflict, among other errors."""


class ReservationTable:
    """The reservations of planned processes, by planned name. A replacement uses the reservation of its predecessor.

    Args:
        held: reservations of an earlier controller of the run.

    A process that lost its reservation has none until `replace`. One thread at a time may call `reserve_all` or
    `replace`.
    """

    def __init__(
        self, requests: Sequence[ProcessRequest], placement: PlacementConfig, held: Sequence[Reservation] = ()
    ) -> None:
        self._requests, self._placement = {each.name: each for each in requests}, placement
        self.held = list(held)
        self._unused: set[str] = set()
        """Ranks without which the trainer now runs."""
        self._notice, self._noticed_at = "", 0.0
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        """Whether resources are reserved for the process according to the plan."""
        return name in self._requests

    def placement_of(self, name: str) -> ProcessPlacement | None:
        """Where the process runs; None if nothing is reserved for it."""
        held = next((each for each in self.held if name in each.gpus), None)
        return None if held is None else ProcessPlacement(held.node, held.gpus[name])

    def processes_on(self, node: str) -> int:
        """How many processes have their places on a node."""
        return sum(len(each.gpus) for each in self.held if each.node == node)

    def needs_gpus(self, name: str) -> bool:
        return self._requests[name].gpus > 0

    def reserve_all(
        self,
        list_nodes: Callable[[], list[NodeResources]],
        reserve: ReserveFunction,
        busy_limit_s: float | None,
        notice_after_s: float,
    ) -> None:
        """Reserves resources for each process, as soon as other runs have released enough.

        Args:
            list_nodes: returns the current nodes; called again later if it raises AllocatorUnavailable.

        Raises:
            PlacementError, DoesNotFit: the run would not fit on idle nodes either.
            WaitTimeout: other runs did not release enough within the limit.
        """

        def attempt() -> bool | None:
            try:
                assignment = assign(list(self._requests.values()), self._placement, list_nodes())
                self._record(reserve(assignment), assignment, logging.WARNING if self._notice else logging.INFO)
            except (NodesBusy, ReservationConflict, AllocatorUnavailable) as error:
                self.notify(str(error), again_after_s=6 * notice_after_s)
                return None
            return True

        waits.poll(
            attempt, kind="placement", waits_for="nodes of the cluster", why="resources that are in use become free",
            every_s=POLL_S, timeout_s=busy_limit_s or UNBOUNDED_S, notice_after_s=None,
        )  # fmt: skip

    def drop_node(self, node: str) -> list[str]:
        """Drops the reservations on a lost node. Returns the groups to release."""
        with self._lock:
            lost = [each for each in self.held if each.node == node]
            self.held = [each for each in self.held if each.node != node]
        return [each.group for each in lost]

    def set_ranks(self, ranks: Collection[str], nodes: Collection[str]) -> None:
        """Sets the current trainer ranks of one role. A rank without a reservation on one of these nodes (given by id)
        gets the reservation of a rank that is no longer used."""
        roles = {self._requests[name].role for name in ranks if name in self._requests}
        trained = [each.name for each in self._requests.values() if each.role in roles]
        with self._lock:
            self._unused = self._unused - set(trained) | {name for name in trained if name not in ranks}
            free = [name for name in trained if name in self._unused and self._is_on(name, nodes)]
            for name in ranks:
                if free and name in self._requests and not self._is_on(name, nodes):
                    self._exchange(name, free.pop(0))

    def replace(self, name: str, nodes: Sequence[NodeResources], reserve: ReserveFunction) -> None:
        """Reserves a new place for the process, and for all others without one, on free resources. If there is too
        little, trainer ranks have priority, as the run cannot continue without them.

        Raises:
            PlacementError: no place; and what `reserve` raises.
        """
        refused: PlacementError | None = None
        for requests in self._request_sets(name):
            try:
                assignment = assign(requests, relax_placement(self._placement), nodes, complete=False)
            except (NodesBusy, DoesNotFit) as error:
                refused = refused or error
                continue
            self._record(reserve(assignment), assignment, logging.WARNING)
            return
        assert refused is not None
        raise refused

    def notify(self, text: str, again_after_s: float = float("inf")) -> None:
        """Logs why a process has no place: once per reason."""
        now = time.monotonic()
        if text != self._notice or now - self._noticed_at > again_after_s:
            log.warning("%s", text)
            self._notice, self._noticed_at = text, now

    # ---

    def _unplaced(self) -> list[ProcessRequest]:
        placed = {name for each in self.held for name in each.gpus}
        return [each for name, each in self._requests.items() if name not in placed and name not in self._unused]

    def _request_sets(self, name: str) -> Iterator[list[ProcessRequest]]:
        """Sets of processes to reserve for together: all that have no place, else as few as possible."""
        unplaced = self._unplaced()
        yield unplaced
        bundles = make_bundles(unplaced, relax_placement(self._placement), complete=False)
        own = next(bundle for bundle in bundles if name in bundle.processes)
        first = [bundle for bundle in bundles if bundle is own or set(bundle.roles) - set(ROLES_WITHOUT_RANKS)]
        names = {name for bundle in first for name in bundle.processes}
        if len(names) < len(unplaced):
            yield [each for each in unplaced if each.name in names]

    def _record(self, held: list[Reservation], assignment: Assignment, level: int) -> None:
        with self._lock:
            self.held = [*self.held, *held]
        self._notice = ""
        for node, address, processes, cpus, gpus in assignment.rows():
            available = f"{cpus} CPUs" + (f" and {gpus} GPUs" if gpus else "")
            log.log(level, "reserved for %s on %s (%s): %s", processes, node, address, available)

    def _is_on(self, name: str, nodes: Collection[str]) -> bool:
        place = self.placement_of(name)
        return place is not None and place.node in nodes

    def _exchange(self, one: str, other: str) -> None:
        def renamed(name: str) -> str:
            return {one: other, other: one}.get(name, name)

        self.held = [
            Reservation(each.group, each.node, {renamed(name): gpus for name, gpus in each.gpus.items()})
            for each in self.held
        ]
