"""Findings about addresses that peers cannot reach."""

import pytest

from lockstep.doctor.check.facts.host_facts import HostInterface, HostNetwork, NameResolution
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.rules.interface_selection import judge_address
from lockstep.doctor.check.rules.network_rules import best_address, judge_names, judge_network
from lockstep.doctor.output.findings import Finding

LO = HostInterface("lo", ["127.0.0.1/8"], kind="loopback")
DOCKER = HostInterface("docker0", ["172.17.0.1/16"], kind="bridge", carries_host=False)
ETH = HostInterface("eth0", ["10.0.0.5/24"])
SEVERAL = HostRequirements(several=True)


def _by_id(findings: object) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
        ("127.0.1.1", "loopback"),
        ("169.254.3.4", "link-local"),
        ("fe80::1", "link-local"),
        ("172.17.0.1", "bridge"),
        ("10.0.0.5", "reachable"),
        ("10.0.0.6", "foreign"),
        ("8.8.4.4", "public"),
        ("2001:4860:4860::8844", "reachable"),
        ("head-node", "name"),
    ],
)
def test_addresses(address: str, reach: str) -> None:
    known = [
        LO,
        DOCKER,
        ETH,
        HostInterface("wan0", ["8.8.4.4/24", "2001:4860:4860::8844/64", "169.254.3.4/16", "fe80::1/64"]),
    ]
    assert judge_address(address, known).reach == reach


def test_a_bridge_that_carries_the_hosts_card_is_the_hosts_network() -> None:
    assert (
        judge_address("10.1.0.5", [HostInterface("vmbr0", ["10.1.0.5/24"], kind="bridge", carries_host=True)]).reach
        == "reachable"
    )
    inner = HostInterface("vmbr1", ["10.1.0.5/24"], kind="bridge", carries_host=False)
    assert (
        judge_address("10.1.0.5", [inner]).reach == "uncertain"
        and not judge_address("10.1.0.5", [inner]).never_reachable
    )


def test_the_bridge_of_docker_is_an_error_with_other_hosts_and_the_fix_names_a_better_one() -> None:
    network = HostNetwork([LO, DOCKER, ETH], "10.0.0.5", environ={"NCCL_SOCKET_IFNAME": "docker0"})
    found = _by_id(judge_network("a", network, NameResolution("a", ["10.0.0.5"]), SEVERAL))
    assert found["interface-nccl"].severity == "error"
    assert found["interface-nccl"].fix == "export NCCL_SOCKET_IFNAME=eth0"
    assert found["interface-gloo"].severity == found["interface-ray"].severity == "ok"
    alone = _by_id(judge_network("a", network, NameResolution("a", ["10.0.0.5"]), HostRequirements()))
    assert alone["interface-nccl"].severity == "note"


def test_loopback_is_right_alone_and_wrong_with_others() -> None:
    names = NameResolution("a", ["127.0.1.1"])
    network = HostNetwork([LO, ETH], "10.0.0.5")
    assert _by_id(judge_network("a", network, names, HostRequirements()))["interface-gloo"].severity == "ok"
    found = _by_id(judge_network("a", network, names, SEVERAL))["interface-gloo"]
    assert found.severity == "error" and found.fix == "export GLOO_SOCKET_IFNAME=eth0"
    assert "own-name" not in _by_id(judge_names("a", names, network, SEVERAL)), "the same once more"
    named = HostNetwork([LO, ETH], "10.0.0.5", environ={"GLOO_SOCKET_IFNAME": "eth0"})
    assert _by_id(judge_names("a", names, named, SEVERAL))["own-name"].severity == "warning"


def test_an_interface_that_is_not_there_is_an_error_even_alone() -> None:
    network = HostNetwork([LO, ETH], "10.0.0.5", environ={"NCCL_SOCKET_IFNAME": "bond0"})
    found = _by_id(judge_network("a", network, None, HostRequirements()))
    assert found["interface-nccl"].severity == "error" and "eth0" in found["interface-nccl"].seen
    assert found["interface-gloo"].severity == "unchecked"


def test_vllm_without_a_route_would_say_everywhere() -> None:
    network, names = HostNetwork([LO, ETH]), NameResolution("a", ["10.0.0.5"])
    found = _by_id(judge_network("a", network, names, SEVERAL))["interface-vllm"]
    assert found.severity == "error" and "0.0.0.0" in found.seen and "VLLM_HOST_IP=10.0.0.5" in found.fix
    assert _by_id(judge_network("a", network, names, HostRequirements()))["interface-vllm"].severity == "note"


def test_a_public_address_is_a_warning_where_a_private_one_is_there() -> None:
    wan = HostInterface("eth0", ["8.8.4.4/24"])
    alone = _by_id(judge_network("a", HostNetwork([LO, wan], "8.8.4.4"), None, SEVERAL))["interface-ray"]
    assert alone.severity == "note" and not alone.fix
    found = _by_id(
        judge_network("a", HostNetwork([LO, wan, HostInterface("eth1", ["10.0.0.5/24"])], "8.8.4.4"), None, SEVERAL)
    )
    assert found["interface-ray"].severity == "warning" and "10.0.0.5" in found["interface-ray"].fix


def test_a_host_with_ipv6_alone_is_like_another() -> None:
    network = HostNetwork([LO, HostInterface("eth0", ["2001:4860::5/64"])], route_v6="2001:4860::5")
    found = judge_network("a", network, NameResolution("a", ["2001:4860::5"]), SEVERAL)
    assert {each.severity for each in found} == {"ok"}


def test_dockers_default_network_is_reported_only_with_other_hosts() -> None:
    network = HostNetwork(
        [LO, HostInterface("eth0", ["172.17.0.2/16"], kind="virtual", carries_host=False)], "172.17.0.2"
    )
    found = _by_id(judge_network("a", network, None, SEVERAL))["interface-nccl"]
    assert found.severity == "warning" and "docker's default network" in found.seen
    assert _by_id(judge_network("a", network, None, HostRequirements()))["interface-nccl"].severity == "ok"


def test_every_interface_that_nccl_takes_is_named() -> None:
    network = HostNetwork([LO, ETH, HostInterface("eth1", ["10.0.1.5/24"])], "10.0.0.5")
    said = _by_id(judge_network("a", network, None, SEVERAL))["interface-nccl"].seen
    assert "10.0.0.5 on eth0" in said and "10.0.1.5 on eth1" in said


def test_a_variable_that_vllm_no_longer_reads() -> None:
    found = _by_id(
        judge_network(
            "a", HostNetwork([LO, ETH], "10.0.0.5", environ={"HOST_IP": "10.0.0.5"}), None, HostRequirements()
        )
    )
    assert found["host-ip"].severity == "note" and found["host-ip"].fix == "export VLLM_HOST_IP=10.0.0.5"


def test_an_address_that_was_copied_from_another_host_is_an_error_even_alone() -> None:
    copied = HostNetwork([LO, ETH], "10.0.0.5", environ={"VLLM_HOST_IP": "10.0.0.9"})
    found = _by_id(judge_network("a", copied, None, HostRequirements()))["interface-vllm"]
    assert found.severity == "error" and "copied from another host" in found.why


def test_the_configs_interface() -> None:
    network = HostNetwork([LO, ETH], "10.0.0.5")
    assert (
        _by_id(judge_network("a", network, None, HostRequirements(interface="eth")))["cluster-interface"].severity
        == "ok"
    )
    found = _by_id(judge_network("a", network, None, HostRequirements(interface="ib")))["cluster-interface"]
    assert found.severity == "error" and "eth0" in found.fix


def test_better_is_the_route_then_ipv4() -> None:
    two = [LO, DOCKER, ETH, HostInterface("eth1", ["192.168.7.5/24"])]
    assert best_address(HostNetwork(two, "192.168.7.5")) == ("eth1", "192.168.7.5")
    assert best_address(HostNetwork(two)) == ("eth0", "10.0.0.5")
    assert best_address(HostNetwork([LO, DOCKER])) is None


def test_names_that_do_not_resolve_and_slow_resolvers() -> None:
    names = NameResolution(
        "a", [], problem="the name of this host, a, does not resolve", asked={"head": []}, seconds=5.2
    )
    found = _by_id(judge_names("a", names, HostNetwork([LO, ETH]), SEVERAL))
    assert found["own-name"].severity == found["name"].severity == "error"
    assert "head does not resolve" in found["name"].seen and "5.2 s" in found["resolver"].seen


def test_a_name_derived_from_the_address_is_reported() -> None:
    names = NameResolution("a", ["10.0.0.5"], {"10.0.0.5": "5.0.0.10.in-addr.arpa"})
    assert (
        _by_id(judge_names("a", names, HostNetwork([LO, ETH]), HostRequirements()))["reverse-name"].severity
        == "warning"
    )
