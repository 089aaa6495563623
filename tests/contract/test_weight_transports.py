"""The contract of every weight transport: one suite, parametrised over the transports."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from weight_nodes import TRANSPORTS, NodeSet, new_cluster, plan_of, rows_of, tensors, until

from lockstep.base.wait_state import Stalled
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import RemoteError
from lockstep.cluster.rendezvous_store import RendezvousStoreProcess, open_store
from lockstep.weights.errors import BufferHeld, LinkFailed
from lockstep.weights.relay.broadcast_tree import RelayTransfer
from lockstep.weights.relay.relay_api import RelayAPI, RelayLink
from lockstep.weights.relay.weight_relay import TransferHeader, WeightRelay
from lockstep.weights.write_records import WriteRecord

BETWEEN = [each for each in TRANSPORTS if each != "shared"]
Build = Callable[..., NodeSet]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with new_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def build(tmp_path: Path, cluster: LocalCluster) -> Iterator[Build]:
    """Builds sets of nodes, and closes them after the test."""
    made: list[NodeSet] = []

    def one(transport: str, *where: Any, **options: Any) -> NodeSet:
        made.append(NodeSet(tmp_path / f"run-{len(made)}", transport, *where, cluster=cluster, **options))
        made[-1].prepare_stores()
        return made[-1]

    yield one
    for node_set in made:
        node_set.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_engine_reads_what_the_ranks_wrote(build: Build, transport: str) -> None:
    node_set = build(transport, ["a", "a"], ["a", "b", "c"])
    for version in (0, 1, 2):
        assert node_set.publish(version) == [True, True, True]
        node_set.check(version)
    assert node_set.delivery.store_folder(node_set.engines[0], 1) is None or transport == "shared"


@pytest.mark.parametrize("transport", BETWEEN)
def test_ranks_on_several_nodes(build: Build, transport: str) -> None:
    node_set = build(transport, ["a", "a", "b"], ["b", "c"])
    for version in (0, 1):
        assert node_set.publish(version) == [True, True]
        node_set.check(version)


@pytest.mark.parametrize("transport", BETWEEN)
def test_another_number_of_ranks(build: Build, transport: str) -> None:
    node_set = build(transport, ["a", "a"], ["b"])
    node_set.publish(0)
    node_set.ranks.pop()
    node_set.prepare_stores()
    node_set.check(0)  # until the next publish
    assert node_set.publish(1) == [True]
    node_set.delivery.delete_former_stores()
    node_set.check(1)


@pytest.mark.parametrize("transport", BETWEEN)
def test_a_late_engine_gets_the_current_version(build: Build, transport: str) -> None:
    node_set = build(transport, ["a"], ["b"])
    node_set.publish(0)
    node_set.engines.append(type(node_set.engines[0])(node_set.engines[0].spec, "late"))
    assert node_set.delivery.store_folder(node_set.engines[1], 0) is None
    node_set.fetch(1, 0)
    node_set.check(0)
    assert node_set.publish(1) == [True, True]


@pytest.mark.parametrize("transport", BETWEEN)
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)], ids=["3", "20"])
def test_a_receiver_is_killed_in_the_middle_of_a_transfer(build: Build, transport: str, times: int) -> None:
    node_set = build(transport, ["a"], ["b", "c"])
    node_set.publish(0)
    for version in range(1, times + 1):
        before = Path(node_set.delivery.store_folder(node_set.engines[0], version - 1))
        assert node_set.interrupt_publish("b", version, lambda pid: os.kill(pid, signal.SIGKILL)) == [False, True]
        node_set.check(version, 1)
        with node_set.reader(before, version - 1) as found:  # unchanged
            assert torch.equal(found["embed"], node_set.make(version - 1)["embed"])
            del found
        node_set.fetch(0, version)
        node_set.check(version)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)], ids=["1", "20"])
def test_a_stopped_receiver_does_not_hold_up_others(build: Build, times: int) -> None:
    node_set = build("gloo", ["a"], ["b", "c"], limit_s=2.0)
    node_set.start()
    for version in range(1, times + 1):
        began = time.monotonic()
        assert node_set.interrupt_publish("b", version, lambda pid: os.kill(pid, signal.SIGSTOP)) == [False, True]
        assert time.monotonic() - began < 20
        node_set.check(version, 1)
        assert node_set.delivery.blocking_readers() == []  # the readers there are unknown
        began = time.monotonic()
        assert node_set.delivery.blocking_readers() == [] and time.monotonic() - began < 1
        began = time.monotonic()
        node_set.write(version + 100)  # the trainer's buffer is free, although b hangs
        assert time.monotonic() - began < 10
        node_set.fetch(0, version)
        node_set.check(version)


@pytest.mark.parametrize("transport", BETWEEN)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_sender_that_fails_is_replaced(build: Build, number: signal.Signals, transport: str) -> None:
    node_set = build(transport, ["a"], ["b", "c"], limit_s=5.0)
    node_set.start()
    # both receivers lose it at once, so neither is at fault
    assert node_set.interrupt_publish("a", 1, lambda pid: os.kill(pid, number)) == [True, True]
    node_set.check(1)
    assert node_set.publish(2) == [True, True]
    node_set.check(2)


def test_receivers_that_notice_the_death_of_their_sender_first_are_not_blamed(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller still has an answer of the sender when the receivers report broken connections."""
    node_set = build("gloo", ["a"], ["b", "c"])
    node_set.start()
    poll, killed = RelayTransfer.poll, list[int]()

    def poll_late(transfer: RelayTransfer) -> Any:
        pid, answer = transfer.sender.pid, transfer._pending_poll
        if not killed and answer is not None and (node_set.hold / f"a.{pid}").exists():
            until(answer.done, "the sender answers in mid-transfer")
            os.kill(pid, signal.SIGKILL)
            (node_set.hold / "a").unlink()
            killed.append(pid)
        if pid in killed:
            until(transfer.receiving.done, "the receiver notices")
        return poll(transfer)

    monkeypatch.setattr(RelayTransfer, "poll", poll_late)
    (node_set.hold / "a").touch()
    assert node_set.publish(1) == [True, True]
    assert killed and node_set.relays["a"].pid not in killed
    node_set.check(1)


@pytest.mark.parametrize("node", ["a", "b"], ids=["collects", "gives"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_trainer_node_fails_while_rows_are_collected(build: Build, node: str, number: signal.Signals) -> None:
    node_set = build("gloo", ["a", "b"], ["c"], limit_s=5.0)
    node_set.start()
    assert node_set.interrupt_publish(node, 1, lambda pid: os.kill(pid, number)) == [True]
    node_set.check(1)
    assert node_set.publish(2) == [True]
    node_set.check(2)


def test_a_version_that_cannot_be_collected_names_the_ranks_to_restart(build: Build) -> None:
    node_set = build("gloo", ["a", "b"], ["c"], limit_s=2.0)
    node_set.start()
    for store, rank in zip(node_set.stores[:1], (0,), strict=True):
        store.write_shards(rank, 1, rows_of(node_set.make(1), rank, 2))
    with pytest.raises(Stalled, match=node_set.ranks[1].spec.name):
        node_set.delivery.publish(1, lambda: node_set.engines)  # rank 1 has written nothing
    node_set.check(0)
    node_set.lost = {"b"}
    os.kill(node_set.relays["b"].pid, signal.SIGKILL)
    until(lambda: not node_set.relays["b"].alive(), "it has ended")
    with pytest.raises(Stalled, match="the node is lost"):
        node_set.publish(1)
    node_set.lost = set()
    assert node_set.publish(1) == [True]
    node_set.check(1)


def test_a_lost_node_is_not_waited_for(build: Build) -> None:
    node_set = build("gloo", ["a"], ["b", "c"])
    node_set.publish(0)
    node_set.lost = {"c"}
    os.kill(node_set.relays["c"].pid, signal.SIGKILL)
    until(lambda: not node_set.relays["c"].alive(), "it has ended")
    node_set.engines.append(type(node_set.engines[0])(node_set.engines[0].spec, "d"))
    node_set.fetch(2, 0)
    node_set.check(0, 2)
    assert node_set.publish(1) == [True, False, True]
    with pytest.raises(Stalled, match="relay of c"):
        node_set.fetch(1, 1)
    node_set.check(1, 2)


@pytest.mark.parametrize("transport", BETWEEN)
def test_other_tensors_are_refused_before_bytes_move(build: Build, transport: str) -> None:
    node_set = build(transport, ["a"], ["b"])
    node_set.publish(0)
    other = plan_of({**tensors(0), "bias": torch.zeros(7, dtype=torch.bfloat16)})
    folder = str(node_set.memory / "b" / "weights")
    node_set.relays["b"].call(RelayAPI.create, folder, other.to_json(), 1)
    with pytest.raises(RemoteError, match=r"PlanMismatch.*bias is bfloat16\[7\], expected float32\[7\]"):
        node_set.publish(1)
    assert node_set.relays["a"].call(RelayAPI.sent, 2).bytes == 0


@pytest.mark.parametrize("transport", BETWEEN)
def test_only_changed_chunks_are_sent(build: Build, transport: str) -> None:
    node_set = build(transport, ["a"], ["b"], delta=True, bucket_bytes=20_000)
    node_set.publish(0)
    first = node_set.delivery.received["b"]
    assert first.sent == first.total
    node_set.publish(1)
    part = node_set.delivery.received["b"]
    frozen = tensors(0)["frozen"].nbytes
    assert part.total - frozen <= part.sent <= part.total - frozen + 2 * 20_000
    node_set.check(1)
    os.kill(node_set.relays["a"].pid, signal.SIGKILL)  # the sender's digests of the receiver's version are lost with it
    node_set.publish(2)
    assert node_set.delivery.received["b"].sent == first.total
    node_set.check(2)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    made = tmp_path / "small"
    made.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", made], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    yield made
    subprocess.run(["umount", "--lazy", made], check=False, capture_output=True)


def test_a_full_disk_is_reported_and_no_process_is_blamed(
    build: Build, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node_set = build("files", ["a"], ["b", "c"], exchange=small / "exchange")
    relays = dict(node_set.relays)
    began = time.monotonic()
    assert node_set.publish(0) == [False, False]
    assert time.monotonic() - began < 15, "the receivers were told"
    assert re.search(r"small/exchange cannot be written: .*No space left.*weights\.folder", caplog.text)
    with pytest.raises(Stalled, match="No space left"):
        node_set.fetch(0, 0)
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True, capture_output=True)
    node_set.fetch(0, 0)
    node_set.fetch(1, 0)
    node_set.check(0)
    assert {name: node_set.relays[name] for name in relays} == relays, "no relay was replaced"
    assert list((small / "exchange").iterdir()) == []


def test_unread_files_are_removed(build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "exchange"
    folder.mkdir()
    for name in ("weights-0-7-b", "weights-0-8-z.new", "notes-of-another-program"):
        (folder / name).write_text("of an earlier life")
    node_set = build("files", ["a"], ["b"], exchange=folder)
    assert node_set.publish(0) == [True]
    assert node_set.interrupt_publish("b", 1, lambda pid: os.kill(pid, signal.SIGKILL)) == [False]
    node_set.fetch(0, 1)
    node_set.check(1)
    assert [path.name for path in folder.iterdir()] == ["notes-of-another-program"]


def test_a_version_other_than_the_requested_one_is_refused() -> None:
    asked = SimpleNamespace(generation=2)
    records = [WriteRecord(0, 5, 2, "", ())]
    good = TransferHeader(5, 2, 1, [], [], records)
    assert WeightRelay._check_header(asked, good, 5, [0], RelayLink(1, "a", "b")) is good  # type: ignore[arg-type]
    others = [replace(good, version=4), replace(good, generation=1), replace(good, records=[])]
    for header in others:
        with pytest.raises(LinkFailed, match="was requested"):
            WeightRelay._check_header(asked, header, 5, [0], RelayLink(1, "a", "b"))  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", BETWEEN)
def test_kept_chunks_are_compared_with_the_senders(build: Build, transport: str) -> None:
    node_set = build(transport, ["a"], ["b"], delta=True, bucket_bytes=20_000, check="sampled")
    node_set.publish(0)
    frozen = next(entry for entry in node_set.plan.entries if entry.name == "frozen")
    with (node_set.memory / "b" / "weights" / "buffer-0").open("r+b") as file:
        file.seek(frozen.offset + frozen.nbytes // 3)  # between the sampled bytes
        file.write(b"\xff")
    assert node_set.publish(1) == [False]
    node_set.fetch(0, 1)
    assert node_set.delivery.received["b"].sent == node_set.delivery.received["b"].total
    node_set.check(1)
    assert node_set.publish(2) == [True]
    assert node_set.delivery.received["b"].sent < node_set.delivery.received["b"].total


def test_the_trainer_does_not_wait_for_transfers_of_older_versions(build: Build) -> None:
    node_set = build("gloo", ["a", "b"], ["b"], limit_s=30.0)
    node_set.start()
    (node_set.hold / "b").write_text("receive")
    thread, _ = node_set.begin(1)
    until(lambda: (node_set.hold / f"b.{node_set.relays['b'].pid}").exists(), "the version is on its way to b")
    os.kill(node_set.relays["b"].pid, signal.SIGKILL)
    thread.join(60)
    left = threading.Thread(target=node_set.fetch, args=(0, 1), daemon=True)
    left.start()
    until(lambda: (node_set.hold / f"b.{node_set.relays['b'].pid}").exists(), "it is fetched, and held in the middle")
    holding = node_set.relays["b"].pid
    thread, answer = node_set.begin(2)
    until(lambda: node_set.relays["b"].pid != holding, "whoever held what the rank wants is ended")
    (node_set.hold / "b").unlink()
    thread.join(60)
    assert answer == [[True]]
    node_set.check(2)
    left.join(60)
    assert not left.is_alive()


@pytest.fixture
def reads() -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts processes that read version 0 of a store and never finish."""
    code = (
        "import sys, time; from pathlib import Path; from lockstep.weights.shared_memory_transport import StoreReader\n"
    )
    code += "with StoreReader()(Path(sys.argv[1]), 0): print('reads', flush=True); time.sleep(120)"
    started = []

    def one(folder: str) -> "subprocess.Popen[str]":
        words = [sys.executable, "-c", code, folder]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "reads\n"
        return started[-1]

    yield one
    for each in started:
        each.kill()
        each.wait(30)
        each.stdout.close()


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_hanging_reader_of_the_needed_buffer_is_named(
    build: Build, reads: Callable[[str], "subprocess.Popen[str]"], transport: str
) -> None:
    node_set = build(transport, ["a"], ["a"], limit_s=1.0)
    node_set.start()
    reader = reads(node_set.delivery.store_folder(node_set.engines[0], 0))
    assert node_set.publish(1) == [True]
    with pytest.raises(BufferHeld, match=rf"pid {reader.pid} has been reading") as caught:
        node_set.publish(2)
    node_set.check(1)
    node_set.engines[0].pid = os.getpid()  # pretend that the engine is another process
    assert node_set.delivery.holds_buffer(node_set.engines[0], caught.value)
    node_set.engines[0].pid = 1 << 30
    assert not node_set.delivery.holds_buffer(node_set.engines[0], caught.value)
    reader.kill()
    reader.wait(30)
    assert node_set.publish(2) == [True]
    node_set.check(2)


def test_a_hanging_reader_on_a_node_without_ranks_leaves_the_node_behind(
    build: Build, reads: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    node_set = build("gloo", ["a"], ["b", "c"], limit_s=3.0)
    node_set.start()
    reader = reads(node_set.delivery.store_folder(node_set.engines[0], 0))
    assert node_set.publish(1) == [True, True] and node_set.delivery.blocking_readers() == []
    assert node_set.publish(2) == [False, True]
    (held,) = node_set.delivery.blocking_readers()
    node_set.engines[0].pid = node_set.engines[1].pid = reader.pid  # pids of different nodes may be equal
    assert [node_set.delivery.holds_buffer(each, held) for each in node_set.engines] == [True, False]
    reader.kill()
    reader.wait(30)
    assert node_set.delivery.blocking_readers() == []
    node_set.fetch(0, 2)
    node_set.check(2)


def test_returning_to_an_earlier_number_of_ranks(build: Build) -> None:
    node_set = build("gloo", ["a", "a", "a"], ["b"])
    node_set.publish(0)
    removed = [node_set.ranks.pop(), node_set.ranks.pop()]
    node_set.prepare_stores()
    node_set.ranks += removed
    node_set.prepare_stores()  # nothing was published with the smaller number of ranks
    node_set.check(0)
    assert node_set.publish(1) == [True]
    node_set.delivery.delete_former_stores()
    node_set.check(1)
    for node in "ab":
        until(lambda node=node: len(node_set.buffers(node)) == 2, f"only one store is left on {node}")


def test_transfers_continue_over_a_store_that_was_replaced(build: Build, tmp_path: Path) -> None:
    store = RendezvousStoreProcess("127.0.0.1", None, tmp_path)
    try:
        node_set = build("gloo", ["a"], ["b", "a"], store=store.serve(), limit_s=60.0)
        assert node_set.publish(0) == [True, True]
        first = store.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)

        def replaced() -> bool:
            store.check()
            return store.pid != first

        until(replaced, "another store")
        open_store(store.url, "ready", 60.0)
        assert node_set.publish(1) == [True, True]
        node_set.check(1)
    finally:
        store.close()
