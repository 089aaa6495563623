"""What every transport of weights does. One suite, parametrised over the transports."""

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
from weight_nodes import TRANSPORTS, House, new_cluster, plan_of, rows_of, tensors, until

from lockstep.base.wait_state import Stalled
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import RemoteError
from lockstep.weights.errors import BufferHeld, LinkFailed
from lockstep.weights.relay.relay_api import RelayAPI, RelayLink
from lockstep.weights.relay.weight_relay import TransferHeader, WeightRelay
from lockstep.weights.write_records import WriteRecord

BETWEEN = [each for each in TRANSPORTS if each != "shared"]
Build = Callable[..., House]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with new_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def build(tmp_path: Path, cluster: LocalCluster) -> Iterator[Build]:
    """Makes houses, and tears them down after the test."""
    made: list[House] = []

    def one(transport: str, *where: Any, **options: Any) -> House:
        made.append(House(tmp_path / f"run-{len(made)}", transport, *where, cluster=cluster, **options))
        made[-1].prepare_stores()
        return made[-1]

    yield one
    for house in made:
        house.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_engine_reads_what_the_ranks_wrote(build: Build, transport: str) -> None:
    house = build(transport, ["a", "a"], ["a", "b", "c"])
    for version in (0, 1, 2):
        assert house.publish(version) == [True, True, True]
        house.check(version)
    assert house.delivery.store_folder(house.engines[0], 1) is None or transport == "shared"


@pytest.mark.parametrize("transport", BETWEEN)
def test_ranks_on_several_nodes(build: Build, transport: str) -> None:
    house = build(transport, ["a", "a", "b"], ["b", "c"])
    for version in (0, 1):
        assert house.publish(version) == [True, True]
        house.check(version)


@pytest.mark.parametrize("transport", BETWEEN)
def test_another_number_of_ranks(build: Build, transport: str) -> None:
    house = build(transport, ["a", "a"], ["b"])
    house.publish(0)
    house.ranks.pop()
    house.prepare_stores()
    house.check(0)  # until the next publish
    assert house.publish(1) == [True]
    house.delivery.delete_former_stores()
    house.check(1)


@pytest.mark.parametrize("transport", BETWEEN)
def test_who_joins_late_gets_the_current_version(build: Build, transport: str) -> None:
    house = build(transport, ["a"], ["b"])
    house.publish(0)
    house.engines.append(type(house.engines[0])(house.engines[0].spec, "late"))
    assert house.delivery.store_folder(house.engines[1], 0) is None
    house.fetch(1, 0)
    house.check(0)
    assert house.publish(1) == [True, True]


@pytest.mark.parametrize("transport", BETWEEN)
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)], ids=["3", "20"])
def test_a_receiver_killed_in_mid_transfer(build: Build, transport: str, times: int) -> None:
    house = build(transport, ["a"], ["b", "c"])
    house.publish(0)
    for version in range(1, times + 1):
        before = Path(house.delivery.store_folder(house.engines[0], version - 1))
        assert house.caught("b", version, lambda pid: os.kill(pid, signal.SIGKILL)) == [False, True]
        house.check(version, 1)
        with house.reader(before, version - 1) as found:  # not torn: still what it was
            assert torch.equal(found["embed"], house.make(version - 1)["embed"])
            del found
        house.fetch(0, version)
        house.check(version)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)], ids=["1", "20"])
def test_a_receiver_that_is_stopped_holds_nobody(build: Build, times: int) -> None:
    house = build("gloo", ["a"], ["b", "c"], limit_s=2.0)
    house.start()
    for version in range(1, times + 1):
        began = time.monotonic()
        assert house.caught("b", version, lambda pid: os.kill(pid, signal.SIGSTOP)) == [False, True]
        assert time.monotonic() - began < 20
        house.check(version, 1)
        assert house.delivery.blocking_readers() == []  # nobody says who reads there
        began = time.monotonic()
        assert house.delivery.blocking_readers() == [] and time.monotonic() - began < 1
        began = time.monotonic()
        house.write(version + 100)  # the trainer's buffer is free, whatever b does
        assert time.monotonic() - began < 10
        house.fetch(0, version)
        house.check(version)


@pytest.mark.parametrize("transport", BETWEEN)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_sender_that_fails_is_replaced(build: Build, number: signal.Signals, transport: str) -> None:
    house = build(transport, ["a"], ["b", "c"], limit_s=10.0)
    house.start()
    # both receivers lose it at once: neither is to blame
    assert house.caught("a", 1, lambda pid: os.kill(pid, number)) == [True, True]
    house.check(1)
    assert house.publish(2) == [True, True]
    house.check(2)


@pytest.mark.parametrize("node", ["a", "b"], ids=["collects", "gives"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_trainer_node_that_fails_while_ranks_are_collected(build: Build, node: str, number: signal.Signals) -> None:
    house = build("gloo", ["a", "b"], ["c"], limit_s=10.0)
    house.start()
    assert house.caught(node, 1, lambda pid: os.kill(pid, number)) == [True]
    house.check(1)
    assert house.publish(2) == [True]
    house.check(2)


def test_a_version_that_cannot_be_collected_names_the_ranks_that_have_to_make_it_again(build: Build) -> None:
    house = build("gloo", ["a", "b"], ["c"], limit_s=2.0)
    house.start()
    for store, rank in zip(house.stores[:1], (0,), strict=True):
        store.write_shards(rank, 1, rows_of(house.make(1), rank, 2))
    with pytest.raises(Stalled, match=house.ranks[1].spec.name):
        house.delivery.publish(1, lambda: house.engines)  # rank 1 has written nothing
    house.check(0)
    house.lost = {"b"}
    os.kill(house.relays["b"].pid, signal.SIGKILL)
    until(lambda: not house.relays["b"].alive(), "it has ended")
    with pytest.raises(Stalled, match="the node is lost"):
        house.publish(1)
    house.lost = set()
    assert house.publish(1) == [True]
    house.check(1)


def test_a_node_that_is_lost_is_neither_asked_nor_waited_for(build: Build) -> None:
    house = build("gloo", ["a"], ["b", "c"])
    house.publish(0)
    house.lost = {"c"}
    os.kill(house.relays["c"].pid, signal.SIGKILL)
    until(lambda: not house.relays["c"].alive(), "it has ended")
    house.engines.append(type(house.engines[0])(house.engines[0].spec, "d"))
    house.fetch(2, 0)
    house.check(0, 2)
    assert house.publish(1) == [True, False, True]
    with pytest.raises(Stalled, match="relay of c"):
        house.fetch(1, 1)
    house.check(1, 2)


@pytest.mark.parametrize("transport", BETWEEN)
def test_other_tensors_are_refused_before_bytes_move(build: Build, transport: str) -> None:
    house = build(transport, ["a"], ["b"])
    house.publish(0)
    other = plan_of({**tensors(0), "bias": torch.zeros(7, dtype=torch.bfloat16)})
    folder = str(house.memory / "b" / "weights")
    house.relays["b"].call(RelayAPI.create, folder, other.to_json(), 1)
    with pytest.raises(RemoteError, match=r"PlanMismatch.*bias is bfloat16\[7\], expected float32\[7\]"):
        house.publish(1)
    assert house.relays["a"].call(RelayAPI.sent, 2).bytes == 0


@pytest.mark.parametrize("transport", BETWEEN)
def test_only_what_changed_travels(build: Build, transport: str) -> None:
    house = build(transport, ["a"], ["b"], delta=True, bucket_bytes=20_000)
    house.publish(0)
    whole = house.delivery.received["b"]
    assert whole.sent == whole.total
    house.publish(1)
    part = house.delivery.received["b"]
    frozen = tensors(0)["frozen"].nbytes
    assert part.total - frozen <= part.sent <= part.total - frozen + 2 * 20_000
    house.check(1)
    os.kill(house.relays["a"].pid, signal.SIGKILL)  # with it goes what it knew of the receiver's version
    house.publish(2)
    assert house.delivery.received["b"].sent == whole.total
    house.check(2)


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


def test_a_disk_that_is_full_is_told_and_blamed_on_nobody(
    build: Build, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = build("files", ["a"], ["b", "c"], exchange=small / "exchange")
    relays = dict(house.relays)
    began = time.monotonic()
    assert house.publish(0) == [False, False]
    assert time.monotonic() - began < 15, "the receivers heard of it"
    assert re.search(r"small/exchange cannot be written: .*No space left.*weights\.folder", caplog.text)
    with pytest.raises(Stalled, match="No space left"):
        house.fetch(0, 0)
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True, capture_output=True)
    house.fetch(0, 0)
    house.fetch(1, 0)
    house.check(0)
    assert {name: house.relays[name] for name in relays} == relays, "none was replaced"
    assert list((small / "exchange").iterdir()) == []


def test_files_that_nobody_read_are_removed(build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "exchange"
    folder.mkdir()
    for name in ("weights-0-7-b", "weights-0-8-z.new", "notes-of-somebody-else"):
        (folder / name).write_text("of an earlier life")
    house = build("files", ["a"], ["b"], exchange=folder)
    assert house.publish(0) == [True]
    assert house.caught("b", 1, lambda pid: os.kill(pid, signal.SIGKILL)) == [False]
    house.fetch(0, 1)
    house.check(1)
    assert [path.name for path in folder.iterdir()] == ["notes-of-somebody-else"]


def test_another_version_than_was_asked_for_is_refused() -> None:
    asked = SimpleNamespace(generation=2)
    records = [WriteRecord(0, 5, 2, "", ())]
    good = TransferHeader(5, 2, 1, [], [], records)
    assert WeightRelay._check_header(asked, good, 5, [0], RelayLink(1, "a", "b")) is good  # type: ignore[arg-type]
    others = [replace(good, version=4), replace(good, generation=1), replace(good, records=[])]
    for header in others:
        with pytest.raises(LinkFailed, match="was requested"):
            WeightRelay._check_header(asked, header, 5, [0], RelayLink(1, "a", "b"))  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", BETWEEN)
def test_what_is_kept_is_held_against_what_the_sender_has(build: Build, transport: str) -> None:
    house = build(transport, ["a"], ["b"], delta=True, bucket_bytes=20_000, check="sampled")
    house.publish(0)
    frozen = next(entry for entry in house.plan.entries if entry.name == "frozen")
    with (house.memory / "b" / "weights" / "buffer-0").open("r+b") as file:
        file.seek(frozen.offset + frozen.nbytes // 3)  # beside the samples
        file.write(b"\xff")
    assert house.publish(1) == [False]
    house.fetch(0, 1)
    assert house.delivery.received["b"].sent == house.delivery.received["b"].total
    house.check(1)
    assert house.publish(2) == [True]
    assert house.delivery.received["b"].sent < house.delivery.received["b"].total


def test_the_trainer_waits_for_no_older_version_on_its_way_to_its_own_nodes(build: Build) -> None:
    house = build("gloo", ["a", "b"], ["b"], limit_s=30.0)
    house.start()
    (house.hold / "b").write_text("receive")
    thread, _ = house.begin(1)
    until(lambda: (house.hold / f"b.{house.relays['b'].pid}").exists(), "the version is on its way to b")
    os.kill(house.relays["b"].pid, signal.SIGKILL)
    thread.join(60)
    left = threading.Thread(target=house.fetch, args=(0, 1), daemon=True)
    left.start()
    until(lambda: (house.hold / f"b.{house.relays['b'].pid}").exists(), "it is fetched, and held in the middle")
    holding = house.relays["b"].pid
    thread, answer = house.begin(2)
    until(lambda: house.relays["b"].pid != holding, "whoever held what the rank wants is ended")
    (house.hold / "b").unlink()
    thread.join(60)
    assert answer == [[True]]
    house.check(2)
    left.join(60)
    assert not left.is_alive()


@pytest.fixture
def reads() -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Processes that read version 0 of a store, and do not come to an end."""
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
def test_a_reader_that_hangs_with_what_the_next_version_needs_is_named(
    build: Build, reads: Callable[[str], "subprocess.Popen[str]"], transport: str
) -> None:
    house = build(transport, ["a"], ["a"], limit_s=1.0)
    house.start()
    reader = reads(house.delivery.store_folder(house.engines[0], 0))
    assert house.publish(1) == [True]
    with pytest.raises(BufferHeld, match=rf"pid {reader.pid} has been reading") as told:
        house.publish(2)
    house.check(1)
    house.engines[0].pid = os.getpid()  # it reads by a process of its own
    assert house.delivery.holds_buffer(house.engines[0], told.value)
    house.engines[0].pid = 1 << 30
    assert not house.delivery.holds_buffer(house.engines[0], told.value)
    reader.kill()
    reader.wait(30)
    assert house.publish(2) == [True]
    house.check(2)


def test_a_reader_that_hangs_where_no_rank_is_leaves_its_node_behind_until_it_is_ended(
    build: Build, reads: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    house = build("gloo", ["a"], ["b", "c"], limit_s=3.0)
    house.start()
    reader = reads(house.delivery.store_folder(house.engines[0], 0))
    assert house.publish(1) == [True, True] and house.delivery.blocking_readers() == []
    assert house.publish(2) == [False, True]
    (held,) = house.delivery.blocking_readers()
    house.engines[0].pid = house.engines[1].pid = reader.pid  # numbers of processes repeat from node to node
    assert [house.delivery.holds_buffer(each, held) for each in house.engines] == [True, False]
    reader.kill()
    reader.wait(30)
    assert house.delivery.blocking_readers() == []
    house.fetch(0, 2)
    house.check(2)


def test_as_many_ranks_as_before_last(build: Build) -> None:
    house = build("gloo", ["a", "a", "a"], ["b"])
    house.publish(0)
    gone = [house.ranks.pop(), house.ranks.pop()]
    house.prepare_stores()
    house.ranks += gone
    house.prepare_stores()  # nothing was published for one rank
    house.check(0)
    assert house.publish(1) == [True]
    house.delivery.delete_former_stores()
    house.check(1)
    for node in "ab":
        until(lambda node=node: len(house.buffers(node)) == 2, f"only one store is left on {node}")
