"""Runs py-spy for an agent: one child at a time, with a bound, driven by the agent's selector."""

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.watch import stacks

log = logging.getLogger(__name__)

Told = Callable[[tuple[stacks.Thread, ...]], None]
"""Takes the stacks; none where there are none to be had."""


@dataclass
class _Dump:
    pid: int
    native: bool
    told: Told
    child: "subprocess.Popen[bytes] | None" = None
    pidfd: int = -1
    deadline: float = 0.0
    output: bytes = b""


class Spy:
    """Takes stacks of processes. `told` is called from the agent's loop, exactly once per order."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._waiting: deque[_Dump] = deque()
        self._now: _Dump | None = None
        self.available = stacks.command(1) is not None

    @property
    def busy(self) -> bool:
        return self._now is not None or bool(self._waiting)

    @property
    def holds(self) -> int | None:
        """The process that is stopped, or about to be, for its native stack."""
        return self._now.pid if self._now is not None and self._now.native else None

    def order(self, pid: int, told: Told, native: bool = False, first: bool = False) -> None:
        """Has stacks taken of a process, `first` before those that wait already."""
        dump = _Dump(pid, native, told)
        if first:
            self._waiting.appendleft(dump)
        else:
            self._waiting.append(dump)
        self._next()

    def tick(self) -> None:
        """Ends a dump that takes too long."""
        dump = self._now
        if dump is not None and time.monotonic() >= dump.deadline:
            log.warning("the stacks of %d took more than %g s", dump.pid, stacks.LIMIT_S)
            self._finish(dump, whole=False)

    def close(self) -> None:
        """Ends what is under way; nobody is told. Idempotent."""
        self._waiting.clear()
        if self._now is not None:
            self._now.told = lambda threads: None
            self._finish(self._now, whole=False)

    def _next(self) -> None:
        while self._now is None and self._waiting:
            dump = self._waiting.popleft()
            argv = stacks.command(dump.pid, dump.native)
            try:
                if argv is None:
                    raise OSError("py-spy is not installed")
                child = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError:
                dump.told(())
                continue
            assert child.stdout is not None
            dump.child, dump.deadline = child, time.monotonic() + stacks.LIMIT_S
            with contextlib.suppress(OSError):
                dump.pidfd = os.pidfd_open(child.pid)
            os.set_blocking(child.stdout.fileno(), False)
            self._now = dump
            self._selector.register(child.stdout, selectors.EVENT_READ, lambda mask, dump=dump: self._hear(dump))

    def _hear(self, dump: _Dump) -> None:
        assert dump.child is not None and dump.child.stdout is not None
        try:
            data = os.read(dump.child.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        dump.output += data
        if not data or len(dump.output) > stacks.MAX_BYTES:
            self._finish(dump, whole=not data)

    def _finish(self, dump: _Dump, whole: bool) -> None:
        assert dump.child is not None and dump.child.stdout is not None
        self._selector.unregister(dump.child.stdout)
        dump.child.stdout.close()
        if dump.pidfd >= 0:  # the agent's loop may have collected it already: its pid may be somebody else's
            if not whole:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(dump.pidfd, signal.SIGKILL)
            os.close(dump.pidfd)
        dump.child.returncode = dump.child.returncode or 0  # the agent's loop collects it
        self._now = None
        dump.told(stacks.parse(dump.output) if whole else ())
        self._next()
