"""Made-up hosts: roots of sysfs and procfs in a folder, and a runner that answers from a table.

There is no GPU and no InfiniBand where these tests run: outputs of nvidia-smi, chronyc and dmesg are written in the
formats that those programs print, and the files of sysfs as the kernel's documentation names them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.doctor.check.facts.host_system import CommandResult, CommandRunner, HostSystem, SourceUnavailable

SMI = ("nvidia-smi", "-q", "-x")
LINKS = ("nvidia-smi", "nvlink", "--status")
TOPO = ("nvidia-smi", "topo", "-m")


def runner(answers: Mapping[tuple[str, ...], str | CommandResult]) -> CommandRunner:
    """Programs that are not in the table are not there."""

    def run(command: Sequence[str], bound_s: float) -> CommandResult:
        answer = answers.get(tuple(command))
        if answer is None:
            raise SourceUnavailable(f"there is no {command[0]} here")
        return answer if isinstance(answer, CommandResult) else CommandResult(0, answer, "")

    return run


def made(
    root: Path, files: Mapping[str, str | bytes], answers: Mapping[tuple[str, ...], str | CommandResult] | None = None
) -> HostSystem:
    """A host whose /sys, /proc and /dev are folders; a path that ends in / is an empty folder."""
    for name, content in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for folder in ("sys", "proc", "dev"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    return HostSystem(root / "sys", root / "proc", root / "dev", runner(answers or {}), {})


def smi_gpu(bus: str = "00000000:07:00.0", name: str = "NVIDIA H100 80GB HBM3", **changes: str) -> str:
    """A `<gpu>` of `nvidia-smi -q -x`; `changes` are texts of elements, by their names."""
    values = {
        "persistence_mode": "Enabled", "current_mig": "Disabled", "compute_mode": "Default", "max_link_gen": "5",
        "current_link_gen": "5", "max_link_width": "16x", "current_link_width": "16x", "replay_counter": "0",
        "total": "81559 MiB", "used": "4 MiB", "gpu_temp": "31 C", "gpu_temp_slow_threshold": "89 C",
        "current_ecc": "Enabled", "sram_uncorrectable_parity": "0", "dram_uncorrectable": "0", "dram_correctable": "0",
        "hw_slowdown": "Not Active", "hw_thermal_slowdown": "Not Active", "gpu_idle": "Active",
        "remapped_row_pending": "No", "remapped_row_failure": "No", "state": "Completed", "status": "Success",
        "processes": "",
    } | changes  # fmt: skip
    hot = "clocks_event_reason_hw_thermal_slowdown"
    return f"""
	<gpu id="{bus}">
		<product_name>{name}</product_name>
		<persistence_mode>{values["persistence_mode"]}</persistence_mode>
		<mig_mode>
			<current_mig>{values["current_mig"]}</current_mig>
			<pending_mig>{values["current_mig"]}</pending_mig>
		</mig_mode>
		<uuid>GPU-5d1f6c1e-8c1a-8a1b-9f0e-3f2b1c0d9e8f</uuid>
		<compute_mode>{values["compute_mode"]}</compute_mode>
		<pci>
			<pci_gpu_link_info>
				<pcie_gen>
					<max_link_gen>{values["max_link_gen"]}</max_link_gen>
					<current_link_gen>{values["current_link_gen"]}</current_link_gen>
				</pcie_gen>
				<link_widths>
					<max_link_width>{values["max_link_width"]}</max_link_width>
					<current_link_width>{values["current_link_width"]}</current_link_width>
				</link_widths>
			</pci_gpu_link_info>
			<replay_counter>{values["replay_counter"]}</replay_counter>
		</pci>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>{values["gpu_idle"]}</clocks_event_reason_gpu_idle>
			<clocks_event_reason_hw_slowdown>{values["hw_slowdown"]}</clocks_event_reason_hw_slowdown>
			<{hot}>{values["hw_thermal_slowdown"]}</{hot}>
		</clocks_event_reasons>
		<fb_memory_usage>
			<total>{values["total"]}</total>
			<reserved>551 MiB</reserved>
			<used>{values["used"]}</used>
			<free>81003 MiB</free>
		</fb_memory_usage>
		<ecc_mode>
			<current_ecc>{values["current_ecc"]}</current_ecc>
			<pending_ecc>{values["current_ecc"]}</pending_ecc>
		</ecc_mode>
		<ecc_errors>
			<volatile>
				<sram_correctable>0</sram_correctable>
				<sram_uncorrectable_parity>{values["sram_uncorrectable_parity"]}</sram_uncorrectable_parity>
				<dram_correctable>{values["dram_correctable"]}</dram_correctable>
				<dram_uncorrectable>{values["dram_uncorrectable"]}</dram_uncorrectable>
			</volatile>
			<aggregate>
				<dram_uncorrectable>7</dram_uncorrectable>
			</aggregate>
		</ecc_errors>
		<remapped_rows>
			<remapped_row_corr>0</remapped_row_corr>
			<remapped_row_unc>0</remapped_row_unc>
			<remapped_row_pending>{values["remapped_row_pending"]}</remapped_row_pending>
			<remapped_row_failure>{values["remapped_row_failure"]}</remapped_row_failure>
		</remapped_rows>
		<temperature>
			<gpu_temp>{values["gpu_temp"]}</gpu_temp>
			<gpu_temp_tlimit>55 C</gpu_temp_tlimit>
			<gpu_temp_slow_threshold>{values["gpu_temp_slow_threshold"]}</gpu_temp_slow_threshold>
		</temperature>
		<fabric>
			<state>{values["state"]}</state>
			<status>{values["status"]}</status>
		</fabric>
		<processes>{values["processes"]}
		</processes>
	</gpu>"""


def smi_process(pid: int, name: str, memory: str = "5000 MiB") -> str:
    """A `<process_info>`."""
    return f"""
			<process_info>
				<gpu_instance_id>N/A</gpu_instance_id>
				<compute_instance_id>N/A</compute_instance_id>
				<pid>{pid}</pid>
				<type>C</type>
				<process_name>{name}</process_name>
				<used_memory>{memory}</used_memory>
			</process_info>"""


def smi(*gpus: str) -> str:
    """The whole output."""
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
	<timestamp>Tue Nov 11 10:21:05 2025</timestamp>
	<driver_version>550.90.07</driver_version>
	<cuda_version>12.4</cuda_version>
	<attached_gpus>{len(gpus)}</attached_gpus>{"".join(gpus)}
</nvidia_smi_log>
"""
