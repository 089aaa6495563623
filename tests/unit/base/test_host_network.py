"""Interfaces on a card, as a made-up /sys/class/net has them."""

from pathlib import Path

import pytest

from lockstep.base.network import SYS_CLASS_NET, is_physical_interface


def net(folder: Path) -> Path:
    """A card, a bridge and a bond on it, a VLAN on the bridge, a bridge of containers, and two that name each other."""
    for name, below in (
        ("eth0", "device"), ("br0", "brif/eth0"), ("bond0", "lower_eth0"), ("br0.7", "lower_br0"),
        ("docker0", "brif/veth1"), ("veth1", ""), ("a", "lower_b"), ("b", "lower_a"),
    ):  # fmt: skip
        (folder / name / below).mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("eth0", True), ("br0", True), ("bond0", True), ("br0.7", True), ("docker0", False), ("veth1", False),
        ("a", False), ("gone", False),
    ],
)  # fmt: skip
def test_what_stands_on_a_card(tmp_path: Path, name: str, found: bool) -> None:
    assert is_physical_interface(net(tmp_path) / name) is found


def test_loopback_of_this_host_is_on_none() -> None:
    assert not is_physical_interface(SYS_CLASS_NET / "lo")
