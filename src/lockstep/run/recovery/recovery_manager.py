"""Keeps the history of failures, decides what to do about each, and reports it: on the console at once, in the ledger
from the run's thread.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from lockstep.base import waits
from lockstep.base.bounded_wait import WaitTimeout
from lockstep.cluster.worker_failures import WorkerFailure
from lockstep.config.fault_tolerance import RecoveryConfig as Config
from lockstep.ledger.ledger import Ledger
from lockstep.report.run_incidents import RECOVERY_EVENT
from lockstep.run.errors import GaveUp
from lockstep.run.recovery.restart_policy import FewerRanks, RestartRole, StopRun, decide_recovery

log = logging.getLogger(__name__)


class VerdictSource(Protocol):
    """Where confirmed verdicts come from: the supervisor."""

    def subscribe(self, act: Callable[[Sequence[str], str], Sequence[str]]) -> None:
        """`act(workers, why)` is to be called, from any thread, with those whom a verdict names; it returns whom it has
        ended."""


class RecoveryManager:
    """What the roles ask when something of theirs failed. Any thread may."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.config = config
        self.step = -1
        """Under way; -1 before the first."""
        self._ledger = ledger
        self._history: list[WorkerFailure] = []
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._kill: Callable[[str], bool] | None = None
        self._accused: dict[str, str] = {}
        """By worker: the verdict that names it. Empty for one that had ended by then: its end speaks for itself."""
        self._heard = threading.Event()
        """A verdict has come."""

    def decide(self, failure: WorkerFailure, cause: Exception, fewer: int | None = None) -> RestartRole | FewerRanks:
        """The restart that a failure gets; `fewer` ranks would do for the trainer.

        Raises:
            GaveUp: it gets none, and why.
            Exception: `cause`, where that says it all.
        """
        with self._lock:
            action = decide_recovery(failure, self._history, self.config, fewer)
            if not isinstance(action, StopRun):
                self._history.append(failure)
        what, why = self._what(failure), self._accused.get(failure.worker)
        facts = {"worker": failure.worker, "role": failure.role, "what": failure.what, "step": failure.step}
        self.note("failed", **facts, **({"why": why} if why else {}))
        if isinstance(action, StopRun):
            self.note("gave up", **facts, reason=action.reason)
            if not action.reason:
                raise cause
            raise GaveUp(failure.worker, f"{what} ({why})" if why else what, action.reason) from cause
        if isinstance(action, FewerRanks):
            log.warning(
                "%s %s: no replacement can be had, training goes on with ranks=%d (recovery.fewer_ranks); the result "
                "will be that of the undisturbed run to about 1e-5, and not bitwise",
                failure.worker, what, action.ranks,
            )  # fmt: skip
            self.note("fewer ranks", worker=failure.worker, role=failure.role, ranks=action.ranks)
            return action
        log.warning(
            "%s %s in step %d; restart %d of %d within %g s begins",
            failure.worker, what, failure.step + 1, action.number, action.budget.max_restarts, action.budget.window_s,
        )  # fmt: skip
        return action

    def restarted(self, failure: WorkerFailure, seconds: float, text: str, **facts: Any) -> None:
        """A failure is healed: `text` says what came of it, for a sentence that goes on after the time it took."""
        log.warning("%s %s; restarted in %.1f s%s", failure.worker, self._what(failure), seconds, text)
        facts |= {"what": failure.what, "step": failure.step, "seconds": round(seconds, 3)}
        self.note("restarted", worker=failure.worker, role=failure.role, **facts)

    def _what(self, failure: WorkerFailure) -> str:
        """How it failed, in a line that comes after the verdict, where it was ended for one."""
        return "was ended" if self._accused.get(failure.worker) and failure.how == "died" else failure.what

    def note(self, action: str, **fields: Any) -> None:
        """Something for the ledger; written by the next `flush`."""
        self._events.put({"action": action, "at": time.time(), **fields})

    def flush(self) -> None:
        """Writes what was noted into the ledger. From the run's thread, the ledger's only writer."""
        while not self._events.empty():
            self._ledger.event(RECOVERY_EVENT, **self._events.get_nowait())

    def listen(self, verdicts: VerdictSource, kill: Callable[[str], bool]) -> None:
        """Lets confirmed verdicts act: their culprits are killed, and what follows is recovery from their deaths.

        Args:
            kill: ends the worker of that name at once; whether there was one.
        """
        self._kill = kill
        verdicts.subscribe(self.failed)

    def failed(self, workers: Sequence[str], why: str) -> list[str]:
        """Workers that a verdict names; those that lived, and were ended for it."""
        ended = []
        for worker in workers:
            self._accused[worker] = why  # before its end is heard of
            if self._kill is not None and self._kill(worker):
                ended.append(worker)
            else:
                self._accused[worker] = ""
                log.info("%s is accused (%s) and no worker of this run any more", worker, why)
        self._heard.set()
        return ended

    def accused(self, workers: Collection[str], timeout_s: float) -> str | None:
        """The one of these workers that a verdict names, or will name within so long."""
        until = time.monotonic() + timeout_s
        while True:
            self._heard.clear()
            found = next((worker for worker in workers if worker in self._accused), None)
            left = until - time.monotonic()
            if found is not None or self._kill is None or left <= 0:
                return found
            with contextlib.suppress(WaitTimeout):
                waits.event(
                    self._heard,
                    waits_for="supervisor",
                    why="the culprits of its verdict",
                    timeout_s=left,
                    notice_after_s=None,
                )
