"""Weights from GPU to GPU (`script/test tests/gpu` on a machine with CUDA): IPC handles between two processes on one
GPU, NCCL between two GPUs, and a run with each."""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.weights.stream.channel import StreamChannel
from lockstep.weights.stream.ipc_buffers import CudaIpcMemory
from lockstep.weights.stream.tensor_buckets import cut_buckets
from lockstep.weights.stream.weight_stream import StreamReceiver, StreamSender
from lockstep.weights.weight_plan import WeightPlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SPAWN = multiprocessing.get_context("spawn")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def tensors(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {f"w{n}": torch.randn(300 + n, 256, generator=made).bfloat16() for n in range(6)}


def plan() -> WeightPlan:
    return WeightPlan.of((name, each.shape, each.dtype) for name, each in tensors(0).items())


def opens(handle: dict[str, Any], answers: Any) -> None:
    """In a process of its own."""
    found = CudaIpcMemory().open(handle, torch.device("cuda:0"))
    answers.put(found.cpu().tolist())


def receives(where: dict[str, Any], device: str, versions: list[int], answers: Any) -> None:
    """In a process of its own."""
    receiver = StreamReceiver()
    for version in versions:
        with receiver.stream(where, version, 0, torch.device(device)) as coming:
            taken = {name: each.cpu() for name, each in coming}
        expected = tensors(version)
        answers.put(all(torch.equal(taken[name], each) for name, each in expected.items()))
    receiver.close()


def test_another_process_opens_an_exported_buffer() -> None:
    buffer = CudaIpcMemory().buffer(1000, torch.device("cuda:0"))
    buffer.copy_(torch.arange(1000).to(torch.uint8))
    torch.cuda.synchronize()
    answers = SPAWN.Queue()
    other = SPAWN.Process(target=opens, args=(CudaIpcMemory().export(buffer), answers), daemon=True)
    other.start()
    assert answers.get(timeout=120) == buffer.cpu().tolist()
    other.join(60)


@pytest.mark.parametrize(
    ("way", "device"),
    [("cuda_ipc", "cuda:0"), pytest.param("nccl", "cuda:1", marks=TWO)],
    ids=["cuda-ipc", "nccl"],
)
def test_versions_arrive_unchanged(way: Any, device: str) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel = StreamChannel(1, way, "nccl", f"tcp://127.0.0.1:{store.port}", "gpu", ("engine",), 1, 400_000, "complete")
    versions, answers = [1, 2], SPAWN.Queue()
    where = channel.where("engine", plan().to_json())
    engine = SPAWN.Process(target=receives, args=(where, device, versions, answers), daemon=True)
    engine.start()
    sender = StreamSender(0, torch.device("cuda:0"))
    for version in versions:
        given = {name: each.cuda(0).view(-1).view(torch.uint8) for name, each in tensors(version).items()}
        buckets = cut_buckets(plan(), channel.bucket_bytes)
        pieces = ({entry.name: [given[entry.name]] for entry in bucket.entries} for bucket in buckets)
        assert sender.send(channel, plan(), version, pieces) == ""
        assert answers.get(timeout=120)
    sender.close()
    engine.join(60)


@pytest.mark.parametrize(
    ("transport", "ranks"),
    [("cuda_ipc", 1), pytest.param("nccl", 1, marks=TWO)],
    ids=["cuda-ipc", "nccl"],
)
def test_a_run_with_streamed_weights(tmp_path: Path, transport: str, ranks: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
    from harness import config, task, train

    if transport == "cuda_ipc" and torch.cuda.device_count() > 1:
        pytest.skip("trainer and engine share a GPU only where there is one (CUDA_VISIBLE_DEVICES=0)")
    home = task(tmp_path)
    cluster, trainer = {"kind": "local", "device": "cuda"}, {"ranks": ranks}
    weights = {"transport": transport}
    run = train(home, config(home, "grpo", steps=3, trainer=trainer, cluster=cluster, weights=weights))
    log = (run / "logs" / "controller.log").read_text()
    assert f"weights go by {transport}" in log and "1 of 1 engines have it" in log
    assert "comes through host memory" not in log
