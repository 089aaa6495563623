"""Ranks for tests: real processes with gloo or the emulation of NCCL, forked from a server that has imported torch.

    outcomes = run_ranks(tmp_path, body, world=2)      # body(rank, job) -> a JSON value

The body is a function of a module and is found by its name. For a rank that raises, the outcome has type and text of
the error."""

import ctypes
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.faults import emulated_nccl
from lockstep.base.folders import run_shm_dir, shm_root
from lockstep.watch.beacon.beacon_records import CommunicatorRecord
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.beacon.writer import open_beacon
from lockstep.watch.recorder import commands, recorder

RUN = "ranks"
BOUND_S = 60.0
"""Time limit for every wait, on a machine that is busy with other tests."""
BACKENDS = ("gloo", emulated_nccl.NAME)
PR_SET_PDEATHSIG = 1

context = multiprocessing.get_context("forkserver")
PRELOAD = ["torch", "torch.distributed", "lockstep.watch.recorder.recorder"]

Body = Callable[[int, "Job"], Any]


@dataclass
class Job:
    """The arguments of a rank."""

    folder: str
    world: int
    options: dict[str, Any] = field(default_factory=dict)
    go: Any = None
    """An event that the test sets."""
    backend: str = "gloo"
    environment: dict[str, str] = field(default_factory=dict)

    def init(self, rank: int, timeout_s: float = BOUND_S, **install: Any) -> None:
        """Open the beacon, start the recorder, and join the other ranks."""
        import torch.distributed as dist

        if self.backend == emulated_nccl.NAME:
            emulated_nccl.register()
        open_beacon(RUN, f"policy-{rank}", "policy", rank).stage("train")
        recorder.install(**{**self.options, **install})
        store = dist.FileStore(str(Path(self.folder, "store")), self.world)
        dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=self.world, timeout=timedelta(seconds=timeout_s)
        )

    @property
    def on_device(self) -> bool:
        """Whether a call returns when its operation is enqueued."""
        return self.backend == emulated_nccl.NAME

    def synchronize(self) -> None:
        """Wait for the device, as reading a result does; with gloo the calls have waited already. Raises
        CollectiveStalled if Lockstep has released this rank."""
        if self.on_device:
            emulated_nccl.device().synchronize(BOUND_S)
            recorder.raise_if_stalled()

    @contextmanager
    def reading_results(self) -> Iterator[None]:
        """Around calls that read results on the host; CUDA's tensors wait for that, those of the emulation do not."""
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        yield
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]

    def wait(self) -> None:
        """Wait until the test calls `go`."""
        assert self.go.wait(BOUND_S)


@dataclass
class Outcome:
    exit_code: int | None
    value: Any = None
    error: str = ""
    text: str = ""


class Ranks:
    """Running ranks, and their beacons."""

    def __init__(
        self,
        folder: Path,
        body: Body,
        world: int,
        options: dict[str, Any],
        backend: str = "gloo",
        environment: dict[str, str] | None = None,
    ) -> None:
        # Not when the module is imported: a module imported later would replace it.
        context.set_forkserver_preload(PRELOAD)
        self.folder, self.world = folder, world
        self.job = Job(str(folder), world, options, context.Event(), backend, environment or {})
        self._processes = [
            context.Process(target=_become, args=(rank, body, self.job, str(shm_root()))) for rank in range(world)
        ]
        for process in self._processes:
            process.start()

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def communicators(self, rank: int) -> dict[str, CommunicatorRecord]:
        """The rank's communicators by label."""
        state = read_beacon(self.path(rank))
        return {} if state is None else {each.label: each for each in state.communicators}

    def path(self, rank: int) -> Path:
        return run_shm_dir(RUN) / f"policy-{rank}.beacon"

    def until(self, rank: int, check: Callable[[dict[str, CommunicatorRecord]], Any]) -> dict[str, CommunicatorRecord]:
        """Read a rank's beacon until `check` returns true for its communicators."""
        end = time.monotonic() + BOUND_S
        while True:
            found = self.communicators(rank)
            if found and check(found):
                return found
            assert time.monotonic() < end, f"rank {rank}: {found}"
            time.sleep(0.01)

    def until_inside(self, rank: int, operation: str, label: str = "default_pg", number: int = 1) -> CommunicatorRecord:
        """Wait until a rank is in that operation, as its `number`th collective or a later one."""

        def there(found: dict[str, CommunicatorRecord]) -> bool:
            inside = found[label].inside if label in found else None
            return inside is not None and inside.operation == operation and inside.issued >= number

        return self.until(rank, there)[label]

    def go(self) -> None:
        self.job.go.set()

    def end(self) -> list[Outcome]:
        """Waits for the end of all ranks."""
        end = time.monotonic() + BOUND_S
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        return [self._outcome(rank) for rank in range(self.world)]

    def end_of(self, rank: int) -> Outcome:
        self._processes[rank].join(BOUND_S)
        return self._outcome(rank)

    def _outcome(self, rank: int) -> Outcome:
        path = self.folder / f"result-{rank}.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        return Outcome(self._processes[rank].exitcode, **result)

    def stop(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(BOUND_S)


def _become(rank: int, body: Body, job: Job, base: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # killed tests leave no processes
    os.environ.update({"LOCKSTEP_BEACONS": base, **job.environment})
    result: dict[str, Any]
    try:
        result = {"value": body(rank, job)}
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error)}
    draft = Path(job.folder, f".result-{rank}")
    draft.write_text(json.dumps(result))
    draft.rename(Path(job.folder, f"result-{rank}.json"))
    os._exit(0)


@contextmanager
def ranks(
    folder: Path,
    body: Body,
    world: int = 2,
    backend: str = "gloo",
    environment: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Ranks]:
    """Start ranks; those that still run at the end are killed. `options` go to `recorder.install`."""
    started = Ranks(folder, body, world, options, backend, environment)
    try:
        yield started
    finally:
        started.stop()


def run_ranks(folder: Path, body: Body, world: int = 2, backend: str = "gloo", **options: Any) -> list[Outcome]:
    """Starts ranks and waits for their end."""
    with ranks(folder, body, world, backend, **options) as started:
        return started.end()


def watched() -> None:
    """Publish that a supervisor observes the ranks' run."""
    commands.open_command_file(RUN)
