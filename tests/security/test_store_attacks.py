"""Other users of a host, or of the network, use up what the rendezvous store of a run has."""

import logging
import os
import resource
import secrets
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from gated_rewards import Gate
from harness import LOCKSTEP, Launched, config, end_all, task, train, weights, write
from intruder import Intruder, is_open_store, listeners, send_large_keys
from needed_systems import needs_namespaces

from benchmarks.faults.ray_hosts import Hosts, until
from lockstep.base.limits import raise_descriptor_limit
from lockstep.cluster import rendezvous_store
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import Worker, WorkerSpec
from lockstep.cluster.rendezvous_store import RendezvousStoreProcess
from lockstep.cluster.rpc.futures import gather_results
from lockstep.config.cluster import LocalClusterConfig as Config
from lockstep.watch.beacon.reader import read_beacon
from tests.faults.rank_services import Ring

FAULTS = str(Path(__file__).parents[1] / "faults")
SOFT_LIMIT = 1024
"""The usual soft limit of descriptors, with which a run starts."""


@pytest.fixture(autouse=True)
def no_run_continues() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture
def intruder() -> Iterator[Intruder]:
    raise_descriptor_limit()
    made = Intruder()
    yield made
    made.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(Config(device="cpu"), f"attacked-{secrets.token_hex(3)}", tmp_path, 1) as made:
        yield made


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store listens, as in a run on several hosts."""
    monkeypatch.setattr(rendezvous_store, "is_on_local_disk", lambda folder: False)
    monkeypatch.setattr(rendezvous_store, "MEMORY_BYTES", 64 << 20)


def ring(cluster: LocalCluster, name: str) -> list[Worker]:
    """Two ranks with a communicator."""
    path = os.pathsep.join([FAULTS, os.environ.get("PYTHONPATH", "")])
    arguments = {"world": 2, "store": cluster.store(), "prefix": name}
    specs = [
        WorkerSpec(
            f"{name}-{rank}", "policy", rank, "rank_services:Ring", {"rank": rank, **arguments},
            {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, ("torch", "psutil"),
        )
        for rank in range(2)
    ]  # fmt: skip
    return cluster.start(specs)


def meet(ranks: list[Worker]) -> list[float]:
    return gather_results([rank.submit(Ring.meet, 3) for rank in ranks], "a sum")


@pytest.fixture
def earlier() -> set[object]:
    """The listeners of this process that other tests left open."""
    return set(listeners([psutil.Process()]))


def test_ranks_on_one_host_have_no_store_to_connect_to(
    earlier: set[object], cluster: LocalCluster, intruder: Intruder
) -> None:
    """And a rank's own listener, gloo's, survives as many connections as the soft limit allows descriptors."""
    ranks = ring(cluster, "before")
    own = psutil.Process()
    everything = listeners([own, *own.children(recursive=True)])
    found = {address: process for address, process in everything.items() if address not in earlier}
    assert any(process.pid == own.pid for process in found.values()), "the controller listens"
    assert [address for address in found if is_open_store(address)] == []
    for address, process in found.items():
        intruder.attack(address, str(process.pid), idle=300)
    assert meet(ranks) == [8.0, 8.0]
    assert meet(ring(cluster, "after")) == [8.0, 8.0]


def test_a_store_across_hosts_that_is_filled_is_named_and_replaced(
    listening: None, cluster: LocalCluster, intruder: Intruder, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller neither grows nor holds the connections, ranks that have met continue, and others can meet."""
    before = ring(cluster, "before")
    store = cluster._store
    assert isinstance(store, RendezvousStoreProcess)
    assert is_open_store(store.address), "anyone may use it: torch has no authentication"
    own, first = psutil.Process(), store.pid
    memory, descriptors = own.memory_info().rss, own.num_fds()
    intruder.attack(store.address)
    assert own.num_fds() <= descriptors + len(intruder.held) + 20, "only this test's ends of the connections"
    assert not send_large_keys(store.address, 64)
    deadline = time.monotonic() + 60
    while store.pid == first:
        assert time.monotonic() < deadline, "the store was not replaced"
        time.sleep(0.05)
    with caplog.at_level(logging.ERROR):
        assert f"rendezvous store {store.url} ended: its process (pid {first})" in caplog.text
    assert meet(before) == [8.0, 8.0]
    assert meet(ring(cluster, "after")) == [8.0, 8.0]
    assert own.memory_info().rss - memory < 64 << 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_one_host_survives_idle_connections_and_garbage(tmp_path: Path, intruder: Intruder) -> None:
    """More connections than descriptors to every listener of a run that starts with the usual soft limit; the weights
    are those of a run in peace."""
    home = task(tmp_path)
    peace = train(tmp_path / "peace", config(home, "sft", folder=str(tmp_path / "peace" / "runs")))
    values = config(home, "sft", folder=str(tmp_path / "war" / "runs"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
    try:
        launched = Launched.start(tmp_path / "war" / "runs" / "sft", str(write(tmp_path / "war", values)), cold=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    stores, limits = [], set()
    while launched.process.poll() is None:
        members = launched.members()
        for address, process in listeners(members).items():
            if address not in intruder.attacked:
                if is_open_store(address):
                    stores.append(address)
                    send_large_keys(address, 200)
                intruder.attack(address, str(process.pid))
                if process.is_running():
                    limits.add(process.rlimit(psutil.RLIMIT_NOFILE)[0])
        time.sleep(0.2)
    assert launched.finish() == 0, launched.text()
    assert stores == []
    assert len(intruder.attacked) >= 4, "controller, agent, supervisor and ranks listen"
    assert min(limits) > SOFT_LIMIT
    assert weights(launched.folder) == weights(peace)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts with two cores each, in one Ray cluster."""
    (tmp_path / "hosts").mkdir()
    made = Hosts(tmp_path / "hosts")
    try:
        made.connect()
        made.start_ray(cpus=2)
        made.meet()
        yield made
    finally:
        made.close()


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_two_hosts_survives_the_end_of_its_store(tmp_path: Path, hosts: Hosts, intruder: Intruder) -> None:
    """The store is filled until it ends. The run names it; weights reach the engine on the other host, and ranks that
    are killed later meet in the store that replaces it."""
    placed = {"cluster": {"kind": "ray", "address": hosts.address}, "placement": {"policy": {"nodes": 1}}}
    attacked, killed = 2, 4
    gate = Gate(tmp_path / "gate", attacked, killed)
    terms = {"terms": [{"kind": "regex", "pattern": "[0-4].*"}, gate.term]}
    values = config(task(tmp_path), "grpo", folder=str(tmp_path / "runs"), steps=6, reward=terms, **placed)
    output = tmp_path / "output"
    with output.open("wb") as file:
        run = psutil.Popen(
            [*LOCKSTEP, "train", str(write(tmp_path, values))], stdout=file, stderr=file,
            env=hosts.environment | {"LOCKSTEP_BEACONS": str(hosts.shared("a"))},
        )  # fmt: skip
    try:
        until((gate.folder / f"reached-{attacked}").exists, 300, "the attacked step")
        (store,) = store_processes(run)
        (address,) = listeners([store])
        descriptors, memory = run.num_fds(), run.memory_info().rss
        intruder.attack(address)
        assert not send_large_keys(address, 400)
        until(lambda: [each.pid for each in store_processes(run)] not in ([], [store.pid]), 60, "another store")
        assert run.num_fds() <= descriptors + 20 and run.memory_info().rss - memory < 64 << 20
        intruder.close()
        gate.open(attacked)
        until((gate.folder / f"reached-{killed}").exists, 120, "a later step")
        (beacon,) = (path for host in "ab" for path in hosts.shared(host).glob("*/policy-1.beacon"))
        rank = read_beacon(beacon)
        assert rank is not None
        os.kill(rank.pid, signal.SIGKILL)
        gate.open(killed)
        assert run.wait(400) == 0, output.read_text()
    finally:
        if run.is_running():
            run.kill()
    printed = " ".join(output.read_text().split())
    assert f"rendezvous store tcp://{address[0]}:{address[1]} ended: its process (pid {store.pid})" in printed
    assert "policy-1 died (SIGKILL); restarted in" in printed
    assert "finished after 6 of 6 steps" in printed


def store_processes(run: psutil.Process) -> list[psutil.Process]:
    return [each for each in run.children() if "lockstep.cluster.rendezvous_store" in each.cmdline()]
