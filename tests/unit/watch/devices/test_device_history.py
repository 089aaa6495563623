"""What samples prove: a device moves, rests, or neither is known; errors are counted from the first sample."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.watch.devices.device_history import DeviceHistory, shows_idleness, shows_movement
from lockstep.watch.devices.device_samples import (
    DeviceFault,
    DeviceProcess,
    DeviceSample,
    DeviceState,
    DeviceUse,
    HostDevices,
    device_label,
    device_summary,
    record_from_json,
    record_to_json,
)

IDLE = DeviceSample("GPU-0", busy=0, memory_busy=0, power_w=70, power_limit_w=700, link_kib_s=0.0, pcie_kib_s=12.0)
SPINNING = replace(IDLE, busy=100, power_w=118)
"""A kernel of NCCL that waits for another rank."""
COMPUTING = replace(IDLE, busy=100, memory_busy=44, power_w=655)


@pytest.mark.parametrize(
    ("sample", "moves", "rests"),
    [
        (IDLE, False, True),
        (SPINNING, False, False),
        (COMPUTING, True, False),
        (replace(SPINNING, memory_busy=31), True, False),
        (replace(SPINNING, power_w=500), True, False),
        (replace(SPINNING, link_kib_s=9e6), True, False),
        (replace(IDLE, pcie_kib_s=4e6), False, False),
        (replace(IDLE, memory_busy=3), False, False),
        (DeviceSample("GPU-0"), False, False),
        (replace(IDLE, lost="GPU is lost"), False, False),
        (DeviceSample("MIG-0", memory_used=5), False, False),
    ],
)
def test_a_sample_proves_movement_idleness_or_neither(sample: DeviceSample, moves: bool, rests: bool) -> None:
    assert (shows_movement(sample), shows_idleness(sample)) == (moves, rests)


percent = st.none() | st.integers(0, 100)
rate = st.none() | st.floats(0, 1e7)


@given(st.builds(
    DeviceSample, uuid=st.just("GPU-0"), busy=percent, memory_busy=percent, power_limit_w=st.none() | st.floats(0, 700),
    power_w=st.none() | st.floats(0, 340), link_kib_s=rate, pcie_kib_s=rate,
))  # fmt: skip
def test_no_sample_proves_both_below_half_of_the_power(sample: DeviceSample) -> None:
    low_power = (sample.power_w or 0) < 0.5 * (sample.power_limit_w or 700)
    assert not (low_power and shows_movement(sample) and shows_idleness(sample))


def test_a_device_is_idle_since_the_first_of_equal_samples() -> None:
    history = DeviceHistory()
    for at, sample in enumerate([COMPUTING, IDLE, IDLE, IDLE]):
        history.add_samples([sample], float(at))
    (state,) = history.states(4.0)
    assert (state.age, state.moved, state.idle) == (1.0, 4.0, 3.0)
    history.add_samples([SPINNING], 4.0)
    (state,) = history.states(5.0)
    assert (state.moved, state.idle) == (5.0, pytest.approx(float("nan"), nan_ok=True))


def test_idleness_begins_anew_after_a_pause_between_samples() -> None:
    history = DeviceHistory()
    for at in (0.0, 1.0, 61.0, 62.0):
        history.add_samples([IDLE], at)
    assert history.states(63.0)[0].idle == 2.0, "what the device did in that minute is not known"


def test_a_shared_device_tells_of_a_process_only_by_its_own_figures() -> None:
    history, own = DeviceHistory(), {11}
    both = (DeviceProcess(11, 5, None, None), DeviceProcess(12, 5, 97, 60))
    for at in (0.0, 1.0):
        history.add_samples([replace(COMPUTING, processes=both, per_process=True)], at)
    assert history.is_shared("GPU-0", own)
    moved, idle = history.process_activity("GPU-0", own)
    assert moved != moved and idle != idle, "the driver has never named this pid: it may have another one there"
    assert history.process_activity("GPU-0", {12})[0] == 1.0
    seen = (DeviceProcess(11, 5, 40, 2), DeviceProcess(12, 5, 97, 60))
    history.add_samples([replace(COMPUTING, processes=seen, per_process=True)], 2.0)
    history.add_samples([replace(COMPUTING, processes=both, per_process=True)], 3.0)
    moved, idle = history.process_activity("GPU-0", own)
    assert moved != moved and idle == 3.0


def test_the_only_process_of_a_device_is_judged_by_the_device() -> None:
    history = DeviceHistory()
    history.add_samples([replace(COMPUTING, processes=(DeviceProcess(11, 5),))], 7.0)
    assert not history.is_shared("GPU-0", {11})
    assert history.process_activity("GPU-0", {11})[0] == 7.0
    history.add_samples([replace(COMPUTING, processes=(DeviceProcess(99, 5),))], 8.0)
    assert not history.is_shared("GPU-0", {11}), "one process, whose pid is that of another namespace"
    history.add_samples([replace(COMPUTING, processes=None)], 9.0)
    assert history.is_shared("GPU-0", {11}), "unknown"


def test_faults_are_kept_once_and_errors_count_from_the_first_sample() -> None:
    history = DeviceHistory()
    history.add_samples([replace(IDLE, uncorrected=5)], 0.0)
    for at in (1.0, 2.0):
        history.add_samples([replace(IDLE, uncorrected=6, lost="GPU is lost")], at)
        history.add_xid("GPU-0", 79, at)
        history.add_xid("GPU-unknown", 79, at)
    (state,) = history.states(10.0)
    once = [("lost", 0, 9.0), ("ecc", 0, 9.0), ("xid", 79, 9.0)]
    assert [(each.kind, each.code, each.age) for each in state.faults] == once
    for at in (30.0, 100.0, 101.0):
        history.add_xid("GPU-0", 79, at)
    (state,) = history.states(110.0)
    assert [each.age for each in state.faults if each.kind == "xid"] == [109.0, 10.0], "a new error after an hour, say"


def test_records_survive_json_and_tolerate_other_versions() -> None:
    sample = replace(COMPUTING, throttled=("hw_slowdown",), processes=(DeviceProcess(3, None, 1, 2),))
    state = DeviceState(sample, 0.5, 1.25, faults=(DeviceFault("xid", "Xid 79", 3.0, 79),))
    full = HostDevices((state,), (DeviceUse(1, 0, "file", True, 2.0, 3.0),), "silent")
    data = record_to_json(full)
    assert record_to_json(record_from_json(HostDevices, data)) == data
    back = record_from_json(HostDevices, data | {"later": 1})
    assert back.devices[0].sample == sample and back.devices[0].faults[0].code == 79
    assert back.uses[0].source == "file" and back.gap == "silent"
    assert record_to_json(HostDevices()) == {}
    with pytest.raises(ValueError, match="not a DeviceSample"):
        record_from_json(DeviceSample, {"index": 3})


def test_devices_have_names_and_figures_for_people() -> None:
    assert device_label(replace(IDLE, index=3)) == "GPU 3"
    assert device_label(replace(IDLE, index=3, instance=1)) == "GPU 3 instance 1"
    text = device_summary(replace(COMPUTING, throttled=("sw_thermal_slowdown",)))
    assert text == "100% busy, memory 44% busy, 655 of 700 W, throttled: sw_thermal_slowdown"
    assert device_summary(DeviceSample("GPU-0")) == "no figures"
