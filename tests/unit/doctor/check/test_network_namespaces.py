"""Real interfaces in network namespaces of their own, and what libraries pick there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from lockstep.doctor.check.facts.host_facts import HostNetwork
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.rules.interface_selection import InterfaceChoice, interface_choices
from lockstep.doctor.check.rules.network_rules import judge_network

LOOK = """
import json
from dataclasses import asdict
from lockstep.doctor.check.facts.network_facts import gather_names, gather_network
from lockstep.doctor.check.facts.host_system import HostSystem
from lockstep.doctor.check.rules.interface_selection import interface_choices
network, names = gather_network(HostSystem()), gather_names(HostSystem())
print(json.dumps({"network": asdict(network), "choices": [asdict(each) for each in interface_choices(network, names)]}))
"""
GLOO = """
import os, sys, tempfile
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
from torch.distributed import distributed_c10d as c10d
print(len(c10d._get_default_group()._get_backend(__import__("torch").device("cpu")).options._devices))
"""


def _within(setup: str, code: str = LOOK, **environ: str) -> subprocess.CompletedProcess[str]:
    """The code, in a new network namespace after the setup; skips where that is not allowed."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("there is no unshare or ip here")
    exports = "".join(f"export {name}={value}; " for name, value in environ.items())
    script = (
        f"set -e; mount -t sysfs sysfs /sys; ip link set lo up; {setup}\n{exports}exec {sys.executable} -c '{code}'"
    )
    done = subprocess.run(
        ["unshare", "-n", "-m", "-u", "sh", "-c", script], capture_output=True, text=True, timeout=120
    )
    if "Operation not permitted" in done.stderr or "unshare failed" in done.stderr:
        pytest.skip("network namespaces are not allowed here")
    return done


def _picked(setup: str, **environ: str) -> tuple[HostNetwork, dict[str, InterfaceChoice]]:
    done = _within(setup, **environ)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    picked = TypeAdapter(list[InterfaceChoice]).validate_python(told["choices"])
    return TypeAdapter(HostNetwork).validate_python(told["network"]), {each.library: each for each in picked}


CARD = "ip link add {0} type veth peer name {0}p; ip link set {0} up; ip link set {0}p up; ip addr add {1} dev {0};"
ETH = CARD.format("eth0", "10.0.0.5/24")
DOCKER = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up;"


def test_a_host_with_a_card_and_dockers_bridge() -> None:
    network, picked = _picked(DOCKER + ETH + "ip route add default via 10.0.0.1;")
    kinds = {each.name: each.kind for each in network.interfaces}
    assert kinds["lo"] == "loopback" and kinds["docker0"] == "bridge"
    assert network.route_v4 == "10.0.0.5"
    assert picked["NCCL"].picks[0] == ("eth0", "10.0.0.5")
    assert picked["Ray"].picks == picked["vLLM"].picks == [("eth0", "10.0.0.5")]


def test_an_unreachable_interface_is_used_if_configured() -> None:
    network, picked = _picked(DOCKER + ETH, NCCL_SOCKET_IFNAME="docker0")
    assert not next(each for each in network.interfaces if each.name == "docker0").carries_host
    assert picked["NCCL"].picks[0][0] == "docker0"
    found = {each.id: each for each in judge_network("a", network, None, HostRequirements(several=True))}
    assert found["interface-nccl"].severity == "error" and "NCCL_SOCKET_IFNAME=eth0" in found["interface-nccl"].fix


def test_a_host_with_nothing_but_loopback() -> None:
    network, picked = _picked("")
    assert (network.route_v4, network.route_v6) == ("", "")
    assert picked["NCCL"].picks == [("lo", "127.0.0.1")] and picked["vLLM"].picks == [("", "0.0.0.0")]


def test_infiniband_by_its_name_comes_before_the_route() -> None:
    _, picked = _picked(ETH + CARD.format("ib0", "10.9.0.5/16") + "ip route add default via 10.0.0.1;")
    assert picked["NCCL"].picks[0] == ("ib0", "10.9.0.5") and picked["Ray"].picks == [("eth0", "10.0.0.5")]


def test_interfaces_that_are_down_are_passed_over() -> None:
    network, picked = _picked(CARD.format("eno1", "10.4.0.5/24") + "ip link set eno1 down;" + ETH)
    eno = next(each for each in network.interfaces if each.name == "eno1")
    assert not eno.up and not eno.running
    assert picked["NCCL"].picks[0] == ("eth0", "10.0.0.5") and "eno1" not in dict(picked["NCCL"].picks)


def test_a_host_whose_own_name_is_loopback_as_debian_writes_it(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node-b\n")
    setup = ETH + f"hostname node-b; mount --bind {tmp_path}/hosts /etc/hosts;"
    _, picked = _picked(setup)
    assert picked["Gloo"].picks == [("lo", "127.0.1.1")] and picked["NCCL"].picks[0] == ("eth0", "10.0.0.5")


SLOW_NAMES = """
import json
from lockstep.doctor.check.host_check import gather_host, judge_host
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.facts.host_system import HostSystem
facts = gather_host(HostSystem(), HostRequirements(several=True), 2.0)
print(json.dumps([[each.id, each.severity, each.seen] for rung in judge_host(facts, HostRequirements()).values() for
each in rung]))
"""


def test_a_resolver_that_does_not_answer_holds_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "resolv.conf").write_text("nameserver 10.0.0.99\n")
    setup = ETH + (
        f"hostname node-c; mount --bind {tmp_path}/hosts /etc/hosts; "
        f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf; "
        "ip neigh add 10.0.0.99 lladdr 02:00:00:00:00:01 dev eth0;"
    )
    done = _within(setup, SLOW_NAMES)
    assert done.returncode == 0, done.stderr
    found = {id: (severity, seen) for id, severity, seen in json.loads(done.stdout)}
    assert found["resolver"][0] == "warning" and "did not answer within 1.6 s" in found["resolver"][1]


@pytest.mark.slow
def test_gloo_itself_takes_whole_names_and_passes_over_one_character() -> None:
    assert _within(ETH, GLOO, GLOO_SOCKET_IFNAME="eth0,lo").stdout.strip() == "2"
    assert _within(ETH, GLOO, GLOO_SOCKET_IFNAME="x").stdout.strip() == "1"
    refused = _within(ETH, GLOO, GLOO_SOCKET_IFNAME="eth")
    assert refused.returncode != 0 and "Unable to find address for: eth" in refused.stderr


def test_choices_need_no_names() -> None:
    assert not {each.library: each for each in interface_choices(HostNetwork(), None)}["Gloo"].picks


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["", ETH, ETH + "ip route add default via 10.0.0.1;", DOCKER + ETH])
def test_ray_and_vllm_pick_the_predicted_address(setup: str) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    code = (
        "from ray._private.services import get_node_ip_address; from vllm.utils.network_utils import get_ip; "
        'print(get_node_ip_address(), get_ip(), sep=" ", end="")'
    )
    done = _within(setup, code)
    assert done.returncode == 0, done.stderr
    _, picked = _picked(setup)
    assert done.stdout.splitlines()[-1].split() == [picked["Ray"].picks[0][1], picked["vLLM"].picks[0][1]]
