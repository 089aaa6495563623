"""GPUs, from outputs of nvidia-smi in the formats that it prints (no GPU is here)."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.doctor.check.facts.host_facts import Gpu, HostFacts, PciBus, PciDevice
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.facts.host_system import CommandResult, SourceFault, SourceUnavailable
from lockstep.doctor.check.facts.nvidia_smi import bus_of, gather_gpus, parse_gpus, parse_links, parse_topology
from lockstep.doctor.check.rules.gpu_rules import judge_gpus
from lockstep.doctor.check.rules.link_rules import judge_topology
from lockstep.doctor.output.findings import Finding

from .simulated_hosts import LINKS, SMI, TOPO, made, smi, smi_gpu, smi_process

STATUS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d1f6c1e-8c1a-8a1b-9f0e-3f2b1c0d9e8f)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""
UNDERLINED = "\x1b[4m{}\x1b[0m"
MATRIX = (
    "\t"
    + UNDERLINED.format("GPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID")
    + """
GPU0\t X \tNV12\tSYS\tSYS\tPXB\tSYS\t0-31,64-95\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\tSYS\t0-31,64-95\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\tNODE\t32-63,96-127\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\tNODE\t32-63,96-127\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tNODE\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
)


def _judged(*gpus: str, ours: set[int] | None = None, needs: HostRequirements | None = None) -> dict[str, Finding]:
    facts = HostFacts("a", gpus=parse_gpus(smi(*gpus), ours or set()))
    return {finding.id: finding for finding in judge_gpus(facts, needs or HostRequirements())}


def test_a_gpu_is_read_whole() -> None:
    (gpu,) = parse_gpus(smi(smi_gpu(processes=smi_process(7, "python3"))), {7})
    assert (gpu.index, gpu.bus, gpu.name) == (0, "0000:07:00.0", "NVIDIA H100 80GB HBM3")
    assert (gpu.memory_mib, gpu.used_mib, gpu.temperature_c, gpu.slowdown_c) == (81559, 4, 31, 89)
    assert (gpu.pcie_width, gpu.pcie_gen_max, gpu.persistence, gpu.ecc, gpu.mig) == (16, 5, True, True, False)
    assert gpu.fabric == "Completed Success" and gpu.throttled == [] and gpu.uncorrected == 0
    assert [(each.pid, each.memory_mib, each.ours) for each in gpu.processes] == [(7, 5000, True)]


def test_a_healthy_gpu_is_one_line() -> None:
    found = _judged(smi_gpu(), smi_gpu(bus="00000000:0A:00.0"))
    assert set(found) == {"gpus"} and found["gpus"].seen == "2 x NVIDIA H100 80GB HBM3 (80 GiB)"


def test_older_drivers_call_the_reasons_otherwise() -> None:
    old = smi_gpu(hw_slowdown="Active").replace("clocks_event_reason", "clocks_throttle_reason")
    assert parse_gpus(smi(old), set())[0].throttled == ["hw_slowdown"]


@pytest.mark.parametrize(
    ("changes", "id", "severity"),
    [
        ({"dram_uncorrectable": "3"}, "ecc", "error"),
        ({"sram_uncorrectable_parity": "1"}, "ecc", "error"),
        ({"remapped_row_failure": "Yes"}, "remap", "error"),
        ({"remapped_row_pending": "Yes"}, "remap", "warning"),
        ({"state": "In Progress", "status": "N/A"}, "fabric", "error"),
        ({"hw_thermal_slowdown": "Active", "gpu_temp": "91 C"}, "throttled", "warning"),
        ({"gpu_temp": "86 C"}, "temperature", "warning"),
        ({"current_link_width": "8x"}, "pcie-width", "warning"),
        ({"replay_counter": "123456"}, "pcie-replays", "warning"),
        ({"compute_mode": "Exclusive_Process"}, "compute-mode", "warning"),
        ({"compute_mode": "Prohibited"}, "compute-mode", "error"),
        ({"current_mig": "Enabled"}, "mig", "warning"),
        ({"persistence_mode": "Disabled"}, "persistence", "note"),
        ({"current_ecc": "Disabled"}, "ecc-off", "note"),
        ({"used": "40000 MiB"}, "gpu-in-use", "warning"),
    ],
)
def test_what_is_wrong_with_a_gpu(changes: dict[str, str], id: str, severity: str) -> None:
    found = _judged(smi_gpu(**changes))
    assert found[id].severity == severity, found
    assert found[id].why or found[id].fix


def test_an_idle_link_is_slow_and_that_is_right() -> None:
    assert set(_judged(smi_gpu(current_link_gen="1"))) == {"gpus"}


def test_lanes_are_reported_once() -> None:
    gpus = parse_gpus(smi(smi_gpu(current_link_width="8x")), set())
    bus = PciBus([PciDevice("0000:07:00.0", "gpu", width=8, width_max=16)])
    assert "pcie-width" not in {each.id for each in judge_gpus(HostFacts("a", gpus=gpus, pci=bus), HostRequirements())}


def test_another_process_on_the_gpu() -> None:
    busy = smi_gpu(
        used="30000 MiB", processes=smi_process(4711, "python3", "30000 MiB") + smi_process(os.getpid(), "me")
    )
    found = _judged(busy, ours={os.getpid()})["gpu-in-use"]
    assert "python3 4711 (30000 MiB)" in found.seen and str(os.getpid()) not in found.seen
    assert "ps -fp 4711" in found.fix


def test_gpus_of_two_kinds() -> None:
    found = _judged(smi_gpu(), smi_gpu(name="NVIDIA A100-SXM4-40GB", total="40960 MiB"))
    assert (
        found["gpus-differ"].severity == "warning" and "1 x NVIDIA A100-SXM4-40GB (40 GiB)" in found["gpus-differ"].seen
    )


def test_links_are_counted(tmp_path: Path) -> None:
    assert parse_links(STATUS) == {0: (2, 0), 1: (1, 1)}
    two = smi(smi_gpu(), smi_gpu(bus="00000000:0A:00.0"))
    gpus = gather_gpus(made(tmp_path, {}, {SMI: two, LINKS: STATUS}))
    assert [(gpu.links_up, gpu.links_down) for gpu in gpus] == [(2, 0), (1, 1)]
    found = {each.id: each for each in judge_gpus(HostFacts("a", gpus=gpus), HostRequirements())}
    assert "GPU 1" in found["nvlink"].seen and "1 of 2 NVLinks down" in found["nvlink"].seen


def test_no_driver_no_gpu_no_error(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="no nvidia-smi"):
        gather_gpus(made(tmp_path, {}))
    facts = HostFacts("a", unchecked={"gpus": "there is no nvidia-smi here"}, pci=PciBus())
    assert list(judge_gpus(facts, HostRequirements())) == []
    (found,) = judge_gpus(facts, HostRequirements(gpus=True))
    assert found.severity == "error" and "needs a GPU" in found.seen


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    with pytest.raises(SourceFault, match="couldn't communicate") as caught:
        gather_gpus(made(tmp_path, {}, {SMI: CommandResult(9, said, "")}))
    card = PciBus([PciDevice("0000:07:00.0", "gpu")])
    (wrong,) = judge_gpus(HostFacts("a", faults={"gpus": str(caught.value)}, pci=card), HostRequirements())
    assert wrong.severity == "error" and "couldn't communicate" in wrong.seen
    (right,) = judge_gpus(HostFacts("a", faults={"gpus": str(caught.value)}, pci=PciBus()), HostRequirements())
    assert right.severity == "note"


def test_a_card_without_a_driver() -> None:
    (found,) = judge_gpus(HostFacts("a", pci=PciBus([PciDevice("0000:07:00.0", "gpu")])), HostRequirements())
    assert found.severity == "warning" and "0000:07:00.0" in found.seen and "--gpus all" in found.fix


def test_invalid_xml_is_reported() -> None:
    with pytest.raises(ValueError, match="printed invalid XML"):
        parse_gpus("Unable to determine the device handle", set())


def test_bus_addresses_are_those_of_sysfs() -> None:
    assert bus_of("00000000:AD:00.0") == "0000:ad:00.0"
    assert bus_of("00010000:01:00.0") == "10000:01:00.0"


def test_the_matrix_is_read() -> None:
    topology = parse_topology(MATRIX)
    assert topology.names == ["GPU0", "GPU1", "GPU2", "GPU3", "NIC0", "NIC1"]
    assert topology.paths[0] == ["X", "NV12", "SYS", "SYS", "PXB", "SYS"]
    assert topology.numa == {"GPU0": "0", "GPU1": "0", "GPU2": "1", "GPU3": "1"}
    assert topology.nics == {"NIC0": "mlx5_0", "NIC1": "mlx5_1"}


def test_the_matrix_is_explained() -> None:
    found = list(judge_topology("a", parse_topology(MATRIX)))
    assert "2 pairs over NVLink (NV); 4 pairs through the link between CPU sockets (SYS)" in found[0].seen
    assert "GPU0 with GPU2" in found[0].seen and "tensor parallelism" in found[0].why
    assert [each.seen.split()[0] for each in found[1:]] == ["GPU2", "GPU3"] and "mlx5_1" in found[1].seen


def test_the_matrix_is_shown_with_the_names_of_cards() -> None:
    lines = next(judge_topology("a", parse_topology(MATRIX))).seen.splitlines()[1:]
    assert lines[0].split() == ["GPU0", "GPU1", "GPU2", "GPU3", "mlx5_0", "mlx5_1"]
    assert lines[1].split() == ["GPU0", "X", "NV12", "SYS", "SYS", "PXB", "SYS"] and len(lines) == 7


def test_the_matrix_of_one_kind_is_ok() -> None:
    one = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-7\nGPU1\tNV18\t X \t0-7\n"
    (found,) = judge_topology("a", parse_topology(one))
    assert found.severity == "ok"
    with pytest.raises(ValueError, match="no matrix"):
        parse_topology("Failed to initialize NVML: Driver/library version mismatch")


def test_replacing_keeps_facts_plain() -> None:
    assert replace(Gpu(0, "b", "n"), links_up=1).links_up == 1
    assert TOPO[0] == "nvidia-smi"
