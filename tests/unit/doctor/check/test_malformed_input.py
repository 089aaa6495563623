"""Nothing that a program prints or a file of sysfs holds ends a check with anything but words."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.doctor.check.facts.hardware import acs_control, gather_pci, gather_rdma, kernel_events
from lockstep.doctor.check.facts.host_facts import KernelLog, host_facts_from_json
from lockstep.doctor.check.facts.host_resources import gather_clock, gather_limits
from lockstep.doctor.check.facts.host_system import HostSystem
from lockstep.doctor.check.facts.network_facts import gather_network, gather_ports
from lockstep.doctor.check.facts.nvidia_smi import parse_gpus, parse_links, parse_topology
from lockstep.doctor.check.rules.link_rules import judge_kernel_log, judge_topology

from .simulated_hosts import SMI, made, smi, smi_gpu
from .test_disks_and_clock import CHRONY, SYSTEMD
from .test_link_rules import DMESG
from .test_nvidia_smi import MATRIX, STATUS

_WORDS = st.sampled_from([
    "", " ", "N/A", "[N/A]", "-1", "0x10", "max", "max 100000", "99999999999999999999999", "4: ACTIVE", "\x1b[31m",
    "GPU0", "X", "NV12", "\t", "\n", "é", "fe80::1", "10.0.0.1/40", "0::/../..", "a b c d", "\x00",
])  # fmt: skip
_TEXT = st.lists(st.one_of(_WORDS, st.text(max_size=20)), max_size=12).map("".join)


@given(st.integers(0, 3000), _TEXT, st.sampled_from([smi(smi_gpu()), MATRIX, STATUS, DMESG]))
@settings(max_examples=150, deadline=None)
def test_outputs_that_are_cut_and_torn(at: int, put: str, whole: str) -> None:
    torn = whole[:at] + put + whole[at + len(put) :]
    list(judge_kernel_log("a", KernelLog(list(kernel_events(torn.splitlines())), "dmesg")))
    parse_links(torn)
    try:
        list(judge_topology("a", parse_topology(torn)))
    except ValueError as error:
        assert "no matrix" in str(error)
    try:
        parse_gpus(torn, set())
    except ValueError as error:
        assert "XML" in str(error)


@given(st.binary(max_size=600))
@settings(max_examples=150, deadline=None)
def test_configuration_spaces(config: bytes) -> None:
    acs_control(bytes(256) + config)


FILES = (
    "proc/self/cgroup", "proc/mounts", "proc/self/net/tcp", "proc/sys/net/ipv4/ip_local_port_range", "proc/cpuinfo",
    "proc/driver/nvidia/version", "proc/sys/vm/max_map_count", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.stat",
    "sys/fs/cgroup/memory.current", "sys/fs/cgroup/pids.max", "sys/fs/cgroup/cpu.max",
    "sys/bus/pci/devices/0000:01:00.0/class", "sys/bus/pci/devices/0000:01:00.0/vendor",
    "sys/bus/pci/devices/0000:01:00.0/max_link_width", "sys/bus/pci/devices/0000:01:00.0/current_link_speed",
    "sys/class/infiniband/mlx5_0/ports/1/state", "sys/class/infiniband/mlx5_0/ports/1/rate",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer", "sys/class/infiniband/mlx5_0/ports/1/gids/0",
    "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0",
)  # fmt: skip


@given(st.lists(_TEXT, min_size=len(FILES), max_size=len(FILES)))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_that_hold_anything(tmp_path: Path, texts: list[str]) -> None:
    filled = dict(zip(FILES, (text.encode("utf-8", "surrogatepass") for text in texts), strict=True))
    system = made(tmp_path, filled, {CHRONY: texts[0], SYSTEMD: texts[1], SMI: texts[2]})
    for look in (gather_limits, gather_pci, gather_rdma, gather_network, gather_clock):
        try:
            look(system)  # type: ignore[operator]
        except (OSError, ValueError):
            continue
    try:
        gather_ports(system, {29500: "x"})
    except (OSError, ValueError):
        return


@pytest.mark.parametrize(
    "facts", [None, 3, [], {}, {"host": None}, {"host": "a", "gpus": [{}]}, {"host": "a", "limits": 1}]
)
def test_facts_from_another_host(facts: object) -> None:
    with pytest.raises(ValueError):
        host_facts_from_json(facts)


def test_this_hosts_own_roots_are_not_touched() -> None:
    assert HostSystem().sys == Path("/sys")
