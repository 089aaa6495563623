import asyncio
import concurrent.futures
import itertools
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.base import waits
from lockstep.base.wait_state import Stalled, WaitState, WaitTimeout, track_wait
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.procfs.processes import is_alive


class Never:
    """A torch Work, store or task that does not end."""

    def __init__(self, ends_at: float = float("inf"), error: Exception | None = None) -> None:
        self.ends_at, self.error = ends_at, error

    def is_completed(self) -> bool:
        return time.monotonic() >= self.ends_at

    def wait(self) -> bool:
        assert self.is_completed(), "asked a work that is under way to block"
        if self.error is not None:
            raise self.error
        return True

    def check(self, keys: list[str]) -> bool:
        return self.is_completed()

    def get(self, key: str) -> bytes:
        return key.encode()


def stuck_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def full() -> "queue.Queue[int]":
    filled: queue.Queue[int] = queue.Queue(1)
    filled.put(1)
    return filled


def condition_never(**bounds: Any) -> None:
    cond = threading.Condition()
    with cond:
        waits.condition(cond, lambda: False, **bounds)


def join_never(**bounds: Any) -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    try:
        waits.join(thread, **bounds)
    finally:
        leave.set()
        thread.join()


def process_never(**bounds: Any) -> None:
    popen = stuck_process()
    try:
        waits.process(popen, **bounds)
    finally:
        popen.kill()
        popen.wait()


def readable_never(**bounds: Any) -> None:
    reading, writing = os.pipe()
    try:
        waits.readable(reading, **bounds)
    finally:
        os.close(reading)
        os.close(writing)


ENDLESS: dict[str, Callable[..., object]] = {
    "poll": lambda **b: waits.poll(lambda: None, kind="poll", **b),
    "queue.get": lambda **b: waits.queue_get(queue.Queue[int](), **b),
    "queue.put": lambda **b: waits.queue_put(full(), 2, **b),
    "event": lambda **b: waits.event(threading.Event(), **b),
    "condition": condition_never,
    "coroutine": lambda **b: waits.coroutine(asyncio.sleep(60), kind="coroutine", **b),
    "future": lambda **b: waits.future(concurrent.futures.Future[int](), **b),
    "join": join_never,
    "process": process_never,
    "collective": lambda waits_for, **b: waits.work(Never(), communicator=waits_for, operation="all_reduce", **b),
    "store": lambda **b: waits.store_get(Never(), "k", **b),
    "file": lambda **b: waits.file(Path("/nowhere/at/all"), **b),
    "read": readable_never,
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_every_wait_ends_at_its_bound_with_target_and_reason(kind: str) -> None:
    started = time.monotonic()
    with pytest.raises(WaitTimeout) as caught:
        ENDLESS[kind](waits_for="policy-1", why="the test", timeout_s=0.15)
    took = time.monotonic() - started
    error = caught.value
    assert 0.15 <= took < 1.5
    assert not isinstance(error, Stalled)
    assert (error.kind, error.waits_for) == (kind, "policy-1")
    assert "the test" in error.why
    assert 0.15 <= error.waited_s <= took
    assert "policy-1" in str(error)
    assert "the test" in str(error)


@pytest.mark.parametrize("kind", ENDLESS)
def test_every_wait_lasts_while_there_is_progress_and_ends_without(kind: str) -> None:
    started = time.monotonic()
    with pytest.raises(Stalled) as caught:
        ENDLESS[kind](
            waits_for="w", why="y", stall_s=0.4, progress=lambda: min(int((time.monotonic() - started) / 0.1), 10)
        )  # progress for one second
    assert 1.3 <= time.monotonic() - started < 3
    assert caught.value.stall_s == 0.4
    assert "w made no progress for" in str(caught.value)


@pytest.mark.parametrize("kind", ENDLESS)
def test_no_wait_without_a_bound(kind: str) -> None:
    with pytest.raises(ValueError, match="no bound"):
        ENDLESS[kind](waits_for="w", why="y")


def test_progress_does_not_extend_the_timeout() -> None:
    with pytest.raises(WaitTimeout) as caught:
        waits.event(threading.Event(), waits_for="w", why="y", timeout_s=0.6, stall_s=0.4, progress=time.monotonic)
    assert not isinstance(caught.value, Stalled)
    assert caught.value.waited_s >= 0.6


def test_a_result_ends_the_wait_immediately() -> None:
    box: queue.Queue[int] = queue.Queue()
    threading.Timer(0.1, box.put, [7]).start()
    started = time.monotonic()
    assert waits.queue_get(box, waits_for="w", why="y", timeout_s=10) == 7
    assert time.monotonic() - started < 0.2


def test_an_available_result_needs_no_time() -> None:
    box: queue.Queue[int] = queue.Queue()
    box.put(3)
    done: concurrent.futures.Future[int] = concurrent.futures.Future()
    done.set_result(4)
    assert waits.queue_get(box, waits_for="w", why="y", timeout_s=0) == 3
    assert waits.future(done, waits_for="w", why="y", timeout_s=0) == 4
    assert waits.poll(lambda: 0, kind="k", waits_for="w", why="y", timeout_s=0) == 0
    with pytest.raises(WaitTimeout):
        waits.poll(lambda: None, kind="k", waits_for="w", why="y", timeout_s=0)


def test_a_result_at_the_bound_is_returned() -> None:
    ready_at = time.monotonic() + 0.2
    answer = waits.poll(
        lambda: "late" if time.monotonic() >= ready_at else None,
        kind="k", waits_for="w", why="y", timeout_s=0.21, every_s=0.15,
    )  # fmt: skip
    assert answer == "late"


def test_condition_returns_what_the_predicate_found() -> None:
    cond, found = threading.Condition(), []

    def feed() -> None:
        with cond:
            found.append("x")
            cond.notify()

    threading.Timer(0.05, feed).start()
    with cond:
        assert waits.condition(cond, lambda: found[0] if found else None, waits_for="w", why="y", timeout_s=5) == "x"


def test_a_futures_own_timeout_error_is_its_result() -> None:
    failed: concurrent.futures.Future[int] = concurrent.futures.Future()
    failed.set_exception(TimeoutError("of the job itself"))
    with pytest.raises(TimeoutError, match="of the job itself"):
        waits.future(failed, waits_for="w", why="y", timeout_s=5)


def test_a_coroutine_gives_its_result_or_its_error_and_is_cancelled_at_the_bound() -> None:
    left: list[str] = []

    async def answers() -> int:
        await asyncio.sleep(0.01)
        return 7

    async def fails() -> None:
        raise TimeoutError("of its own")

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            left.append("tidied up")

    assert waits.coroutine(answers(), kind="k", waits_for="w", why="y", timeout_s=10) == 7
    with pytest.raises(TimeoutError, match="of its own"):
        waits.coroutine(fails(), kind="k", waits_for="w", why="y", timeout_s=10)
    with pytest.raises(WaitTimeout):
        waits.coroutine(endless(), kind="k", waits_for="w", why="y", timeout_s=0.1)
    assert left == ["tidied up"]


def test_work_raises_what_the_collective_failed_with() -> None:
    waits.work(None, communicator="c", operation="all_reduce", why="y", timeout_s=1)
    waits.work(Never(time.monotonic() + 0.1), communicator="c", operation="all_reduce", why="y", timeout_s=1)
    with pytest.raises(RuntimeError, match="reset"):
        waits.work(
            Never(0.0, RuntimeError("reset")), communicator="c", operation="all_reduce", why="y", timeout_s=1
        )  # fmt: skip


def test_store_get_asks_for_the_key_first() -> None:
    store = Never(time.monotonic() + 0.1)
    assert waits.store_get(store, "k", waits_for="rank 1", why="it joined", timeout_s=5) == b"k"


def test_exit_codes_of_processes() -> None:
    popen = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(5)"])
    assert waits.process(popen, waits_for="w", why="y", timeout_s=20) == 5


def test_run_returns_output_and_code() -> None:
    done = waits.run(["sh", "-c", "cat; echo err >&2; exit 3"], why="y", timeout_s=10, stdin="in")
    assert (done.returncode, done.stdout, done.stderr) == (3, "in", "err\n")
    with pytest.raises(subprocess.CalledProcessError):
        waits.run(["false"], why="y", timeout_s=10, check=True)


def test_run_kills_the_command_and_its_children_at_the_bound(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/a; sh -c 'echo $$ > {tmp_path}/b; sleep 60' & sleep 60"
    with pytest.raises(WaitTimeout):
        waits.run(["sh", "-c", script], why="y", timeout_s=0.5)
    pids = [int((tmp_path / name).read_text()) for name in "ab"]
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_notices_come_at_doubling_times_and_start_again_with_progress() -> None:
    notices: list[WaitState] = []
    started = time.monotonic()
    with pytest.raises(WaitTimeout):
        waits.event(
            threading.Event(), waits_for="w", why="y", timeout_s=3.4, progress=lambda: time.monotonic() - started > 1.6,
            on_notice=notices.append, notice_after_s=0.5,
        )  # fmt: skip
    stalled = [state.stalled_s for state in notices]
    assert min(stalled) >= 0.5
    assert stalled[1] >= 2 * stalled[0]
    assert len([1 for a, b in itertools.pairwise(stalled) if b < a]) == 1  # it moved once
    assert notices[-1].stalled_s < notices[-1].waited_s
    assert (notices[0].kind, notices[0].waits_for, notices[0].why) == ("event", "w", "y")


def test_a_notice_without_a_handler_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(WaitTimeout):
        waits.event(threading.Event(), waits_for="policy-1", why="its weights", timeout_s=0.6, notice_after_s=0.1)
    assert "policy-1" in caplog.text
    assert "its weights" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(WaitTimeout):
        waits.event(threading.Event(), waits_for="w", why="y", timeout_s=0.6, notice_after_s=None)
    assert not caplog.text


def test_a_loop_with_check_keeps_its_bounds() -> None:
    with pytest.raises(Stalled), track_wait("call", "w", "y", timeout_s=10, stall_s=0.2) as wait:
        while True:
            remaining = wait.remaining()
            assert remaining is not None
            assert remaining <= 0.2
            wait.check()
            wait.report_progress(min(int(wait.waited_s() * 10), 3))
            time.sleep(0.01)
    assert wait.waited_s() >= 0.4


def test_a_failed_wait_is_no_longer_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    open_beacon("r", "me", "policy", 0)
    try:
        with pytest.raises(WaitTimeout):
            waits.event(threading.Event(), waits_for="w", why="y", timeout_s=0.05)
        with pytest.raises(KeyError), track_wait("call", "w", "y"):
            raise KeyError
        assert read_beacons("r")[0].waits == ()
    finally:
        close_beacon()


def test_a_woken_poll_checks_immediately():
    wake, calls = threading.Event(), []

    def check():
        calls.append(time.monotonic())
        if len(calls) == 1:
            threading.Timer(0.05, wake.set).start()
        return len(calls) == 2 or None

    began = time.monotonic()
    assert waits.poll(check, kind="queue", waits_for="x", why="y", every_s=30.0, timeout_s=60.0, wake=wake)
    assert calls[1] - began < 5


def test_a_wait_in_a_forked_process_has_its_main_thread_s_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from fork servers; Python 3.11 keeps the native id of the parent's main thread."""
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        open_beacon("r", "me", "policy", 0)
        with track_wait("call", "w", "y"):
            (record,) = read_beacons("r")[0].waits
        os.write(write_end, str(record.thread).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as output:
        assert int(output.read()) == child
    assert os.waitpid(child, 0)[1] == 0


def fail(problem: str) -> None:
    raise RuntimeError(problem)


def test_a_call_in_a_thread_returns_its_result_or_its_error() -> None:
    assert waits.future(waits.run_in_thread(lambda: 3, "counts"), waits_for="it", why="the count", timeout_s=10) == 3
    with pytest.raises(RuntimeError, match="no such interface"):
        waits.future(
            waits.run_in_thread(lambda: fail("no such interface"), "fails"), waits_for="it", why="its end", timeout_s=10
        )


def test_a_call_in_a_thread_that_does_not_end_is_left_behind() -> None:
    never = threading.Event()
    call = waits.run_in_thread(lambda: never.wait(20), "never ends")
    with pytest.raises(WaitTimeout, match="members of the stream"):
        waits.future(call, waits_for="all", why="members of the stream", timeout_s=0.1)
    assert not call.done()
    never.set()
    assert waits.future(call, waits_for="it", why="its end after all", timeout_s=10)
