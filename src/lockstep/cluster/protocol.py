"""The protocol of worker processes and of the cluster that starts them, the same for local processes and Ray.

A worker process hosts one *service*: an object whose class has typed methods. The controller holds a `Worker` handle
and names methods by a class that imports little, such as `TrainerAPI`, so that mypy checks the arguments and the codec
knows the types:

    pending = worker.submit(TrainerAPI.step, microbatches, loss)
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
    """A node of a run."""

    name: str
    """Name shown to users."""
    address: str
    """Address at which other nodes reach it."""
    shared: Path
    """The run's folder in the node's shared memory."""


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
    """Modules that a fork server imports once; workers with the same `preload` are forked from it."""
    adoptable: bool = False
    """Whether the run's next controller may adopt the process. The service must have a method `renew()`."""
    node: str | None = None
    """Name of the node that it must run on; if None, the placement decides."""
    placement_limit_s: float | None = None
    """How long to wait for resources that other runs use, before the start fails with WorkerDied; if None, the
    cluster's config decides."""


def successor_name(name: str) -> str:
    """The name of a worker's replacement: `engine-0.1` after `engine-0`, then `engine-0.2`. So the beacons and logs of
    dead workers keep their names."""
    stem, dot, number = name.rpartition(".")
    return f"{stem}.{int(number) + 1}" if dot and number.isdigit() else f"{name}.1"


class RemoteError(PicklableError, RuntimeError):
    """An exception that was raised in a worker. Decisions depend on `code` (`lockstep.base.errors.error_code`), never
    on `kind`, the dotted path of the exception's class."""

    def __init__(self, worker: str, rank: int, kind: str, message: str, traceback: str, code: str = "") -> None:
        super().__init__(f"{kind} in {worker}: {message}\n\n--- traceback in {worker} ---\n{traceback}")
        self.worker, self.rank, self.kind, self.message, self.traceback = worker, rank, kind, message, traceback
        self.code = code


class WorkerDied(PicklableError, RuntimeError):
    """A worker ended while it was needed.

    Args:
        exit_code: negative for a signal; None if unknown, because the worker's node or the node's agent was lost.
        log_tail: the last lines of the worker's log.
        lost: which node was lost, and why.
    """

    def __init__(self, worker: str, rank: int, exit_code: int | None, log_tail: str, lost: str = "") -> None:
        how = f"exited with {exit_code}" if exit_code is not None else f"vanished ({lost})" if lost else "vanished"
        super().__init__(f"{worker} {how}" + (f"\n\n--- end of its log ---\n{log_tail}" if not lost else ""))
        self.worker, self.rank, self.exit_code, self.log_tail, self.lost = worker, rank, exit_code, log_tail, lost

    @property
    def with_node(self) -> bool:
        """Whether the worker was lost with its node or the node's agent, so that its own end is unknown."""
        return self.exit_code is None

    @property
    def how(self) -> str:
        """How the worker ended, as a verb phrase."""
        if self.exit_code is None:
            return f"vanished ({self.lost})" if self.lost else "vanished"
        if self.exit_code < 0:
            return f"was ended by signal {-self.exit_code}"
        return f"exited with {self.exit_code}"

    @property
    def last_words(self) -> str:
        """The end of the worker's log under a heading; empty if the log is empty."""
        return f"--- end of the log of {self.worker} ---\n{self.log_tail}" if self.log_tail.strip() else ""


class PendingResult(Protocol[R_co]):
    """A call in progress."""

    def done(self) -> bool: ...

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the call is done, in the thread that receives the result; immediately if it is already
        done."""

    def result(self, why: str, stall_s: float | None = None) -> R_co:
        """Waits for the result as long as the worker makes progress.

        Raises:
            Stalled: the worker made no progress for `stall_s` (by default the cluster's limit).
            RemoteError, WorkerDied: the call failed.
        """


class Worker(Protocol):
    """A handle to a worker process."""

    spec: WorkerSpec
    pid: int
    progress_count: int
    """Grows whenever the worker reports progress; while it works, it reports about once a second."""

    def submit(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> PendingResult[R]:
        """Sends the call. Calls of one worker run in the order of submission, except those whose service method is
        marked `@concurrent`: they run immediately, even during another call."""

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`submit(...).result(why=method name)`."""

    def alive(self) -> bool: ...

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        """Calls `callback` once it is known that the worker ended, in the thread that notices it; immediately if it is
        already known."""


class Cluster(Protocol):
    """Starts and stops workers."""

    def place(self, spec: WorkerSpec) -> None:
        """Waits until there is a place for a worker, and starts nothing. Raises what `WorkerLauncher.place` raises."""

    def start(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        """Starts all workers in parallel, and returns when every service is constructed. Raises RemoteError if a
        constructor raised."""

    def stop(self, worker: Worker, grace_s: float = 5.0) -> None:
        """Asks the worker to exit, and kills it after `grace_s`."""

    def nodes(self) -> list[NodeInfo]:
        """The nodes that are alive, the controller's first."""

    def node_of(self, worker: Worker) -> NodeInfo:
        """The node that a worker runs on."""

    def store(self) -> str:
        """URL of the run's rendezvous store, which does not run in any rank; see `rendezvous_store.open_store`."""

    def close(self) -> None:
        """Stops all workers and agents. Idempotent; leaves no process behind."""


class WorkerLauncher(Protocol):
    """Starts the workers of a run's roles, and their replacements after a failure. Any thread may call its methods."""

    def place(self, role: str, ranks: Sequence[int]) -> None:
        """Waits until the nodes have a place for these ranks of a role; `launch` then starts them without this wait.

        Raises:
            WaitTimeout: no node has free resources for a worker.
        """

    def launch(self, role: str, ranks: Sequence[int] = (), node: NodeInfo | None = None) -> list[Worker]:
        """Starts these ranks of a role, or its worker on a node; replaces earlier workers of the same ranks or node.

        Raises:
            RemoteError, WorkerDied: a worker did not start.
            WaitTimeout: no node has free resources for a worker.
            ValueError: there is no such node.
        """

    def kill(self, workers: Sequence[Worker]) -> None:
        """Kills workers at once, whatever they are doing; some may have ended already."""


def concurrent(method: Callable[P, R]) -> Callable[P, R]:
    """Marks a service method that may run during another call, in the worker's I/O thread; it must be fast."""
    method.__lockstep_concurrent__ = True  # type: ignore[attr-defined]
    return method


class DeferredResult(Generic[T]):
    """A result that is not available yet: a service method returns it, and the caller gets the value once it is set.

    Meanwhile the service runs other calls and its background work; as long as they make progress, the caller waits.
    Only the service's main thread may use it; only the first outcome is sent.
    """

    def __init__(self) -> None:
        self.patience_s = 0.0
        """How long the value may wait for those of other workers of its node that have the same method to answer."""
        self._outcome: tuple[T | None, Exception | None] | None = None
        self._callback: Callable[[T | None, Exception | None], None] | None = None

    def settle(self, value: T, patience_s: float = 0.0) -> None:
        """Sets the value."""
        self.patience_s = patience_s
        self._set_outcome(value, None)

    def fail(self, error: Exception) -> None:
        """Sets an error, which the caller gets as if the method had raised it."""
        self._set_outcome(None, error)

    def on_settled(self, callback: Callable[[T | None, Exception | None], None]) -> None:
        """Calls `callback(value, error)` once the result is set; immediately if it is already set."""
        self._callback = callback
        if self._outcome is not None:
            callback(*self._outcome)

    def _set_outcome(self, value: T | None, error: Exception | None) -> None:
        if self._outcome is None:
            self._outcome = value, error
            if self._callback is not None:
                self._callback(value, error)


RESERVED_NAMES = ("agent", "controller", "supervisor")
"""Names of processes of a run that are not workers."""

_WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,94}")


def check_worker_names(specs: Sequence[WorkerSpec], living: Collection[str]) -> None:
    """Raises ValueError if a name cannot be a file name, is reserved, or is the name of a living worker."""
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
