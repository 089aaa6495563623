"""Fake engine workers, launchers and weight sources for tests of the rollout client."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.cluster.protocol import WorkerDied, WorkerSpec
from lockstep.cluster.rpc.futures import PendingCall
from lockstep.config.fault_tolerance import RecoveryConfig, RestartBudget
from lockstep.config.rollout import SamplingConfig
from lockstep.data.samples import Completion, Prompt
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import CompletionBatch, EngineProgress, RequestGroup
from lockstep.run.recovery.recovery_manager import RecoveryManager

_LOOK_S = 0.05  # between two looks of a call whose engine has no request that is due


class Engine:
    """An engine worker that completes half of its requests after `half_s`, and all after `all_s`."""

    progress_count = 0

    def __init__(self, half_s: float = 0.0, all_s: float = 0.0) -> None:
        self.half_s, self.all_s, self.name = half_s, all_s, "engine-0"
        self.asked: list[str] = []
        self.asked_at = 0.0
        self.version = self.sent = 0

    def submit(self, method: Any, *arguments: Any) -> Any:
        if method.__name__ == "collect":
            return Answer(self, *arguments)
        if method.__name__ == "progress":
            return self.answer(method, EngineProgress(0, 0, 0, 0, 0, False))
        self.asked += [id for group in arguments[0] for id in group.ids]
        self.asked_at = time.monotonic()
        return self.answer(method, None)

    def answer(self, method: Any, value: Any) -> PendingCall[Any]:
        call: PendingCall[Any] = PendingCall(self, method.__name__, lambda payload: value)  # type: ignore[arg-type]
        call.settle(memoryview(b""))
        return call

    def finished(self) -> list[str]:
        waited = time.monotonic() - self.asked_at
        half = len(self.asked) // 2 if waited >= self.half_s else 0
        return self.asked[: len(self.asked) if waited >= self.all_s else half]


class Answer:
    """A pending `collect` call, answered when there are new completions."""

    def __init__(self, engine: Engine, hold_s: float = 0.0) -> None:
        self.engine = engine

    def done(self) -> bool:
        return len(self.engine.finished()) > self.engine.sent

    def on_done(self, callback: Any) -> None:
        """Calls back once, when the call is answered: a second time would take completions of the next call."""
        if self.done():
            callback()
            return
        waited = time.monotonic() - self.engine.asked_at
        due = next((due for due in (self.engine.half_s, self.engine.all_s) if due > waited), waited + _LOOK_S)
        timer = threading.Timer(due - waited + 0.001, self.on_done, [callback])
        timer.daemon = True
        timer.start()

    def result(self, why: str) -> CompletionBatch:
        done, sent = self.engine.finished(), self.engine.sent
        self.engine.sent = len(done)
        return CompletionBatch.of([completion(id, self.engine.version) for id in done[sent:]])


def completion(id: str, version: int) -> Completion:
    tokens = np.array([1, 2], np.int32)
    return Completion(id, tokens, np.zeros(2, np.float32), np.full(2, version, np.int32), "stop", "ab")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"0:{row}", row, np.array([3], np.int32), "p") for row in range(count)]


def requests(group: str, *ids: str) -> RequestGroup:
    return RequestGroup(group, np.array([3], np.int32).tobytes(), list(ids), [0] * len(ids))


class FakeWorker:
    """An engine worker whose completions and death the test controls."""

    progress_count, last_progress_at, stall_limit_s, notice_after_s, pid = 0, 0.0, 60.0, 60.0, 1

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.spec = name, WorkerSpec(name, "rollout", rank, "none:None")
        self.calls: list[tuple[str, Any]] = []
        self.open: list[tuple[PendingCall[Any], list[Any]]] = []
        self.told = 0
        self.death: WorkerDied | None = None
        self.death_callbacks: list[Callable[[WorkerDied], None]] = []

    def submit(self, method: Any, *arguments: Any) -> PendingCall[Any]:
        self.calls.append((method.__name__, arguments))
        answer: list[Any] = [EngineProgress(0, 0, 0, 0, 0, False) if method.__name__ == "progress" else None]
        call: PendingCall[Any] = PendingCall(self, method.__name__, lambda payload: answer[0])
        if self.death is not None:
            call.fail(self.death)
        elif method.__name__ == "collect":
            self.open.append((call, answer))
        else:
            call.settle(memoryview(b""))
        return call

    def tell(self, *ids: str) -> None:
        """Answers the open `collect` call."""
        self.told += len(ids)
        call, answer = self.open.pop()
        answer[0] = CompletionBatch.of([completion(id, 0) for id in ids])
        call.settle(memoryview(b""))

    def die(self) -> None:
        self.death = WorkerDied(self.name, self.spec.rank, -9, "")
        for call, _ in self.open:
            call.fail(self.death)
        for callback in self.death_callbacks:
            callback(self.death)

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        self.death_callbacks.append(callback)

    def asked(self) -> list[str]:
        return [id for method, (given,) in self._of("submit") for group in given for id in group.ids]

    def _of(self, name: str) -> list[tuple[str, Any]]:
        return [call for call in self.calls if call[0] == name]

    def describe(self) -> str:
        return "is alive"


class FakeWeights:
    """A weight source with every version on every node, except for the named engines until `fetch` may proceed."""

    def __init__(self, *behind: str) -> None:
        self.behind, self.fetch_allowed = set(behind), threading.Event()

    def store_folder(self, worker: Any, version: int) -> str | None:
        return None if worker.name in self.behind else "/w"

    def fetch(self, worker: Any, version: int) -> None:
        if worker.name in self.behind:
            assert self.fetch_allowed.wait(10)
            self.behind.discard(worker.name)

    def progress(self) -> object:
        return None


class FakeLauncher:
    """Launches engines when the test allows it."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.allowed.set()
        self.launched: list[FakeWorker] = []
        self.killed: list[str] = []
        self.errors: list[Exception] = []
        self.starting = 0
        self.place_allowed = threading.Event()
        self.place_allowed.set()
        self.place_errors: list[Exception] = []
        self.kill_allowed = threading.Event()
        self.kill_allowed.set()

    def place(self, role: str, ranks: Sequence[int]) -> None:
        assert self.place_allowed.wait(10)
        if self.place_errors:
            raise self.place_errors.pop(0)

    def launch(self, role: str, ranks: Sequence[int] = (), node: Any = None) -> list[Any]:
        (rank,) = ranks
        self.starting += 1
        assert role == "rollout" and self.allowed.wait(10)
        if self.errors:
            raise self.errors.pop(0)
        self.launched.append(self.make(f"engine-{rank}.{len(self.launched) + 1}", rank))
        return [self.launched[-1]]

    def make(self, name: str, rank: int) -> FakeWorker:
        return FakeWorker(name, rank)

    def kill(self, workers: Sequence[Any]) -> None:
        assert self.kill_allowed.wait(10)
        self.killed += [worker.name for worker in workers]

    def wait(self, engines: RolloutClient, count: int = 1) -> FakeWorker:
        until(lambda: len(engines.workers) == count)
        return self.launched[-1]


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def make_client(
    ledger: Ledger, launcher: FakeLauncher, count: int, restarts: int = 2
) -> tuple[RolloutClient, list[FakeWorker], RecoveryManager]:
    workers = [FakeWorker(f"engine-{rank}", rank) for rank in range(count)]
    recovery = RecoveryManager(RecoveryConfig(rollout=RestartBudget(max_restarts=restarts)), ledger)
    engines = RolloutClient(workers, SamplingConfig(), 0, 30.0, launcher, recovery)  # type: ignore[arg-type]
    return engines, workers, recovery
