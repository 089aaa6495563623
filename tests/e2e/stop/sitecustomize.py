"""Stops every process of a run at its next use of the file system once a certain file exists (a pattern in the
environment), so that a test can look, and kill, between two writes that belong together, however busy the machine is.
Python imports a module of this name at its start; `zygote.py` puts this folder into the path of the processes of such a
run."""

import glob
import os
import signal
import sys
import threading

STOP_WHEN = "LOCKSTEP_TEST_STOP_WHEN"
_EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"})


def stop_when(pattern: str) -> None:
    looking = threading.local()

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event not in _EVENTS or getattr(looking, "now", False):
            return
        looking.now = True  # to look is a use of the file system, too
        if glob.glob(pattern):  # noqa: PTH207 - pathlib would have to be imported by every process
            os.kill(os.getpid(), signal.SIGSTOP)
        looking.now = False

    sys.addaudithook(look)


if os.environ.get(STOP_WHEN):
    stop_when(os.environ[STOP_WHEN])
