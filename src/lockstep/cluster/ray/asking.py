"""Questions to Ray. None of its calls has a bound: where the head is gone they are never answered."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import ray

from lockstep.cluster.places import Silent
from lockstep.watch import waits
from lockstep.watch.bounded import begun
from lockstep.watch.errors import first_line
from lockstep.watch.waits import WaitTimeout

T = TypeVar("T")
log = logging.getLogger(__name__)

ASK_S = 10.0


class RaySilent(Silent):
    """Ray does not answer now, or not with what it was asked for."""


class _Silence:
    """Since when Ray does not answer, as long as it does not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Future[Any] | None = None
        self._since = 0.0

    def still(self) -> float | None:
        """For how many seconds; None where Ray answers."""
        with self._lock:
            if self._open is not None and self._open.done():
                self._open = None
                log.warning("Ray answers again, after %.0f s", time.monotonic() - self._since)
            return None if self._open is None else time.monotonic() - self._since

    def begins(self, question: "Future[Any]", since: float, why: str) -> None:
        with self._lock:
            if self._open is None:
                self._open, self._since = question, since
                log.warning(
                    "Ray has not answered for %.0f s (%s): the run goes on with the nodes that it has, and nothing is "
                    "reserved until Ray answers", time.monotonic() - since, why,
                )  # fmt: skip


_silence = _Silence()


def ask(call: Callable[[], T], why: str, timeout_s: float = ASK_S) -> T:
    """What a call of Ray returns, or raises. Where an earlier one has not returned yet, none is made.

    Raises:
        RaySilent: it did not return in time, or with one of Ray's own errors.
    """
    silent_s = _silence.still()
    if silent_s is not None:
        raise RaySilent(f"Ray has not answered for {silent_s:.0f} s ({why})")
    since, question = time.monotonic(), begun(call, "asks Ray")
    try:
        return waits.future(question, whom="Ray", why=why, timeout_s=timeout_s)
    except ray.exceptions.RayError as error:
        raise RaySilent(f"Ray does not say ({why}): {first_line(error)}") from error
    except WaitTimeout as error:
        _silence.begins(question, since, why)
        raise RaySilent(f"Ray has not answered for {timeout_s:.0f} s ({why})") from error


def forget() -> None:
    """What a session that has ended has not answered."""
    global _silence
    _silence = _Silence()
