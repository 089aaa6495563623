"""What watches a run, with a real driver and NCCL: `script/gpu watch`."""

from pathlib import Path

import pytest
import torch

from lockstep.doctor.check.facts.host_system import HostSystem
from lockstep.doctor.check.facts.nvidia_smi import gather_gpus, gather_topology
from tests.faults.ranks import run_ranks
from tests.gpu import watched_nccl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_the_gpus_of_nvidia_smi_are_those_of_torch() -> None:
    found = gather_gpus(HostSystem())
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    assert [gpu.name for gpu in found] == names
    for number, gpu in enumerate(found):
        assert gpu.memory_mib == pytest.approx(torch.cuda.get_device_properties(number).total_memory / 2**20, rel=0.05)
        assert gpu.bus and gpu.uuid and gpu.capability == ".".join(map(str, torch.cuda.get_device_capability(number)))
    if len(found) > 1:
        gather_topology(HostSystem())


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs"))])  # fmt: skip
def test_a_collective_behind_a_kernel_is_pending_until_it_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "beacons"))
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_ENABLE_TIMING": "1"}
    for each in run_ranks(
        tmp_path, watched_nccl.collective_behind_a_kernel, world, backend="nccl", environment=environment
    ):
        assert (each.error, each.text) == ("", "")
        assert each.value["pending"] == [2, 1], "a call that returned has not completed"
        assert each.value["completed"] == [2, 2]
        assert each.value["sum"] == world**2
        assert each.value["normalized"] == len(each.value["operations"]) == 2
        assert all("all_reduce" in name for name in each.value["operations"])
