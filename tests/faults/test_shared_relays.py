"""One call relay serves the workers of several nodes, as in large runs; and what happens when it or a node is lost."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lockstep.base.folders import new_run_id
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import HandshakeRefused, WireError
from lockstep.base.transport.run_token import new_run_token

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from cluster_services import Plain, Renewable
from relayed_cluster import await_relay, until
from several_nodes import OtherNode, SeveralNodes, is_open

from lockstep.cluster import call_relays, relay_groups
from lockstep.cluster.protocol import WorkerDied, WorkerSpec
from lockstep.cluster.rpc.futures import gather_outcomes, gather_results
from lockstep.cluster.rpc.group_calls import submit_all
from lockstep.cluster.rpc.relayed_connection import RelayedConnection
from lockstep.watch.agent.service_discovery import ServiceAddress

OTHERS = 3
"""Nodes beside the controller's, all of which share a relay."""


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of few nodes are like large ones."""
    paths = [str(Path(__file__).parents[1] / "contract"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(call_relays, "SEPARATE_NODES", 1)
    monkeypatch.setattr(relay_groups, "WORKERS_PER_RELAY", OTHERS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SeveralNodes]:
    with SeveralNodes(new_run_id("shared"), tmp_path / "run", 1, new_run_token(), OTHERS) as made:
        yield made


def start(cluster: SeveralNodes, ledger: Path, *nodes: int, service: type = Plain, suffix: str = "") -> list[Any]:
    """A worker on each of these nodes."""
    ledger.touch()
    where, arguments = f"cluster_services:{service.__name__}", {"ledger": str(ledger)}
    names = [cluster._nodes[number].info.name for number in nodes]
    return cluster.start(
        [
            WorkerSpec(f"w-{at}{suffix}", "tester", at, where, arguments, preload=("numpy",), node=name,
                       adoptable=service is Renewable)
            for at, name in zip(nodes, names, strict=True)
        ]
    )  # fmt: skip


@pytest.fixture
def workers(cluster: SeveralNodes, tmp_path: Path) -> list[Any]:
    return start(cluster, tmp_path / "ledger", *range(1, OTHERS + 1))


def relay_of(cluster: SeveralNodes) -> Any:
    """The relay that serves the other nodes now."""
    (relay,) = [each for each in cluster._relays._relays.values() if not each.ended]
    return relay


def notes(tmp_path: Path) -> list[int]:
    """Numbers of the calls that were executed."""
    return sorted(map(int, (tmp_path / "ledger").read_text().split()))


def begun(tmp_path: Path, workers: list[Any], seconds: float) -> Any:
    """Calls that are being executed."""
    calls = submit_all(workers, Plain.note, [(rank, None, seconds) for rank in range(len(workers))])
    until(lambda: len(notes(tmp_path)) == len(workers))
    return calls


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def shown(cluster: SeveralNodes) -> list[ServiceAddress | None]:
    return [node.relay() for node in cluster._nodes if isinstance(node, OtherNode)]


def test_nodes_share_relays_and_a_call_of_all_workers_is_one_message_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SeveralNodes(new_run_id("shared"), tmp_path / "run", 1, new_run_token(), OTHERS + 1) as cluster:
        near, *far = start(cluster, tmp_path / "ledger", 0, *range(1, OTHERS + 2))
        first, second = await_relay(*far[:OTHERS]), await_relay(far[OTHERS])
        assert first is not second and not isinstance(near.connection, RelayedConnection)
        sent = []
        for link in (first, second):
            queue = link.connection.queue
            monkeypatch.setattr(link.connection, "queue", lambda *parts, to=queue: (sent.append(parts), to(*parts))[1])
        assert gather_results(submit_all([near, *far], Plain.add, [(rank,) for rank in range(5)]), "sums") == [
            *range(5)
        ]
        assert len([parts for parts in sent if b"add" in bytes(parts[0])]) == 2


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_shared_relay_listens_at_its_nodes_address_only_and_for_processes_of_the_run(
    tmp_path: Path, tls: bool
) -> None:
    token = new_run_token(tls)
    with SeveralNodes(new_run_id("shared"), tmp_path / "run", 1, token, OTHERS) as cluster:
        workers = start(cluster, tmp_path / "ledger", *range(1, OTHERS + 1))
        await_relay(*workers)
        relay = relay_of(cluster)
        assert shown(cluster) == [relay.address] * OTHERS
        host, port = relay.address.host, relay.address.port
        assert host == relay.node.info.address != "127.0.0.1" and is_open(host, port)
        addresses = ["127.0.0.1", *(node.info.address for node in cluster._nodes)]
        assert not any(is_open(each, port) for each in addresses if each != host)
        with pytest.raises(HandshakeRefused) as refused:
            auth_handshake.connect(host, port, token=new_run_token(tls), run=cluster._run, generation=1, name="w-1")
        assert refused.value.code == "token"
        if tls:
            with pytest.raises(WireError):
                auth_handshake.connect(
                    host, port, token=token[4:], run=cluster._run, generation=1, name="w-1", timeout_s=1.0
                )
        assert gather_results(submit_all(workers, Plain.add, [(1,)] * OTHERS), "sums") == [1] * OTHERS


def test_a_killed_relay_is_replaced_by_one_on_another_node_and_every_call_runs_once(
    cluster: SeveralNodes, workers: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, relay = await_relay(*workers), relay_of(cluster)
    calls = begun(tmp_path, workers, 2.0)
    os.kill(relay.address.pid, signal.SIGKILL)
    assert gather_results(calls, "notes") == [0, 1, 2]
    await_relay(*workers, other_than=link)
    assert relay_of(cluster).node is not relay.node
    assert gather_results(submit_all(workers, Plain.note, [(rank,) for rank in (3, 4, 5)]), "notes") == [3, 4, 5]
    assert notes(tmp_path) == [0, 1, 2, 3, 4, 5]
    (line,) = [each.getMessage() for each in caplog.records if "call relay" in each.getMessage()]
    assert line.startswith("call-relay-1-0, the call relay of node-1 and 2 other nodes, ended (signal 9)")


def test_a_stopped_relay_is_killed_and_every_call_runs_once(
    cluster: SeveralNodes, workers: list[Any], tmp_path: Path
) -> None:
    link = await_relay(*workers)
    link.heartbeat.limit_s = 3.0
    stop(relay_of(cluster).address.pid)
    calls = submit_all(workers, Plain.note, [(rank,) for rank in range(OTHERS)])
    assert gather_results(calls, "notes") == [0, 1, 2] == notes(tmp_path)
    await_relay(*workers, other_than=link)


def test_workers_of_other_nodes_outlive_the_relays_node(
    cluster: SeveralNodes, workers: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, relay = await_relay(*workers), relay_of(cluster)
    assert relay.node is workers[0].node
    calls = begun(tmp_path, workers, 2.0)
    os.kill(relay.agent.address.pid, signal.SIGKILL)  # and the kernel kills its workers and the relay
    died, *others = gather_outcomes(calls, "notes")
    assert isinstance(died, WorkerDied) and others == [1, 2] and notes(tmp_path) == [0, 1, 2]
    await_relay(*workers[1:], other_than=link)
    assert relay_of(cluster).node in (workers[1].node, workers[2].node)
    assert "the call relay of node-1 and 2 other nodes, ended with its node" in caplog.text


def test_workers_leave_a_relay_whose_host_is_silent_and_closes_no_connection(
    cluster: SeveralNodes, workers: list[Any], tmp_path: Path
) -> None:
    link, relay = await_relay(*workers), relay_of(cluster)
    link.heartbeat.limit_s = 3.0
    agent, pid, own = relay.agent.address.pid, relay.address.pid, workers[0].pid
    for each in (agent, pid, own):
        stop(each)
    calls = submit_all(workers, Plain.note, [(rank,) for rank in range(OTHERS)])
    died, *others = gather_outcomes(calls, "notes")
    assert isinstance(died, WorkerDied) and others == [1, 2] == notes(tmp_path)
    await_relay(*workers[1:], other_than=link)
    for each in (own, pid, agent):
        os.kill(each, signal.SIGKILL)


def test_the_loss_of_another_node_disturbs_nobody_behind_the_relay(
    cluster: SeveralNodes, workers: list[Any], tmp_path: Path
) -> None:
    link, relay = await_relay(*workers), relay_of(cluster)
    lost = workers[2]
    calls = begun(tmp_path, workers, 2.0)
    os.kill(lost.node.agent.address.pid, signal.SIGKILL)
    first, second, died = gather_outcomes(calls, "notes")
    assert (first, second) == (0, 1) and isinstance(died, WorkerDied)
    assert await_relay(*workers[:2]) is link and relay_of(cluster) is relay
    until(lambda: not lost.node.alive)
    (lost.node.info.shared / "call-relay.json").unlink()  # as on a host that was started again
    cluster.start_agent(lost.node)
    (again,) = start(cluster, tmp_path / "ledger", 3, suffix=".1")
    assert await_relay(*workers[:2], again) is link and again.call(Plain.add, 2) == 2


def test_the_relays_of_a_later_controller_take_the_place_of_the_first_ones(
    cluster: SeveralNodes, tmp_path: Path
) -> None:
    workers = start(cluster, tmp_path / "ledger", *range(1, OTHERS + 1), service=Renewable)
    await_relay(*workers)
    before = relay_of(cluster).address
    with ExitStack() as closing:
        later = SeveralNodes(cluster._run, tmp_path / "run", 2, cluster._token, OTHERS, cluster)
        closing.callback(later.close)
        heirs = start(later, tmp_path / "ledger", *range(1, OTHERS + 1), service=Renewable)
        assert [each.pid for each in heirs] == [each.pid for each in workers]
        link = await_relay(*heirs)
        assert link.connection.peer.name.startswith("call-relay-2-")
        assert gather_results(submit_all(heirs, Renewable.renewed, [()] * OTHERS), "renewals") == [1] * OTHERS
        until(lambda: not is_open(before.host, before.port))
        assert shown(later) == [relay_of(later).address] * OTHERS


def test_a_worker_that_cannot_reach_the_relay_keeps_its_connection_to_the_controller(
    cluster: SeveralNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall lets through what comes from the controller, and drops what comes from other nodes."""
    monkeypatch.setattr(call_relays, "DIRECT_NODES", 1 << 30)  # no relay is started
    (worker,) = start(cluster, tmp_path / "ledger", 1)
    before, log = worker.connection, worker.log
    with socket.create_server(("127.0.0.9", 0), backlog=0) as silent:
        address = silent.getsockname()
        with socket.create_connection(address):  # its queue is full now
            relay = ServiceAddress(cluster._run, 1, *address, os.getpid())
            worker.node.agent.show_call_relay(relay)
            until(lambda: "doing without the call relay" in log.read_text())
            assert worker.connection is before and worker.call(Plain.add, 1) == 1
    assert log.read_text().count("doing without the call relay") == 1
