"""Nodes for the tests of weight transports: folders of one host that stand for the shared memory of several nodes."""

import itertools
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import NodeInfo, Worker, WorkerSpec
from lockstep.config.cluster import LocalClusterConfig as Config
from lockstep.train.trainer_protocol import ParameterShard
from lockstep.weights.relay.relay_api import RELAY_PRELOAD
from lockstep.weights.relay.relay_transport import RelayTransport
from lockstep.weights.shared_memory_transport import SharedMemoryTransport, StoreReader
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore

NUMBERS, GENERATIONS = itertools.count(), itertools.count(1)
"""Numbers node sets that share a cluster and its store."""
TRANSPORTS = ("shared", "gloo", "files")


@dataclass
class FakeWorker:
    """Stands for a trainer rank or an engine; only its node matters."""

    spec: WorkerSpec
    node: str
    pid: int = 0


def tensors(version: int, rows: int = 600) -> dict[str, torch.Tensor]:
    """Tensors that differ in every version, except `frozen`."""
    made = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(rows, 256, generator=made),
        "bias": torch.randn(7, generator=made),
        "frozen": torch.arange(rows * 64, dtype=torch.float32).view(rows, 64),
        "half": torch.randn(rows, 64, generator=made).bfloat16(),
        "scale": torch.randn((), generator=made),
    }


def plan_of(given: dict[str, torch.Tensor]) -> WeightPlan:
    return WeightPlan.of((name, tensor.shape, tensor.dtype) for name, tensor in given.items())


def rows_of(given: dict[str, torch.Tensor], rank: int, ranks: int) -> list[ParameterShard]:
    """The rows of a rank, sharded like FSDP2's."""
    found = []
    for name, tensor in given.items():
        if not tensor.ndim:
            found += [ParameterShard(name, tuple(tensor.shape), 0, tensor)] if rank == 0 else []
            continue
        chunk = -(-len(tensor) // ranks)
        part = tensor[rank * chunk : (rank + 1) * chunk]
        found += [ParameterShard(name, tuple(tensor.shape), rank * chunk, part)] if len(part) else []
    return found


def until(there: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def new_cluster(folder: Path) -> LocalCluster:
    return LocalCluster(Config(notice_after_s=5.0), f"house-{secrets.token_hex(3)}", folder, 1)


class NodeSet:
    """Trainer ranks on `trainers` and engines on `engines` (names of nodes, one for each), joined by a transport."""

    def __init__(
        self, folder: Path, transport: str, trainers: Sequence[str], engines: Sequence[str], limit_s: float = 20.0,
        make: Any = tensors, block: int = 100_000, addresses: Mapping[str, str] | None = None,
        spaces: Mapping[str, str] | None = None, store: str | None = None,
        cluster: LocalCluster | None = None, exchange: Path | None = None, **relay: Any,
    ) -> None:  # fmt: skip
        """`addresses` and network namespaces (`spaces`) are by node; all nodes must reach the store."""
        self.lost: set[str] = set()
        self.addresses, self.spaces = addresses or {}, spaces or {}
        self.transport, self.make, self.limit_s = transport, make, limit_s
        self.memory = Path(tempfile.mkdtemp(prefix="lockstep-test-", dir="/dev/shm"))
        self.own = None if cluster is not None else new_cluster(folder)
        self.cluster = cluster or self.own
        self.generation, self.started = next(GENERATIONS), list[Worker]()
        self.ranks = [FakeWorker(WorkerSpec(f"policy-{n}", "policy", n, ""), node) for n, node in enumerate(trainers)]
        self.engines = [FakeWorker(WorkerSpec(f"engine-{n}", "rollout", n, ""), node) for n, node in enumerate(engines)]
        self.arguments = {
            "generation": self.generation, "way": transport, "store": store or self.cluster.store(), "limit_s": limit_s,
            "bucket_bytes": block, "check": "complete", "folder": str(exchange or folder / "exchange"), **relay,
        }  # fmt: skip
        self.hold = folder / "hold"
        self.hold.mkdir(parents=True)
        self.relays: dict[str, Worker] = {}
        self.plan = plan_of(make(0))
        self.delivery: Any = (
            SharedMemoryTransport(self.memory / "one" / "weights", self.plan, self.generation, limit_s)
            if transport == "shared"
            else RelayTransport(self, self, self.plan, limit_s)
        )
        (self.memory / "one").mkdir()
        self.stores: list[WeightStore] = []
        self.reader = StoreReader("complete")

    # --- what `RelayTransport` needs

    def nodes(self) -> list[NodeInfo]:
        names = dict.fromkeys(each.node for each in (*self.ranks, *self.engines))
        return [self._info(name) for name in names if name not in self.lost]

    def node_of(self, worker: Any) -> NodeInfo:
        return self._info(worker.node)

    def place(self, role: str, ranks: Sequence[int]) -> None:
        """Relays run where their node is."""

    def launch(self, role: str, ranks: Sequence[int] = (), node: NodeInfo | None = None) -> list[Worker]:
        assert role == "weights" and node is not None
        arguments = {**self.arguments, "node": node.name, "address": node.address, "hold": str(self.hold)}
        arguments["space"] = self.spaces.get(node.name)
        name = f"courier-{node.name}-{next(NUMBERS)}"
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        spec = WorkerSpec(name, "weights", 0, "paused_relay:PausedRelay", arguments, environment, RELAY_PRELOAD)
        (self.relays[node.name],) = self.cluster.start([spec])
        self.started.append(self.relays[node.name])
        return [self.relays[node.name]]

    def kill(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self.cluster.stop(worker, grace_s=0.0)

    def _info(self, name: str) -> NodeInfo:
        (self.memory / name).mkdir(exist_ok=True)
        return NodeInfo(name, self.addresses.get(name, "127.0.0.1"), self.memory / name)

    # --- actions of tests

    def prepare_stores(self) -> None:
        for store in self.stores:
            store.close()
        self.stores = [
            WeightStore.open(Path(folder), self.plan, generation=self.generation)
            for folder in self.delivery.prepare_stores(self.ranks)
        ]

    def write(self, version: int) -> None:
        given = self.make(version)
        for rank, store in enumerate(self.stores):
            store.write_shards(rank, version, rows_of(given, rank, len(self.stores)), complete=True)

    def publish(self, version: int) -> list[bool]:
        """Publish a version; returns for each engine whether it has the version at once."""

        def write() -> list[Any]:
            self.write(version)
            return self.engines

        self.delivery.publish(version, write)
        return [self.delivery.store_folder(engine, version) is not None for engine in self.engines]

    def start(self) -> None:
        """Publish version 0, and fetch it for engines whose relay started too late."""
        for number, there in enumerate(self.publish(0)):
            if not there:
                self.fetch(number, 0)

    def check(self, version: int, *engines: int) -> None:
        """Check that these engines (by default all) read exactly the written bytes."""
        expected = self.make(version)
        for number in engines or range(len(self.engines)):
            folder = self.delivery.store_folder(self.engines[number], version)
            assert folder is not None, f"engine {number} has no version {version}"
            with self.reader(Path(folder), version) as found:
                for name, tensor in expected.items():
                    assert torch.equal(found[name], tensor), (version, name)
                del found

    def interrupt_publish(self, node: str, version: int, act: Callable[[int], None]) -> list[bool]:
        """Publish, and call `act` with the pid of the node's relay while the relay is in the middle of a transfer."""
        (self.hold / node).touch()
        thread, answer = self.begin(version)
        pid = self.relays[node].pid
        until(lambda: (self.hold / f"{node}.{pid}").exists(), f"{node} is in mid-transfer")
        act(pid)
        (self.hold / node).unlink()
        thread.join(60)
        assert answer, "the publish did not end"
        return answer[0]

    def begin(self, version: int) -> tuple[threading.Thread, list[list[bool]]]:
        """Publish in a thread. Returns the thread and a list that will contain the result."""
        answer: list[list[bool]] = []
        thread = threading.Thread(target=lambda: answer.append(self.publish(version)), daemon=True)
        thread.start()
        return thread, answer

    def buffers(self, node: str) -> list[Path]:
        """The files with weights in the node's memory."""
        return [path for path in (self.memory / node).glob("*/buffer-*") if "rank" not in path.name]

    def fetch(self, engine: int, version: int) -> None:
        """Fetch a version for an engine whose node was left behind, as a run does."""
        self.delivery.fetch(self.engines[engine], version)

    def close(self) -> None:
        if self.own is not None:
            self.own.close()
        else:
            self.kill(self.started)
        for path in sorted(self.memory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.memory.rmdir()
