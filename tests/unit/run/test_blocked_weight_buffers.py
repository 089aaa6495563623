"""Engines that hold the buffer of the next version for long."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout" / "client"))
from engine_stub import FakeLauncher, FakeWeights, FakeWorker, make_client, until

from lockstep.cluster.protocol import WorkerDied
from lockstep.cluster.rpc.futures import PendingCall
from lockstep.ledger.ledger import Ledger
from lockstep.run.weight_sync import WeightPublisher
from lockstep.train.trainer_protocol import ParameterShard
from lockstep.weights import store_files
from lockstep.weights.shared_memory_transport import SharedMemoryTransport
from lockstep.weights.weight_plan import WeightPlan

READ = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH); print(1, flush=True); input()"


class Copying(FakeWorker):
    """Begins to read the first weights that it is given, in a process, and is done when the test says, or when it is
    killed."""

    def __init__(self, name: str, rank: int, store: SharedMemoryTransport) -> None:
        super().__init__(name, rank)
        self._store, self.reader, self.copy = store, None, None

    def submit(self, method: Any, *arguments: Any) -> PendingCall[Any]:
        if method.__name__ != "load_weights" or self.reader is not None:
            return super().submit(method, *arguments)
        newest = self._store.store.control.newest()
        assert newest is not None
        buffer = str(self._store.store.folder / f"buffer-{newest.buffer}")
        self.reader = subprocess.Popen(
            [sys.executable, "-c", READ, buffer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.reader.pid
        assert self.reader.stdout is not None and self.reader.stdout.readline() == "1\n"
        self.copy = PendingCall(self, "load_weights", lambda payload: None)
        return self.copy

    def finish(self) -> None:
        self._let_go()
        self.copy.settle(memoryview(b""))

    def end(self) -> None:
        self._let_go()
        self.copy.fail(WorkerDied(self.name, self.spec.rank, -9, ""))

    def _let_go(self) -> None:
        self.reader.communicate("\n")


class CopyingLauncher(FakeLauncher):
    """Launches engines that copy, and ends the ones that it kills."""

    def __init__(self, store: SharedMemoryTransport) -> None:
        super().__init__()
        self._store = store

    def make(self, name: str, rank: int) -> FakeWorker:
        worker = Copying(name, rank, self._store)
        if self.launched:
            worker.reader = SimpleNamespace()  # type: ignore[assignment]
        return worker

    def kill(self, workers: Any) -> None:
        super().kill(workers)
        for worker in workers:
            if isinstance(worker, Copying) and worker.copy is not None and not worker.copy.done():
                worker.end()


Run = tuple[WeightPublisher, FakeWorker, CopyingLauncher]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run with two engines that has published version 1; readers have a second."""
    folder = Path("/dev/shm") / f"lockstep-test-{tmp_path.parent.name}-{tmp_path.name}-{time.monotonic_ns()}"
    store = SharedMemoryTransport(folder, WeightPlan.of([("w", (4,), "float32")]), 1, limit_s=1.0)
    store.prepare_stores([object()])  # type: ignore[list-item]

    def write(version: int) -> None:
        store.store.write_shards(0, version, [ParameterShard("w", (4,), 0, torch.full((4,), float(version)))], False)

    ledger, launcher = Ledger.create(tmp_path / "run", {"name": "x"}), CopyingLauncher(store)
    engines, (one, _), _ = make_client(ledger, launcher, 2, restarts=5)
    policy: Any = SimpleNamespace(write_weights=write, offload=lambda: None)
    sync = WeightPublisher(policy, engines, store, SimpleNamespace(record_published=lambda version: None))  # type: ignore[arg-type]
    sync.publish(1)
    yield sync, one, launcher
    engines.close()
    launcher.kill(launcher.launched)
    store.store.close()
    for each in folder.parent.glob(f"{folder.name}*"):
        for file in each.iterdir():
            file.unlink()
        each.rmdir()


def lost(run: Run) -> Copying:
    """The first engine is lost, and its successor reads version 1, whose memory version 3 needs."""
    sync, one, launcher = run
    one.die()
    until(lambda: bool(launcher.launched) and launcher.launched[0].copy is not None)  # type: ignore[attr-defined]
    sync.publish(2)
    first = launcher.launched[0]
    assert isinstance(first, Copying)
    return first


def test_a_successor_that_hangs_while_copying_is_killed(run: Run) -> None:
    sync, _, launcher = run
    hanging = lost(run)
    sync.publish(3)
    assert launcher.killed.count(hanging.name) >= 1
    until(lambda: len(sync.engines.workers) == 2)


def test_a_successor_that_copies_slowly_is_waited_for(run: Run) -> None:
    sync, _, launcher = run
    slow = lost(run)
    over = threading.Event()

    def copy() -> None:
        began = time.monotonic()
        while time.monotonic() - began < 3.5:
            slow.progress_count += 1
            time.sleep(0.1)
        slow.finish()
        over.set()

    threading.Thread(target=copy, daemon=True).start()
    sync.publish(3)
    assert over.wait(5) and launcher.killed == ["engine-0"]


def test_an_incoming_engine_can_be_killed(tmp_path: Path) -> None:
    engines, (one, _), _ = make_client(Ledger.create(tmp_path / "run", {"name": "x"}), FakeLauncher(), 2)
    one.pid, plain = 7, one.submit
    copies: list[PendingCall[Any]] = []

    def submit(method: Any, *arguments: Any) -> PendingCall[Any]:
        if method.__name__ != "load_weights":
            return plain(method, *arguments)
        copies.append(PendingCall(one, "load_weights", lambda payload: None))
        return copies[-1]

    one.submit = submit  # type: ignore[method-assign]
    weights = FakeWeights("engine-0")
    engines.load_weights(weights, 3)
    weights.fetch_allowed.set()
    until(lambda: bool(copies))
    is_one: Callable[[Any], bool] = lambda worker: worker.pid == 7  # noqa: E731
    assert engines.progress_by_engine(is_one) == {"engine-0": 0}
    assert engines.kill_engines(is_one, "pid 7 reads")


def test_locks_of_other_file_systems_are_not_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path("/dev/shm") / f"lockstep-test-{time.monotonic_ns()}"
    file.touch()
    try:
        held = store_files.BufferLease.take(file)
        assert held is not None and len(store_files.lease_holders(file)) == 1
        text, inode = Path("/proc/locks").read_text(), file.stat().st_ino
        others = f"{len(text.splitlines()) + 1}: FLOCK  ADVISORY  READ 1 fe:77:{inode} 0 EOF\n"
        read = Path.read_text
        monkeypatch.setattr(
            Path, "read_text", lambda self, *_: text + others if str(self) == "/proc/locks" else read(self)
        )
        assert 1 not in store_files.lease_holders(file)
        held.release()
    finally:
        file.unlink()
