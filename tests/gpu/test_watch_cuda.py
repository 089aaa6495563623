"""What watches a run, with a real driver and NCCL: `script/gpu watch`."""

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.doctor.check.facts.host_system import HostSystem
from lockstep.doctor.check.facts.nvidia_smi import gather_gpus, gather_topology
from lockstep.watch.devices.device_sampler import DeviceSampler
from lockstep.watch.devices.device_samples import DeviceUse
from lockstep.watch.procfs.processes import start_ticks
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


def test_the_sampler_sees_what_this_process_does_with_its_gpu() -> None:
    """A product of matrices moves the device, a kernel of one thread neither moves it nor lets it rest."""
    pytest.importorskip("pynvml")
    device = torch.device("cuda", torch.cuda.current_device())
    one = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    own = [(os.getpid(), start_ticks(os.getpid()) or 0)]
    with contextlib.closing(DeviceSampler(every_s=0.25)) as sampler:
        sampler.start()
        assert not sampler.unavailable

        def look(work: Callable[[], object], seconds: float) -> DeviceUse:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                work()
                torch.cuda.synchronize()
                sampler.tick()
            report = sampler.report(own)
            (use,) = report.uses
            assert use.source in ("driver", "file")
            assert report.devices[use.device].sample.uuid.removeprefix("GPU-") == str(
                torch.cuda.get_device_properties(device).uuid
            )
            return use

        look(lambda: one @ one, 15.0)  # the child starts
        assert look(lambda: one @ one, 3.0).moved < 1.5
        waiting = look(lambda: torch.cuda._sleep(200_000_000), 6.0)
        assert waiting.moved > 3.0 and math.isnan(waiting.idle)
        assert look(lambda: time.sleep(0.05), 6.0).idle > 2.0


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
