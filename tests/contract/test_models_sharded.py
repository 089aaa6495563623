"""A policy sharded by FSDP2 over two gloo ranks: filled from meta by rows, equal to the whole model."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANK_CODE = """
import os, sys
import torch
import torch.distributed as dist
from datetime import timedelta
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from lockstep.config.model import Model
from lockstep.data.layout import Layout
from lockstep.models import head
from lockstep.models.load import load_policy
from lockstep.models.probe import probe_packing
from lockstep.models.weights import fill, local_rows, named_weights

head.KEPT_ELEMENTS = 0
folder, out, reshard = sys.argv[1], sys.argv[2], sys.argv[3] == "yes"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
mesh = init_device_mesh("cpu", (world,))
policy = load_policy(Model(path=folder), "cpu", meta=True)
for layer in policy.layers:
    fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
fully_shard(policy, mesh=mesh, reshard_after_forward=reshard)
from pathlib import Path
report = fill(policy, Path(folder), "cpu")
assert not report.missing and not report.unexpected, report
mode = probe_packing(policy).mode
torch.manual_seed(rank)
layout = Layout([5, 4, 3, 6], [-1, 0, 0, -1])
tokens = torch.randint(2, 90, (layout.tokens,))
sources = torch.tensor([4, 5, 6, 7, 4, 9, 10, 12, 13])
targets = torch.randint(2, 90, (len(sources),))
logprobs, entropies = policy(tokens, layout, sources, targets, 0.9, 4, True)
((logprobs * torch.linspace(-1, 1, len(sources))).sum() + 0.1 * entropies.sum()).backward()
rows = {name: local_rows(parameter.data) for name, parameter in named_weights(policy)}
grads = {name: parameter.grad.full_tensor() for name, parameter in named_weights(policy)}
torch.save(
    {"mode": mode, "logprobs": logprobs.detach(), "tokens": tokens, "targets": targets, "grads": grads, "rows": rows},
    f"{out}/{rank}.pt",
)
dist.destroy_process_group()
"""


def run_ranks(folder: Path, out: Path, reshard: bool) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        argv = [sys.executable, "-c", RANK_CODE, str(folder), str(out), "yes" if reshard else "no"]
        ranks.append(subprocess.Popen(argv, env=env | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True))
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors[-3000:]
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("family", "tied", "reshard"), [("qwen2", True, True), ("llama", False, False)])
def test_sharded_equals_whole(tmp_path: Path, family: str, tied: bool, reshard: bool) -> None:
    from lockstep.config.model import Model
    from lockstep.data.layout import Layout
    from lockstep.models import head
    from lockstep.models.load import load_policy
    from lockstep.models.tiny import make_tiny
    from lockstep.models.weights import named_weights

    folder = make_tiny(tmp_path / "tiny", family=family, tie_embeddings=tied, hidden=32, ffn=48)
    found = run_ranks(folder, tmp_path, reshard)
    whole = load_policy(Model(path=str(folder)), "cpu")
    kept = head.KEPT_ELEMENTS
    head.KEPT_ELEMENTS = 0
    try:
        for rank in found:
            assert rank["mode"] == "forest"
            layout = Layout([5, 4, 3, 6], [-1, 0, 0, -1])
            sources = torch.tensor([4, 5, 6, 7, 4, 9, 10, 12, 13])
            logprobs, entropies = whole(rank["tokens"], layout, sources, rank["targets"], 0.9, 4, True)
            torch.testing.assert_close(rank["logprobs"], logprobs.detach(), rtol=0, atol=1e-5)
            # FSDP averages gradients over its ranks.
            loss = (logprobs * torch.linspace(-1, 1, len(sources))).sum() + 0.1 * entropies.sum()
            (loss / 2).backward()
    finally:
        head.KEPT_ELEMENTS = kept
    names = dict(named_weights(whole))
    assert found[0]["grads"].keys() == names.keys()
    for name, parameter in names.items():
        halves = [rank["rows"][name] for rank in found]
        assert halves[0][0] == 0 and halves[0][1] + halves[1][1] == parameter.shape[0]
        for rank in found:
            error = (rank["grads"][name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5 or name.endswith("k_proj.bias"), (name, error)
