"""Weights between real processes: two writers, a reader, and writers killed in the middle."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch

from lockstep.weights.errors import IncompleteWeights
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore

ROWS = 4000
PLAN = WeightPlan.of([("a", (ROWS, 64), "float32"), ("b", (ROWS, 16), "bfloat16")])

PRELUDE = """
import sys, time, torch
from dataclasses import dataclass
from pathlib import Path
from lockstep.weights.weight_store import WeightStore
torch.set_num_threads(1)
@dataclass
class Shard:
    name: str
    offset: int
    tensor: torch.Tensor
    constant: bool = False
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
half = ROWS // 2
def part(version):
    yield Shard("a", rank * half, torch.full((half, 64), float(version)))
    yield Shard("b", rank * half, torch.full((half, 16), float(version)))
def say(text):
    print(text, flush=True)
""".replace("ROWS", str(ROWS))

WRITER = (
    PRELUDE
    + """
store = WeightStore.open(folder, generation=1)
for line in sys.stdin:
    store.write_shards(rank, int(line), part(int(line)))
    say("done")
"""
)

# Dies after its first tensor: the bytes are there, the record is not.
KILLED = (
    PRELUDE
    + """
def slow(version):
    shards = part(version)
    yield next(shards)
    say("half")
    time.sleep(60)
WeightStore.open(folder, generation=1).write_shards(rank, int(sys.argv[3]), slow(int(sys.argv[3])))
"""
)

READER = (
    PRELUDE
    + """
store = WeightStore.open(folder)
seen, end, last = set(), time.monotonic() + 60, int(sys.argv[3])
while last not in seen and time.monotonic() < end:
    with store.reading(check="complete") as weights:
        for tensor in weights.tensors.values():
            first = tensor.clone()
            assert (first == float(weights.version)).all(), (weights.version, first.unique())
        time.sleep(0.002)
        for tensor in weights.tensors.values():
            assert (tensor == float(weights.version)).all(), "changed while it was read"
        seen.add(weights.version)
say(f"versions {len(seen)} last {max(seen)}")
"""
)


class Process:
    def __init__(self, code, *argv):
        self.popen = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, argv)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def send(self, text):
        self.popen.stdin.write(f"{text}\n")
        self.popen.stdin.flush()

    def receive(self):
        return self.popen.stdout.readline().strip()

    def end(self):
        self.popen.stdin.close()
        self.popen.stdout.close()
        return self.popen.wait(timeout=60)


@pytest.fixture
def folder(tmp_path):
    """A folder in shared memory, if there is any."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path / "weights"
        return
    made = Path(tempfile.mkdtemp(prefix="lockstep-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.mark.slow
def test_two_writers_and_a_reader(folder):
    store = WeightStore.create(folder, PLAN, writers=2)
    writers = [Process(WRITER, folder, rank) for rank in (0, 1)]
    reader = None
    last = 40
    for version in range(1, last + 1):
        for writer in writers:
            writer.send(version)
        assert [writer.receive() for writer in writers] == ["done", "done"]
        store.commit(version)
        if reader is None:
            reader = Process(READER, folder, 0, last)
        time.sleep(0.1 if version % 10 == 0 else 0.0)
    assert reader.receive().endswith(f"last {last}")
    assert [process.end() for process in (*writers, reader)] == [0, 0, 0]
    with store.reading(last, "complete") as weights:
        assert torch.equal(weights.tensors["a"], torch.full((ROWS, 64), float(last)))


def test_a_writer_killed_in_the_middle(folder):
    store = WeightStore.create(folder, PLAN, writers=2)
    writers = [Process(WRITER, folder, rank) for rank in (0, 1)]
    for version in (1, 2):
        for writer in writers:
            writer.send(version)
        assert [writer.receive() for writer in writers] == ["done", "done"]
        store.commit(version)
    writers[0].send(3)
    assert writers[0].receive() == "done"
    victim = Process(KILLED, folder, 1, 3)
    assert victim.receive() == "half"
    victim.popen.send_signal(signal.SIGKILL)
    assert victim.end() == -signal.SIGKILL
    with pytest.raises(IncompleteWeights, match="rank 1: has not finished"):
        store.commit(3)
    with store.reading(check="complete") as weights:
        assert weights.version == 2
        assert (weights.tensors["a"] == 2.0).all()
    writers[1].send(3)  # its successor writes the part again: the lease of the dead writer is released
    assert writers[1].receive() == "done"
    store.commit(3)
    with store.reading(3, "complete") as weights:
        assert (weights.tensors["b"] == 3.0).all()
    assert [writer.end() for writer in writers] == [0, 0]


def test_a_reader_that_is_killed_frees_its_buffer(folder):
    store = WeightStore.create(folder, PLAN, writers=1)
    code = (
        PRELUDE
        + """
store = WeightStore.open(folder)
with store.reading() as weights:
    say("reading")
    time.sleep(60)
"""
    )

    class FullShard:
        def __init__(self, name, tensor):
            self.name, self.offset, self.tensor, self.constant = name, 0, tensor, False

    def publish(version):
        tensors = {"a": torch.full((ROWS, 64), float(version)), "b": torch.full((ROWS, 16), float(version))}
        store.write_shards(0, version, [FullShard(name, tensor) for name, tensor in tensors.items()])
        store.commit(version)

    publish(1)
    victim = Process(code, folder, 0)
    assert victim.receive() == "reading"
    publish(2)
    victim.popen.send_signal(signal.SIGKILL)
    victim.end()
    publish(3)  # would wait for the reader of version 1
    assert store.version() == 3
