"""What the kernel says of this host's network: interfaces that stand on a card, the address on the way to a peer."""

import socket
from contextlib import closing
from pathlib import Path

NET = Path("/sys/class/net")


def on_card(interface: Path, depth: int = 4) -> bool:
    """Whether a device of the host is this interface, or below it: a port of a bridge, of a bond, what a VLAN is on.

    Args:
        interface: its folder in `NET`.
        depth: how many such steps down are taken.
    """
    if (interface / "device").exists():
        return True
    below = {port.name for port in _entries(interface / "brif")}
    below |= {each.name.removeprefix("lower_") for each in _entries(interface) if each.name.startswith("lower_")}
    return depth > 0 and any(on_card(interface.parent / name, depth - 1) for name in below)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def route_to(peer: str, names: bool = False) -> str:
    """The address of this host that its kernel would use to reach the peer; nothing is sent, and nobody asked.

    Args:
        names: whether the peer may be a name, which is looked up then.

    Raises:
        OSError: there is no route, or the peer is a name that is not looked up, or not known.
    """
    flags = 0 if names else socket.AI_NUMERICHOST
    family, _, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM, flags=flags)[0]
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
