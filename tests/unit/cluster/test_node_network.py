"""The reachable address of a node: pure cases, this host, and network namespaces with a router, a bridge and two
links."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from needed_systems import needs_namespaces

from benchmarks.faults.network_namespaces import add_namespace, ip
from lockstep.base.network import route_source_address
from lockstep.cluster.node_network import (
    NetworkInterface,
    UnreachableAddress,
    check_node_addresses,
    check_reachable_address,
    network_interfaces,
    reachable_address,
)

LO = NetworkInterface("lo", "127.0.0.1")
ETH = NetworkInterface("eth0", "10.1.0.4")
IB = NetworkInterface("ibp12s0", "10.2.0.4")
DOCKER = NetworkInterface("docker0", "172.17.0.1", bridge=True)
LINK = NetworkInterface("eth1", "169.254.3.4")


@pytest.mark.parametrize(
    ("interface", "why"),
    [
        pytest.param(NetworkInterface("", "0.0.0.0"), "reaches none.*--node-ip-address", id="unspecified"),
        pytest.param(NetworkInterface("", "::"), "reaches none", id="unspecified six"),
        pytest.param(LO, "other hosts cannot reach", id="loopback"),
        pytest.param(DOCKER, "bridge that only containers.*cluster.interface", id="docker"),
        pytest.param(NetworkInterface("cni-podman0", "10.88.0.1"), "bridge that only containers", id="podman"),
        pytest.param(NetworkInterface("br0", "10.88.0.1", bridge=True), "bridge that only containers", id="any bridge"),
        pytest.param(LINK, "link-local", id="link-local"),
        pytest.param(NetworkInterface("eth0", "fe80::1"), "link-local", id="link-local six"),
        pytest.param(NetworkInterface("eth0", "node-7"), "not an IP address", id="a name"),
    ],
)
def test_unreachable_addresses_are_refused(interface: NetworkInterface, why: str) -> None:
    with pytest.raises(UnreachableAddress, match=why) as caught:
        check_reachable_address("node-b", interface, several=True)
    assert "node-b" in str(caught.value) and interface.address in str(caught.value)
    assert interface.name in str(caught.value)


def test_loopback_is_right_for_a_single_host() -> None:
    assert check_reachable_address("here", LO, several=False) is LO
    assert reachable_address("here", [LO, ETH], None, None, several=False).address == "127.0.0.1"
    with pytest.raises(UnreachableAddress, match="reaches none"):
        check_reachable_address("here", NetworkInterface("", "0.0.0.0"), several=False)
    with pytest.raises(UnreachableAddress, match="other hosts cannot reach"):
        reachable_address("here", [LO, ETH], None, None, several=True)


def test_an_interface_is_selected_by_prefix() -> None:
    found = [LO, NetworkInterface("ibp12s0", "fe80::2"), IB, ETH, DOCKER]
    assert reachable_address("b", found, "10.1.0.1", "ib", several=True) is IB
    assert reachable_address("b", found, None, "docker", several=True) is DOCKER, "the config names it"
    with pytest.raises(UnreachableAddress, match=r"wlan.*set cluster\.interface to one of lo, ibp12s0, eth0, docker0"):
        reachable_address("b", found, None, "wlan", several=True)
    with pytest.raises(UnreachableAddress, match="other hosts cannot reach"):
        reachable_address("b", found, None, "lo", several=True)
    down = NetworkInterface("eth0", "10.1.0.4", up=False)
    with pytest.raises(UnreachableAddress, match="without an address"):
        reachable_address("b", [LO, down], None, "eth", several=True)


def test_addresses_of_a_cluster() -> None:
    a, b, bad, c = ("a", "10.1.0.1"), ("b", "10.1.0.2"), ("a", "127.0.0.1"), ("c", "10.1.0.2")
    check_node_addresses([bad], [bad])
    check_node_addresses([a, b], [a, b])
    check_node_addresses([b], [bad, b])  # the run does not use the other node
    check_node_addresses([a], [a, b, c])
    with pytest.raises(UnreachableAddress, match=r"a is known as 0\.0\.0\.0"):
        check_node_addresses([("a", "0.0.0.0")], [("a", "0.0.0.0")])
    with pytest.raises(UnreachableAddress, match=r"a is known as 127\.0\.0\.1"):
        check_node_addresses([b, bad], [bad, b])
    with pytest.raises(UnreachableAddress, match=r"b is known as 10\.1\.0\.2, which is also the address of c"):
        check_node_addresses([a, b], [a, b, c])
    with pytest.raises(UnreachableAddress, match=r"also the address of another Ray of that host: .* only one Ray"):
        check_node_addresses([b], [a, b, b])


def test_this_host() -> None:
    found = network_interfaces()
    assert NetworkInterface("lo", "127.0.0.1") in found
    assert route_source_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UnreachableAddress, match="has no route to it"):
        reachable_address("here", found, "no-such-host.invalid", None, several=True)


# ---------------------------------------------------------------- namespaces

SEES = """
import dataclasses, json, sys
from lockstep.cluster.node_network import network_interfaces, reachable_address
found = network_interfaces()
peer, prefix = (word if word != "-" else None for word in sys.argv[1:3])
try:
    print(json.dumps(dataclasses.asdict(reachable_address("here", found, peer, prefix, True))))
except ValueError as error:
    print(json.dumps({"refused": str(error)}))
"""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """A namespace with two links to others (`fast` and `slow`), and a bridge that answers for everything else."""
    mine, peer = f"la{os.getpid()}", f"lb{os.getpid()}"
    add_namespace(mine)
    try:
        add_namespace(peer)
        for number, name in enumerate(("fast0", "slow0")):
            ip("-n", mine, "link", "add", name, "type", "veth", "peer", "name", name, "netns", peer)
            for namespace, last in ((mine, 1), (peer, 2)):
                ip("-n", namespace, "address", "add", f"10.77.{number}.{last}/24", "dev", name)
                ip("-n", namespace, "link", "set", name, "up")
        ip("-n", mine, "link", "add", "pod0", "type", "bridge")
        ip("-n", mine, "address", "add", "10.88.0.1/16", "dev", "pod0")
        ip("-n", mine, "link", "set", "pod0", "up")
        ip("-n", mine, "link", "set", "lo", "up")
        ip("-n", mine, "route", "add", "10.99.0.0/24", "via", "10.77.0.2")
        yield mine
    finally:
        for namespace in (mine, peer):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=20)


def seen(host: str, peer: str = "-", prefix: str = "-") -> Any:
    command = ["ip", "netns", "exec", host, sys.executable, "-c", SEES, peer, prefix]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def test_a_bridge_with_a_network_card_is_the_hosts_own() -> None:
    uplink = NetworkInterface("vmbr0", "10.1.0.4", bridge=True, carries_host=True)
    assert check_reachable_address("here", uplink, several=True) == uplink
    assert check_reachable_address("here", replace(uplink, name="br-ex"), several=True).name == "br-ex"


@needs_namespaces
def test_the_route_to_the_peer_decides(host: str) -> None:
    assert seen(host, "10.77.0.2") == {
        "name": "fast0",
        "address": "10.77.0.1",
        "bridge": False,
        "up": True,
        "carries_host": False,
    }
    assert seen(host, "10.77.1.2")["name"] == "slow0"
    assert seen(host, "10.99.0.7")["name"] == "fast0", "through a router"
    assert seen(host, "10.77.0.2", "slow")["address"] == "10.77.1.1", "the config names it"


@needs_namespaces
def test_addresses_without_a_route_are_refused(host: str) -> None:
    assert "interface pod0), a bridge" in seen(host, "10.88.0.7")["refused"]
    assert "other hosts cannot reach" in seen(host, "127.0.0.1")["refused"]
    assert "has no route to it" in seen(host, "10.55.0.1")["refused"]
