"""`python -m lockstep.cluster.rpc.worker_main`: a process that hosts one service, with a redacted log.

The variable `LOCKSTEP_WORKER` names the worker's manifest, a JSON file; `LOCKSTEP_TOKEN` contains the run's token.
Neither is an argument, since other users can read those. The controller's address is in the run's shared memory
(`Leader`). stdout and stderr are the worker's log; SIGUSR1 writes all stacks to it.
"""

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
from lockstep.base.transport.run_token import TOKEN_VARIABLE
from lockstep.cluster.rpc.controller_connection import ORPHANED_EXIT_CODE, ControllerConnection
from lockstep.cluster.rpc.rpc_messages import MANIFEST_VARIABLE, WorkerManifest
from lockstep.cluster.rpc.service_runner import ServiceRunner, load_service
from lockstep.watch.agent.service_discovery import Leader
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.recorder import recorder

log = logging.getLogger(__name__)


class RedactedStream(io.TextIOWrapper):
    """Redacts secrets in each line before writing it. Each thread has its own unfinished line.

    Args:
        known: secret values, in addition to those that are recognised by their form.
    """

    def __init__(self, buffer: BinaryIO, known: Collection[str]) -> None:
        super().__init__(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._known = known
        self._unfinished = threading.local()

    def write(self, text: str) -> int:
        lines, newline, rest = (getattr(self._unfinished, "text", "") + text).rpartition("\n")
        self._unfinished.text = rest
        if newline:
            super().write(redact_text(lines, self._known) + newline)
        return len(text)

    def flush(self) -> None:
        """Also writes an unfinished line, as progress bars need. A secret that is split by the flush is not found."""
        rest = getattr(self._unfinished, "text", "")
        if rest:
            self._unfinished.text = ""
            super().write(redact_text(rest, self._known))
        super().flush()


def redact_worker_output(name: str) -> None:
    """Redacts the output of this process's Python code, loggers and tracebacks: values that look like secrets, and
    values of environment variables whose names do. SIGUSR1 and crashes write all stacks to stderr.

    The output of C libraries and child processes is not redacted.
    """
    known = secret_values(os.environ)
    sys.stdout, sys.stderr = (RedactedStream(stream.buffer, known) for stream in (sys.stdout, sys.stderr))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname).1s %(name)s: %(message)s"
    )
    logging.getLogger("lockstep").setLevel(logging.INFO)


def main() -> int:
    """Runs the service until the controller ends it; returns the exit code."""
    manifest = WorkerManifest.read(Path(os.environ[MANIFEST_VARIABLE]))
    token = os.environ.pop(TOKEN_VARIABLE)
    redact_worker_output(manifest.name)
    leader = Leader.read(manifest.run)
    if leader is None or leader.generation != manifest.generation:
        log.warning(
            "the controller that started this worker (generation %d) no longer has the run", manifest.generation
        )
        return ORPHANED_EXIT_CODE
    open_beacon(manifest.run, manifest.name, manifest.role, manifest.rank).stage("start")
    controller = ControllerConnection(manifest.run, manifest.name, token, leader)
    service = ServiceRunner(lambda: load_service(manifest.service, manifest.arguments), controller)

    def terminate(number: int, frame: FrameType | None) -> None:
        controller.signal_handled()
        service.interrupt(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    controller.start(service)
    log.info("%s, pid %d, service %s", manifest.name, os.getpid(), manifest.service)
    try:
        service.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        controller.flush(1.0)
        controller.finished()
    log.info("exiting")
    recorder.uninstall()
    close_beacon()
    return ORPHANED_EXIT_CODE if controller.orphaned else 0


if __name__ == "__main__":
    sys.exit(main())
