"""Stops every process of a run at its next use of the file system once a certain file exists (a pattern in the
environment), so that a test can look, and kill, between two writes that belong together, however busy the machine is;
or lets the trainer's rank 1 stand still in its next step once a file exists.

Python imports a module of this name at its start; `controller_fork_server.py` puts this folder into the path of the
processes of such a run."""

import ctypes
import glob
import os
import signal
import sys
import threading
import time
from typing import Any

STOP_WHEN, TRAINER = "LOCKSTEP_TEST_STOP_WHEN", "LOCKSTEP_TEST_TRAINER"
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


def stand_still(how: str, file: str) -> None:
    """`stop` by a signal, in a `sleep`, or in one that holds the interpreter lock (`gil`); once."""
    from lockstep.watch.recorder import import_hook

    def patch(module: Any) -> None:
        original = module.FSDP2Trainer.step

        def held() -> None:
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "sleep":
                time.sleep(1000)
            else:
                ctypes.PyDLL(None).sleep(1000)

        def step(self: Any, *args: Any) -> Any:
            if self.ranks.rank == 1 and os.path.exists(file):  # noqa: PTH110 - as above
                os.remove(file)  # noqa: PTH107
                held()
            return original(self, *args)

        module.FSDP2Trainer.step = step

    import_hook.when_imported("lockstep.train.fsdp", patch)


if os.environ.get(STOP_WHEN):
    stop_when(os.environ[STOP_WHEN])
if os.environ.get(TRAINER):
    stand_still(*os.environ[TRAINER].split(":", 1))
