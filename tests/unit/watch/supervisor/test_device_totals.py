"""The totals of a job's GPUs: means over samples, each counted once, however many reports carry it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_evidence_builder import roster, state

from lockstep.watch.devices.device_samples import DeviceFault, DeviceSample, DeviceState, DeviceUse, HostDevices
from lockstep.watch.supervisor.device_totals import DeviceTotals
from lockstep.watch.supervisor.evidence_builder import HostState


def host(at: float, busy: int, *reasons: str, age: float = 0.2, name: str = "a", errors: str = "") -> HostState:
    sample = DeviceSample(
        "GPU-0", 0, "H100", busy=busy, memory_busy=busy // 2, power_w=5.0 * busy, power_limit_w=700.0,
        memory_used=busy << 20, memory_total=80 << 30, temperature_c=30 + busy, throttled=reasons,
    )  # fmt: skip
    faults = (DeviceFault("lost", errors, 1.0),) if errors else ()
    devices = HostDevices((DeviceState(sample, age, faults=faults),), (DeviceUse(1, 0),))
    return HostState(roster(name, [0, 1]), replace(state(name, [0, 1]), devices=devices), at)


def test_totals_are_means_over_samples(tmp_path: Path) -> None:
    file = tmp_path / "devices.json"
    totals = DeviceTotals(file)
    for each in (host(10.0, 90), host(10.5, 90, age=0.7), host(11.0, 50, "hw_slowdown"), host(12.0, 40, errors="lost")):
        totals.add(each)
    totals.add(host(12.0, 7, name="b"))
    totals.write(12.0)
    first, second = json.loads(file.read_text())
    assert (first["host"], first["device"], first["processes"], first["samples"]) == ("a", "GPU 0", ["policy-1"], 3)
    assert (first["busy"], first["memory_busy"], first["power_w"]) == (60.0, 30.0, 300.0)
    assert (first["memory_used"], first["temperature_c"]) == (90 << 20, 120)
    assert first["throttled"] == {"hw_slowdown": pytest.approx(33.3)} and first["errors"] == ["lost"]
    assert (second["host"], second["busy"]) == ("b", 7.0)


def test_the_file_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "devices.json"
    totals = DeviceTotals(file)
    totals.write(100.0, last=True)
    assert not file.exists(), "a job without GPUs has none"
    for at, last, busy in ((100.0, False, 50.0), (101.0, False, 50.0), (102.0, True, 60.0)):
        totals.add(host(at, 50 if at == 100.0 else 70))
        totals.write(at, last)
        assert json.loads(file.read_text())[0]["busy"] == pytest.approx(busy, abs=4)
    DeviceTotals(None).write(0.0, last=True)
