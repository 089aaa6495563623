"""The contract of every cluster: one suite, parametrised over the implementations."""

import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cluster_services import BackgroundService, DeferringService, Parcel, Plain
from needed_systems import needs_ray
from relayed_cluster import RelayedCluster, await_relay

from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, ConnectionClosed, HandshakeRefused
from lockstep.base.wait_state import Stalled
from lockstep.cluster.agent_cluster import AgentCluster
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import RemoteError, Worker, WorkerDied, WorkerSpec
from lockstep.cluster.rendezvous_store import open_store
from lockstep.cluster.rpc.codec import CodecError
from lockstep.cluster.rpc.futures import gather_results
from lockstep.cluster.rpc.relayed_connection import RelayedConnection
from lockstep.config.cluster import LocalClusterConfig as LocalConfig
from lockstep.config.cluster import RayClusterConfig as RayConfig

PATH = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
TOKEN = secrets.token_hex(16)
Start = Callable[..., Any]


def local(folder: Path) -> LocalCluster:
    return LocalCluster(LocalConfig(notice_after_s=1.0), f"contract-{secrets.token_hex(3)}", folder, 1, TOKEN)


def relayed(folder: Path) -> LocalCluster:
    return RelayedCluster(LocalConfig(notice_after_s=1.0), f"contract-{secrets.token_hex(3)}", folder, 1, TOKEN)


def own_ray(folder: Path) -> AgentCluster:
    from lockstep.cluster.ray.ray_cluster import RayCluster

    return RayCluster(RayConfig(notice_after_s=1.0), f"contract-{secrets.token_hex(3)}", folder, 1, TOKEN)


CLUSTERS: dict[str, Callable[[Path], AgentCluster]] = {"local": local, "relayed": relayed, "ray": own_ray}
QUICK = ("local", pytest.param("relayed", marks=pytest.mark.slow))
"""test_call_relays.py has what is particular to relays."""


@pytest.fixture(scope="module", params=[*QUICK, pytest.param("ray", marks=needs_ray)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with CLUSTERS[request.param](tmp_path_factory.mktemp("run")) as made:
        yield made


def spec(name: str, service: type = Plain, rank: int = 0, **arguments: Any) -> WorkerSpec:
    return WorkerSpec(
        name, "tester", rank, f"cluster_services:{service.__name__}", arguments,
        environment={"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        preload=("numpy", "lockstep.cluster.rpc.controller_connection"),
    )  # fmt: skip


@pytest.fixture
def start(cluster: Any) -> Iterator[Start]:
    """Starts workers, and stops them after the test."""
    started: list[Worker] = []
    count = iter(range(1000))
    prefix = secrets.token_hex(2)

    def one(service: type = Plain, **arguments: Any) -> Any:
        (worker,) = cluster.start([spec(f"w{prefix}-{next(count)}", service, 7, **arguments)])
        started.append(worker)
        if isinstance(cluster, RelayedCluster):
            await_relay(worker)
        return worker

    yield one
    for worker in started:
        cluster.stop(worker, grace_s=1.0)


def cut(worker: Any) -> None:
    """Break the worker's connection as a network failure would."""
    connection = worker.connection
    if isinstance(connection, RelayedConnection):
        connection = connection.link.connection
    if connection is not None:
        with contextlib.suppress(OSError):
            connection._socket.shutdown(socket.SHUT_RDWR)


def test_calls_run_in_the_order_of_submission(start: Start) -> None:
    worker = start()
    pendings = [worker.submit(Plain.add, n) for n in range(100)]
    totals = gather_results(pendings, "sums")
    assert totals == [sum(range(n + 1)) for n in range(100)]
    assert worker.call(Plain.add, 0) == sum(range(100))
    assert worker.call(Plain.pid) == worker.pid != os.getpid()


def test_concurrent_calls_are_answered_during_a_running_call(start: Start) -> None:
    worker = start()
    long = worker.submit(Plain.sleep, 2.0)
    began = time.monotonic()
    assert [worker.call(Plain.peek) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert time.monotonic() - began < 1.0
    assert not long.done()
    assert long.result("the long one") == 2.0


def test_values_of_all_kinds_survive_a_round_trip(start: Start) -> None:
    worker = start()
    parcel = Parcel("x", {"a": np.arange(7, dtype=np.int32), "b": np.ones((300, 70)), "c": np.zeros((0, 3))})
    back = worker.call(Plain.double, parcel)
    assert back.label == "xx"
    for name, array in parcel.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array * 2)
        assert back.arrays[name].dtype == array.dtype


def test_large_arrays_cross_both_ways(start: Start) -> None:
    worker = start()
    array = np.random.default_rng(0).integers(0, 100, 12_500_000).astype(np.float64)  # 100 MB
    kept = array[0]
    assert worker.call(Plain.checksum, array) == (array.nbytes, float(array.sum()))
    assert array[0] == kept
    back = worker.call(Plain.zeros, 100)
    assert back.nbytes == 100 << 20
    assert not back.any()
    back[0] = 1


def test_an_answer_is_a_snapshot_from_when_the_call_returned(start: Start) -> None:
    worker = start()
    pendings = [worker.submit(Plain.reused, n) for n in range(6)]
    assert [int(answer.mean()) for answer in gather_results(pendings, "answers")] == list(range(6))


def test_exceptions_arrive_with_worker_rank_and_remote_traceback(start: Start) -> None:
    worker = start()
    with pytest.raises(RemoteError) as caught:
        worker.call(Plain.fail, "the third layer is missing")
    error = caught.value
    assert (error.worker, error.rank) == (worker.spec.name, 7)
    assert error.kind == "cluster_services.Painful"
    assert error.message == "the third layer is missing"
    assert "in fail" in error.traceback
    assert "lockstep/cluster" not in error.traceback, "only the service's own frames"
    assert worker.call(Plain.add, 1) == 1, "the worker continues"


def test_wrong_arguments_and_results_are_reported(start: Start) -> None:
    worker = start()
    with pytest.raises(TypeError, match="missing a required argument: 'n'"):
        worker.submit(Plain.add)  # type: ignore[call-arg]
    with pytest.raises(CodecError, match=r"Plain.add: n: "):
        worker.submit(Plain.add, object())  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match=r"Plain.add: n: Expected `int`, got `str`"):
        worker.call(Plain.add, "three")  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match=r"Plain.wrong: return value: builtins.object cannot be sent"):
        worker.call(Plain.wrong)
    with pytest.raises(RemoteError, match="Plain has no method 'collect'"):
        worker.call(BackgroundService.collect)


def test_a_call_is_executed_once_if_the_connection_breaks_during_it(start: Start, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    worker = start(ledger=str(ledger))
    pending = worker.submit(Plain.note, 1, None, 1.0)
    time.sleep(0.3)
    cut(worker)
    assert pending.result("the note") == 1
    assert ledger.read_text() == "1\n"


def test_a_result_arrives_after_the_connection_is_restored(start: Start) -> None:
    worker = start()
    pending = worker.submit(Plain.sleep, 0.2)
    os.kill(worker.pid, signal.SIGSTOP)
    cut(worker)
    os.kill(worker.pid, signal.SIGCONT)
    assert pending.result("the nap") == 0.2


def test_a_connection_that_breaks_repeatedly_loses_and_repeats_nothing(start: Start, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    worker = start(ledger=str(ledger))
    over = threading.Event()
    cuts = 0

    def saboteur() -> None:
        nonlocal cuts
        generator = random.Random(0)
        while not over.wait(generator.uniform(0.0, 0.06)):
            cut(worker)
            cuts += 1

    thread = threading.Thread(target=saboteur)
    thread.start()
    try:
        pendings = []
        for number in range(150):
            padding = np.full(number * 4000, 1, np.uint8) if number % 3 == 0 else None
            pendings.append(worker.submit(Plain.note, number, padding, 0.005))
            if number % 10 == 0:
                worker.call(Plain.peek)
        results = gather_results(pendings, "notes")
    finally:
        over.set()
        thread.join(5)
    assert cuts > 10
    assert results == [number * 4000 if number % 3 == 0 else number for number in range(150)]
    assert ledger.read_text().split() == [str(number) for number in range(150)]
    assert worker.call(Plain.peek) == 16


def test_a_call_without_progress_is_stalled(start: Start) -> None:
    worker = start()
    pending = worker.submit(Plain.wait_for, "reward-3", 30.0)
    began = time.monotonic()
    with pytest.raises(Stalled) as caught:
        pending.result("scores", stall_s=1.6)
    assert 1.5 < time.monotonic() - began < 4
    assert caught.value.waits_for == worker.spec.name
    assert "is in stage collecting, waits for reward-3 (its scores)" in str(caught.value)


def test_progress_keeps_a_long_call_alive(start: Start) -> None:
    worker = start()
    pending = worker.submit(Plain.work, 4.0)
    assert pending.result("work", stall_s=2.0) > 20


def test_a_call_queued_behind_a_progressing_one_is_not_stalled(start: Start) -> None:
    worker = start()
    worker.submit(Plain.work, 3.5)
    assert worker.submit(Plain.add, 1).result("behind it", stall_s=2.0) == 1


def test_a_wait_without_progress_is_reported(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    worker = start()
    with caplog.at_level(logging.WARNING, logger="lockstep.cluster.rpc.call_wait"):
        worker.submit(Plain.wait_for, "judge", 2.5).result("train step 12")
    messages = [record.getMessage() for record in caplog.records]
    assert any(
        f"waiting for {worker.spec.name} " in line
        and "(train step 12): no progress for" in line
        and "waits for judge (its scores)" in line
        for line in messages
    ), messages


def test_a_stopped_worker_is_stalled_and_may_continue(start: Start) -> None:
    worker = start()
    pending = worker.submit(Plain.work, 1.0)
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Stalled, match="is stopped"):
            pending.result("work", stall_s=1.5)
        began = time.monotonic()
        large = worker.submit(Plain.checksum, np.zeros(4_000_000))
        assert time.monotonic() - began < 1.0, "a peer that does not read does not block the caller"
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    assert pending.result("work") > 0
    assert large.result("checksum") == (32_000_000, 0.0)


def test_the_first_failure_ends_a_wait_for_several_calls(start: Start) -> None:
    good, bad = start(), start()
    pendings = [good.submit(Plain.sleep, 60.0), bad.submit(Plain.sleep, 0.3), bad.submit(Plain.fail, "now")]
    began = time.monotonic()
    with pytest.raises(RemoteError, match="now"):
        gather_results(pendings, "all of them")
    assert time.monotonic() - began < 2.0
    assert not pendings[0].done()


def test_a_killed_worker_fails_its_calls_at_once(start: Start) -> None:
    worker = start()
    pendings = [worker.submit(Plain.sleep, 60.0), worker.submit(Plain.add, 1)]
    threading.Timer(0.3, os.kill, (worker.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        gather_results(pendings, "both")
    assert time.monotonic() - began < 1.3
    assert caught.value.exit_code == -signal.SIGKILL
    assert not worker.alive()
    with pytest.raises(WorkerDied):
        pendings[1].result("the other")
    with pytest.raises(WorkerDied):
        worker.call(Plain.add, 1)


@pytest.mark.parametrize(("how", "code"), [("exit_process", 3), ("quit", 5)])
def test_a_worker_that_ends_by_itself_leaves_its_last_lines(start: Start, how: str, code: int) -> None:
    worker = start()
    pending = worker.submit(Plain.exit_process, 3) if how == "exit_process" else worker.submit(Plain.quit)
    with pytest.raises(WorkerDied) as caught:
        pending.result("its end")
    assert caught.value.exit_code == code
    assert ("last words" if how == "exit_process" else "exiting") in caught.value.log_tail or how == "quit"
    assert worker.spec.name in caught.value.log_tail


def test_the_background_loop_runs_between_calls(start: Start) -> None:
    worker = start(BackgroundService)
    worker.call(BackgroundService.submit, 400)
    latencies = []
    while (done := worker.call(BackgroundService.collect)) < 400:
        began = time.monotonic()
        assert worker.call(BackgroundService.progress) >= done
        worker.call(BackgroundService.collect)
        latencies.append(time.monotonic() - began)
        time.sleep(0.02)
    assert len(latencies) > 5
    assert np.median(latencies) < 0.1


def test_an_idle_background_loop_does_not_spin(start: Start) -> None:
    worker = start(BackgroundService)
    worker.call(BackgroundService.submit, 3)
    time.sleep(0.2)
    calls_before, process = worker.call(BackgroundService.background_calls), psutil.Process(worker.pid)
    before = process.cpu_times()
    time.sleep(2.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.2
    assert worker.call(BackgroundService.background_calls) - calls_before < 20


def test_a_broken_background_loop_fails_the_calls(start: Start) -> None:
    worker = start(BackgroundService)
    worker.call(BackgroundService.sabotage)
    for _ in range(2):
        with pytest.raises(RemoteError, match="the decode loop broke"):
            worker.call(BackgroundService.collect)
            time.sleep(0.2)
            worker.call(BackgroundService.collect)
    assert worker.call(BackgroundService.progress) == 0


def test_calls_may_be_answered_out_of_order(start: Start) -> None:
    worker = start(DeferringService)
    now = worker.call(DeferringService.at, 0)
    late = worker.submit(DeferringService.at, 150)
    with pytest.raises(RemoteError, match="there was no such turn"):
        worker.call(DeferringService.at, -1)
    assert worker.call(DeferringService.count) == 3
    assert now == [0] and not late.done()
    assert late.result("its turn") == [150, 150]


def test_a_deferred_answer_survives_a_broken_connection(start: Start) -> None:
    worker = start(DeferringService)
    late = worker.submit(DeferringService.at, 300)
    assert worker.call(DeferringService.count) == 1
    cut(worker)
    assert late.result("its turn") == [300, 300]


def test_a_broken_service_fails_its_open_calls(start: Start) -> None:
    worker = start(DeferringService)
    late = worker.submit(DeferringService.at, 90_000)
    worker.submit(DeferringService.sabotage)
    with pytest.raises(RemoteError, match="the loop broke"):
        late.result("its turn")


def test_a_worker_that_dies_fails_its_open_calls(start: Start) -> None:
    worker = start(DeferringService)
    late = worker.submit(DeferringService.at, 90_000)
    worker.call(DeferringService.count)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        late.result("its turn")


def test_a_constructor_that_raises(cluster: Any) -> None:
    specs = [spec("fine", Plain, 0), spec("poor", Plain, 3, fail="raise"), spec("slow", Plain, 1, fail="sleep")]
    began = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        cluster.start(specs)
    assert time.monotonic() - began < 20
    assert (caught.value.worker, caught.value.rank) == ("poor", 3)
    assert caught.value.message == "no such model: tiny"
    (again,) = cluster.start([spec("fine", Plain)])  # the names are free again, because the others have ended
    assert again.call(Plain.add, 1) == 1
    cluster.stop(again)


def test_classes_that_are_no_services_are_refused(cluster: Any) -> None:
    for service, expected in (("nowhere:Thing", "No module named 'nowhere'"), ("cluster_services", "package.module:")):
        wrong = spec("wrong")
        wrong.service = service
        with pytest.raises(RemoteError, match=expected):
            cluster.start([wrong])


def test_a_worker_that_dies_while_it_starts(cluster: Any) -> None:
    with pytest.raises(WorkerDied) as caught:
        cluster.start([spec("early", Plain, 2, fail="exit")])
    assert (caught.value.worker, caught.value.rank, caught.value.exit_code) == ("early", 2, 3)
    assert "about to exit" in caught.value.log_tail


def test_imports_may_take_longer_than_a_stall(tmp_path: Path) -> None:
    slow = spec("slow")
    slow.preload = ("slow_import",)
    config = LocalConfig(stall_limit_s=1.5, notice_after_s=1.0)
    with LocalCluster(config, f"slow-{secrets.token_hex(3)}", tmp_path, 1) as made:
        (worker,) = made.start([slow])
        assert worker.call(Plain.add, 1) == 1


def test_names_are_unique(cluster: Any) -> None:
    with pytest.raises(ValueError, match="'twin' is taken"):
        cluster.start([spec("twin"), spec("twin")])
    for name in ("../up", "", "agent", "a b"):
        with pytest.raises(ValueError, match="worker name"):
            cluster.start([spec(name)])


def test_stop_closes_the_service(cluster: Any, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    idle, busy = cluster.start([spec("idle", ledger=str(ledger)), spec("busy", ledger=str(tmp_path / "other"))])
    pending = busy.submit(Plain.sleep, 60.0)
    for worker in (idle, busy):
        began = time.monotonic()
        cluster.stop(worker)
        assert time.monotonic() - began < 4
        assert not psutil.pid_exists(worker.pid)
        cluster.stop(worker)
    assert ledger.read_text() == (tmp_path / "other").read_text() == "closed\n"
    with pytest.raises(WorkerDied):
        pending.result("nothing")


def test_a_worker_that_does_not_end_is_killed(cluster: Any) -> None:
    (worker,) = cluster.start([spec("deaf")])
    worker.submit(Plain.deaf, 60.0)
    time.sleep(0.2)
    began = time.monotonic()
    cluster.stop(worker, grace_s=0.5)
    assert time.monotonic() - began < 4
    assert not psutil.pid_exists(worker.pid)


def test_unknown_connections_are_refused(cluster: Any, start: Start) -> None:
    worker = start()
    host, port = cluster._server.address
    identity: dict[str, Any] = {"run": cluster._run, "generation": 1, "name": worker.spec.name, "timeout_s": 3.0}
    for change, code in (({"token": "x"}, "token"), ({"token": TOKEN, "generation": 0}, "generation")):
        with pytest.raises(HandshakeRefused) as caught:
            auth_handshake.connect(host, port, **identity | change)
        assert caught.value.code == code
    unknown = auth_handshake.connect(host, port, **identity | {"token": TOKEN, "name": "nobody"})
    with pytest.raises(ConnectionClosed):
        unknown.recv(3.0)
    assert worker.call(Plain.add, 2) == 2


def test_the_token_is_in_no_command_line_and_no_file(cluster: Any, start: Start) -> None:
    worker = start()
    assert worker.call(Plain.environment, "LOCKSTEP_TOKEN") is None, "not inherited by the worker's children"
    assert TOKEN not in worker.call(Plain.started_with), "and not readable by a user's function"
    words = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not any(TOKEN in line for line in words)
    folder = cluster._folder
    assert not [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_the_store_lives_outside_the_ranks(cluster: Any) -> None:
    url = cluster.store()
    assert cluster.store() == url
    open_store(url, "ranks", 10.0).set("a", "1")
    assert open_store(url, "ranks", 10.0).get("a") == b"1"
    assert not open_store(url, "others", 10.0).check(["a"])
    assert url.startswith("file://"), "nothing listens for a run on one host"


def test_close_leaves_nothing(request: pytest.FixtureRequest, cluster: Any, tmp_path: Path) -> None:
    made = CLUSTERS[request.node.callspec.params["cluster"]](tmp_path)
    workers = made.start([spec("a"), spec("b")])
    pids = [worker.pid for worker in workers]
    pending = workers[0].submit(Plain.sleep, 60.0)
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 5
    made.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(WorkerDied):
        pending.result("nothing")
    with pytest.raises(RuntimeError, match="closed"):
        made.start([spec("c")])


def test_workers_end_with_the_agent_that_started_them(
    request: pytest.FixtureRequest, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if another agent takes its place before anybody has looked whether they have ended."""
    looks, tick = threading.Event(), AgentCluster._tick
    monkeypatch.setattr(AgentCluster, "_tick", lambda made: tick(made) if looks.is_set() else None)
    with CLUSTERS[request.node.callspec.params["cluster"]](tmp_path) as made:
        left = made.start([spec("left-0"), spec("left-1")])
        agent = left[0].node.agent
        os.kill(agent.address.pid, signal.SIGKILL)
        until = time.monotonic() + 30.0
        while agent.alive:
            assert time.monotonic() < until
            time.sleep(0.001)
        (other,) = made.start([spec("other")])
        looks.set()
        assert other.node.agent is not agent
        for worker in left:
            with pytest.raises(WorkerDied):
                worker.submit(Plain.add, 1).result("nothing", stall_s=10.0)
            assert not worker.alive()
        assert other.call(Plain.add, 1) == 1


def test_the_token_does_not_travel_to_agents(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[bytes] = []
    queue, send = Connection.queue, Connection.send

    def queued(connection: Connection, frame: bytes, *more: Any, **named: Any) -> Any:
        frames.append(bytes(frame))
        return queue(connection, frame, *more, **named)

    def sent(connection: Connection, frame: bytes, *more: Any, **named: Any) -> Any:
        frames.append(bytes(frame))
        return send(connection, frame, *more, **named)

    monkeypatch.setattr(Connection, "queue", queued)
    monkeypatch.setattr(Connection, "send", sent)
    worker = start()
    assert worker.alive()  # it has proved that it knows the token
    orders = [frame for frame in frames if b'"spawn"' in frame]
    assert orders
    assert not [frame for frame in orders if TOKEN.encode() in frame]
