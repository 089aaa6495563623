"""The cost of weight sync compared with plain copies and broadcasts of the same bytes: `python -m benchmarks.weights`.

Prints the table and writes every repeat to `--out`; `python -m benchmarks.docs_tables` puts it into
docs/weight-sync.md.
The variants take turns within a repeat, with one torch thread each, so that their ratios are comparable. Nodes are
folders in shared memory, connected by loopback.
"""

import argparse
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import docs_tables
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import NodeInfo, Worker, WorkerSpec
from lockstep.cluster.rpc.futures import gather_results
from lockstep.config.cluster import LocalClusterConfig as Config
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig as EngineConfig
from lockstep.models.tiny_model import TinyModel, make_tiny
from lockstep.rollout.builtin.engine import BuiltinEngine
from lockstep.train.trainer_protocol import ParameterShard
from lockstep.weights.relay.relay_api import RELAY_PRELOAD, RELAY_SERVICE
from lockstep.weights.relay.relay_transport import RelayTransport
from lockstep.weights.shared_memory_transport import StoreReader
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "3M": TinyModel(hidden=256, layers=4, heads=4, kv_heads=2, ffn=768, max_length=1024, seed=1),
    "100M": TinyModel(
        alphabet="".join(map(chr, range(0x4E00, 0x4E00 + 8192))), hidden=768, layers=14, heads=12, kv_heads=12,
        ffn=2048, max_length=1024, seed=1,
    ),
}  # fmt: skip
Line = dict[str, Any]


@dataclass
class FakeWorker:
    """Stands for a trainer rank or an engine; only its node matters."""

    spec: WorkerSpec
    node: str


class BareBroadcast:
    """A rank of the plain gloo broadcast that is the baseline of all transfers over gloo."""

    def __init__(self, rank: int, world: int, store: str, nbytes: int) -> None:
        from lockstep.cluster.rendezvous_store import open_store

        bound = timedelta(seconds=300)
        dist.init_process_group(
            "gloo", store=open_store(store, "bare", 60.0), rank=rank, world_size=world, timeout=bound
        )
        self.bytes = torch.full((nbytes,), rank, dtype=torch.uint8)

    def broadcast(self, bucket: int) -> float:
        """Seconds."""
        dist.barrier()
        began = time.perf_counter()
        for piece in self.bytes.split(bucket):
            dist.broadcast(piece, 0)
        return time.perf_counter() - began


class Nodes:
    """Starts relays for nodes that are folders."""

    def __init__(self, cluster: LocalCluster, memory: Path, **relay: Any) -> None:
        self.cluster, self.memory, self.arguments, self.numbers = cluster, memory, relay, itertools.count()

    def nodes(self) -> list[NodeInfo]:
        return [self._info(name) for name in ("a", "b", "c")]

    def node_of(self, worker: Any) -> NodeInfo:
        return self._info(worker.node)

    def launch(self, role: str, ranks: Sequence[int] = (), node: NodeInfo | None = None) -> list[Worker]:
        assert role == "weights" and node is not None
        arguments = {
            "node": node.name, "address": node.address, "way": "gloo", "store": self.cluster.store(), **self.arguments,
        }  # fmt: skip
        name = f"{self.memory.name}-{node.name}-{next(self.numbers)}"
        return self.cluster.start([spec(name, RELAY_SERVICE, arguments)])

    def kill(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self.cluster.stop(worker, grace_s=0.0)

    def _info(self, name: str) -> NodeInfo:
        (self.memory / name).mkdir(exist_ok=True)
        return NodeInfo(name, "127.0.0.1", self.memory / name)


def spec(name: str, service: str, arguments: dict[str, Any]) -> WorkerSpec:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return WorkerSpec(
        name, "weights", 0, service, arguments, {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}, RELAY_PRELOAD
    )


def timed(call: Callable[..., object], *arguments: object) -> float:
    """Seconds."""
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


class OneHost:
    """A trainer rank that writes and an engine that loads, compared with a memcpy of the same bytes."""

    def __init__(self, size: str, memory: Path, folder: Path) -> None:
        make_tiny(folder, MODELS[size])
        engine = EngineConfig(max_rows=8, cache_tokens=512)
        self.reader = StoreReader("sampled")
        self.engine = BuiltinEngine.from_config(ModelConfig(path=str(folder)), engine, "cpu", self.reader, 0)
        self.own = {name: tensor.detach().contiguous().clone() for name, tensor in self.engine.lm.named_parameters()}
        self.plan = WeightPlan.of((name, tensor.shape, tensor.dtype) for name, tensor in self.own.items())
        self.store = WeightStore.create(memory / "one", self.plan, 1)
        self.flat = torch.cat([tensor.reshape(-1) for tensor in self.own.values()])
        self.copy = torch.empty_like(self.flat).fill_(0)
        self.versions = itertools.count(1)

    def repeat(self) -> Line:
        found: Line = {"memcpy": timed(self.copy.copy_, self.flat)}
        for check in ("sampled", "complete"):
            version = next(self.versions)
            self.reader.check = check
            shards = [ParameterShard(name, tuple(tensor.shape), 0, tensor) for name, tensor in self.own.items()]
            found[f"write_{check}"] = timed(self.store.write_shards, 0, version, shards, check == "complete")
            found[f"commit_{check}"] = timed(self.store.commit, version)
            found[f"take_{check}"] = timed(self._take, version)
            found[f"load_{check}"] = timed(self.engine.load_weights, self.store.folder, version)
        return found

    def _take(self, version: int) -> None:
        """Verify and copy a version, as every reader does."""
        with self.reader(self.store.folder, version) as tensors:
            at = 0
            for name in self.own:
                tensor = tensors[name]
                self.copy[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
                at += tensor.numel()


class Between:
    """One sender and two receivers, compared with a plain broadcast to two."""

    def __init__(self, cluster: LocalCluster, memory: Path, plan: WeightPlan, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.versions = tensors, itertools.count(1)
        rank = FakeWorker(WorkerSpec("policy-0", "policy", 0, ""), "a")
        self.engines: Any = [
            FakeWorker(WorkerSpec(f"engine-{n}", "rollout", n, ""), node) for n, node in enumerate("bc")
        ]
        self.ways = {}
        settings: dict[str, dict[str, Any]] = {"gloo": {}, "complete": {"check": "complete"}, "delta": {"delta": True}}
        for generation, (name, relay) in enumerate(settings.items(), start=1):  # separates their keys in the store
            (memory / name).mkdir()
            hires = Nodes(cluster, memory / name, generation=generation, **relay)
            delivery = RelayTransport(hires, hires, plan, 60.0)
            (folder,) = delivery.prepare_stores([rank])  # type: ignore[list-item]
            self.ways[name] = delivery, WeightStore.open(Path(folder), plan, generation)
        about = {"world": 3, "store": cluster.store(), "nbytes": plan.nbytes}
        self.bare = cluster.start(
            [spec(f"bare-{n}", "benchmarks.weights:BareBroadcast", {"rank": n, **about}) for n in range(3)]
        )

    def repeat(self) -> Line:
        found: Line = {}
        for name, bucket in (("broadcast", 1 << 40), ("broadcast_64", 64 << 20)):
            found[name] = max(
                gather_results([worker.submit(BareBroadcast.broadcast, bucket) for worker in self.bare], why=name)
            )
        for name, (delivery, store) in self.ways.items():
            version = next(self.versions)
            if name == "delta":  # a tenth of the tensors
                for tensor in list(self.tensors.values())[::10]:
                    tensor.add_(1e-3)
            shards = [ParameterShard(each, tuple(tensor.shape), 0, tensor) for each, tensor in self.tensors.items()]
            store.write_shards(0, version, shards, name == "complete")
            found[name] = timed(delivery.publish, version, lambda: self.engines)
            found[f"{name}_bytes"] = delivery.received["b"].sent
        return found


@contextmanager
def scratch() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="lockstep-benchmark-", dir="/dev/shm"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def measure(size: str, repeats: int, parts: Sequence[str]) -> list[Line]:
    """Measure all repeats, after one that is not counted."""
    lines: list[Line] = []
    with scratch() as memory, tempfile.TemporaryDirectory() as folder:
        one = OneHost(size, memory, Path(folder) / "model")
        about = {"size": size, "bytes": one.plan.nbytes, "parameters": one.flat.numel()}
        for repeat in range(repeats + 1 if "host" in parts else 0):
            line = {"part": "host", "repeat": repeat, **about, **one.repeat(), "load": os.getloadavg()[0]}
            lines += [line] if repeat else []
        if "nodes" in parts:
            with LocalCluster(Config(), "benchmark-weights", Path(folder) / "run", 1) as cluster:
                between = Between(cluster, memory, one.plan, one.own)
                for repeat in range(repeats + 1):
                    line = {"part": "nodes", "repeat": repeat, **about, **between.repeat(), "load": os.getloadavg()[0]}
                    lines += [line] if repeat else []
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=["host", "nodes"], default=["host", "nodes"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu" / "weights.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [line for size in options.sizes for line in measure(size, options.repeats, options.parts)]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print("\n".join(docs_tables.weights(lines)))


if __name__ == "__main__":
    main()
