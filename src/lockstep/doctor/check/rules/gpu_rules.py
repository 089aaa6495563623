"""Judges the GPUs of one host. Pure."""

from collections.abc import Iterator, Sequence

from lockstep.doctor.check.facts.host_facts import Gpu, HostFacts
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.output.findings import Finding, Severity

ECC_SOURCE = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html"
FABRIC_SOURCE = "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html"
SMI_SOURCE = "https://docs.nvidia.com/deploy/nvidia-smi/index.html"

_HARDWARE_SLOWDOWNS = {
    "hw_slowdown": "the hardware halves its clocks: too hot, or too little power",
    "hw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "the host's power supply asks it to brake",
    "sw_thermal_slowdown": "the driver slows it down for its temperature",
}
_IN_USE_MIB = 1024
"""Memory of a GPU that somebody must be using."""


def judge_gpus(facts: HostFacts, needs: HostRequirements) -> Iterator[Finding]:
    """All GPUs of a host, or why there are none."""
    host = facts.host
    if facts.gpus is None:
        yield from _no_gpus(facts, needs)
        return
    if not facts.gpus:
        yield Finding("gpus", "error" if needs.gpus else "ok", host, "the driver knows no GPU here")
        return
    yield Finding("gpus", "ok", host, gpu_summary(facts.gpus))
    if len({(gpu.name, gpu.memory_mib) for gpu in facts.gpus}) > 1:
        why = "ranks wait for the slowest, and shards must fit the smallest"
        yield Finding("gpus-differ", "warning", host, f"GPUs of this host differ: {gpu_summary(facts.gpus)}", why)
    slots = {device.bus for device in (facts.pci.devices if facts.pci else []) if device.width}
    for gpu in facts.gpus:
        yield from _health(host, gpu)
        yield from _processes_on_gpu(host, gpu)
        yield from _links(host, gpu, gpu.bus in slots)
    if any(gpu.persistence is False for gpu in facts.gpus):
        why = "the driver unloads between processes, and each start of a process waits for it"
        fix = "systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1)"
        yield Finding("persistence", "note", host, "persistence mode is off", why, fix, SMI_SOURCE)


def _no_gpus(facts: HostFacts, needs: HostRequirements) -> Iterator[Finding]:
    cards = [device for device in (facts.pci.devices if facts.pci else []) if device.kind == "gpu"]
    fault = facts.faults.get("gpus")
    if fault is not None:
        wrong = needs.gpus or bool(cards)
        why = "CUDA does not start on this host" if wrong else "that is right where there is no GPU"
        fix = "dmesg | grep NVRM; reload the driver or restart the host" if wrong else ""
        yield Finding("driver", "error" if wrong else "note", facts.host, fault, why, fix)
    elif cards:
        some = ", ".join(card.bus for card in cards[:4])
        said = f"NVIDIA devices are on the PCI bus ({some}), and there is no nvidia-smi"
        fix = "install the driver; in a container: docker run --gpus all (nvidia-container-toolkit)"
        severity: Severity = "error" if needs.gpus else "warning"
        yield Finding("driver", severity, facts.host, said, "no program can use them from here", fix)
    elif needs.gpus:
        said = f"the run needs a GPU, and none is found here ({facts.unchecked.get('gpus', 'not looked for')})"
        yield Finding("gpus", "error", facts.host, said, "", "cluster.device=auto, or run it on a host with GPUs")


def gpu_summary(gpus: Sequence[Gpu]) -> str:
    """`8 x NVIDIA H100 80GB HBM3 (80 GiB)`."""
    kinds: dict[tuple[str, int], int] = {}
    for gpu in gpus:
        key = gpu.name, round((gpu.memory_mib or 0) / 1024)
        kinds[key] = kinds.get(key, 0) + 1
    return ", ".join(f"{count} x {name}{f' ({gib} GiB)' if gib else ''}" for (name, gib), count in kinds.items())


def _health(host: str, gpu: Gpu) -> Iterator[Finding]:
    who = f"GPU {gpu.index} ({gpu.bus})"
    if gpu.uncorrected:
        said = f"{who} has had {gpu.uncorrected} uncorrected memory errors since its driver was loaded"
        why = "a program that meets one ends with 'uncorrectable ECC error'; results before it may be wrong"
        yield Finding("ecc", "error", host, said, why, f"drain the host; nvidia-smi -r -i {gpu.index}", ECC_SOURCE)
    if gpu.remap_failed:
        fix = "take the GPU out and have it replaced"
        yield Finding("remap", "error", host, f"{who} could not remap a bad row of memory", "", fix, ECC_SOURCE)
    elif gpu.remap_pending:
        why, fix = "the bad row is used until then", f"nvidia-smi -r -i {gpu.index} when nobody uses it"
        yield Finding(
            "remap", "warning", host, f"{who} waits for a reset to remap a row of memory", why, fix, ECC_SOURCE
        )
    if gpu.ecc is False:
        yield Finding("ecc-off", "note", host, f"{who} runs without ECC", "bit errors go unnoticed", "nvidia-smi -e 1")
    if gpu.fabric and "Completed" not in gpu.fabric:
        said = f"{who} is not registered with the NVSwitch fabric: {gpu.fabric}"
        why = "CUDA says 'system not yet initialized' (error 802), though nvidia-smi looks healthy"
        fix = "systemctl restart nvidia-fabricmanager, of the very version of the driver"
        yield Finding("fabric", "error", host, said, why, fix, FABRIC_SOURCE)
    for reason in gpu.throttled:
        if reason in _HARDWARE_SLOWDOWNS:
            hot = f", {gpu.temperature_c} C" if gpu.temperature_c is not None else ""
            said = f"{who} is slowed down: {_HARDWARE_SLOWDOWNS[reason]}{hot}"
            why = "every rank waits for the slowest GPU"
            yield Finding(
                "throttled", "warning", host, said, why, f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.index}"
            )
    if gpu.temperature_c is not None and gpu.slowdown_c is not None and gpu.temperature_c >= gpu.slowdown_c - 5:
        said = f"{who} has {gpu.temperature_c} C and slows down at {gpu.slowdown_c} C"
        yield Finding(
            "temperature", "warning", host, said, "every rank waits for the slowest GPU", "look at its cooling"
        )


def _processes_on_gpu(host: str, gpu: Gpu) -> Iterator[Finding]:
    who = f"GPU {gpu.index}"
    others = [process for process in gpu.processes if not process.ours]
    if others:
        who_else = ", ".join(
            f"{each.name or 'process'} {each.pid}" + (f" ({each.memory_mib} MiB)" if each.memory_mib else "")
            for each in others[:4]
        )
        why = "the run finds less memory than it plans with, and both are slower"
        fix = f"end what is left over: ps -fp {','.join(str(each.pid) for each in others)}"
        yield Finding("gpu-in-use", "warning", host, f"{who} is used by {who_else}", why, fix)
    elif (gpu.used_mib or 0) > _IN_USE_MIB and not gpu.processes:
        said = f"{who} has {gpu.used_mib} MiB in use, by processes that cannot be seen from here"
        why = "another container, or a process that ended without giving it back"
        yield Finding(
            "gpu-in-use", "warning", host, said, why, f"on the host: nvidia-smi; fuser -v /dev/nvidia{gpu.index}"
        )
    if gpu.compute_mode == "Prohibited":
        yield Finding("compute-mode", "error", host, f"{who} forbids programs", "", f"nvidia-smi -c 0 -i {gpu.index}")
    elif gpu.compute_mode.startswith("Exclusive"):
        why = "an engine and a trainer on the same GPU are two, and the second fails"
        fix = f"nvidia-smi -c 0 -i {gpu.index}"
        yield Finding("compute-mode", "warning", host, f"{who} takes one process only ({gpu.compute_mode})", why, fix)
    if gpu.mig:
        why = "NCCL does not join instances of one GPU, and a process sees one of them"
        yield Finding("mig", "warning", host, f"{who} is divided (MIG)", why, f"nvidia-smi -mig 0 -i {gpu.index}")


def _links(host: str, gpu: Gpu, slot_known: bool) -> Iterator[Finding]:
    """What the PCI bus tells itself, with the slot, is not told here."""
    who = f"GPU {gpu.index} ({gpu.bus})"
    if gpu.links_down and gpu.links_up:
        said = f"{who} has {gpu.links_down} of {gpu.links_up + gpu.links_down} NVLinks down"
        why = "traffic of all ranks goes at the pace of the GPU with the fewest"
        yield Finding(
            "nvlink", "warning", host, said, why, f"nvidia-smi nvlink --status -i {gpu.index}; dmesg | grep Xid"
        )
    if not slot_known and gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        said = f"{who} runs with {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
        why = "transfers to the host, and between GPUs without NVLink, take longer by as much"
        yield Finding("pcie-width", "warning", host, said, why, "reseat the card or its riser; look into the BIOS")
    if gpu.replays and gpu.replays > 1000:
        said = f"{who} has sent {gpu.replays} PCIe packets again"
        yield Finding("pcie-replays", "warning", host, said, "the signal is bad", "reseat the card or its riser")
