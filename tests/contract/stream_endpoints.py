"""Both ends of a device transport as real processes without a GPU: gloo for NCCL, files for CUDA IPC."""

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from lockstep.base import waits
from lockstep.train.distributed import join_ranks
from lockstep.train.fsdp.parallelize import device_mesh, local_shard
from lockstep.train.lazy_weights import LazyWeight, gather_buckets
from lockstep.weights.stream.channel import StreamChannel
from lockstep.weights.stream.tensor_buckets import cut_buckets
from lockstep.weights.stream.weight_stream import StreamReceiver, StreamSender
from lockstep.weights.weight_plan import WeightPlan

CPU = torch.device("cpu")


def tensors(version: int) -> dict[str, Tensor]:
    """Tensors that differ in every version; some have an odd number of rows, or fewer rows than there are ranks."""
    made = torch.Generator().manual_seed(version)
    shapes = {"embed": (601, 64), "bias": (7,), "norm": (1, 5), "frozen": (30, 8), "wide": (3, 4000)}
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def plan() -> WeightPlan:
    """The plan of the tensors as they are sent: one of them in another dtype."""
    return WeightPlan.of((name, each.shape, wire(name)) for name, each in tensors(0).items())


def wire(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "wide" else torch.float32


def digests(found: Mapping[str, Tensor]) -> dict[str, str]:
    raw = {name: each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, each in found.items()}
    return {name: hashlib.sha256(body).hexdigest() for name, body in raw.items()}


def expected(version: int) -> dict[str, str]:
    return digests({name: each.to(wire(name)) for name, each in tensors(version).items()})


class FileMemory:
    """Stands for CUDA IPC: a file that both processes map."""

    def __init__(self, gpu: str = "gpu-0", folder: str = "") -> None:
        self.gpu, self.folder, self.made = gpu, folder, 0
        self.paths: dict[int, str] = {}

    def device_key(self, device: torch.device) -> str:
        return self.gpu

    def allocate(self, size: int, device: torch.device) -> Tensor:
        self.made += 1
        path = f"{self.folder}/{self.gpu}-{os.getpid()}-{self.made}"
        buffer = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self.paths[buffer.data_ptr()] = path
        return buffer

    def export(self, buffer: Tensor) -> dict[str, Any]:
        return {"path": self.paths[buffer.data_ptr()], "size": buffer.numel()}

    def open(self, handle: Mapping[str, Any], device: torch.device) -> Tensor:
        return torch.from_file(handle["path"], shared=True, size=handle["size"], dtype=torch.uint8)


class FileReceiver(StreamReceiver):
    """The receiver that engines use instead of one for GPUs."""

    def __init__(self) -> None:
        super().__init__(FileMemory())


class TrainerEnd:
    """A trainer rank with a module that FSDP2 has sharded."""

    def __init__(self, rank: int, world: int, store: str, prefix: str, folder: str = "", gpu: str = "") -> None:
        self.ranks = join_ranks(rank, world, CPU, store, prefix, 60.0)
        module = nn.Module()
        for name, each in tensors(0).items():
            module.register_parameter(name, nn.Parameter(torch.zeros_like(each)))
        if world > 1:
            fully_shard(module, mesh=device_mesh(self.ranks))
        self.parameters = dict(module.named_parameters())
        self.sender = StreamSender(rank, CPU, FileMemory(gpu, folder))

    def stream_weights(self, channel: StreamChannel, version: int) -> str:
        given = tensors(version)
        for name, parameter in self.parameters.items():
            first, last = self.ranks.rows(len(given[name]))
            local_shard(parameter).copy_(given[name][first:last])
        weights = {
            name: LazyWeight(tuple(each.shape), lambda each=each: local_shard(each))
            for name, each in self.parameters.items()
        }
        buckets = [
            [(e.name, e.torch_dtype) for e in bucket.entries] for bucket in cut_buckets(plan(), channel.bucket_bytes)
        ]
        coming = gather_buckets(weights, buckets, self.ranks, everyone=channel.way == "cuda_ipc")
        return self.sender.send(channel, plan(), version, coming)

    def full_digests(self) -> dict[str, str]:
        """Digests of the full tensors, gathered by torch."""
        full = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in self.parameters.items()}
        return digests({name: each.detach().to(wire(name)) for name, each in full.items()})

    def close(self) -> None:
        self.sender.close()


class EngineEnd:
    """An engine that keeps the received tensors. While the file `hold-NAME` exists in its folder, it pauses in the
    middle."""

    def __init__(self, name: str, folder: str, gpu: str = "") -> None:
        self.receiver = StreamReceiver(FileMemory(gpu, folder))
        self.hold, self.half = Path(folder) / f"hold-{name}", Path(folder) / f"half-{name}"
        self.version: int | None = None
        self.tensors: dict[str, Tensor] = {}

    def receive_weights(self, where: dict[str, Any], version: int) -> None:
        taken: dict[str, Tensor] = {}
        with self.receiver.stream(where, version, 0, CPU) as coming:
            for name, tensor in coming:
                taken[name] = tensor
                if self.hold.exists() and len(taken) == 2:
                    self.half.touch()
                    waits.poll(
                        lambda: None if self.hold.exists() else True, kind="file", waits_for="test", why="hold",
                        timeout_s=120, every_s=0.01,
                    )  # fmt: skip
        self.tensors, self.version = taken, version

    def has(self) -> dict[str, str]:
        return digests(self.tensors)

    def close(self) -> None:
        self.receiver.close()


class Feeder:
    """Sends models to one engine of this process, from a thread."""

    def __init__(self, folder: Path, limit_s: float = 20.0) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.sender, self.limit_s, self.numbers = StreamSender(0, CPU, FileMemory("gpu-0", str(folder))), limit_s, 0

    def give(self, engine: Any, lm: nn.Module, version: int, until: int | None = None) -> None:
        """Stream the model's weights to the engine; the sender ends after `until` buckets. Raises the engine's
        error."""
        given = {name: each.detach() for name, each in lm.named_parameters()}
        plan_of_model = WeightPlan.of((name, each.shape, each.dtype) for name, each in given.items())
        self.numbers += 1
        address = f"tcp://127.0.0.1:{self.store.port}"
        channel = StreamChannel(
            self.numbers, "cuda_ipc", "", address, "feed", ("engine",), 1, 50_000, limit_s=self.limit_s
        )

        def pieces() -> Iterator[dict[str, list[Tensor]]]:
            for bucket in cut_buckets(plan_of_model, channel.bucket_bytes):
                if bucket.number == until:
                    return
                yield {e.name: [given[e.name].contiguous().view(-1).view(torch.uint8)] for e in bucket.entries}

        def send() -> None:
            with contextlib.suppress(ValueError):  # fewer buckets than planned
                self.sender.send(channel, plan_of_model, version, pieces())

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            source = channel.where("engine", plan_of_model.to_json())
            engine.receive_weights({**source, "receiver": "stream_endpoints:FileReceiver"}, version)
        finally:
            thread.join(60)


class ModelEnd:
    """A trainer rank with a model from a folder."""

    def __init__(self, folder: str) -> None:
        lm = AutoModelForCausalLM.from_pretrained(folder)
        self.given = {name: each.detach() for name, each in lm.named_parameters()}
        self.sender = StreamSender(0, CPU)

    def plan(self) -> str:
        return WeightPlan.of((name, each.shape, each.dtype) for name, each in self.given.items()).to_json()

    def stream_weights(self, channel: StreamChannel, version: int) -> str:
        plan_of_model = WeightPlan.from_json(self.plan())
        raw = {name: each.contiguous().view(-1).view(torch.uint8) for name, each in self.given.items()}
        pieces = (
            {e.name: [raw[e.name]] for e in bucket.entries}
            for bucket in cut_buckets(plan_of_model, channel.bucket_bytes)
        )
        return self.sender.send(channel, plan_of_model, version, pieces)
