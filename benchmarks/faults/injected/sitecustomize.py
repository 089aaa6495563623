"""Stops every process of a run at its next use of the file system once a file exists (a pattern in the environment), so
that a test can kill the run between two related writes, however busy the machine is; or freezes the trainer's rank 1 in
its next step once a file exists; or registers another kind of trainer.

Python imports a module of this name at its start; `controller_fork_server.py` puts this folder into the path of the
processes of such a run."""

import ctypes
import glob
import importlib
import os
import signal
import sys
import threading
import time
from typing import Any

STOP_WHEN, TRAINER = "LOCKSTEP_TEST_STOP_WHEN", "LOCKSTEP_TEST_TRAINER"
TRAINER_KIND = "LOCKSTEP_TEST_TRAINER_KIND"
TRAINERS = {
    "lockstep.train.fsdp.fsdp_trainer": "FSDP2Trainer",
    "lockstep.train.deepspeed.deepspeed_trainer": "DeepSpeedTrainer",
}
_EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"})


def stop_when(pattern: str) -> None:
    checking = threading.local()

    def check(event: str, arguments: tuple[object, ...]) -> None:
        if event not in _EVENTS or getattr(checking, "now", False):
            return
        checking.now = True  # the check uses the file system itself
        if glob.glob(pattern):  # noqa: PTH207 - pathlib would have to be imported by every process
            os.kill(os.getpid(), signal.SIGSTOP)
        checking.now = False

    sys.addaudithook(check)


def freeze_rank(how: str, file: str) -> None:
    """Freeze the rank once: by a signal (`stop`), in a `sleep`, or in a sleep that holds the interpreter lock
    (`gil`)."""
    from lockstep.watch.recorder import import_hook

    def patch(kind: Any) -> None:
        original = kind.step

        def block() -> None:
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "sleep":
                time.sleep(1000)
            else:
                ctypes.PyDLL(None).sleep(1000)

        def step(self: Any, *args: Any) -> Any:
            if self.ranks.rank == 1 and os.path.exists(file):  # noqa: PTH110 - as above
                os.remove(file)  # noqa: PTH107
                block()
            return original(self, *args)

        kind.step = step

    for path, name in TRAINERS.items():
        import_hook.when_imported(path, lambda module, name=name: patch(getattr(module, name)))


def register_kind(module: str) -> None:
    """Registers a kind of trainer, whose module is in the path, as soon as kinds are known."""
    from lockstep.watch.recorder import import_hook

    import_hook.when_imported("lockstep.train.trainer_kinds", lambda kinds: importlib.import_module(module).register())


if os.environ.get(TRAINER_KIND):
    register_kind(os.environ[TRAINER_KIND])
if os.environ.get(STOP_WHEN):
    stop_when(os.environ[STOP_WHEN])
if os.environ.get(TRAINER):
    freeze_rank(*os.environ[TRAINER].split(":", 1))
