"""A single worker against a controller that the test plays: resending, acknowledging, and the lease."""

import io
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import ConnectionClosed
from lockstep.base.transport.run_token import new_run_token
from lockstep.cluster.rpc.codec import MethodSignature
from lockstep.cluster.rpc.rpc_messages import (
    AckMessage,
    CallMessage,
    FailureMessage,
    HeartbeatMessage,
    LeaveMessage,
    ResultMessage,
    ResumeMessage,
    call_id_base,
    pack_message,
    unpack_to_controller,
)
from lockstep.cluster.rpc.worker_main import RedactedStream
from lockstep.watch.agent.service_discovery import LEADER_FILE, Leader
from lockstep.watch.procfs import processes

SERVICE = """
import logging, os, signal, sys, threading, time
class Service:
    def __init__(self):
        self.total = 0
    def add(self, n: int) -> int:
        self.total += n
        return self.total
    def tell(self, text: str) -> None:
        print(text, end="")
        print(" is", os.environ["WORLD_API_KEY"])
        sys.stderr.write(f"Authorization: Bearer {text * 9}\\n")
        logging.getLogger("theirs").warning("still %s", os.environ["WORLD_API_KEY"])
        raise ValueError(os.environ["WORLD_API_KEY"])
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)
    def deaf(self, seconds: float) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        time.sleep(seconds)
    def miss(self, seconds: float) -> None:
        hear = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
        threading.Timer(0.2, hear.start).start()
        time.sleep(seconds)
    def lose(self, seconds: float) -> None:
        from lockstep.cluster.rpc.controller_connection import ControllerConnection
        ControllerConnection._check_lease = lambda self: 1 / 0
        time.sleep(seconds)
    def renew(self):
        self.total = 0
    def close(self):
        print("service closed", flush=True)
"""


KEY = "correct horse battery staple"


class Protocol:
    def tell(self, text: str) -> None:
        raise NotImplementedError

    def add(self, n: int) -> int:
        raise NotImplementedError

    def nap(self, seconds: float) -> None:
        raise NotImplementedError

    def deaf(self, seconds: float) -> None:
        raise NotImplementedError

    def miss(self, seconds: float) -> None:
        raise NotImplementedError

    def lose(self, seconds: float) -> None:
        raise NotImplementedError


class Line:
    """The controller's end of one connection."""

    def __init__(self, listener: auth_handshake.Listener) -> None:
        connection = listener.accept(10)
        assert connection is not None
        self.connection = connection
        self.hello = self.hear(ResumeMessage)

    def call(self, number: int, method: object, *args: object) -> None:
        payload = MethodSignature(method).encode_arguments(args, {})  # type: ignore[arg-type]
        self.connection.send(*pack_message(CallMessage(number, method.__name__, False), payload))  # type: ignore[attr-defined]

    def hear(self, kind: type, timeout_s: float = 10.0) -> object:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            frame = self.connection.recv(max(0.01, deadline - time.monotonic()))
            if frame is not None:
                message, self.payload = unpack_to_controller(frame)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")


FIRST = call_id_base(1) + 1
"""Id of the first call that a controller of generation 1 makes."""


def lead(folder: Path, run: str, listener: auth_handshake.Listener, generation: int, pid: int, grace_s: float) -> None:
    """Publishes a listener as the controller's."""
    shared = folder / "beacons" / run
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    leader = Leader(generation, listener.host, listener.port, pid, processes.start_ticks(pid), grace_s)
    (shared / "new").write_text(json.dumps(asdict(leader)))
    (shared / "new").rename(shared / LEADER_FILE)


@contextmanager
def worker(folder: Path, grace_s: float = 0.0, controller: int | None = None) -> Iterator[tuple]:
    (folder / "lone_service.py").write_text(SERVICE)
    token, run = new_run_token(), f"lease-{secrets.token_hex(3)}"
    with auth_handshake.Listener(token, run, 1) as listener:
        pid = os.getpid() if controller is None else controller
        charge = {
            "name": "w", "role": "r", "rank": 0, "service": "lone_service:Service", "arguments": {}, "run": run,
            "generation": 1,
        }  # fmt: skip
        (folder / "w.json").write_text(json.dumps(charge))
        lead(folder, run, listener, 1, pid, grace_s)
        environment = {
            **os.environ, "LOCKSTEP_WORKER": str(folder / "w.json"), "LOCKSTEP_TOKEN": token,
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "WORLD_API_KEY": KEY, "LOCKSTEP_BEACONS": str(folder / "beacons"),
        }  # fmt: skip
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "lockstep.cluster.rpc.worker_main"], env=environment, stdout=log, stderr=log
            )
        try:
            yield listener, process
        finally:
            process.kill()
            process.wait(10)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen]:
    """A process that plays the controller whose pid is watched."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait(10)


def test_answers_are_kept_until_acknowledged_and_calls_are_taken_once(tmp_path: Path) -> None:
    with worker(tmp_path) as (listener, process):
        line = Line(listener)
        assert line.hello == ResumeMessage(0, process.pid)
        assert line.hear(ResultMessage) == ResultMessage(0)
        line.call(FIRST, Protocol.add, 5)
        assert line.hear(ResultMessage) == ResultMessage(FIRST)
        line.connection.close()

        line = Line(listener)
        assert line.hello == ResumeMessage(FIRST, process.pid)
        assert [line.hear(ResultMessage), line.hear(ResultMessage)] == [ResultMessage(0), ResultMessage(FIRST)], (
            "nothing was acknowledged"
        )
        line.call(FIRST, Protocol.add, 5)  # a repetition
        line.call(FIRST + 1, Protocol.add, 1)
        assert line.hear(ResultMessage) == ResultMessage(FIRST + 1)
        assert MethodSignature(Protocol.add).decode_result(line.payload) == 6
        line.connection.send(*pack_message(AckMessage([0, FIRST])))
        line.connection.send(b"nonsense")  # costs the connection, nothing else
        with pytest.raises(ConnectionClosed):
            line.hear(ResultMessage)

        line = Line(listener)
        assert line.hear(ResultMessage) == ResultMessage(FIRST + 1), "the others were acknowledged"
        line.connection.send(*pack_message(LeaveMessage("test")))
        assert process.wait(10) == 0
    assert "service closed" in (tmp_path / "log").read_text()


def test_heartbeats_are_sent_while_a_call_runs(tmp_path: Path) -> None:
    with worker(tmp_path) as (listener, _):
        line = Line(listener)
        line.hear(ResultMessage)
        with pytest.raises(AssertionError):
            line.hear(HeartbeatMessage, 2.5)
        began = time.monotonic()
        line.call(FIRST, Protocol.nap, 600.0)
        for _ in range(3):
            line.hear(HeartbeatMessage, 15)
        # However late they arrive on a busy machine, the third leaves two seconds after the first.
        assert 2.0 <= time.monotonic() - began < 9.0


def test_a_worker_that_nobody_can_reach_any_more_exits_and_says_why(tmp_path: Path) -> None:
    """Its main thread computes, or waits for a call that can no longer arrive."""
    with worker(tmp_path) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        line.call(FIRST, Protocol.lose, 600.0)
        assert process.wait(10) == 70
    log = (tmp_path / "log").read_text()
    assert "exiting: the I/O thread ended unexpectedly" in log
    assert "ZeroDivisionError" in log


def test_a_worker_exits_in_order_without_its_controller(tmp_path: Path, stranger: subprocess.Popen) -> None:
    with worker(tmp_path, controller=stranger.pid) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        line.call(FIRST, Protocol.nap, 600.0)
        stranger.kill()
        stranger.wait(10)
        time.sleep(0.5)
        assert process.poll() is None, "the connection still counts as the controller"
        listener.close()
        line.connection.close()
        assert process.wait(5) == 75
    log = (tmp_path / "log").read_text()
    assert "exiting: the controller has been gone for" in log
    assert "service closed" in log


def test_a_blocked_main_thread_does_not_keep_an_orphan(tmp_path: Path, stranger: subprocess.Popen) -> None:
    with worker(tmp_path, controller=stranger.pid) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        line.call(FIRST, Protocol.deaf, 600.0)
        time.sleep(0.3)
        stranger.kill()
        stranger.wait(10)
        line.connection.close()
        listener.close()
        began = time.monotonic()
        assert process.wait(8) == 75
        assert time.monotonic() - began < 5
    assert "the main thread did not return" in (tmp_path / "log").read_text()


def test_an_orphan_waits_for_its_grace(tmp_path: Path, stranger: subprocess.Popen) -> None:
    with worker(tmp_path, grace_s=1.5, controller=stranger.pid) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        stranger.kill()
        stranger.wait(10)
        line.connection.close()
        time.sleep(0.7)
        line = Line(listener)  # back within the grace: the lease holds again
        time.sleep(1.5)
        assert process.poll() is None
        began = time.monotonic()
        line.connection.close()
        listener.close()
        assert process.wait(8) == 75
        assert 1.2 < time.monotonic() - began < 4


def test_a_living_controller_may_be_away_for_a_while(tmp_path: Path) -> None:
    with worker(tmp_path) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        line.connection.close()
        time.sleep(1.5)
        assert process.poll() is None
        line = Line(listener)
        line.call(FIRST, Protocol.add, 1)
        assert line.hear(ResultMessage) == ResultMessage(0)
        assert line.hear(ResultMessage) == ResultMessage(FIRST)


def test_refused_connections_are_retried_with_pauses(tmp_path: Path) -> None:
    """The controller does not know the worker, not yet or no longer."""
    with worker(tmp_path) as (listener, _):
        dials, until = 0, time.monotonic() + 60.0
        while dials == 0 or time.monotonic() < until:
            assert time.monotonic() < until
            connection = listener.accept(0.1)
            if connection is not None:
                connection.close()
                until = until if dials else time.monotonic() + 3.0
                dials += 1
        assert 2 < dials < 40
        assert Line(listener).hear(ResultMessage) == ResultMessage(0), "accepted later"


def test_a_superseded_worker_exits(tmp_path: Path) -> None:
    with worker(tmp_path) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        listener.highest_generation = 2
        line.connection.close()
        deadline = time.monotonic() + 8
        while process.poll() is None and time.monotonic() < deadline:
            assert listener.accept(0.1) is None
        assert process.poll() == 75
    assert "generation 1 is stale" in (tmp_path / "log").read_text()


@contextmanager
def successor(folder: Path, before: auth_handshake.Listener) -> Iterator[auth_handshake.Listener]:
    """A controller of generation 2 that has the run from now on."""
    me = before._me
    with auth_handshake.Listener(before._token.decode(), me.run, 2) as listener:
        lead(folder, me.run, listener, 2, os.getpid(), 0.0)
        yield listener


@pytest.mark.parametrize("dead", [True, False], ids=["dead", "alive"])
def test_a_worker_switches_to_a_later_controller(tmp_path: Path, stranger: subprocess.Popen, dead: bool) -> None:
    second = call_id_base(2) + 1
    with worker(tmp_path, grace_s=60.0, controller=stranger.pid) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        line.call(FIRST, Protocol.add, 5)
        line.hear(ResultMessage)  # kept without an acknowledgement
        line.call(FIRST + 1, Protocol.nap, 1.5)
        line.call(FIRST + 2, Protocol.add, 7)
        time.sleep(0.3)
        if dead:
            stranger.kill()
            stranger.wait(10)
            line.connection.close()
            listener.close()
        began = time.monotonic()
        with successor(tmp_path, listener) as later:
            new = Line(later)
            assert new.hello == ResumeMessage(FIRST + 2, process.pid)
            if not dead:
                with pytest.raises(ConnectionClosed):
                    line.hear(FailureMessage)  # there is none, nor anything else any more
            new.call(second, Protocol.add, 1)
            assert new.hear(ResultMessage) == ResultMessage(0), "renewed, once the running call is over"
            assert time.monotonic() - began > 0.5
            assert new.hear(ResultMessage) == ResultMessage(second), "earlier calls are dropped"
            assert MethodSignature(Protocol.add).decode_result(new.payload) == 1, "and not run"
            if not dead:
                listener.highest_generation = 1  # the worker does not connect to it again
                assert listener.accept(1.5) is None
            new.connection.send(*pack_message(LeaveMessage("test")))
            assert process.wait(10) == 0


@pytest.mark.parametrize(("how", "why"), [("changed", "has changed since it was loaded"), ("none", "has no renew()")])
def test_services_that_cannot_be_renewed(tmp_path: Path, how: str, why: str) -> None:
    with worker(tmp_path) as (listener, _):
        if how == "none":
            text = SERVICE.replace("def renew", "def other")
            (tmp_path / "lone_service.py").write_text(text)
        line = Line(listener)
        line.hear(ResultMessage)
        if how == "changed":
            time.sleep(0.1)  # the file system's clock may be behind by a tick
            os.utime(tmp_path / "lone_service.py")
        with successor(tmp_path, listener) as later:
            new = Line(later)
            refused = new.hear(FailureMessage)
            assert isinstance(refused, FailureMessage)
            assert (refused.id, refused.kind) == (0, "lockstep.cluster.rpc.service_runner.NotRenewable")
            assert why in refused.message
            new.call(call_id_base(2) + 1, Protocol.add, 1)
            assert new.hear(FailureMessage).kind == refused.kind, "it refuses all calls"  # type: ignore[attr-defined]


def test_a_worker_of_a_replaced_controller_exits(tmp_path: Path) -> None:
    with auth_handshake.Listener(new_run_token(), "none", 1) as nobody, worker(tmp_path) as (listener, process):
        lead(tmp_path, listener._me.run, nobody, 2, os.getpid(), 0.0)
        try:
            assert process.wait(20) == 75
        except subprocess.TimeoutExpired:  # it started before, and switches
            assert nobody.accept(0) is not None


def test_sigterm_interrupts_the_call_and_closes_the_service(tmp_path: Path) -> None:
    with worker(tmp_path) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        line.call(FIRST, Protocol.nap, 600.0)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    assert "service closed" in (tmp_path / "log").read_text()


def test_a_signal_that_does_not_wake_the_main_thread_is_repeated(tmp_path: Path) -> None:
    """Like a signal that arrives between the interpreter's last check and a blocking system call."""
    with worker(tmp_path) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        line.call(FIRST, Protocol.miss, 600.0)
        assert process.wait(5) == 0
    assert "service closed" in (tmp_path / "log").read_text()


def test_secrets_that_users_code_prints_are_not_in_the_log(tmp_path: Path) -> None:
    with worker(tmp_path) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        line.call(FIRST, Protocol.tell, "tok3n")
        line.hear(FailureMessage)
        line.connection.send(*pack_message(LeaveMessage("test")))
        assert process.wait(10) == 0
    log = (tmp_path / "log").read_text()
    assert "tok3n is [hidden]\n" in log
    assert "Authorization: Bearer [hidden]\n" in log
    assert "theirs: still [hidden]\n" in log
    assert KEY not in log


def test_an_unfinished_line_is_written_when_it_is_flushed_and_threads_have_their_own() -> None:
    written = io.BytesIO()
    stream = RedactedStream(written, ["swordfish1"])
    stream.write("10% of sword")
    thread = threading.Thread(target=lambda: stream.write("another\nline\n"))
    thread.start()
    thread.join(5)
    stream.write("fish1")
    assert written.getvalue() == b"another\nline\n"
    stream.flush()
    stream.write("\r20%\n")
    assert written.getvalue() == b"another\nline\n10% of [hidden]\r20%\n"


def test_sigusr1_writes_all_stacks_into_the_log(tmp_path: Path) -> None:
    with worker(tmp_path) as (listener, process):
        line = Line(listener)
        line.hear(ResultMessage)
        line.call(FIRST, Protocol.nap, 600.0)
        time.sleep(0.3)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        log = (tmp_path / "log").read_text()
        assert "in nap" in log
        assert "controller_connection.py" in log
        assert process.poll() is None


def test_a_failing_constructor_is_reported(tmp_path: Path) -> None:
    with worker(tmp_path) as (listener, _):
        (tmp_path / "lone_service.py").write_text("class Service:\n    def __init__(self):\n        1 / 0\n")
        line = Line(listener)
        failed = line.hear(FailureMessage)
        assert isinstance(failed, FailureMessage)
        assert (failed.id, failed.kind, failed.message) == (0, "ZeroDivisionError", "division by zero")
        assert "lone_service.py" in failed.traceback
