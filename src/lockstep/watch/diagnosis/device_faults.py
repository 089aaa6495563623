"""Finds broken devices: a GPU that is lost, or reports an error that its processes cannot have outlived unharmed."""

from dataclasses import replace

import numpy as np

from lockstep.watch.devices.device_samples import DeviceFault, device_label
from lockstep.watch.diagnosis.device_evidence import ProcessDevice, device_texts, fault_class, strikes
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.root_cause import longest_wait_on, longest_waiting_node
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel

_ANSWERS = {"lost": "named_failure", "xid": "device_reports", "ecc": "device_counts"}
"""What an error of a device answers, by its kind."""
_REPORT_S = 2.0
"""Progress within this time after an error was noticed may be older than the error."""


def find_device_faults(context: DiagnosisContext) -> list[Hypothesis]:
    """A hypothesis for each living process that takes part in a stall and whose device has failed."""
    found = []
    for process, devices in _likely_users(context).items():
        if context.liveness(process) not in (Liveness.RUNNING, Liveness.STOPPED) or context.note(process).ours:
            continue
        node, waits = _stalled_node(context, process)
        failed = None if node is None else _first_fault(context, process, devices)
        if failed is not None:
            hypothesis = _device_hypothesis(context, process, None if waits else node, *failed)
            if waits:  # those that it waits for may be the cause instead
                hypothesis = replace(hypothesis, level=VerdictLevel.NOTICE, proven_by_structure=False)
            found.append(hypothesis)
    return found


def _likely_users(context: DiagnosisContext) -> dict[int, tuple[ProcessDevice, ...]]:
    """The devices of each process, without those that it should use by its environment and others are known to use."""
    by_process = context.evidence.devices
    known = {each.sample.uuid for devices in by_process.values() for each in devices if each.certain}
    return {
        process: tuple(each for each in devices if each.certain or each.sample.uuid not in known)
        for process, devices in by_process.items()
    }


def _stalled_node(context: DiagnosisContext, process: int) -> tuple[int | None, bool]:
    """The wait that the process holds up, or that it is in itself, None if there is none that has stalled; and whether
    the process only waits for others in it."""
    graph = context.graph
    blocked, _ = longest_wait_on(context, process)
    if blocked is not None and graph.stalled[blocked]:
        return blocked, False
    own = graph.wait_node[graph.wait_process == process]
    node, _ = longest_waiting_node(graph, own[graph.stalled[own]].tolist())
    return node, node is not None and bool(graph.blockers(node))


def _first_fault(
    context: DiagnosisContext, process: int, devices: tuple[ProcessDevice, ...]
) -> tuple[ProcessDevice, float, DeviceFault] | None:
    """The first error of the devices of a process that strikes it and after which it has made no progress. A device
    that is still lost counts whatever the process has done since on its CPU."""
    progressed_at = _progressed_at(context, process)
    faults = [
        (device, at, fault)
        for device in devices
        for at, fault in device.faults
        if fault_class(fault) and strikes(device, fault)
        if (fault.kind == "lost" and device.sample.lost) or not progressed_at > at + _REPORT_S
    ]
    return min(faults, key=lambda each: each[1], default=None)


def _progressed_at(context: DiagnosisContext, process: int) -> float:
    """When a counter of the process last changed or it last completed a collective."""
    members = context.evidence.communicators
    completed = members.completed_at[members.process == process]
    return float(np.fmax.reduce([context.evidence.processes.progressed_at[process], *completed]))


def _device_hypothesis(
    context: DiagnosisContext, process: int, node: int | None, device: ProcessDevice, at: float, fault: DeviceFault
) -> Hypothesis:
    cause = fault_class(fault)
    other = "cuda_kernel_error" if cause == "gpu_hardware_fault" else "gpu_hardware_fault"
    name = context.name(process)
    return Hypothesis(
        VerdictKind.DEVICE,
        VerdictLevel.CONFIRMED,
        {_ANSWERS[fault.kind]: True, "device_assumed": not device.certain},
        f"uses {device_label(device.sample)}, which has failed: {fault.text}",
        (process,),
        node=node,
        since=at,
        cause=cause,
        alternatives=() if fault.kind != "xid" else (Alternative(other, 0.15),),
        facts=tuple(Fact(f"{name}: {text}", "NVML") for text in device_texts((device,), context.at)),
        collect=("the kernel log of its host (dmesg | grep -i xid)", "nvidia-smi -q", "dcgmi diag -r 3"),
        proven_by_structure=True,
    )


def class_of_failed_device(context: DiagnosisContext, process: int, within_s: float = 60.0) -> str:
    """The failure class that an error of its device proves for a process that ended up to `within_s` seconds later;
    empty without such an error."""
    ended_at = float(context.evidence.processes.ended_at[process])
    for device in context.evidence.devices.get(process, ()):
        for at, fault in device.faults:
            if device.certain and fault_class(fault) and -_REPORT_S <= ended_at - at <= within_s:
                return fault_class(fault)
    return ""
