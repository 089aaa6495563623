"""Which process uses which device: by the driver's list, by open device files, by the environment."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.watch.devices.device_mapping import (
    DeviceMapping,
    ProcessFacts,
    devices_of,
    open_minors,
    process_facts,
    visible_devices,
)
from lockstep.watch.devices.device_samples import DeviceProcess, DeviceSample
from lockstep.watch.procfs.processes import start_ticks


def gpus(*pids: tuple[int, ...], name: str = "H100") -> list[DeviceSample]:
    return [
        DeviceSample(f"GPU-{n}abc-{n}", n, name, minor=n, processes=tuple(DeviceProcess(pid) for pid in each))
        for n, each in enumerate(pids)
    ]


def of(devices: list[DeviceSample], minors: set[int] | None = None, **variables: str) -> tuple[tuple[int, ...], str]:
    known = None if minors is None else frozenset(minors)
    return devices_of(ProcessFacts(frozenset({7, 8}), known, variables), devices)


def test_the_pid_in_the_drivers_list_decides() -> None:
    assert of(gpus((1,), (7,), ())) == ((1,), "driver")
    assert of(gpus((8,), (7,), ()), {0, 1}, CUDA_VISIBLE_DEVICES="2") == ((0, 1), "driver"), "children count as well"


def test_a_pid_of_another_namespace_is_not_believed() -> None:
    assert of(gpus((7,), (99,)), {1}) == ((1,), "file"), "pid 7 of the host is another process: ours has GPU 1 open"


def test_the_only_open_device_file_decides_without_a_pid() -> None:
    assert of(gpus((500,), (501,), (502,)), {2}, CUDA_VISIBLE_DEVICES="0") == ((2,), "file")
    assert of(gpus((), ()), set(), LOCAL_RANK="1") == ((), ""), "a process that has no device open uses none"
    unnumbered = [replace(each, minor=None) for each in gpus((7,), ())]
    assert of(unnumbered, set(), LOCAL_RANK="1") == ((0,), "driver")
    assert of(unnumbered[1:], set(), CUDA_VISIBLE_DEVICES="0") == ((), "")


def test_the_environment_decides_at_last() -> None:
    devices = gpus((), (), (), ())
    assert of(devices, None, CUDA_VISIBLE_DEVICES="3") == ((3,), "environment")
    assert of(devices, None, CUDA_VISIBLE_DEVICES="2,0", LOCAL_RANK="1") == ((0,), "environment")
    assert of(devices, {0, 1, 2, 3}, LOCAL_RANK="2") == ((2,), "environment"), "CUDA opens all that it sees"
    assert of(devices, None, CUDA_VISIBLE_DEVICES="2,0", OMPI_COMM_WORLD_LOCAL_RANK="0") == ((2,), "environment")
    assert of(devices, None, CUDA_VISIBLE_DEVICES="2,0") == ((), ""), "which of the two is not known"
    assert of(devices, {1}, CUDA_VISIBLE_DEVICES="3") == ((1,), "file")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2]), ("", []), ("1", [1]), ("2, 0", [2, 0]), ("0,-1,1", [0]), ("0,7,1", [0]), ("NoDevFiles", []),
        ("GPU-1abc-1,0", [1, 0]), ("GPU-1", [1]), ("GPU-", []), ("gpu-1", []), ("1,1", [1]),
    ],
)  # fmt: skip
def test_visible_devices_are_read_as_cuda_does(text: str | None, expected: list[int]) -> None:
    variables = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_devices(variables, gpus((), (), ())) == expected


def test_numbers_mean_nothing_among_gpus_that_differ_unless_ordered_by_bus() -> None:
    devices = [*gpus((), ()), DeviceSample("GPU-2abc-2", 2, "L4", minor=2)]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1"}, devices) is None
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, devices) == [1]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-2"}, devices) == [2]


def test_instances_of_a_partitioned_gpu_are_chosen_by_uuid_or_pid() -> None:
    whole = gpus(())[0]
    parts = [DeviceSample(f"MIG-{n}", 0, "H100", parent=whole.uuid, instance=n, minor=0) for n in range(2)]
    devices = [whole, *parts]
    assert of(devices, {0}, CUDA_VISIBLE_DEVICES="MIG-1") == ((2,), "environment")
    assert of(devices, {0}) == ((), ""), "one file, two instances"
    assert of(devices, {0}, CUDA_VISIBLE_DEVICES="0") == ((), "")
    busy = DeviceSample("MIG-0", 0, "H100", parent=whole.uuid, instance=0, minor=0, processes=(DeviceProcess(8),))
    assert of([whole, busy, parts[1]], {0}) == ((1,), "driver")


def test_open_device_files_are_read_from_proc(tmp_path: Path) -> None:
    for name in ("nvidia3", "nvidia12", "nvidiactl", "nvidia3x"):
        (tmp_path / name).touch()
    names = ("nvidia3", "nvidia3", "nvidiactl", "nvidia3x")
    opened = [(tmp_path / name).open() for name in names]
    try:
        assert open_minors([os.getpid()], str(tmp_path / "nvidia")) == {3}
    finally:
        for each in opened:
            each.close()
    assert open_minors([os.getpid()], str(tmp_path / "nvidia")) == frozenset()
    assert open_minors([2**22 + 1]) is None


def test_facts_of_a_process_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    ticks = start_ticks(own)
    assert ticks is not None
    assert own in process_facts(own).pids and process_facts(own).variables
    mapping, devices = DeviceMapping(), [DeviceSample("GPU-0", processes=(DeviceProcess(own),))]
    first = mapping.uses([(own, ticks)], devices)
    assert first[0][1:] == ((0,), "driver")
    monkeypatch.setattr("lockstep.watch.devices.device_mapping.process_facts", lambda *given: None)
    assert mapping.uses([(own, ticks)], devices) == first
    lost = [DeviceSample("GPU-1"), DeviceSample("GPU-0", lost="GPU is lost")]
    assert mapping.uses([(own, ticks)], lost)[0][1:] == ((1,), "driver"), "the driver lists nobody any more"


def test_a_process_that_has_ended_has_used_its_last_devices() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        tracked = [(child.pid, ticks)]
        mapping, devices = DeviceMapping(), [DeviceSample("GPU-0", processes=(DeviceProcess(child.pid),))]
        assert mapping.uses(tracked, devices)[0][1] == (0,)
        child.kill()
    gone = [DeviceSample("GPU-1"), DeviceSample("GPU-0", processes=())]
    assert mapping.uses(tracked, gone)[0][1:] == ((1,), "driver")
    assert mapping.uses([(child.pid, ticks + 1)], gone)[0][1:] == ((), ""), "another process of the same pid"


def test_one_process_is_looked_at_again_per_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.watch.devices.device_mapping.REFRESH_S", 0.0)
    looked: list[int] = []

    def look(pid: int, own: object) -> ProcessFacts:
        looked.append(pid)
        return process_facts(pid)

    monkeypatch.setattr("lockstep.watch.devices.device_mapping.process_facts", look)
    mapping, both = DeviceMapping(), [(os.getpid(), 0), (os.getppid(), 0)]
    for _ in range(3):
        mapping.uses(both, gpus((), ()))
    assert looked == [os.getpid(), os.getppid(), os.getpid(), os.getppid()]


def test_a_stable_process_is_looked_at_once_a_minute_until_pids_change(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looked, pid = 0.0, list[float](), os.getpid()

    def look(pid: int, own: object) -> ProcessFacts:
        looked.append(now)
        return ProcessFacts(frozenset({pid}))

    def until(end: float, tracked: list[tuple[int, int]], *listed: int) -> list[float]:
        nonlocal now
        looked.clear()
        while now < end:
            mapping.uses(tracked, [DeviceSample("GPU-0", processes=tuple(DeviceProcess(each) for each in listed))])
            now += 1.0
        return looked.copy()

    monkeypatch.setattr("lockstep.watch.devices.device_mapping.process_facts", look)
    monkeypatch.setattr("lockstep.watch.devices.device_mapping.time", SimpleNamespace(monotonic=lambda: now))
    mapping, one = DeviceMapping(), [(pid, 0)]
    assert until(400.0, one, pid) == [0.0, 5.0, 15.0, 35.0, 75.0, 135.0, 195.0, 255.0, 315.0, 375.0]
    assert until(410.0, one, pid, 77)[0] == 400.0, "another process uses a device"
    until(600.0, one, pid, 77)
    assert until(620.0, [*one, (os.getppid(), 0)], pid, 77)[:2] == [600.0, 600.0], "the job has another process"
