"""Faults of the process that passes calls on to the workers of a node: none of them interrupts a call."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.base.transport import auth_handshake
from lockstep.base.wait_state import Stalled

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from cluster_services import Plain
from relayed_cluster import RelayedCluster, await_relay, until

from lockstep.cluster import call_relays
from lockstep.cluster.protocol import RemoteError, WorkerDied, WorkerSpec
from lockstep.cluster.rpc import relayed_connection
from lockstep.cluster.rpc.futures import gather_outcomes, gather_results
from lockstep.cluster.rpc.group_calls import submit_all
from lockstep.cluster.rpc.relayed_connection import RelayedConnection
from lockstep.config.cluster import LocalClusterConfig as Config
from lockstep.watch.agent.service_discovery import RELAY_FILE, ServiceAddress

WORKERS = 3


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RelayedCluster]:
    paths = [str(Path(__file__).parents[1] / "contract"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with RelayedCluster(Config(device="cpu"), new_run_id("relayed"), tmp_path / "run", 1) as made:
        yield made


@pytest.fixture
def workers(cluster: RelayedCluster, tmp_path: Path) -> list[Any]:
    (tmp_path / "ledger").touch()
    arguments = {"ledger": str(tmp_path / "ledger")}
    return cluster.start(
        [WorkerSpec(f"w-{rank}", "tester", rank, "cluster_services:Plain", arguments) for rank in range(WORKERS)]
    )


def relay_pid(cluster: RelayedCluster) -> int:
    return ServiceAddress.parse((run_shm_dir(cluster._run) / RELAY_FILE).read_bytes()).pid


def notes(tmp_path: Path) -> list[int]:
    """Numbers of the calls that were executed."""
    return sorted(map(int, (tmp_path / "ledger").read_text().split()))


def begun(tmp_path: Path, workers: list[Any], seconds: float) -> list[Any]:
    """Calls of all workers that are being executed."""
    calls = submit_all(workers, Plain.note, [(rank, None, seconds) for rank in range(WORKERS)])
    until(lambda: len(notes(tmp_path)) == WORKERS)
    return calls


def test_a_killed_relay_is_named_and_replaced_and_every_call_runs_once(
    cluster: RelayedCluster, workers: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = await_relay(*workers)
    calls = begun(tmp_path, workers, 2.0)
    os.kill(relay_pid(cluster), signal.SIGKILL)
    assert gather_results(calls, "notes") == [0, 1, 2]
    again = await_relay(*workers, other_than=link)
    assert gather_results(submit_all(workers, Plain.note, [(rank,) for rank in (3, 4, 5)]), "notes") == [3, 4, 5]
    assert notes(tmp_path) == [0, 1, 2, 3, 4, 5] and again is not link
    (line,) = [each.getMessage() for each in caplog.records if "call relay" in each.getMessage()]
    assert line.startswith("call-relay-1-0, the call relay of ") and "(signal 9)" in line


def test_a_stopped_relay_is_named_and_killed_and_every_call_runs_once(
    cluster: RelayedCluster, workers: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = await_relay(*workers)
    link.heartbeat.limit_s = 3.0
    os.kill(relay_pid(cluster), signal.SIGSTOP)
    calls = submit_all(workers, Plain.note, [(rank,) for rank in range(WORKERS)])
    began = time.monotonic()
    assert gather_results(calls, "notes") == [0, 1, 2]
    assert time.monotonic() - began < 20
    assert notes(tmp_path) == [0, 1, 2]
    assert "the call relay of" in caplog.text and "has been silent for" in caplog.text
    await_relay(*workers, other_than=link)


def test_a_relay_that_ends_again_and_again_is_done_without(
    cluster: RelayedCluster, workers: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_relays, "MAX_RESTARTS", 1)
    link = await_relay(*workers)
    os.kill(relay_pid(cluster), signal.SIGKILL)
    await_relay(*workers, other_than=link)
    os.kill(relay_pid(cluster), signal.SIGKILL)
    until(lambda: not any(isinstance(each.connection, RelayedConnection) for each in workers))
    assert gather_results(submit_all(workers, Plain.add, [(2,)] * WORKERS), "sums") == [2] * WORKERS
    first, second = [each.getMessage() for each in caplog.records if "call relay" in each.getMessage()]
    assert "until another one has started" in first and "until" not in second


def test_a_worker_that_dies_behind_a_relay_is_named_alone(
    cluster: RelayedCluster, workers: list[Any], tmp_path: Path
) -> None:
    await_relay(*workers)
    calls = begun(tmp_path, workers, 1.0)
    os.kill(workers[1].pid, signal.SIGKILL)
    first, died, third = gather_outcomes(calls, "notes")
    assert (first, third) == (0, 2)
    assert isinstance(died, WorkerDied) and died.worker == "w-1" and died.exit_code == -signal.SIGKILL
    assert isinstance(workers[0].connection, RelayedConnection), "the others stay behind the relay"


def test_an_error_of_one_worker_is_its_own_and_comes_before_the_others_results(
    cluster: RelayedCluster, workers: list[Any]
) -> None:
    await_relay(*workers)
    began = time.monotonic()
    with pytest.raises(RemoteError) as raised:
        gather_results(
            [*submit_all(workers[:2], Plain.sleep, [(5.0,)] * 2), *submit_all(workers[2:], Plain.sleep, [(-1.0,)])],
            "naps",
        )
    assert raised.value.worker == "w-2" and time.monotonic() - began < 4.0


def test_a_call_of_all_workers_is_one_message(
    cluster: RelayedCluster, workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = await_relay(*workers)
    sent = []
    queue = link.connection.queue
    monkeypatch.setattr(link.connection, "queue", lambda *parts: (sent.append(parts), queue(*parts))[1])
    assert gather_results(submit_all(workers, Plain.add, [(rank,) for rank in range(3)]), "sums") == [0, 1, 2]
    twice = [workers[0], workers[0], workers[1]]
    assert gather_results(submit_all(twice, Plain.add, [(1,), (1,), (1,)]), "sums") == [1, 2, 2]
    calls = [parts for parts in sent if b"add" in bytes(parts[0])]
    assert len(calls) == 1, "and where a worker is called twice, each call by itself"


def test_workers_of_a_broken_link_connect_again(cluster: RelayedCluster, workers: list[Any], tmp_path: Path) -> None:
    link = await_relay(*workers)
    calls = begun(tmp_path, workers, 1.0)
    link.connection._socket.shutdown(socket.SHUT_RDWR)  # as a network failure would
    assert gather_results(calls, "notes") == [0, 1, 2] and notes(tmp_path) == [0, 1, 2]
    await_relay(*workers, other_than=link)


@pytest.mark.parametrize("bad", [b"", b"\xff" * 80])
def test_a_malformed_frame_of_a_relay_ends_its_connection_only(
    cluster: RelayedCluster, workers: list[Any], bad: bytes
) -> None:
    link = await_relay(*workers)
    monkey = link.handle_frame

    def garbled(frame: bytearray, accept: Any) -> None:
        monkey(bytearray(bad), accept)

    link.handle_frame = garbled  # type: ignore[method-assign]
    assert gather_results(submit_all(workers, Plain.add, [(1,)] * WORKERS), "sums") == [1] * WORKERS
    await_relay(*workers, other_than=link)


def test_a_connection_that_is_open_at_one_end_only_does_not_cost_a_healthy_relay(
    cluster: RelayedCluster, workers: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayed_connection, "RELAY_SILENT_S", 2.0)
    link, pid = await_relay(*workers), relay_pid(cluster)
    name = link.connection.peer.name
    ghost = auth_handshake.connect(
        *cluster._server.address, token=cluster._token, run=cluster._run, generation=1, name=name
    )
    with ghost:  # nothing is ever sent over it, as if its other end had lost it and connected anew
        again = await_relay(*workers, other_than=link)
        until(lambda: [*cluster._server._links.values()] == [again])
        time.sleep(4.0)
        assert gather_results(submit_all(workers, Plain.add, [(rank,) for rank in range(3)]), "sums") == [0, 1, 2]
        assert relay_pid(cluster) == pid and await_relay(*workers) is again
    assert "the call relay of" not in caplog.text


def test_a_stuck_worker_is_named_while_data_of_another_one_pass_the_relay(
    cluster: RelayedCluster, workers: list[Any]
) -> None:
    await_relay(*workers)
    padding, ending = np.zeros(64 << 20, np.uint8), threading.Event()

    def keep_busy() -> None:
        while not ending.is_set():
            assert workers[0].submit(Plain.note, 7, padding).result("its data") == 0

    os.kill(workers[1].pid, signal.SIGSTOP)
    sending = threading.Thread(target=keep_busy)
    try:
        stuck = submit_all(workers[1:], Plain.add, [(1,), (2,)])
        sending.start()
        began = time.monotonic()
        with pytest.raises(Stalled) as raised:
            gather_results(stuck, "sums", stall_s=3.0)
        assert raised.value.waits_for == "w-1" and time.monotonic() - began < 15
    finally:
        ending.set()
        sending.join(60)
        os.kill(workers[1].pid, signal.SIGCONT)
    assert gather_results(stuck, "sums") == [1, 2]
