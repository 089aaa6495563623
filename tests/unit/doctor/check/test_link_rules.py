"""PCI bus, InfiniBand and the kernel's log: folders in the shape of sysfs, lines as the kernel prints them."""

import struct
from pathlib import Path

import pytest

from lockstep.doctor.check.facts.hardware import (
    acs_control,
    gather_kernel_log,
    gather_pci,
    gather_rdma,
    kernel_events,
    pci_generation,
)
from lockstep.doctor.check.facts.host_facts import HostFacts, KernelLog, PciBus, RdmaPort
from lockstep.doctor.check.facts.host_system import CommandResult, HostSystem, SourceUnavailable
from lockstep.doctor.check.rules.link_rules import (
    gpu_count,
    hca_matches,
    judge_kernel_log,
    judge_pci,
    judge_rdma,
    xid_table,
)
from lockstep.doctor.output.findings import Finding

from .simulated_hosts import made

DMESG = """\
[    0.000000] Linux version 5.15.0-101-generic
[   12.301442] nvidia 0000:07:00.0: enabling device (0140 -> 0142)
[ 9512.120000] NVRM: Xid (PCI:0000:07:00): 31, pid=4711, name=python3, Ch 00000008, intr 00000000. MMU Fault
[ 9513.120000] NVRM: Xid (PCI:0000:0a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 9513.120001] NVRM: Xid (PCI:0000:0a:00): 79, pid=4712, name=python3, GPU has fallen off the bus.
[ 9514.120000] NVRM: Xid (PCI:0000:47:00): 63, pid=1896, Row Remapper: New row marked for remapping.
[ 9600.000000] Memory cgroup out of memory: Killed process 4713 (python3) total-vm:1kB, anon-rss:2kB
[ 9700.000000] pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer
[ 9800.000000] EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0
[ 9900.000000] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 22013, Non-fatal, Link 46
"""


def _config(acs: int | None) -> bytes:
    """A configuration space with an AER capability, then ACS with that control register, as lspci reads them."""
    space = bytearray(4096)
    following = 0x148 if acs is not None else 0
    struct.pack_into("<I", space, 0x100, 0x0001 | 2 << 16 | following << 20)
    if acs is not None:
        struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x001F, acs)
    return bytes(space)


def _host(root: Path, acs: int | None = None, readable: bool = True, iommu: str = "", **gpu: str) -> HostSystem:
    """Two GPUs, each below a bridge, and a network card; `gpu` are files of the first."""
    files: dict[str, str | bytes] = {"proc/cpuinfo": "flags : fpu vme\n"}
    for number, bridge in ((0, "00:01.0"), (1, "00:02.0")):
        above = f"sys/devices/pci0000:00/0000:{bridge}"
        files |= {
            f"{above}/class": "0x060400\n", f"{above}/vendor": "0x8086\n",
            f"{above}/max_link_width": "16\n", f"{above}/max_link_speed": "32.0 GT/s PCIe\n",
            f"{above}/config": _config(acs) if readable else bytes(64),
        }  # fmt: skip
        card = f"{above}/0000:0{number + 1}:00.0"
        values = {
            "class": "0x030200", "vendor": "0x10de", "max_link_width": "16", "current_link_width": "16",
            "max_link_speed": "32.0 GT/s PCIe", "current_link_speed": "2.5 GT/s PCIe", "numa_node": "0",
        } | (gpu if number == 0 else {})  # fmt: skip
        files |= {f"{card}/{name}": f"{value}\n" for name, value in values.items()}
        if iommu:
            files[f"{card}/iommu_group/type"] = f"{iommu}\n"
    nic = "sys/devices/pci0000:00/0000:00:03.0/0000:03:00.0"
    files |= {
        f"{nic}/class": "0x020700\n", f"{nic}/vendor": "0x15b3\n", f"{nic}/current_link_speed": "16.0 GT/s PCIe\n",
        f"{nic}/max_link_speed": "32.0 GT/s PCIe\n", f"{nic}/max_link_width": "16\n",
        f"{nic}/current_link_width": "8\n",
    }  # fmt: skip
    system = made(root, files)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    for path in sorted((root / "sys/devices/pci0000:00").rglob("class")):
        (root / "sys/bus/pci/devices" / path.parent.name).symlink_to(path.parent)
    return system


def _pci(root: Path, **how: object) -> dict[str, Finding]:
    pci = gather_pci(_host(root, **how))  # type: ignore[arg-type]
    return {
        f"{each.id} {each.seen.split()[1]}" if "pcie" in each.id else each.id: each for each in judge_pci("a", pci, 2)
    }


def test_a_good_bus(tmp_path: Path) -> None:
    found = _pci(tmp_path, acs=0)
    assert found["acs"].severity == "ok" and not [id for id in found if "GPU" in id]


def test_an_idle_gpus_speed_is_nothing_and_a_network_cards_is_something(tmp_path: Path) -> None:
    said = [each.seen for each in _pci(tmp_path, acs=0).values() if each.id == "pcie-speed"]
    assert said == ["network card 0000:03:00.0 runs at PCIe generation 4; it and its slot support 5"]


def test_fewer_lanes_than_card_and_slot_can_do(tmp_path: Path) -> None:
    pci = gather_pci(_host(tmp_path, current_link_width="4"))
    widths = [each for each in judge_pci("a", pci, 2) if each.id == "pcie-width"]
    assert [each.seen.split(" runs")[0] for each in widths] == ["GPU 0000:01:00.0", "network card 0000:03:00.0"]
    assert "4 PCIe lanes; it and its slot support 16" in widths[0].seen


def test_a_slot_that_has_fewer_lanes_is_a_note(tmp_path: Path) -> None:
    system = _host(tmp_path, current_link_width="8")
    (tmp_path / "sys/devices/pci0000:00/0000:00:01.0/max_link_width").write_text("8\n")
    found = {each.id: each for each in judge_pci("a", gather_pci(system), 2) if "0000:01" in each.seen}
    assert set(found) == {"pcie-slot"} and found["pcie-slot"].severity == "note"


def test_access_control_that_redirects(tmp_path: Path) -> None:
    found = _pci(tmp_path, acs=0x1D)["acs"]
    assert found.severity == "warning" and "0000:00:01.0, 0000:00:02.0" in found.seen and "ECAP_ACS+0x6.w" in found.fix


def test_access_control_that_only_root_can_read(tmp_path: Path) -> None:
    found = _pci(tmp_path, readable=False)["acs"]
    assert found.severity == "unchecked" and "root" in found.seen


def test_an_iommu_that_translates(tmp_path: Path) -> None:
    assert _pci(tmp_path / "a", acs=0, iommu="DMA-FQ")["iommu"].severity == "warning"
    assert "iommu" not in _pci(tmp_path / "b", acs=0, iommu="identity")


def test_one_gpu_needs_no_peer(tmp_path: Path) -> None:
    assert list(judge_pci("a", PciBus(redirecting=["0000:00:01.0"], acs_known=True), 1)) == []


def test_the_extended_capabilities() -> None:
    assert acs_control(_config(0x5D)) == 0x5D and acs_control(_config(None)) is None and acs_control(bytes(64)) is None
    circle = bytearray(4096)
    struct.pack_into("<I", circle, 0x100, 0x0001 | 0x100 << 20)
    assert acs_control(bytes(circle)) is None
    assert [pci_generation(speed) for speed in (2.5, 16.0, 64.0, 3.0, None)] == [1, 4, 6, None, None]


def test_no_bus(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable):
        gather_pci(made(tmp_path, {}))


PORT = "sys/class/infiniband/{}/ports/1/{}"


def _adapter(name: str, layer: str = "InfiniBand", **changes: str) -> dict[str, str]:
    values = {
        "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": layer,
        "counters/symbol_error": "0", "counters/link_downed": "0",
    } | changes  # fmt: skip
    return {PORT.format(name, file): f"{value}\n" for file, value in values.items()}


def _rdma(root: Path, files: dict[str, str], gpus: int = 0) -> dict[str, Finding]:
    return {each.id: each for each in judge_rdma("a", gather_rdma(made(root, files)), gpus)}


def test_good_adapters(tmp_path: Path) -> None:
    files = _adapter("mlx5_0") | _adapter("mlx5_1") | {"dev/infiniband/uverbs0": "", "sys/module/nvidia_peermem/": ""}
    found = _rdma(tmp_path, files, 8)
    assert {each.severity for each in found.values()} == {"ok"} and "mlx5_0 400 Gb/s" in found["rdma"].seen


def test_no_adapter(tmp_path: Path) -> None:
    assert _rdma(tmp_path, {})["rdma"].seen.startswith("no InfiniBand")


def test_a_port_without_a_subnet_manager_and_one_without_a_cable(tmp_path: Path) -> None:
    waiting = _rdma(tmp_path / "a", _adapter("mlx5_0", state="2: INIT") | {"dev/infiniband/uverbs0": ""})
    assert waiting["rdma-port"].severity == "error" and "subnet manager" in waiting["rdma-port"].why
    down = {"state": "1: DOWN", "phys_state": "2: Polling"}
    found = _rdma(tmp_path / "b", _adapter("mlx5_0") | _adapter("mlx5_1", **down) | {"dev/infiniband/uverbs0": ""})
    assert found["rdma-port"].severity == "warning" and "mlx5_1 port 1 is down (Polling)" in found["rdma-port"].seen
    unused = _rdma(tmp_path / "c", _adapter("mlx5_0") | _adapter("mlx5_1", state="1: DOWN", phys_state="3: Disabled"))
    assert "rdma-port" not in unused


def test_errors_and_rates(tmp_path: Path) -> None:
    slow = _adapter("mlx5_1", rate="100 Gb/sec (1X NDR)", **{"counters/symbol_error": "17"})
    found = _rdma(
        tmp_path, _adapter("mlx5_0") | slow | {PORT.format("mlx5_1", "hw_counters/local_ack_timeout_err"): "5"}
    )
    assert "symbol_error 17, local_ack_timeout_err 5" in found["rdma-errors"].seen
    assert found["rdma-rate"].severity == "warning" and found["rdma-devices"].severity == "error"


def _board(name: str, board: str) -> dict[str, str]:
    return {f"sys/class/infiniband/{name}/board_id": f"{board}\n"}


def test_cards_for_storage_are_no_fault_of_the_fabric(tmp_path: Path) -> None:
    files = {"dev/infiniband/uverbs0": ""}
    for at in range(4):
        files |= _adapter(f"mlx5_{at}") | _board(f"mlx5_{at}", "MT_0000000838")
    files |= _adapter("mlx5_4", rate="200 Gb/sec (4X HDR)") | _board("mlx5_4", "MT_0000000891")
    down = {"state": "1: DOWN", "phys_state": "2: Polling"}
    files |= _adapter("mlx5_5", **down) | _board("mlx5_5", "MT_0000000891")
    found = _rdma(tmp_path / "a", files)
    assert found["rdma-rate"].severity == found["rdma-port"].severity == "note"
    assert found["rdma-rate"].fix.startswith("export NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3 ")
    broken = judge_rdma("a", gather_rdma(made(tmp_path / "b", files | _adapter("mlx5_3", **down))), 0)
    assert {each.seen.split()[0]: each.severity for each in broken if each.id == "rdma-port"} == {
        "mlx5_3": "warning", "mlx5_5": "note",
    }  # fmt: skip
    slower = _rdma(tmp_path / "c", files | _adapter("mlx5_3", rate="200 Gb/sec (4X HDR)"))["rdma-rate"]
    assert slower.severity == "warning" and "mlx5_3 200" in slower.seen and "mlx5_4" not in slower.seen


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("", ["mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
        ("mlx5_1", ["mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
        ("=mlx5_1", ["mlx5_1:1", "mlx5_1:2"]),
        ("=mlx5_1:2,mlx5_10", ["mlx5_1:2", "mlx5_10:1"]),
        ("^=mlx5_1", ["mlx5_10:1"]),
    ],
)
def test_ports_selected_by_nccl_ib_hca(wanted: str, taken: list[str]) -> None:
    ports = [RdmaPort(device, number, "ACTIVE", "LinkUp", "InfiniBand") for device, number in
             (("mlx5_1", 1), ("mlx5_1", 2), ("mlx5_10", 1))]  # fmt: skip
    assert [f"{port.device}:{port.port}" for port in ports if hca_matches(wanted, port)] == taken


def test_roce_needs_an_address_that_is_routed(tmp_path: Path) -> None:
    local = {
        PORT.format("mlx5_0", "gids/0"): "fe80:0000:0000:0000:5aa2:e1ff:fe0d:0001",
        PORT.format("mlx5_0", "gid_attrs/types/0"): "RoCE v2",
        PORT.format("mlx5_0", "gid_attrs/ndevs/0"): "eth2",
    }
    found = _rdma(tmp_path / "a", _adapter("mlx5_0", "Ethernet") | local)
    assert found["rdma-gid"].severity == "warning" and "eth2" in found["rdma-gid"].seen
    routed = {
        PORT.format("mlx5_0", "gids/3"): "0000:0000:0000:0000:0000:ffff:0a00:0005",
        PORT.format("mlx5_0", "gid_attrs/types/3"): "RoCE v2",
    }
    assert "rdma-gid" not in _rdma(tmp_path / "b", _adapter("mlx5_0", "Ethernet") | local | routed)


def test_gpudirect(tmp_path: Path) -> None:
    without = _rdma(tmp_path / "a", _adapter("mlx5_0"), 8)["gpudirect"]
    assert without.severity == "warning" and without.fix == "modprobe nvidia-peermem"
    kind = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build"
    assert (
        _rdma(tmp_path / "b", _adapter("mlx5_0") | {"proc/driver/nvidia/version": kind}, 8)["gpudirect"].severity
        == "ok"
    )


def test_the_kernels_log(tmp_path: Path) -> None:
    kernel = gather_kernel_log(made(tmp_path, {}, {("dmesg",): DMESG}))
    found = list(judge_kernel_log("a", kernel))
    by_code = {(each.kind, each.code): each for each in kernel.events}
    assert by_code["xid", 79].count == 2 and by_code["xid", 79].device == "0000:0a:00"
    severities = {each.why.split(":")[0]: each.severity for each in found if each.id == "xid"}
    assert severities == {"Xid 31": "note", "Xid 79": "error", "Xid 63": "warning"}
    assert {each.id for each in found} == {"xid", "kernel-oom", "kernel-pcie", "kernel-memory", "kernel-sxid"}
    assert next(each for each in found if "79" in each.why).seen.endswith("(2 times)")


def test_many_events_are_truncated_worst_first() -> None:
    lines = [f"NVRM: Xid (PCI:0000:{at:02x}:00): 31, pid=1" for at in range(20)]
    found = list(
        judge_kernel_log(
            "a", KernelLog(list(kernel_events([*lines, "NVRM: Xid (PCI:0000:ff:00): 79, pid=1"])), "dmesg")
        )
    )
    assert len(found) == 9 and found[0].severity == "error" and found[-1].seen.startswith("the kernel log has 13 more")


def test_the_journal_is_read_where_dmesg_is_forbidden(tmp_path: Path) -> None:
    journal = ("journalctl", "--dmesg", "--boot", "--no-pager", "--quiet", "--output=short-iso")
    refused = CommandResult(1, "", "dmesg: read kernel buffer failed: Operation not permitted\n")
    line = "2025-11-11T10:00:00+0000 a kernel: NVRM: Xid (PCI:0000:07:00): 95, pid=1, Uncontained ECC error\n"
    kernel = gather_kernel_log(made(tmp_path, {}, {("dmesg",): refused, journal: line}))
    assert kernel.said_by == "journalctl" and kernel.events[0].code == 95
    with pytest.raises(SourceUnavailable, match=r"Operation not permitted; there is no journalctl"):
        gather_kernel_log(made(tmp_path / "b", {}, {("dmesg",): refused}))


def test_a_quiet_log_is_ok() -> None:
    (found,) = judge_kernel_log("a", KernelLog([], "dmesg"))
    assert found.severity == "ok" and not list(kernel_events(["[    0.000000] Linux version 5.15"]))


def test_the_table_of_xids_is_whole() -> None:
    groups = xid_table()["groups"].values()
    codes = [code for group in groups for code in group["codes"]]
    assert xid_table()["source"].startswith("https://") and len(codes) == len(set(codes))


@pytest.mark.parametrize(
    ("line", "severity", "word"),
    [
        ("145, RLW_REMAP Nonfatal XC1 i0 Link -1 (0x00000004 0x80000000)", "warning", "NVLink error (RLW)"),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004505c6 0x00000000)", "error", "NVLink error (NETIR)"),
        ("150, MSE Fatal XC0", "error", "NVLink error (MSE)"),
        ("94, pid=4711, Contained: SM (0x1)", "warning", "others are not affected"),
        ("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "error", "after another Xid"),
        ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", "note", "after another Xid"),
        ("999, something new", "note", "see the catalogue"),
    ],
)
def test_xids_are_judged_as_in_the_catalogue(line: str, severity: str, word: str) -> None:
    (found,) = judge_kernel_log("a", KernelLog(list(kernel_events([f"NVRM: Xid (PCI:0000:07:00): {line}"])), "dmesg"))
    assert found.severity == severity and word in found.why and "program's fault" not in found.why


def test_gpus_are_counted_by_the_more_complete_source(tmp_path: Path) -> None:
    assert gpu_count(HostFacts("a", pci=gather_pci(_host(tmp_path)))) == 2
    assert gpu_count(HostFacts("a")) == 0
