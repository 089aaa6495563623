"""Verdicts with samples of GPUs: a long kernel is no stillness, an idle device proves it, an error names its ranks."""

import json
from dataclasses import replace

import numpy as np
import pytest
from test_diagnose import AT, NAN, Group, One, check, diagnose, fsdp, only, policy, snapshot
from test_diagnose_device import on_device

from lockstep.watch.agent.report_messages import (
    Roster,
    RosterCommunicator,
    RosterMember,
    StateReport,
    encode_report,
    pack_member,
    pack_process,
)
from lockstep.watch.devices.device_samples import DeviceFault, DeviceSample, DeviceState, DeviceUse, HostDevices
from lockstep.watch.diagnosis.device_evidence import ProcessDevice, process_devices
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.evidence_types import CommunicatorInfo, Liveness, ProcessInfo, ProcessNote
from lockstep.watch.diagnosis.verdict import MIN_ACTION_CONFIDENCE, VerdictKind, VerdictLevel
from lockstep.watch.supervisor.agent_connections import parse_report
from lockstep.watch.supervisor.message_store import MessageStore

SYNCHRONIZES = ProcessNote(where="step() at train.py:40", waits_for_device=True)
IDLE = DeviceSample("GPU-3", 3, busy=0, memory_busy=0, power_w=71, power_limit_w=700)
SPINNING = replace(IDLE, busy=100, power_w=118)
COMPUTING = replace(IDLE, busy=100, memory_busy=52, power_w=640)
LOST = replace(IDLE, busy=None, memory_busy=None, lost="GPU is lost")


def waiting_for_its_device(*devices: ProcessDevice, seconds: float = 60.0, process: int = 1) -> Evidence:
    """Rank 1 is in a synchronisation with its device, a core busy; the others wait for it in #412."""
    slow = One("policy-1", still=seconds, cpu=0.1, note=SYNCHRONIZES)
    return replace(snapshot(policy(4, p1=slow), [fsdp(since=seconds)]), devices={process: devices} if devices else {})


def fault(kind: str, ago: float, code: int = 0) -> tuple[float, DeviceFault]:
    return AT - ago, DeviceFault(kind, {"lost": "the driver says: GPU is lost"}.get(kind, f"{kind} {code}"), ago, code)


def test_a_long_kernel_is_not_confirmed_while_the_device_moves() -> None:
    assert only(diagnose(waiting_for_its_device())).level is VerdictLevel.CONFIRMED, "without samples"
    moving = ProcessDevice(COMPUTING, moved_at=AT - 1)
    verdict = check(diagnose(waiting_for_its_device(moving)), VerdictKind.ABSENT, ["policy-1"], VerdictLevel.NOTICE)
    assert "policy-1: GPU 3: 100% busy, memory 52% busy, 640 of 700 W" in [each.text for each in verdict.evidence]
    for seconds in (399.0, 410.0):  # as for a process that uses the CPU: after ten times the bound, never acted on
        verdict = only(diagnose(waiting_for_its_device(moving, seconds=seconds)))
        assert (verdict.level is VerdictLevel.CONFIRMED) == (seconds > 400)
        assert verdict.confidence < MIN_ACTION_CONFIDENCE


@pytest.mark.parametrize(
    ("device", "confidence"),
    [
        (None, 0.7),
        (ProcessDevice(SPINNING), 0.7),
        (ProcessDevice(COMPUTING, moved_at=AT - 58), 0.7),
        (ProcessDevice(IDLE, idle_since=AT - 10), 0.7),
        (ProcessDevice(IDLE, idle_since=AT - 58, certain=False), 0.7),
        (ProcessDevice(IDLE, idle_since=AT - 58), 0.78),
    ],
)  # fmt: skip
def test_only_a_device_that_runs_nothing_makes_a_wait_for_it_certain(
    device: ProcessDevice | None, confidence: float
) -> None:
    """A kernel that waits and one that computes in few cores look the same: 100 % busy, at little power."""
    verdict = check(
        diagnose(waiting_for_its_device(*([] if device is None else [device]))), VerdictKind.ABSENT, ["policy-1"]
    )
    assert verdict.confidence == confidence
    assert (confidence >= MIN_ACTION_CONFIDENCE) == (confidence == 0.78)


def test_one_of_two_devices_that_is_not_known_to_rest_leaves_it_open() -> None:
    idle = ProcessDevice(IDLE, idle_since=AT - 58)
    assert only(diagnose(waiting_for_its_device(idle, ProcessDevice(SPINNING)))).confidence == 0.7
    assert only(diagnose(waiting_for_its_device(idle, idle))).confidence == 0.78


def test_a_device_that_should_be_the_ranks_moves_for_nobody() -> None:
    guessed = ProcessDevice(COMPUTING, moved_at=AT - 1, certain=False)
    check(diagnose(waiting_for_its_device(guessed)), VerdictKind.ABSENT, ["policy-1"])


def test_a_transfer_between_devices_is_not_stuck() -> None:
    ranks = [replace(each, note=SYNCHRONIZES, cpu=0.1, still=20.0) for each in policy(2)]
    job = on_device(snapshot(ranks, [Group("fsdp", [0, 1], [7, 7], [6, 6], 20.0)]), [20.0, 20.0])
    check(diagnose(job), VerdictKind.IN_FLIGHT, [], VerdictLevel.NOTICE)
    link = replace(SPINNING, link_kib_s=9e6)
    assert diagnose(replace(job, devices={0: (ProcessDevice(link, moved_at=AT - 1),)})) == []
    stuck = only(diagnose(replace(job, devices={0: (ProcessDevice(SPINNING),)})))
    assert "a kernel runs that may only wait" in stuck.evidence[0].text


@pytest.mark.parametrize(
    ("sample", "error", "cause", "confidence"),
    [
        (LOST, fault("lost", 50), "gpu_hardware_fault", 0.95),
        (SPINNING, fault("xid", 50, 119), "gpu_hardware_fault", 0.9),
        (SPINNING, fault("ecc", 50), "gpu_hardware_fault", 0.85),
        (SPINNING, fault("xid", 50, 31), "cuda_kernel_error", 0.9),
    ],
)
def test_an_error_of_a_device_names_its_rank(
    sample: DeviceSample, error: tuple[float, DeviceFault], cause: str, confidence: float
) -> None:
    """All ranks have entered, and none completes: without the samples it could be any link."""
    ranks = [replace(each, note=SYNCHRONIZES, cpu=0.1) for each in policy(4)]
    job = snapshot(ranks, [Group("fsdp", [0, 1, 2, 3], [7] * 4, [6] * 4)])
    check(diagnose(job), VerdictKind.IN_FLIGHT, [])
    broken = replace(job, devices={2: (ProcessDevice(sample, faults=(error,)),), 1: (ProcessDevice(SPINNING),)})
    verdict = check(diagnose(broken), VerdictKind.DEVICE, ["policy-2"])
    assert (verdict.cause, verdict.confidence) == (cause, confidence)
    assert verdict.explanation.startswith("rank 2 (policy, host a) uses GPU 3, which has failed: ")
    assert verdict.fix and any("50 s ago" in each.text for each in verdict.evidence)


def test_an_error_explains_the_absence_of_its_rank_and_of_no_other() -> None:
    lost = ProcessDevice(LOST, faults=(fault("lost", 55),))
    check(diagnose(waiting_for_its_device(lost)), VerdictKind.DEVICE, ["policy-1"])
    kinds = {each.kind: each for each in diagnose(waiting_for_its_device(lost, process=2))}
    assert VerdictKind.ABSENT in kinds, "rank 1 is missing whatever befell the device of rank 2"


@pytest.mark.parametrize(
    "error",
    [*(fault("xid", 50, code) for code in (45, 109, 63, 92, 121, 149)), fault("silent", 50)],
    ids=["cleanup", "unclear", "remapped", "corrected", "corrected on a link", "link", "silent"],
)
def test_what_may_be_an_effect_accuses_nobody(error: tuple[float, DeviceFault]) -> None:
    """The driver tears down channels after any error (Xid 45), and one sick GPU can hold up calls about another."""
    verdict = check(
        diagnose(waiting_for_its_device(ProcessDevice(SPINNING, faults=(error,)))), VerdictKind.ABSENT, ["policy-1"]
    )
    assert verdict.confidence == 0.7
    assert any(error[1].text in each.text for each in verdict.evidence), "but it is shown"


def test_an_error_that_the_rank_has_outlived_is_no_cause() -> None:
    """Rank 1 has made progress for minutes since: a contained error of another process, say."""
    old = ProcessDevice(SPINNING, faults=(fault("xid", 600, 94),))
    check(diagnose(waiting_for_its_device(old)), VerdictKind.ABSENT, ["policy-1"])
    back = ProcessDevice(SPINNING, faults=(fault("lost", 600),))
    check(diagnose(waiting_for_its_device(back)), VerdictKind.ABSENT, ["policy-1"])
    gone = ProcessDevice(LOST, faults=(fault("lost", 600),))
    check(diagnose(waiting_for_its_device(gone)), VerdictKind.DEVICE, ["policy-1"])
    assert (
        diagnose(replace(snapshot(policy(2), []), devices={0: (ProcessDevice(LOST, faults=(fault("lost", 9),)),)}))
        == []
    )


def test_moving_data_is_no_progress_after_an_error_and_no_busy_loop() -> None:
    """Rank 1 writes a traceback after its device's error; without the error, it may be compiling."""
    broken = ProcessDevice(SPINNING, faults=(fault("xid", 50, 79),))

    def moving(job: Evidence) -> Evidence:
        return replace(job, processes=replace(job.processes, moved_at=np.array([NAN, AT - 1.0, NAN, NAN])))

    verdict = check(diagnose(moving(waiting_for_its_device(broken))), VerdictKind.DEVICE, ["policy-1"])
    assert verdict.confidence == 0.9
    busy = One("policy-1", still=500.0, cpu=0.1)
    job = snapshot(policy(4, p1=busy), [fsdp(since=500.0)])
    check(diagnose(job), VerdictKind.ABSENT, ["policy-1"])
    verdict = check(diagnose(moving(job)), VerdictKind.SLOW, ["policy-1"], VerdictLevel.NOTICE)
    assert "policy-1: no counter progress for 500 s" in [each.text for each in verdict.evidence]


def test_the_error_of_one_that_only_waits_is_a_notice_beside_the_one_that_it_waits_for() -> None:
    """Rank 1 has not entered #412, in which rank 2 waits; rank 2's device has an error."""
    broken = ProcessDevice(SPINNING, faults=(fault("xid", 50, 119),))
    found = diagnose(waiting_for_its_device(broken, process=2))
    assert found[0].kind is VerdictKind.ABSENT and [each.name for each in found[0].culprits] == ["policy-1"]
    other = next(each for each in found if each.kind is VerdictKind.DEVICE)
    assert other.level is VerdictLevel.NOTICE and other.confidence <= 0.6 and "has waited" not in other.explanation


@pytest.mark.parametrize(
    ("kind", "code", "accuses"),
    [("xid", 31, False), ("xid", 94, False), ("xid", 119, True), ("ecc", 0, False), ("lost", 0, True)],
)
def test_on_a_shared_device_only_what_strikes_all_of_its_users_accuses_one(kind: str, code: int, accuses: bool) -> None:
    sample = LOST if kind == "lost" else SPINNING
    for shared in (False, True):
        device = ProcessDevice(sample, faults=(fault(kind, 50, code),), shared=shared)
        found = only(diagnose(waiting_for_its_device(device)))
        assert (found.kind is VerdictKind.DEVICE) == (accuses or not shared)


def test_a_part_of_a_device_has_the_errors_of_its_neighbours_too() -> None:
    part, states = replace(SPINNING, parent="GPU-3", instance=1), []
    for sample, shared in ((SPINNING, False), (SPINNING, True), (part, False)):
        state = DeviceState(sample, faults=(DeviceFault("xid", "Xid 31", 50.0, 31),))
        report = HostDevices((state,), (DeviceUse(0, 0, shared=shared),))
        states += [process_devices(report, 0, AT)[0][0].shared]
    assert states == [False, True, True]


def test_a_device_known_by_the_environment_is_too_little_to_act_on() -> None:
    guessed = ProcessDevice(LOST, certain=False, faults=(fault("lost", 55),))
    verdict = check(diagnose(waiting_for_its_device(guessed)), VerdictKind.DEVICE, ["policy-1"])
    assert verdict.confidence < MIN_ACTION_CONFIDENCE
    sure = replace(guessed, certain=True)
    both = replace(waiting_for_its_device(), devices={1: (sure,), 2: (guessed,)})
    assert check(diagnose(both), VerdictKind.DEVICE, ["policy-1"]).confidence == 0.95, "the driver names its user"


def test_ranks_that_share_a_device_are_named_together() -> None:
    lost = ProcessDevice(LOST, faults=(fault("lost", 50),))
    job = snapshot(policy(3), [Group("fsdp", [0, 1, 2], [7] * 3, [6] * 3)])
    verdict = check(
        diagnose(replace(job, devices={0: (lost,), 2: (lost,)})), VerdictKind.DEVICE, ["policy-0", "policy-2"]
    )
    assert "ranks 0 and 2 (policy) use GPU 3, which has failed" in verdict.explanation


def test_a_rank_that_dies_with_its_device_has_the_class_of_the_device() -> None:
    aborted = One(
        "policy-1", Liveness.DEAD, 1, AT - 10, note=ProcessNote(error="CUDA error: unspecified launch failure")
    )
    job = snapshot(policy(2, p1=aborted), [Group("fsdp", [0, 1], [7, 6], [6, 6], 12.0)])
    assert check(diagnose(job), VerdictKind.DEAD, ["policy-1"]).cause == "cuda_kernel_error"
    later = (8.5, "gpu_hardware_fault"), (5.0, "cuda_kernel_error"), (NAN, "cuda_kernel_error")
    for ago, cause in ((11.0, "gpu_hardware_fault"), (900.0, "cuda_kernel_error"), *later):
        device = ProcessDevice(SPINNING, faults=(fault("xid", ago, 48),))
        verdict = check(diagnose(replace(job, devices={1: (device,)})), VerdictKind.DEAD, ["policy-1"])
        assert verdict.cause == cause


def test_a_slow_rank_says_that_its_gpu_is_throttled() -> None:
    slow = One("policy-1", still=30.0, cpu=0.1, stack=0.2)
    group = replace(fsdp(since=30.0))
    hot = replace(COMPUTING, throttled=("sw_thermal_slowdown",), temperature_c=91, sm_mhz=1200, sm_max_mhz=1980)
    job = replace(snapshot(policy(4, p1=slow), [group]), devices={1: (ProcessDevice(hot, moved_at=AT),)})
    verdict = check(diagnose(job), VerdictKind.SLOW, ["policy-1"], VerdictLevel.NOTICE)
    assert verdict.explanation.endswith("GPU 3 is throttled: sw_thermal_slowdown, 91 C, 1,200 of 1,980 MHz.")


def test_devices_reach_the_diagnosis_through_the_reports_of_agents() -> None:
    """Two hosts; the clock of the report is the supervisor's."""
    store = MessageStore()
    lost = DeviceState(LOST, 0.5, faults=(DeviceFault("lost", "the driver says: GPU is lost", 20.0),))
    for number, host in enumerate("ab"):
        roster = Roster(
            host, 1, (ProcessInfo(f"policy-{number}", "policy", number, host, 7 + number),),
            (RosterCommunicator("policy/fsdp", CommunicatorInfo("fsdp"), 2),), (RosterMember(0, 0, number, 2),),
        )  # fmt: skip
        devices = HostDevices((lost,), (DeviceUse(0, 0),), "no answer for 12 s") if host == "b" else HostDevices()
        state = StateReport(
            host, 1, pack_process(moved=30.0, active=30.0), pack_member(7, 6, 30.0, 30.0, blocked=True), ("train",),
            devices=devices,
        )  # fmt: skip
        for report in (roster, state):
            assert store.receive(parse_report(json.dumps(encode_report(report)).encode()), 1000.0)
    evidence = store.evidence(1000.0)
    assert list(evidence.devices) == [1] and evidence.devices[1][0].faults[0][0] == pytest.approx(980.0)
    assert evidence.gaps == ["host b: no answer for 12 s"]
    verdict = check(diagnose(evidence), VerdictKind.DEVICE, ["policy-1"])
    assert verdict.culprits[0].host == "b"
