"""On which ports the processes of a run listen, and whether others get there."""

import errno
import socket

from lockstep.watch.errors import Carried
from lockstep.watch.waiting import waiting

Ports = tuple[int, int]
"""The first and the last of those that may be used."""


class NoPort(Carried, OSError):
    """All ports of a range are in use on a host."""

    error_code = "no_port"

    def __init__(self, host: str, ports: Ports) -> None:
        first, last = ports
        super().__init__(f"all ports from {first} to {last} of {host} are in use: free some, or name a wider range")
        self.host, self.ports = host, ports


def listen(host: str, ports: Ports | None = None, backlog: int = 1024) -> socket.socket:
    """A socket that listens on that address alone, IPv4 or IPv6: on the first free port of the range, or on any.

    Raises:
        NoPort: none is free.
        OSError: the address is none of this host's, or the port is not ours to use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = (0, 0) if ports is None else ports
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or first == last:
                raise
    raise NoPort(host, (first, last))


def dial(host: str, port: int, why: str, timeout_s: float) -> None:
    """Whether somebody listens there, at one of the addresses of that name; the bound is that of each.

    Raises:
        OSError: nobody does, or nothing comes back within that time.
    """
    refused: OSError | None = None
    with waiting("connect", f"{host}:{port}", why, timeout_s):
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
