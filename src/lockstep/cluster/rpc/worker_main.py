"""The C library's allocator in a worker that computes: it keeps its memory."""

import ctypes
import faulthandler
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from lockstep.base.secrets import redact_text, secret_values
from lockstep.cluster.rpc.controller_connection import ORPHANED_EXIT_CODE, ControllerConnection
from lockstep.cluster.rpc.rpc_messages import MANIFEST_VARIABLE, WorkerManifest
from lockstep.cluster.rpc.service_runner import ServiceRunner, load_service
from lockstep.watch.agent.service_discovery import Leader
from lockstep.watch.beacon import writer
from lockstep.watch.recorder import recorder

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_RETAINED_BYTES = 2**30


def tune_malloc() -> bool:
    """Lets glibc keep what a step frees for the next step: otherwise every large tensor is new pages from the kernel.

    Returns:
        Whether it is done; False where the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (
        mallopt(_M_MMAP_THRESHOLD, _RETAINED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _RETAINED_BYTES)
    ):
        log.warning("malloc is to be tuned, but this C library's malloc cannot be: left as it is")
        return False
    return True


class RedactedStream(io.TextIOWrapper):
    """Text that is searched for secrets before it is written, line by line; each thread has its own unfinished line.

    Args:
        known: values that are secrets, besides what looks like one.
    """

    def __init__(self, buffer: BinaryIO, known: Collection[str]) -> None:
        super().__init__(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._known = known
        self._unfinished = threading.local()

    def write(self, text: str) -> int:
        whole, newline, rest = (getattr(self._unfinished, "text", "") + text).rpartition("\n")
        self._unfinished.text = rest
        if newline:
            super().write(redact_text(whole, self._known) + newline)
        return len(text)

    def flush(self) -> None:
        """Writes an unfinished line as well, as progress bars want it. A secret in two such pieces is not seen."""
        rest = getattr(self._unfinished, "text", "")
        if rest:
            self._unfinished.text = ""
            super().write(redact_text(rest, self._known))
        super().flush()


def redact_worker_output(name: str) -> None:
    """Sends what Python prints in this process, its loggers and tracebacks to stdout and stderr without what looks like
    a secret or is the value of a variable that is called like one; SIGUSR1 and crashes write all stacks to stderr.

    What is written past Python, by a library in C or a child process, stays as it is.
    """
    known = secret_values(os.environ)
    sys.stdout, sys.stderr = (RedactedStream(stream.buffer, known) for stream in (sys.stdout, sys.stderr))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname).1s %(name)s: %(message)s"
    )
    logging.getLogger("lockstep").setLevel(logging.INFO)


TOKEN_VARIABLE = "LOCKSTEP_TOKEN"


def main() -> int:
    """Serves until it is told to leave; returns the exit code."""
    charge = WorkerManifest.read(Path(os.environ[MANIFEST_VARIABLE]))
    token = os.environ.pop(TOKEN_VARIABLE)
    redact_worker_output(charge.name)
    leader = Leader.read(charge.run)
    if leader is None or leader.generation != charge.generation:
        log.warning("the controller that ordered this worker (generation %d) has the run no more", charge.generation)
        return ORPHANED_EXIT_CODE
    writer.open_beacon(charge.run, charge.name, charge.role, charge.rank).stage("start")
    uplink = ControllerConnection(charge.run, charge.name, token, leader)
    service = ServiceRunner(lambda: load_service(charge.service, charge.arguments), uplink)

    def terminate(number: int, frame: FrameType | None) -> None:
        uplink.heard()
        service.interrupt(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uplink.start(service)
    log.info("%s, pid %d, service %s", charge.name, os.getpid(), charge.service)
    try:
        service.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        uplink.flush(1.0)
        uplink.finished()
    log.info("leaving")
    recorder.uninstall()
    writer.close_beacon()
    return ORPHANED_EXIT_CODE if uplink.orphaned else 0


if __name__ == "__main__":
    sys.exit(main())
