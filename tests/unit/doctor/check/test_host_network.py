"""Interfaces in a simulated sysfs: which of them are backed by a card of the host."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lockstep.doctor.check.facts.network_facts import gather_interfaces

FILES = (
    "eth0/device/", "bond0/lower_eth0/", "bond0.7/lower_bond0/", "br0/bridge/", "br0/brif/bond0.7/",
    "vmbr1/bridge/", "vmbr1/brif/tap100i0/", "tap100i0/", "docker0/bridge/", "docker0/brif/veth1/", "veth1/",
)  # fmt: skip


def test_bridges_bonds_and_vlans_on_a_card_are_the_hosts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES:
        (tmp_path / "class/net" / name).mkdir(parents=True)
    address: Any = SimpleNamespace(family=socket.AF_INET, address="10.0.0.5", netmask="255.255.255.0")
    names = [each.name for each in (tmp_path / "class/net").iterdir()]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: [address] for name in names})
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    found = {each.name: (each.kind, each.carries_host) for each in gather_interfaces(tmp_path)}
    assert found["br0"] == ("bridge", True)
    assert found["vmbr1"] == found["docker0"] == ("bridge", False)
    assert found["eth0"] == found["bond0"] == found["bond0.7"] == ("physical", True)
    assert found["veth1"] == found["tap100i0"] == ("virtual", False)
    assert gather_interfaces(tmp_path)[0].plain == ["10.0.0.5"]
