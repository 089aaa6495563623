"""The wait for calls: who is told of, who ends it, and what does not."""

import logging
import threading
import time

import pytest

from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.rpc import call_wait
from lockstep.cluster.rpc.futures import PendingCall, gather_results


class Callee:
    def __init__(self, name: str, stall_limit_s: float = 60.0, notice_after_s: float = 60.0) -> None:
        self.name, self.progress_count, self.last_progress_at = name, 0, time.monotonic()
        self.stall_limit_s, self.notice_after_s = stall_limit_s, notice_after_s

    def describe(self) -> str:
        return "is in stage test"

    def move(self) -> None:
        self.progress_count += 1
        self.last_progress_at = time.monotonic()


def pending(worker: Callee) -> PendingCall[str]:
    return PendingCall(worker, "method", lambda payload: bytes(payload).decode())


def later(seconds: float, action: object, *args: object) -> None:
    threading.Timer(seconds, action, args).start()  # type: ignore[arg-type]


def test_results_come_in_order_whenever_they_arrive() -> None:
    first, second = pending(Callee("a")), pending(Callee("b"))
    later(0.2, first.settle, memoryview(b"one"))
    later(0.05, second.settle, memoryview(b"two"))
    assert gather_results([first, second], "both") == ["one", "two"]
    assert first.result("again") == "one"
    assert gather_results([], "no calls") == []


def test_a_result_ends_the_wait_immediately() -> None:
    call = pending(Callee("a"))
    stamps = []
    later(0.1, lambda: (stamps.append(time.monotonic()), call.settle(memoryview(b""))))
    call.result("it")
    assert time.monotonic() - stamps[0] < 0.1


def test_a_death_explains_what_it_caused() -> None:
    effect, cause = pending(Callee("a")), pending(Callee("b"))
    effect.fail(RemoteError("a", 0, "RuntimeError", "connection closed by peer", ""))
    cause.fail(WorkerDied("b", 1, -9, ""))
    with pytest.raises(WorkerDied):
        gather_results([effect, cause], "both")


def test_a_death_that_arrives_late_is_still_the_cause() -> None:
    victim, cause, bystander = pending(Callee("a")), pending(Callee("b")), pending(Callee("c"))
    later(0.05, victim.fail, RemoteError("a", 0, "RuntimeError", "connection closed by peer", ""))
    later(0.25, cause.fail, WorkerDied("b", 1, 3, ""))
    with pytest.raises(WorkerDied) as caught:
        gather_results([victim, cause, bystander], "all three")
    assert caught.value.worker == "b"


def test_a_failure_without_a_death_is_raised_soon() -> None:
    calls_ = [pending(Callee("a")), pending(Callee("b"))]
    calls_[0].fail(RemoteError("a", 0, "ValueError", "bad data", ""))
    began = time.monotonic()
    with pytest.raises(RemoteError, match="bad data"):
        gather_results(calls_, "both")
    assert time.monotonic() - began < call_wait.DEATH_NOTICE_S + 0.5
    # Without other calls there is no death to wait for.
    began = time.monotonic()
    with pytest.raises(RemoteError):
        gather_results(calls_[:1], "one")
    assert time.monotonic() - began < 0.1


def test_the_first_of_several_errors_is_raised() -> None:
    a, b = pending(Callee("a")), pending(Callee("b"))
    b.fail(RemoteError("b", 1, "ValueError", "first", ""))
    time.sleep(0.01)
    a.fail(RemoteError("a", 0, "ValueError", "second", ""))
    with pytest.raises(RemoteError, match="first"):
        gather_results([a, b], "both")


def test_a_worker_without_progress_stalls_although_others_progress() -> None:
    mover, sleeper = Callee("mover", 0.8), Callee("sleeper", 0.8)
    a, b = pending(mover), pending(sleeper)
    for turn in range(12):
        later(0.2 * turn, mover.move)
    with pytest.raises(Stalled) as caught:
        gather_results([a, b], "both")
    assert caught.value.waits_for == "sleeper"
    assert "both; it is in stage test" in str(caught.value)
    assert caught.value.stall_s == 0.8


def test_progress_extends_the_wait() -> None:
    worker = Callee("a", 0.6)
    call = pending(worker)
    for turn in range(8):
        later(0.25 * turn, worker.move)
    later(2.0, call.settle, memoryview(b"done"))
    assert call.result("it") == "done"


def test_notices_at_doubling_times_and_recovery(caplog: pytest.LogCaptureFixture) -> None:
    worker = Callee("a", notice_after_s=0.3)
    call = pending(worker)
    later(1.5, worker.move)
    later(1.9, call.settle, memoryview(b""))
    with caplog.at_level(logging.WARNING, logger=call_wait.__name__):
        call.result("train step 3")
    lines = [record.getMessage() for record in caplog.records]
    assert 2 <= sum("no progress for" in line for line in lines) <= 3, lines
    assert "(train step 3): no progress for" in lines[0]
    assert "a is making progress again (train step 3)" in lines


def test_a_stopped_controller_blames_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Callee("a", 10.0)
    call = pending(worker)
    later(0.6, call.settle, memoryview(b"fine"))
    real, frozen = time.monotonic, [0.0]
    later(0.3, lambda: frozen.__setitem__(0, 1000.0))  # as after SIGCONT: the clock has run, the process has not
    monkeypatch.setattr(call_wait.time, "monotonic", lambda: real() + frozen[0])
    assert call.result("it") == "fine"


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="expected pending calls"):
        gather_results([object()], "it")  # type: ignore[list-item]
