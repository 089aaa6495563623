"""A process that has imported what the controller needs and forks controllers: the same program as `lockstep`,

`python controller_fork_server.py FD`: one JSON request per line on the socket FD, one JSON answer each:
    {"argv", "cwd", "env", "output", "hold"} -> {"pid"}     {"poll": pid} -> {"code": exit code, null while it runs}
"""

import atexit
import ctypes
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.base.errors import ForkedWorker
from lockstep.run.planning import worker_preload

PRELOAD = (
    *worker_preload.PRELOAD_MODULES["builtin"], "pandas", "matplotlib.figure", "lockstep.cli.train_run",
    "lockstep.cli.top",
)  # fmt: skip
PR_SET_PDEATHSIG = 1
STOP_WHEN, TRAINER = "LOCKSTEP_TEST_STOP_WHEN", "LOCKSTEP_TEST_TRAINER"
TRAINER_KIND = "LOCKSTEP_TEST_TRAINER_KIND"
MIDWAY = "LOCKSTEP_TEST_MIDWAY"


def serve(control: socket.socket) -> dict | None:
    """Answers requests. Returns the request in a child that is to become a controller, None at the end."""
    codes: dict[int, int] = {}
    with control.makefile("r", encoding="utf-8") as requests:
        for line in requests:
            request = json.loads(line)
            if "poll" in request:
                control.sendall(json.dumps({"code": poll(request["poll"], codes)}).encode() + b"\n")
                continue
            pid = os.fork()
            if pid == 0:
                return request
            control.sendall(json.dumps({"pid": pid}).encode() + b"\n")
    return None


def poll(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


def become(request: dict, control: socket.socket) -> None:
    """Turns the child into `lockstep ARGV` and runs it to its end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # killed tests leave no processes
    control.close()
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.closerange(3, 256)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["lockstep", *request["argv"]]
    add_recipe((request["hold"] or {}).get("recipe"))
    add_trainer_kind((request["hold"] or {}).get("trainer_kind"))
    match request["hold"]:
        case {"file": file}:
            stop_when(file)
        case {"stage": stage, "seconds": seconds, "at_end": at_end}:
            hold(stage, seconds, at_end)
        case {"keep_every_s": seconds}:
            importlib.import_module("lockstep.run.rollout_buffer").PERSIST_INTERVAL_S = seconds
        case {"trainer": file, "how": how}:
            with_sitecustomize(TRAINER, f"{how}:{file}")
        case {"replacements_for": ranks}:
            refuse_more(ranks)
        case {"midway": folder}:
            read_midway(folder)
    from lockstep.cli import OWN_PROCESS, app

    try:
        app(obj=OWN_PROCESS)
    except ForkedWorker as worker:
        run = worker.run
    except SystemExit as end:
        # End at once, without the second that the interpreter needs to unload torch.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else int(bool(end.code)))
    run()


def add_recipe(module: str | None) -> None:
    """Imports a recipe of these tests, such as `two_roles`."""
    if module is not None:
        sys.path.insert(0, str(Path(__file__).parent))
        importlib.import_module(module)
        sys.path.pop(0)


def add_trainer_kind(module: str | None) -> None:
    """Registers a kind of trainer of the contract tests, such as `replicated_trainer`, here and in the workers."""
    if module is not None:
        contract, stop = Path(__file__).parents[1] / "contract", with_sitecustomize(TRAINER_KIND, module)
        add_python_path(contract)
        sys.path.insert(0, str(contract))
        import_sitecustomize(stop)
        sys.path.pop(0)


def hold(stage: str, seconds: float, at_end: bool) -> None:
    """Make a stage last longer, as some are too short to be observed."""
    from lockstep.run.run_reporter import StageTimers

    original = StageTimers.__call__

    @contextmanager
    def held(self: StageTimers, name: str) -> Iterator[None]:
        with original(self, name):
            if name == stage and not at_end:
                time.sleep(seconds)
            yield
            if name == stage and at_end:
                time.sleep(seconds)

    StageTimers.__call__ = held  # type: ignore[method-assign]


def refuse_more(most: int) -> None:
    """Refuse to start more than `most` trainer ranks again, as if a host were lost."""
    from lockstep.cluster.protocol import NodeInfo, Worker, WorkerDied
    from lockstep.run.worker_launcher import RunWorkerLauncher

    original = RunWorkerLauncher.launch

    def launch(
        self: RunWorkerLauncher, role: str, ranks: Sequence[int] = (), node: NodeInfo | None = None
    ) -> list[Worker]:
        if role == "policy" and len(ranks) > most:
            raise WorkerDied(f"policy-{len(ranks) - 1}", len(ranks) - 1, 1, "no host")
        return original(self, role, ranks, node)

    RunWorkerLauncher.launch = launch  # type: ignore[method-assign]


def stop_when(file: str) -> None:
    """Stops this process and those that it starts once the file (a pattern) exists: see `injected/sitecustomize.py`."""
    import_sitecustomize(with_sitecustomize(STOP_WHEN, file))


def read_midway(folder: str) -> None:
    """Engines load weights with `stalling_reader.py`, which pauses while files in the folder exist."""
    from lockstep.run.worker_launcher import WEIGHT_READERS

    WEIGHT_READERS["complete"] = "stalling_reader:complete"
    os.environ[MIDWAY] = folder
    add_python_path(Path(__file__).parent)


def import_sitecustomize(folder: Path) -> None:
    """Imports the folder's, also if the interpreter has one of its own, which it imported at its start."""
    spec = importlib.util.spec_from_file_location("sitecustomize", folder / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def with_sitecustomize(variable: str, value: str) -> Path:
    """Lets processes that this one starts import `injected/sitecustomize.py`, which does what the variable says."""
    folder = Path(__file__).parents[2] / "benchmarks" / "faults" / "injected"
    os.environ[variable] = value
    add_python_path(folder)
    return folder


def add_python_path(folder: Path) -> None:
    """Lets processes that this one starts import modules of the folder. Workers are then forked from a process that
    imports everything anew, because one forked from this process has its path."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    worker_preload.prepare_agent = lambda preload: None


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path.pop(0)  # the folder of this file, which the command has not
    for module in PRELOAD:
        importlib.import_module(module)
    request = serve(control)
    if request is None:
        os._exit(0)  # without the second that the interpreter needs to unload torch
    become(request, control)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    Path("/proc/self/comm").write_text("fork-server")
    main()
