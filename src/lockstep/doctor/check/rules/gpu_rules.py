"""Judges the GPUs of one host. Pure."""

from collections.abc import Iterator, Sequence

from lockstep.doctor.check.facts.host_facts import Gpu, HostFacts
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.output.findings import Finding, Severity

ECC_SOURCE = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html"
FABRIC_SOURCE = "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html"
SMI_SOURCE = "https://docs.nvidia.com/deploy/nvidia-smi/index.html"

_HARDWARE_SLOWDOWNS = {
    "hw_slowdown": "the hardware halves its clocks: too hot, or not enough power",
    "hw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "the host's power supply triggered its power brake",
    "sw_thermal_slowdown": "the driver lowers its clocks because of its temperature",
}
_IN_USE_MIB = 1024
"""More GPU memory in use than this must belong to a process."""


def judge_gpus(facts: HostFacts, needs: HostRequirements) -> Iterator[Finding]:
    """Judges all GPUs of a host, or their absence."""
    host = facts.host
    if facts.gpus is None:
        yield from _judge_missing_gpus(facts, needs)
        return
    if not facts.gpus:
        yield Finding("gpus", "error" if needs.gpus else "ok", host, "the driver lists no GPU")
        return
    yield Finding("gpus", "ok", host, gpu_summary(facts.gpus))
    if len({(gpu.name, gpu.memory_mib) for gpu in facts.gpus}) > 1:
        why = "ranks wait for the slowest, and shards must fit the smallest"
        yield Finding("gpus-differ", "warning", host, f"GPUs of this host differ: {gpu_summary(facts.gpus)}", why)
    slots = {device.bus for device in (facts.pci.devices if facts.pci else []) if device.width}
    for gpu in facts.gpus:
        yield from _judge_health(host, gpu)
        yield from _judge_processes(host, gpu)
        yield from _judge_gpu_links(host, gpu, gpu.bus in slots)
    if any(gpu.persistence is False for gpu in facts.gpus):
        why = "the driver unloads between processes, which delays the start of each process"
        fix = "systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1)"
        yield Finding("persistence", "note", host, "persistence mode is off", why, fix, SMI_SOURCE)


def _judge_missing_gpus(facts: HostFacts, needs: HostRequirements) -> Iterator[Finding]:
    cards = [device for device in (facts.pci.devices if facts.pci else []) if device.kind == "gpu"]
    fault = facts.faults.get("gpus")
    if fault is not None:
        is_error = needs.gpus or bool(cards)
        why = "CUDA cannot start on this host" if is_error else "that is correct on a host without GPUs"
        fix = "dmesg | grep NVRM; reload the driver or reboot the host" if is_error else ""
        yield Finding("driver", "error" if is_error else "note", facts.host, fault, why, fix)
    elif cards:
        some = ", ".join(card.bus for card in cards[:4])
        seen = f"NVIDIA devices are on the PCI bus ({some}), but nvidia-smi is missing"
        fix = "install the driver; in a container: docker run --gpus all (nvidia-container-toolkit)"
        severity: Severity = "error" if needs.gpus else "warning"
        yield Finding("driver", severity, facts.host, seen, "no program can use them", fix)
    elif needs.gpus:
        seen = f"the run needs a GPU, but this host has none ({facts.unchecked.get('gpus', 'not checked')})"
        yield Finding("gpus", "error", facts.host, seen, "", "cluster.device=auto, or run it on a host with GPUs")


def gpu_summary(gpus: Sequence[Gpu]) -> str:
    """Lists the GPUs, such as `8 x NVIDIA H100 80GB HBM3 (80 GiB)`."""
    kinds: dict[tuple[str, int], int] = {}
    for gpu in gpus:
        key = gpu.name, round((gpu.memory_mib or 0) / 1024)
        kinds[key] = kinds.get(key, 0) + 1
    return ", ".join(f"{count} x {name}{f' ({gib} GiB)' if gib else ''}" for (name, gib), count in kinds.items())


def _judge_health(host: str, gpu: Gpu) -> Iterator[Finding]:
    label = f"GPU {gpu.index} ({gpu.bus})"
    if gpu.uncorrected:
        seen = f"{label} has had {gpu.uncorrected} uncorrected memory errors since its driver was loaded"
        why = "a program that hits such an error ends with 'uncorrectable ECC error'; earlier results may be wrong"
        yield Finding("ecc", "error", host, seen, why, f"drain the host; nvidia-smi -r -i {gpu.index}", ECC_SOURCE)
    if gpu.remap_failed:
        fix = "take the GPU out of service and have it replaced"
        yield Finding("remap", "error", host, f"{label} failed to remap a bad memory row", "", fix, ECC_SOURCE)
    elif gpu.remap_pending:
        why, fix = "the bad row remains in use until then", f"nvidia-smi -r -i {gpu.index} when the GPU is idle"
        yield Finding(
            "remap", "warning", host, f"{label} needs a reset to remap a bad memory row", why, fix, ECC_SOURCE
        )
    if gpu.ecc is False:
        yield Finding(
            "ecc-off", "note", host, f"{label} runs without ECC", "bit errors are not detected", "nvidia-smi -e 1"
        )
    if gpu.fabric and "Completed" not in gpu.fabric:
        seen = f"{label} is not registered with the NVSwitch fabric: {gpu.fabric}"
        why = "CUDA reports 'system not yet initialized' (error 802), although nvidia-smi shows a healthy GPU"
        fix = "systemctl restart nvidia-fabricmanager, in exactly the version of the driver"
        yield Finding("fabric", "error", host, seen, why, fix, FABRIC_SOURCE)
    for reason in gpu.throttled:
        if reason in _HARDWARE_SLOWDOWNS:
            hot = f", {gpu.temperature_c} C" if gpu.temperature_c is not None else ""
            seen = f"{label} is throttled: {_HARDWARE_SLOWDOWNS[reason]}{hot}"
            why = "every rank waits for the slowest GPU"
            yield Finding(
                "throttled", "warning", host, seen, why, f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.index}"
            )
    if gpu.temperature_c is not None and gpu.slowdown_c is not None and gpu.temperature_c >= gpu.slowdown_c - 5:
        seen = f"{label} is at {gpu.temperature_c} C and slows down at {gpu.slowdown_c} C"
        yield Finding("temperature", "warning", host, seen, "every rank waits for the slowest GPU", "check its cooling")


def _judge_processes(host: str, gpu: Gpu) -> Iterator[Finding]:
    label = f"GPU {gpu.index}"
    others = [process for process in gpu.processes if not process.ours]
    if others:
        users = ", ".join(
            f"{each.name or 'process'} {each.pid}" + (f" ({each.memory_mib} MiB)" if each.memory_mib else "")
            for each in others[:4]
        )
        why = "the run has less memory than planned, and both become slower"
        fix = f"end leftover processes: ps -fp {','.join(str(each.pid) for each in others)}"
        yield Finding("gpu-in-use", "warning", host, f"{label} is used by {users}", why, fix)
    elif (gpu.used_mib or 0) > _IN_USE_MIB and not gpu.processes:
        seen = f"{label} has {gpu.used_mib} MiB in use by processes that are not visible here"
        why = "they belong to another container, or an ended process has not released its memory"
        yield Finding(
            "gpu-in-use", "warning", host, seen, why, f"on the host: nvidia-smi; fuser -v /dev/nvidia{gpu.index}"
        )
    if gpu.compute_mode == "Prohibited":
        yield Finding(
            "compute-mode", "error", host, f"{label} prohibits compute", "", f"nvidia-smi -c 0 -i {gpu.index}"
        )
    elif gpu.compute_mode.startswith("Exclusive"):
        why = "an engine and a trainer on the same GPU are two processes, and the second one fails"
        fix = f"nvidia-smi -c 0 -i {gpu.index}"
        yield Finding(
            "compute-mode", "warning", host, f"{label} allows only one process ({gpu.compute_mode})", why, fix
        )
    if gpu.mig:
        why = "NCCL cannot connect instances of one GPU, and a process sees only one of them"
        yield Finding("mig", "warning", host, f"{label} is partitioned (MIG)", why, f"nvidia-smi -mig 0 -i {gpu.index}")


def _judge_gpu_links(host: str, gpu: Gpu, slot_known: bool) -> Iterator[Finding]:
    """Judges NVLink and PCIe.

    Args:
        slot_known: whether the rules about the PCI bus report the width, which they compare with that of the slot.
    """
    label = f"GPU {gpu.index} ({gpu.bus})"
    if gpu.links_down and gpu.links_up:
        seen = f"{label} has {gpu.links_down} of {gpu.links_up + gpu.links_down} NVLinks down"
        why = "all ranks are as slow as the GPU with the fewest links"
        yield Finding(
            "nvlink", "warning", host, seen, why, f"nvidia-smi nvlink --status -i {gpu.index}; dmesg | grep Xid"
        )
    if not slot_known and gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        seen = f"{label} runs with {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
        why = "transfers to the host, and between GPUs without NVLink, take proportionally longer"
        yield Finding("pcie-width", "warning", host, seen, why, "reseat the card or its riser; check the BIOS settings")
    if gpu.replays and gpu.replays > 1000:
        seen = f"{label} has replayed {gpu.replays} PCIe packets"
        yield Finding(
            "pcie-replays", "warning", host, seen, "the signal quality is bad", "reseat the card or its riser"
        )
