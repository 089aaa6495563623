"""Worker processes, the cluster that starts them, and typed calls to them: one protocol for local processes and Ray.

A worker process hosts one *service*: an object whose class has typed methods. The controller holds a `Worker`
handle and calls it through unbound methods of a (light) protocol class, so that mypy checks the arguments and the
codec knows the types:

    pending = worker.submit(TrainerService.step, microbatches, loss)
    stats = pending.result(why="train step 12")
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from lockstep.base.errors import PicklableError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A host of a run."""

    name: str
    """As users know it."""
    address: str
    """At which the other nodes reach it."""
    shared: Path
    """The run's folder in its shared memory."""


@dataclass(slots=True)
class WorkerSpec:
    """Describes a worker process to start."""

    name: str
    """Unique in the run, e.g. `policy-1`; also the name of its beacon."""
    role: str
    rank: int
    service: str
    """`package.module:Class`, constructed in the worker with `arguments` as keywords."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """JSON-like values (configs travel as `model_dump(mode="json")`)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    """Modules that a warm template process imports once, before workers of the same `preload` are forked from it."""
    adoptable: bool = False
    """Whether the run's next controller may adopt the process: its service has a `renew()`."""
    node: str | None = None
    """Name of the node that it must run on; the placement decides when None."""
    place_limit_s: float | None = None
    """How long to wait for resources that other runs use; then the worker counts as dead. The cluster's config decides
    when None."""


def successor_name(name: str) -> str:
    """The name of a worker's replacement: `engine-0.1` after `engine-0`, then `engine-0.2`. Dead workers keep their
    names, and so their beacons and logs."""
    place, dot, life = name.rpartition(".")
    return f"{place}.{int(life) + 1}" if dot and life.isdigit() else f"{name}.1"


class RemoteError(PicklableError, RuntimeError):
    """An exception that was raised in a worker: its type, message, worker and remote traceback. Decisions depend on
    `code` (`lockstep.base.errors.error_code`), never on `kind`, the dotted path of its class."""

    def __init__(self, worker: str, rank: int, kind: str, message: str, traceback: str, code: str = "") -> None:
        super().__init__(f"{kind} in {worker}: {message}\n\n--- traceback in {worker} ---\n{traceback}")
        self.worker, self.rank, self.kind, self.message, self.traceback = worker, rank, kind, message, traceback
        self.code = code


class WorkerDied(PicklableError, RuntimeError):
    """A worker ended while it was needed: exit code or signal, and the last lines of its log; or its node was lost:
    which node and why."""

    def __init__(self, worker: str, rank: int, exit_code: int | None, log_tail: str, lost: str = "") -> None:
        how = f"exited with {exit_code}" if exit_code is not None else f"vanished ({lost})" if lost else "vanished"
        super().__init__(f"{worker} {how}" + (f"\n\n--- end of its log ---\n{log_tail}" if not lost else ""))
        self.worker, self.rank, self.exit_code, self.log_tail, self.lost = worker, rank, exit_code, log_tail, lost

    @property
    def with_node(self) -> bool:
        """Whether it is only known that its node, or the node's agent, was lost: the worker's own end is unknown."""
        return self.exit_code is None

    @property
    def how(self) -> str:
        """How it ended, as the predicate of a sentence about the process."""
        if self.exit_code is None:
            return f"vanished ({self.lost})" if self.lost else "vanished"
        if self.exit_code < 0:
            return f"was ended by signal {-self.exit_code}"
        return f"exited with {self.exit_code}"

    @property
    def last_words(self) -> str:
        """The end of its log under a heading; empty when the log is."""
        return f"--- end of the log of {self.worker} ---\n{self.log_tail}" if self.log_tail.strip() else ""


class PendingResult(Protocol[R_co]):
    """A call in progress."""

    def done(self) -> bool: ...

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the call is done, in the thread that receives the result; at once when it is done."""

    def result(self, why: str, stall_s: float | None = None) -> R_co:
        """Waits for the result as long as the worker makes progress; after `stall_s` (the cluster's limit when
        None) without any, raises `lockstep.base.wait_state.Stalled`. Raises RemoteError or WorkerDied."""


class Worker(Protocol):
    """A handle to a worker process."""

    spec: WorkerSpec
    pid: int
    moves: int
    """Grows whenever the worker reports progress, which it does about once a second while it has work."""

    def submit(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> PendingResult[R]:
        """Sends the call. Calls of one worker run in the order of submission, except those whose service method is
        marked `@concurrent` (they run immediately, beside a running call)."""

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`submit(...).result(why=method name)`."""

    def alive(self) -> bool: ...

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        """Calls `callback` once the worker's end is known, in the thread that learns of it; at once when it is."""


class Cluster(Protocol):
    """Starts and stops workers."""

    def start(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        """Starts all (in parallel) and returns when every service is constructed, waiting visibly for those
        that are not. Raises RemoteError when a constructor raised."""

    def stop(self, worker: Worker, grace_s: float = 5.0) -> None:
        """Tells the worker to exit, and kills it after the grace."""

    def nodes(self) -> list[NodeInfo]:
        """The nodes that are alive, the controller's first."""

    def node_of(self, worker: Worker) -> NodeInfo:
        """The node that a worker runs on."""

    def store(self) -> tuple[str, int]:
        """Host and port of a rendezvous store (torch TCPStore protocol) that lives outside the ranks."""

    def close(self) -> None:
        """Stops every worker and the agent. Idempotent; leaves no orphan."""


class WorkerLauncher(Protocol):
    """Starts the workers of a run's roles, and their successors after a failure. Any thread may call."""

    def launch(self, role: str, ranks: Sequence[int] = (), node: NodeInfo | None = None) -> list[Worker]:
        """Starts these ranks of a role, or its worker on a node, as successors of any earlier ones.

        Raises:
            RemoteError, WorkerDied: a worker did not start.
            WaitTimeout: there is no place for it.
            ValueError: there is no such node.
        """

    def kill(self, workers: Sequence[Worker]) -> None:
        """Ends workers at once, whatever they do; they may have ended already."""


def concurrent(method: Callable[P, R]) -> Callable[P, R]:
    """Marks a service method that may run beside a running call, in the worker's I/O thread; it must be fast."""
    method.__lockstep_concurrent__ = True  # type: ignore[attr-defined]
    return method


class DeferredResult(Generic[T]):
    """A result that is not available yet: a service method returns it, and the caller gets the value once it is set.

    Meanwhile the service runs other calls and its background work, whose progress keeps the caller waiting. Created,
    settled and failed in the service's main thread; only the first outcome counts.
    """

    def __init__(self) -> None:
        self._outcome: tuple[T | None, Exception | None] | None = None
        self._callback: Callable[[T | None, Exception | None], None] | None = None

    def settle(self, value: T) -> None:
        """Sets the value."""
        self._end(value, None)

    def fail(self, error: Exception) -> None:
        """Sets an error, which the caller gets as if the method had raised it."""
        self._end(None, error)

    def on_settled(self, callback: Callable[[T | None, Exception | None], None]) -> None:
        """Calls `callback(value, error)` once the result is set; at once when it is."""
        self._callback = callback
        if self._outcome is not None:
            callback(*self._outcome)

    def _end(self, value: T | None, error: Exception | None) -> None:
        if self._outcome is None:
            self._outcome = value, error
            if self._callback is not None:
                self._callback(value, error)


RESERVED_NAMES = ("agent", "controller", "supervisor")
"""Names that other beacons of a run have."""

_WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,94}")


def check_worker_names(specs: Sequence[WorkerSpec], living: Collection[str]) -> None:
    """Raises ValueError for a name that cannot be a file name, or that another worker has."""
    taken = set(living)
    for spec in specs:
        if not _WORKER_NAME.fullmatch(spec.name) or spec.name in RESERVED_NAMES:
            raise ValueError(
                f"worker name {spec.name!r}: expected up to 95 letters, digits, '.', '_' or '-', and not one of "
                f"{', '.join(RESERVED_NAMES)}"
            )
        if spec.name in taken:
            raise ValueError(f"worker name {spec.name!r} is taken; names are unique in a run")
        taken.add(spec.name)
