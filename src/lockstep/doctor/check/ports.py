"""Whether the ports that a run would listen on are free on this host. Nothing is bound to find out."""

from collections.abc import Iterator, Mapping, Sequence

import psutil

from lockstep.doctor.check.facts import WantedPort
from lockstep.doctor.check.system import System, Unavailable, text_of
from lockstep.doctor.finding import Finding

_LISTEN = "0A"
"""State of a socket in /proc/net/tcp (include/net/tcp_states.h)."""


def gather_ports(system: System, wanted: Mapping[int, str]) -> list[WantedPort]:
    """Of each wanted port, who listens on it.

    Raises:
        Unavailable: there is no /proc/net.
    """
    if not wanted:
        return []
    taken = _listening(system)
    words = (text_of(system.proc / "sys/net/ipv4/ip_local_port_range") or "").split()
    low, high = (int(words[0]), int(words[1])) if len(words) == 2 else (1 << 16, 0)
    return [
        WantedPort(port, purpose, _owner(port) if port in taken else None, low <= port <= high)
        for port, purpose in wanted.items()
    ]


def _listening(system: System) -> set[int]:
    tables = [text_of(system.proc / "self/net" / name) for name in ("tcp", "tcp6")]
    if tables == [None, None]:
        raise Unavailable(f"there is no {system.proc}/self/net/tcp")
    found = set()
    for line in "\n".join(table or "" for table in tables).splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[3] == _LISTEN:
            found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def _owner(port: int) -> str:
    """By name and pid, as far as this user may see."""
    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"{psutil.Process(each.pid).name()} (pid {each.pid})"
    except psutil.Error:
        pass
    return "a process that cannot be seen from here"


def judge_ports(host: str, ports: Sequence[WantedPort]) -> Iterator[Finding]:
    """What is taken, and what may be taken between now and the start."""
    for each in ports:
        what = f"port {each.port} ({each.purpose})"
        if each.taken_by is not None:
            why = "rank 0 ends with 'Address already in use', and the others wait for it"
            fix = f"end it (ss -ltnp 'sport = :{each.port}'), or take another port"
            yield Finding("port", "error", host, f"{what} is taken by {each.taken_by}", why, fix)
        elif each.fleeting:
            why = "any connection of this host may be given it before the run listens: it fails now and then"
            fix = "take one below 32768, or reserve it: sysctl net.ipv4.ip_local_reserved_ports"
            said = f"{what} is free, but one of those that the kernel hands out to connections"
            yield Finding("port", "note", host, said, why, fix)
        else:
            yield Finding("port", "ok", host, f"{what} is free")
