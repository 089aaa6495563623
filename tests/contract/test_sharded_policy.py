"""A policy that FSDP2 shards over two gloo ranks: each rank loads its rows, and the result equals the unsharded
model."""

import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.config.model import ModelConfig
from lockstep.data.row_layout import RowLayout
from lockstep.models import logprob_head
from lockstep.models.hf_checkpoint import fill_policy, local_row_range, named_weights
from lockstep.models.model_loader import load_policy
from lockstep.models.packing_probe import probe_packing
from lockstep.models.tiny_model import make_tiny

CASES = [("qwen2", True, True), ("llama", False, False)]
"""(family, tied embeddings, reshard after forward)"""


def case_id(case: tuple[str, bool, bool]) -> str:
    return "-".join(map(str, case))


def _rank(rank: int, world: int, port: int, cases: dict[str, bool]) -> None:
    """Computes all cases, by folder and whether weights are resharded after the forward, into `FOLDER.RANK.pt`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    logprob_head.DIRECT_ELEMENTS = 0
    store = dist.TCPStore("127.0.0.1", port, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (world,))
    for folder, reshard in cases.items():
        policy = load_policy(ModelConfig(path=folder), "cpu", meta=True)
        for layer in policy.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(policy, mesh=mesh, reshard_after_forward=reshard)
        report = fill_policy(policy, Path(folder), "cpu")
        assert not report.missing and not report.unexpected, report
        mode = probe_packing(policy).mode
        torch.manual_seed(rank)
        layout = RowLayout([5, 4, 3, 6], [-1, 0, 0, -1])
        tokens = torch.randint(2, 90, (layout.tokens,))
        sources = torch.tensor([4, 5, 6, 7, 4, 9, 10, 12, 13])
        targets = torch.randint(2, 90, (len(sources),))
        logprobs, entropies = policy(tokens, layout, sources, targets, 0.9, 4, True)
        ((logprobs * torch.linspace(-1, 1, len(sources))).sum() + 0.1 * entropies.sum()).backward()
        rows = {name: local_row_range(parameter.data) for name, parameter in named_weights(policy)}
        grads = {name: parameter.grad.full_tensor() for name, parameter in named_weights(policy)}
        torch.save(
            {"mode": mode, "logprobs": logprobs.detach(), "tokens": tokens, "targets": targets}
            | {"grads": grads, "rows": rows},
            f"{folder}.{rank}.pt",
        )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny models and, next to each, the results of two ranks in `FOLDER.RANK.pt`. The ranks start once for all
    cases."""
    base = tmp_path_factory.mktemp("sharded")
    made = {
        case_id(case): make_tiny(base / case_id(case), family=case[0], tie_embeddings=case[1], hidden=32, ffn=48)
        for case in CASES
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "lockstep.train.trainer_service"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cases = {str(made[case_id(case)]): case[2] for case in CASES}
    ranks = [context.Process(target=_rank, args=(rank, 2, store.port, cases), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(150)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0, 0]
    return made


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_sharded_policy_equals_an_unsharded_one(
    folders: dict[str, Path], case: tuple[str, bool, bool], monkeypatch
) -> None:
    folder = folders[case_id(case)]
    found = [torch.load(f"{folder}.{rank}.pt") for rank in range(2)]
    unsharded = load_policy(ModelConfig(path=str(folder)), "cpu")
    monkeypatch.setattr(logprob_head, "DIRECT_ELEMENTS", 0)
    layout, sources = RowLayout([5, 4, 3, 6], [-1, 0, 0, -1]), torch.tensor([4, 5, 6, 7, 4, 9, 10, 12, 13])
    for rank in found:
        assert rank["mode"] == "forest"
        logprobs, entropies = unsharded(rank["tokens"], layout, sources, rank["targets"], 0.9, 4, True)
        torch.testing.assert_close(rank["logprobs"], logprobs.detach(), rtol=0, atol=1e-5)
        # FSDP averages gradients over its ranks.
        ((logprobs * torch.linspace(-1, 1, len(sources))).sum() / 2 + 0.1 * entropies.sum() / 2).backward()
    names = dict(named_weights(unsharded))
    assert found[0]["grads"].keys() == names.keys()
    for name, parameter in names.items():
        halves = [rank["rows"][name] for rank in found]
        assert halves[0][0] == 0 and halves[0][1] + halves[1][1] == parameter.shape[0]
        for rank in found:
            error = (rank["grads"][name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5 or name.endswith("k_proj.bias"), (name, error)
