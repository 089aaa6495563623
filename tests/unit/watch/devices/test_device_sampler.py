"""The sampler, its child and nvidia-ml-py against a library of C that answers as NVIDIA's does."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.watch.devices import device_sampler
from lockstep.watch.devices.device_sampler import DeviceSampler
from lockstep.watch.devices.device_samples import DeviceSample, DeviceState, HostDevices
from tests.unit.watch.devices.fake_nvml import FakeNvml, gpu, nvml

__all__ = ["nvml"]

BOUND_S = 30.0


@contextlib.contextmanager
def started() -> Iterator[DeviceSampler]:
    with contextlib.closing(DeviceSampler(every_s=0.1, silent_s=1.0)) as made:
        made.start()
        yield made


@pytest.fixture
def sampler() -> Iterator[DeviceSampler]:
    with started() as made:
        yield made


def until(
    sampler: DeviceSampler, holds: Callable[[HostDevices], bool], tracked: tuple[tuple[int, int], ...] = ()
) -> HostDevices:
    end = time.monotonic() + BOUND_S
    while True:
        sampler.tick()
        found = sampler.report(tracked)
        if holds(found):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.02)


def only(found: HostDevices) -> DeviceState:
    (state,) = found.devices
    return state


def sampled(found: HostDevices) -> bool:
    return bool(found.devices)


def test_every_figure_of_a_gpu_is_read(nvml: FakeNvml, sampler: DeviceSampler) -> None:
    nvml.set(
        **gpu(0, busy=98, memory_busy=41, power=612_000, reasons=0x1 | 0x20 | 0x4, uncorrected=2, temperature=87,
              sm_clock=1200, field138=1000, field139=500, field52=3, field59=1, pcie_tx=700, pcie_rx=300,
              pcie_replays=9, processes="4711:1073741824 4712:5")
    )  # fmt: skip
    until(sampler, sampled)
    found = only(until(sampler, lambda found: only(found).sample.link_kib_s is not None)).sample
    assert found == DeviceSample(
        uuid="GPU-00000000-0000-0000-0000-000000000000", index=0, name="NVIDIA H100 80GB HBM3", minor=0, busy=98,
        memory_busy=41, memory_used=1 << 30, memory_total=80 << 30, power_w=612.0, power_limit_w=700.0, sm_mhz=1200,
        sm_max_mhz=1980, temperature_c=87, throttled=("sw_power_cap", "sw_thermal_slowdown"), uncorrected=2,
        link_kib_s=0.0, link_errors=4, pcie_kib_s=1000.0, pcie_replays=9, processes=found.processes,
    )  # fmt: skip
    assert [(each.pid, each.memory) for each in found.processes or ()] == [(4711, 1 << 30), (4712, 5)]


def test_power_is_the_mean_by_the_counter_of_energy(nvml: FakeNvml, sampler: DeviceSampler) -> None:
    nvml.set(gpu0__energy=1_000_000)
    until(sampler, sampled)
    until(sampler, lambda found: only(found).sample.power_w == 0.0)  # no joule since the sample before
    nvml.set(gpu0__energy=1_060_000)  # 60 J
    found = until(sampler, lambda found: bool(only(found).sample.power_w))
    assert 60 / 2 < (only(found).sample.power_w or 0) < 60 / 0.05


def test_what_a_gpu_does_not_report_is_unknown(nvml: FakeNvml, sampler: DeviceSampler) -> None:
    names = ("busy", "memory_busy", "memory_total", "power", "power_limit", "reasons", "uncorrected", "processes")
    nvml.set(**{f"gpu0__{name}": None for name in names}, gpu0__temperature__error=999, gpu0__sm_clock__error=4)
    found = only(until(sampler, sampled))
    assert found.sample == DeviceSample(
        uuid="GPU-00000000-0000-0000-0000-000000000000", name="NVIDIA H100 80GB HBM3", minor=0, sm_max_mhz=1980
    )
    assert found.idle != found.idle and found.moved != found.moved, "what is unknown proves nothing"


def test_an_old_driver_has_the_reasons_by_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(tmp_path, monkeypatch, "-DOLD_DRIVER").set(gpu0__reasons=0x8)
    with contextlib.closing(DeviceSampler(every_s=0.1)) as sampler:
        sampler.start()
        assert only(until(sampler, sampled)).sample.throttled == ("hw_slowdown",)


def test_a_lost_gpu_is_a_fault_of_that_gpu(nvml: FakeNvml, sampler: DeviceSampler) -> None:
    nvml.set(count=2, **gpu(1))
    until(sampler, lambda found: len(found.devices) == 2)
    nvml.set(gpu1__lost=15)
    found = until(sampler, lambda found: bool(found.devices[1].faults))
    assert [(each.kind, each.text) for each in found.devices[1].faults] == [("lost", "the driver says: GPU is lost")]
    assert found.devices[0].faults == () and found.devices[0].sample.busy == 0
    assert found.devices[1].sample.uuid.startswith("GPU-1"), "its name is remembered"


def test_errors_since_the_start_are_faults_and_earlier_ones_are_not(nvml: FakeNvml, sampler: DeviceSampler) -> None:
    nvml.set(gpu0__uncorrected=7)
    assert only(until(sampler, sampled)).faults == ()
    nvml.set(gpu0__uncorrected=9, event="1 0 48")
    found = only(until(sampler, lambda found: len(only(found).faults) == 2))
    assert {(each.kind, each.code) for each in found.faults} == {("ecc", 0), ("xid", 48)}
    assert all(0 <= each.age < BOUND_S for each in found.faults)


def test_a_partitioned_gpu_has_instances_with_memory_and_processes(nvml: FakeNvml, sampler: DeviceSampler) -> None:
    nvml.set(
        gpu0__busy=None, gpu0__mig=1, gpu0__mig_count=7, gpu0__mig0__uuid="MIG-aa", gpu0__mig0__memory_total=20 << 30,
        gpu0__mig0__memory_used=3 << 30, gpu0__mig0__processes=f"{os.getpid()}:9", gpu0__mig2__uuid="MIG-bb",
    )  # fmt: skip
    whole, first, second = (each.sample for each in until(sampler, sampled).devices)
    assert (whole.busy, first.parent, second.parent) == (None, whole.uuid, whole.uuid)
    assert (first.uuid, first.instance, first.memory_used) == ("MIG-aa", 0, 3 << 30)
    assert (second.uuid, second.instance, second.memory_used) == ("MIG-bb", 2, None)
    nvml.set(event="1 0 79")
    found = until(sampler, lambda found: bool(found.devices[2].faults))
    assert found.devices[1].faults[0].code == 79, "an error of the GPU is one of its instances"


def test_a_call_that_does_not_return_is_reported_and_the_child_killed(nvml: FakeNvml, sampler: DeviceSampler) -> None:
    nvml.set(count=2, **gpu(1))
    until(sampler, lambda found: len(found.devices) == 2)
    nvml.set(gpu1__hang=1)
    began = time.monotonic()
    found = until(sampler, lambda found: bool(found.gap))
    assert time.monotonic() - began < 15, "a deadline of a second, and no wait for the child"
    assert "about GPU 1" in found.gap
    assert [fault.kind for fault in found.devices[1].faults] == ["silent"] and not found.devices[0].faults
    until(sampler, lambda found: sampler._child is None)
    assert sampler.report().gap, "the silence remains until the driver answers"


def test_a_child_that_hangs_before_the_first_sample_is_reported(nvml: FakeNvml) -> None:
    nvml.set(gpu0__hang=1)
    with started() as sampler:
        assert "about GPU 0" in until(sampler, lambda found: bool(found.gap)).gap


def test_sampling_begins_again_after_a_crash(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampler, "RESTART_S", 0.2)
    with contextlib.closing(DeviceSampler(every_s=0.1)) as sampler:
        sampler.start()
        until(sampler, sampled)
        assert sampler._child is not None
        first = sampler._child.pid
        sampler._child.kill()
        until(sampler, lambda found: sampler._child is not None and sampler._child.pid != first)
        nvml.set(gpu0__busy=55)
        until(sampler, lambda found: only(found).sample.busy == 55)


def test_a_driver_that_does_not_fit_its_library_leaves_no_devices(nvml: FakeNvml) -> None:
    nvml.set(init=18)
    with started() as sampler:
        end = time.monotonic() + BOUND_S
        while not sampler.unavailable:
            assert time.monotonic() < end
            sampler.tick()
            time.sleep(0.02)
        assert "mismatch" in sampler.unavailable.lower()
        assert sampler.report() == HostDevices()


def test_gpus_that_are_lost_from_the_beginning_are_reported(nvml: FakeNvml) -> None:
    nvml.set(count=3, **gpu(1), **gpu(2), gpu0__lost=15, gpu2__handle__error=15)
    with started() as sampler:
        found = until(sampler, sampled)
        assert [(each.sample.index, each.sample.lost) for each in found.devices] == [
            (0, "GPU is lost"), (1, ""), (2, "GPU is lost"),
        ]  # fmt: skip


@pytest.mark.parametrize("noise", ["WARNING: infoROM is corrupted", "{}", '{"devices": [3]}', '{"xid": "x"}', "[1]"])
def test_what_the_library_prints_disturbs_nothing(nvml: FakeNvml, noise: str) -> None:
    nvml.set(noise=noise)
    with started() as sampler:
        assert only(until(sampler, sampled)).sample.busy == 0


def test_without_the_library_there_is_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampler, "NVML_LIBRARY", "libno-such-library.so.1")
    sampler = DeviceSampler()
    sampler.start()
    sampler.tick()
    assert (sampler._child, sampler.report()) == (None, HostDevices())
    assert sampler.unavailable


def test_the_process_that_the_driver_lists_uses_the_device(nvml: FakeNvml, sampler: DeviceSampler) -> None:
    nvml.set(gpu0__processes=f"{os.getpid()}:5", gpu0__minor=None, gpu0__busy=100, gpu0__memory_busy=60)
    found = until(sampler, lambda found: bool(found.uses), ((os.getpid(), 0),))
    (use,) = found.uses
    assert (use.process, use.device, use.source, use.shared) == (0, 0, "driver", False)
    assert use.moved < BOUND_S and use.idle != use.idle


def test_the_child_ends_with_its_parent(nvml: FakeNvml, sampler: DeviceSampler) -> None:
    until(sampler, sampled)
    child = sampler._child
    assert child is not None and child.stdin is not None
    child.stdin.close()
    assert child.wait(BOUND_S) == 0
