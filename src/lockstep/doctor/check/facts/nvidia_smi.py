"""Gathers GPUs and their topology with `nvidia-smi`, whose output is parsed as of drivers 450 to 580."""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import psutil

from lockstep.doctor.check.facts.host_facts import Gpu, GpuProcess, GpuTopology
from lockstep.doctor.check.facts.host_system import HostSystem, SourceFault, SourceUnavailable

SMI_TIMEOUT_S = 4.0
"""Without persistence mode, the driver initialises every GPU to answer, which takes seconds."""
_HARMLESS_THROTTLING = ("gpu_idle", "applications_clocks_setting", "sync_boost", "display_clocks_setting")
"""Reasons for lower clocks that need no action."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def gather_gpus(system: HostSystem, bound_s: float = SMI_TIMEOUT_S) -> list[Gpu]:
    """All GPUs of this host.

    Raises:
        SourceUnavailable: nvidia-smi is not installed.
        SourceFault: nvidia-smi cannot reach the driver or a GPU.
    """
    begun = time.monotonic()
    gpus = parse_gpus(_run_smi(system, ["nvidia-smi", "-q", "-x"], bound_s), own_processes())
    left = bound_s - (time.monotonic() - begun)
    try:
        links = parse_links(_run_smi(system, ["nvidia-smi", "nvlink", "--status"], max(0.1, left)))
    except (SourceUnavailable, TimeoutError):
        return gpus
    return [_with_links(gpu, *links[gpu.index]) if gpu.index in links else gpu for gpu in gpus]


def gather_topology(system: HostSystem, bound_s: float = SMI_TIMEOUT_S) -> GpuTopology:
    """How GPUs and network cards are connected.

    Raises:
        SourceUnavailable: nvidia-smi is not installed or reports no topology.
    """
    return parse_topology(_run_smi(system, ["nvidia-smi", "topo", "-m"], bound_s))


def _run_smi(system: HostSystem, command: list[str], bound_s: float) -> str:
    ran = system.run(command, bound_s)
    if ran.code:
        words = " ".join((ran.out.strip() or ran.err.strip()).split())[:300]
        raise SourceFault(f"{' '.join(command)} failed: {words or f'exit code {ran.code}'}")
    return ran.out


def own_processes() -> set[int]:
    """Process ids of this process and its ancestors."""
    return {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}


def parse_gpus(text: str, ours: set[int]) -> list[Gpu]:
    """Parses the output of `nvidia-smi -q -x`.

    Raises:
        ValueError: the output is invalid.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi -q -x printed invalid XML: {error}") from error
    return [_gpu(index, node, ours) for index, node in enumerate(root.iter("gpu"))]


def _gpu(index: int, node: ElementTree.Element, ours: set[int]) -> Gpu:
    def word(path: str) -> str:
        found = (node.findtext(path) or "").strip()
        return "" if found in ("N/A", "[N/A]", "Not Supported", "None") else found

    def number(path: str) -> int | None:
        found = re.match(r"-?\d+", word(path))
        return int(found[0]) if found else None

    link = "pci/pci_gpu_link_info"
    state, status = word("fabric/state"), word("fabric/status")
    return Gpu(
        index=index,
        bus=bus_of(node.get("id", "")),
        name=word("product_name"),
        uuid=word("uuid"),
        memory_mib=number("fb_memory_usage/total"),
        used_mib=number("fb_memory_usage/used"),
        mig=word("mig_mode/current_mig") == "Enabled",
        compute_mode=word("compute_mode"),
        persistence={"Enabled": True, "Disabled": False}.get(word("persistence_mode")),
        temperature_c=number("temperature/gpu_temp"),
        slowdown_c=number("temperature/gpu_temp_slow_threshold"),
        throttled=list(_throttled(node)),
        ecc={"Enabled": True, "Disabled": False}.get(word("ecc_mode/current_ecc")),
        uncorrected=_uncorrected(node),
        remap_pending="Yes" in (word("remapped_rows/remapped_row_pending"), word("retired_pages/pending_retirement")),
        remap_failed=word("remapped_rows/remapped_row_failure") == "Yes",
        fabric=" ".join(part for part in (state, status) if part),
        pcie_width=number(f"{link}/link_widths/current_link_width"),
        pcie_width_max=number(f"{link}/link_widths/max_link_width"),
        pcie_gen=number(f"{link}/pcie_gen/current_link_gen"),
        pcie_gen_max=number(f"{link}/pcie_gen/max_link_gen"),
        replays=number("pci/replay_counter"),
        processes=list(_processes(node, ours)),
    )  # fmt: skip


def bus_of(text: str) -> str:
    """Converts `00000000:07:00.0` to the form of sysfs, `0000:07:00.0`."""
    domain, _, rest = text.strip().lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return text


def _throttled(node: ElementTree.Element) -> Iterator[str]:
    """The active reasons for lower clocks, except harmless ones."""
    for group, prefix in (
        ("clocks_event_reasons", "clocks_event_reason_"),
        ("clocks_throttle_reasons", "clocks_throttle_reason_"),
    ):
        for child in node.findall(f"{group}/*"):
            reason = child.tag.removeprefix(prefix)
            if (child.text or "").strip() == "Active" and reason not in _HARMLESS_THROTTLING:
                yield reason


def _uncorrected(node: ElementTree.Element) -> int:
    """Number of uncorrected errors of memory and caches since the driver was loaded."""
    total = 0
    for child in node.findall("ecc_errors/volatile/*"):
        text = (child.text or "").strip()
        if "uncorrectable" in child.tag and text.isdigit():
            total += int(text)
    return total


def _processes(node: ElementTree.Element, ours: set[int]) -> Iterator[GpuProcess]:
    for each in node.findall("processes/process_info"):
        pid = (each.findtext("pid") or "").strip()
        if not pid.isdigit() or (each.findtext("type") or "").strip() == "G":
            continue
        memory = re.match(r"\d+", (each.findtext("used_memory") or "").strip())
        name = (each.findtext("process_name") or "").strip()
        yield GpuProcess(int(pid), name, int(memory[0]) if memory else None, int(pid) in ours)


def parse_links(text: str) -> dict[int, tuple[int, int]]:
    """Parses `nvidia-smi nvlink --status`: by GPU, the number of links that are up and down."""
    found: dict[int, tuple[int, int]] = {}
    gpu: int | None = None
    for line in _ANSI.sub("", text).splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = int(head[1])
        elif gpu is not None and (link := re.match(r"\s+Link \d+: (.*)", line)):
            up, down = found.get(gpu, (0, 0))
            inactive = "inactive" in link[1].lower()
            found[gpu] = (up, down + 1) if inactive else (up + 1, down)
    return found


def _with_links(gpu: Gpu, up: int, down: int) -> Gpu:
    return replace(gpu, links_up=up, links_down=down)


_PATH = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|OK|NS|GNS|DIS")


def parse_topology(text: str) -> GpuTopology:
    """Parses `nvidia-smi topo -m`. Columns are separated by tabs, names underlined with escape sequences.

    Raises:
        ValueError: the output contains no matrix.
    """
    lines = _ANSI.sub("", text).splitlines()
    head = next((line for line in lines if re.match(r"\s*(\t|\s)GPU0", line)), None)
    if head is None:
        raise ValueError(f"nvidia-smi topo -m printed no matrix: {' '.join(text.split())[:120]}")
    columns = [column.strip() for column in head.split("\t")][1:]
    names = [
        column for column in columns if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+|bnxt\w+|rdma\w+|hfi\w+|irdma\w+", column)
    ]
    rows: dict[str, list[str]] = {}
    numa: dict[str, str] = {}
    nics: dict[str, str] = {}
    for line in lines[lines.index(head) + 1 :]:
        cells = [cell.strip() for cell in line.split("\t")]
        if cells[0] in names:
            rows[cells[0]] = [
                cell if _PATH.fullmatch(cell) else "?" for cell in (cells[1:] + [""] * len(names))[: len(names)]
            ]
            node = dict(zip(columns, cells[1:], strict=False)).get("NUMA Affinity", "")
            if cells[0].startswith("GPU") and node:
                numa[cells[0]] = node
        elif nic := re.match(r"\s+(NIC\d+): (\S+)", line):
            nics[nic[1]] = nic[2]
    complete = [name for name in names if name in rows]
    keep = [names.index(name) for name in complete]
    return GpuTopology(complete, [[rows[name][at] for at in keep] for name in complete], numa, nics)
