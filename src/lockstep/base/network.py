"""The network of this host: physical interfaces, the address used to reach a peer, listening and connecting."""

import errno
import socket
from contextlib import closing
from pathlib import Path

from lockstep.base.errors import PicklableError
from lockstep.base.wait_state import track_wait

LOOPBACK = "127.0.0.1"
SYS_CLASS_NET = Path("/sys/class/net")


def is_physical_interface(interface: Path, depth: int = 4) -> bool:
    """Whether the interface is a network card, or a bridge, bond or VLAN on top of one.

    Args:
        interface: the folder of the interface in `SYS_CLASS_NET`.
        depth: how many interfaces may be on top of each other.
    """
    if (interface / "device").exists():
        return True
    below = {port.name for port in _list_dir(interface / "brif")}
    below |= {each.name.removeprefix("lower_") for each in _list_dir(interface) if each.name.startswith("lower_")}
    return depth > 0 and any(is_physical_interface(interface.parent / name, depth - 1) for name in below)


def _list_dir(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def route_source_address(peer: str, names: bool = False) -> str:
    """The address of this host that the kernel would use to reach the peer. Sends nothing.

    Args:
        names: whether the peer may be a host name, which is then looked up.

    Raises:
        OSError: there is no route; or the peer is a host name that is unknown or may not be looked up.
    """
    flags = 0 if names else socket.AI_NUMERICHOST
    family, _, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM, flags=flags)[0]
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


PortRange = tuple[int, int]
"""The first and the last port that may be used."""


class NoFreePort(PicklableError, OSError):
    """All ports of a range are in use on a host."""

    error_code = "no_port"

    def __init__(self, host: str, ports: PortRange) -> None:
        first, last = ports
        super().__init__(f"all ports from {first} to {last} of {host} are in use: free some or configure a wider range")
        self.host, self.ports = host, ports


def listen(host: str, ports: PortRange | None = None, backlog: int = 1024) -> socket.socket:
    """A socket that listens on this IPv4 or IPv6 address, on the first free port of the range or on any free port.

    Raises:
        NoFreePort: no port of the range is free.
        OSError: the address does not belong to this host, or this user may not use the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = (0, 0) if ports is None else ports
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or first == last:
                raise
    raise NoFreePort(host, (first, last))


def check_reachable(host: str, port: int, why: str, timeout_s: float) -> None:
    """Checks that a process listens at one of the addresses of a host name. The time limit applies to each address.

    Raises:
        OSError: no process listens there, or none replies in time.
    """
    refused: OSError | None = None
    with track_wait("connect", f"{host}:{port}", why, timeout_s):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as trial:
                    trial.settimeout(timeout_s)
                    trial.connect(target)
                    return
            except OSError as error:
                refused = refused or error
    assert refused is not None  # a name without addresses is an OSError
    raise refused
