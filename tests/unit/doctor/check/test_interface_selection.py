"""Which interface each library picks: the rules of NCCL, Gloo, Ray and vLLM as their sources have them."""

import pytest

from lockstep.doctor.check.facts.host_facts import HostInterface, HostNetwork, NameResolution
from lockstep.doctor.check.rules.interface_selection import (
    InterfaceChoice,
    gloo_choice,
    interface_choices,
    nccl_choice,
    nccl_matches,
    ray_choice,
    vllm_choice,
)

LO = HostInterface("lo", ["127.0.0.1/8", "::1/128"], kind="loopback")
DOCKER = HostInterface("docker0", ["172.17.0.1/16"], kind="bridge", carries_host=False)
ETH = HostInterface("eth0", ["10.0.0.5/24", "fe80::5/64"])
ETH1 = HostInterface("eth1", ["192.168.7.5/24"])
IB = HostInterface("ib0", ["10.9.0.5/16"], kind="infiniband")
DOWN = HostInterface("eno1", ["10.4.0.5/24"], running=False)
ALL = [LO, DOCKER, DOWN, ETH, ETH1, IB]


def _names(choice: InterfaceChoice) -> list[str]:
    return [name for name, _ in choice.picks]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth0", ["eth0"]),
        ("eth1,ib", ["eth1", "ib0"]),
        ("=eth", []),
        ("=eth0", ["eth0"]),
        ("=ib0,eth1", ["eth1", "ib0"]),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^=docker,lo", ["docker0", "eth0", "eth1", "ib0"]),
        ("eno1", []),
        ("eth0:5000", ["eth0"]),
    ],
)
def test_nccl_reads_prefixes_whole_names_and_exclusions(pattern: str, expected: list[str]) -> None:
    assert sorted(name for name, _ in nccl_matches(ALL, pattern)) == sorted(expected)


def test_nccl_without_a_variable_takes_ib_then_anything_then_docker_then_loopback() -> None:
    assert _names(nccl_choice(ALL, {})) == ["ib0"]
    assert _names(nccl_choice([LO, DOCKER, ETH, ETH1], {})) == ["eth0", "eth1"]
    assert _names(nccl_choice([LO, DOCKER, HostInterface("virbr0", ["192.168.122.1/24"])], {})) == ["docker0"]
    assert _names(nccl_choice([LO, HostInterface("virbr0", ["192.168.122.1/24"])], {})) == ["lo"]
    assert nccl_choice([LO], {}).picks == [("lo", "127.0.0.1")]


def test_nccl_takes_a_bridge_of_docker_compose_for_a_network() -> None:
    assert _names(nccl_choice([LO, HostInterface("br-3fa2", ["172.18.0.1/16"], kind="bridge")], {})) == ["br-3fa2"]


def test_nccl_takes_the_subnet_of_its_communicators_id_before_others() -> None:
    assert _names(nccl_choice([LO, ETH, ETH1], {"NCCL_COMM_ID": "192.168.7.9:2000"})) == ["eth1"]


def test_a_value_of_one_character_is_none() -> None:
    assert _names(nccl_choice([LO, ETH], {"NCCL_SOCKET_IFNAME": "x"})) == ["eth0"]
    assert gloo_choice([LO, ETH], {"GLOO_SOCKET_IFNAME": "x"}, ["10.0.0.5"]).picks == [("eth0", "10.0.0.5")]


def test_nccl_that_finds_nothing_names_what_there_is() -> None:
    choice = nccl_choice(ALL, {"NCCL_SOCKET_IFNAME": "ens"})
    assert not choice.picks and "eth0" in choice.problem and "eno1" not in choice.problem


def test_nccl_prefers_ipv4_and_the_configured_family() -> None:
    assert nccl_choice([ETH], {}).picks == [("eth0", "10.0.0.5")]
    assert nccl_choice([ETH], {"NCCL_SOCKET_FAMILY": "AF_INET6"}).picks == [("eth0", "fe80::5")]
    assert not nccl_choice([LO], {"NCCL_SOCKET_FAMILY": "AF_INET6"}).picks  # ::1 is passed over


def test_gloo_takes_whole_names_only() -> None:
    assert gloo_choice(ALL, {"GLOO_SOCKET_IFNAME": "eth0,ib0"}, []).picks == [("eth0", "10.0.0.5"), ("ib0", "10.9.0.5")]
    assert "'eth'" in gloo_choice(ALL, {"GLOO_SOCKET_IFNAME": "eth"}, []).problem


def test_gloo_takes_the_first_address_of_the_own_name_that_this_host_has() -> None:
    assert gloo_choice(ALL, {}, ["203.0.113.9", "192.168.7.5"]).picks == [("eth1", "192.168.7.5")]
    assert gloo_choice(ALL, {}, ["127.0.1.1", "10.0.0.5"]).picks == [("lo", "127.0.1.1")]  # as Debian writes /etc/hosts
    assert gloo_choice(ALL, {}, ["203.0.113.9"]).picks == [("lo", "127.0.0.1")]
    assert gloo_choice(ALL, {}, []).picks == [("lo", "127.0.0.1")]
    assert not gloo_choice(ALL, {}, None).picks


def test_ray_and_vllm_take_the_route_to_the_internet() -> None:
    network = HostNetwork(ALL, route_v4="10.0.0.5")
    assert ray_choice(network, ["127.0.0.1"]).picks == vllm_choice(network).picks == [("eth0", "10.0.0.5")]


def test_without_that_route_ray_takes_the_own_name_and_vllm_nothing() -> None:
    network = HostNetwork(ALL)
    assert ray_choice(network, ["fe80::5", "192.168.7.5"]).picks == [("eth1", "192.168.7.5")]
    assert ray_choice(network, []).picks == [("lo", "127.0.0.1")]
    assert vllm_choice(network).picks == [("", "0.0.0.0")]


def test_vllm_follows_its_variable() -> None:
    assert vllm_choice(HostNetwork(ALL, "10.0.0.5", environ={"VLLM_HOST_IP": "10.9.0.5"})).picks == [
        ("ib0", "10.9.0.5")
    ]


def test_all_four_and_each_has_its_source() -> None:
    found = interface_choices(HostNetwork(ALL, "10.0.0.5"), NameResolution("a", ["10.0.0.5"]))
    assert [each.library for each in found] == ["NCCL", "Gloo", "Ray", "vLLM"]
    assert all(each.source.startswith("https://github.com/") and each.because for each in found)
