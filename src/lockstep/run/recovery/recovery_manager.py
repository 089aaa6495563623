"""Keeps the history of failures, decides what to do about each, and reports it: immediately in the log and on the
console, later in the ledger, which only the run's thread writes.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from lockstep.base import waits
from lockstep.base.secrets import redact, secret_values
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.protocol import Worker
from lockstep.cluster.worker_failures import WorkerFailure
from lockstep.config.fault_tolerance import RecoveryConfig as Config
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_incidents import RECOVERY_EVENT
from lockstep.run.errors import GaveUp
from lockstep.run.recovery.restart_policy import FewerRanks, RestartWorkers, StopRun, decide_recovery

log = logging.getLogger(__name__)


VERDICT_AFTER_ABORT_S = 2.0
"""Longest wait, after ranks have left their collectives, for the verdict that names the culprit."""


class VerdictSource(Protocol):
    """The source of confirmed verdicts."""

    def subscribe(self, act: Callable[[Sequence[str], str], Sequence[str]]) -> None:
        """Registers `act(culprits, why)`, which is called for each confirmed verdict, from any thread. It kills
        culprits and returns the names of those that it killed."""


class RecoveryManager:
    """Decides about failed workers of all roles. Any thread may call its methods, except for `flush`."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.config = config
        self.step = 0
        """The step in progress, from 1; 0 before the first."""
        self._ledger = ledger
        self._history: list[WorkerFailure] = []
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._kill: Callable[[str], bool] | None = None
        self._accused: dict[str, str] = {}
        """By worker, the text of the verdict that names it; "" if the worker had already ended, as its end explains
        more."""
        self._verdict_arrived = threading.Event()

    def decide(self, failure: WorkerFailure, cause: Exception, fewer: int | None = None) -> RestartWorkers | FewerRanks:
        """Decides how to restart after a failure.

        Args:
            fewer: a smaller number of ranks with which the trainer could continue.

        Raises:
            GaveUp: the worker is not restarted; says why.
            Exception: `cause` itself, if the worker is not restarted and `cause` needs no further explanation.
        """
        with self._lock:
            action = decide_recovery(failure, self._history, self.config, fewer)
            if not isinstance(action, StopRun):
                self._history.append(failure)
        what, why = self._failure_text(failure), self._accused.get(failure.worker)
        facts = {"worker": failure.worker, "role": failure.role, "what": failure.what, "step": failure.step}
        self.note("failed", **facts, **({"why": why} if why else {}))
        if isinstance(action, StopRun):
            self.note("gave up", **facts, reason=action.reason)
            if not action.reason:
                raise cause
            raise GaveUp(failure.worker, f"{what} ({why})" if why else what, action.reason) from cause
        if isinstance(action, FewerRanks):
            log.warning(
                "%s %s: no replacement available; continuing with %d ranks (recovery.fewer_ranks). The result will "
                "match that of an undisturbed run to about 1e-5, not bitwise",
                failure.worker, what, action.ranks,
            )  # fmt: skip
            self.note("fewer ranks", worker=failure.worker, role=failure.role, ranks=action.ranks)
            return action
        log.warning(
            "%s %s in step %d; starting restart %d of %d within %g s",
            failure.worker, what, failure.step, action.number, action.budget.max_restarts, action.budget.window_s,
        )  # fmt: skip
        return action

    def restarted(self, failure: WorkerFailure, seconds: float, text: str, **facts: Any) -> None:
        """Reports a restart; `text` continues the log message after its duration."""
        log.warning("%s %s; restarted in %.1f s%s", failure.worker, self._failure_text(failure), seconds, text)
        facts |= {"what": failure.what, "step": failure.step, "seconds": round(seconds, 3)}
        self.note("restarted", worker=failure.worker, role=failure.role, **facts)

    def _failure_text(self, failure: WorkerFailure) -> str:
        """How a worker failed; only "was killed" if a verdict, named in the message before, was the reason."""
        return "was killed" if self._accused.get(failure.worker) and failure.how == "died" else failure.what

    def note(self, action: str, **fields: Any) -> None:
        """Queues an event for the ledger; the next `flush` writes it. Errors' messages may contain secrets, which are
        hidden."""
        self._events.put({"action": action, "at": time.time(), **redact(fields, secret_values(os.environ))})

    def flush(self) -> None:
        """Writes the events into the ledger. Only the run's thread may call it: no other thread may write there."""
        while not self._events.empty():
            self._ledger.record_event(RECOVERY_EVENT, **self._events.get_nowait())

    def listen(self, verdicts: VerdictSource, kill: Callable[[str], bool]) -> None:
        """Makes confirmed verdicts kill their culprits, so that recovery restarts these.

        Args:
            kill: kills the worker of that name; returns whether it was running.
        """
        self._kill = kill
        verdicts.subscribe(self.kill_culprits)

    def kill_culprits(self, workers: Sequence[str], why: str) -> list[str]:
        """Kills the workers that a verdict names, and returns those that were still alive."""
        killed = []
        for worker in workers:
            self._accused[worker] = why  # before its death is reported
            if self._kill is not None and self._kill(worker):
                killed.append(worker)
            else:
                self._accused[worker] = ""
                log.info("%s is named by a verdict (%s) and has already ended", worker, why)
        self._verdict_arrived.set()
        return killed

    def accused_rank(self, role: str, workers: Sequence[Worker], starting: bool = False) -> WorkerFailure | None:
        """Returns the failure of a rank that a verdict names as the one that held up the others, now or soon after the
        ranks have left their collectives; None if there is none.

        Args:
            workers: the ranks of the role.
        """
        ranks = {worker.spec.name: worker.spec.rank for worker in workers}
        name = self._accused_worker(ranks, VERDICT_AFTER_ABORT_S)
        if name is None:
            return None
        what = "held up the other ranks"
        return WorkerFailure(role, name, ranks[name], "stalled", what, step=self.step, starting=starting)

    def _accused_worker(self, workers: Collection[str], timeout_s: float) -> str | None:
        until = time.monotonic() + timeout_s
        while True:
            self._verdict_arrived.clear()
            found = next((worker for worker in workers if worker in self._accused), None)
            left = until - time.monotonic()
            if found is not None or self._kill is None or left <= 0:
                return found
            with contextlib.suppress(WaitTimeout):
                waits.event(
                    self._verdict_arrived,
                    waits_for="supervisor",
                    why="the culprits of its verdict",
                    timeout_s=left,
                    notice_after_s=None,
                )
