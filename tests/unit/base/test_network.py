"""Physical interfaces, listening and connecting, and private folders."""

import errno
import socket
from pathlib import Path

import pytest

from lockstep.base.network import SYS_CLASS_NET, NoFreePort, check_reachable, is_physical_interface, listen


def free(count: int) -> tuple[int, int]:
    """A range of ports of which none is in use."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as trial:
            first = trial.getsockname()[1]
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return first, first + count - 1


def test_the_first_free_port_of_a_range() -> None:
    first, last = free(2)
    with listen("127.0.0.1", (first, last)) as one, listen("127.0.0.1", (first, last)) as two:
        assert [each.getsockname() for each in (one, two)] == [("127.0.0.1", first), ("127.0.0.1", last)]
        with pytest.raises(NoFreePort, match=f"all ports from {first} to {last} of 127.0.0.1 are in use"):
            listen("127.0.0.1", (first, last))
        with pytest.raises(OSError) as caught:
            listen("127.0.0.1", (last, last))
        assert caught.value.errno == errno.EADDRINUSE
    with listen("127.0.0.1", (first, last)) as again:
        assert again.getsockname()[1] == first


def test_any_port_of_an_ipv4_or_ipv6_address() -> None:
    for host in ("127.0.0.1", "::1"):
        with listen(host) as listening:
            port = listening.getsockname()[1]
            check_reachable(host, port, "a test", 5.0)
        with pytest.raises(ConnectionRefusedError):
            check_reachable(host, port, "a test", 5.0)


def test_connecting_to_an_address_that_does_not_reply_is_bounded() -> None:
    with socket.socket() as full:  # its queue has room for one connection, which is never accepted
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()), pytest.raises(TimeoutError):
            for _ in range(8):
                check_reachable(*full.getsockname(), "a test", 0.2)


def fake_interfaces(folder: Path) -> Path:
    """Interfaces: a card, a bridge and a bond on it, a VLAN on the bridge, a containers' bridge, and a cycle of two."""
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
def test_interfaces_on_top_of_a_card_are_physical(tmp_path: Path, name: str, found: bool) -> None:
    assert is_physical_interface(fake_interfaces(tmp_path) / name) is found


def test_loopback_is_not_physical() -> None:
    assert not is_physical_interface(SYS_CLASS_NET / "lo")
