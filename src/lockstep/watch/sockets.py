"""What has gone over the TCP sockets of this host's processes: Linux counts network bytes by socket, not by process.

Asked of the kernel by netlink (sock_diag(7), INET_DIAG), as `ss -ti` does; nothing is known where it does not answer.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterable

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_ESTABLISHED = 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_MESSAGE = struct.Struct("=4B48x5I")
"""`inet_diag_msg`: family, state, timer, retrans, the socket's addresses, expires, rqueue, wqueue, uid, inode."""
_ATTRIBUTE = struct.Struct("=HH")
_BYTES = struct.Struct("=QQ")
_BYTES_AT = 120
"""Of `tcpi_bytes_acked` and `tcpi_bytes_received` in `tcp_info`, since Linux 4.1."""


def moved_bytes() -> dict[int, int]:
    """Bytes that were taken from each established TCP socket of this network, or sent over it and acknowledged, by
    inode. What has come and nobody has read is somebody else's doing."""
    found: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asked:
            asked.settimeout(0.2)  # the kernel answers at once or not at all
            for family in (socket.AF_INET, socket.AF_INET6):
                body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 1 << _ESTABLISHED)
                header = _HEADER.pack(
                    _HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, int(family), 0
                )
                asked.send(header + body)
                while _read(asked.recv(1 << 17), found):
                    pass
    except (AttributeError, OSError):
        return {}
    return found


def _read(data: bytes, found: dict[int, int]) -> bool:
    """Takes one datagram of answers; whether more are to come."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, at)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
            return False
        message = _MESSAGE.unpack_from(data, at + _HEADER.size)
        unread, inode = message[5], message[8]
        place, end = at + _HEADER.size + _MESSAGE.size, at + length
        while place + _ATTRIBUTE.size <= end:
            size, what = _ATTRIBUTE.unpack_from(data, place)
            if what == _INET_DIAG_INFO and size >= _ATTRIBUTE.size + _BYTES_AT + _BYTES.size:
                found[inode] = sum(_BYTES.unpack_from(data, place + _ATTRIBUTE.size + _BYTES_AT)) - unread
            place += max(4, (size + 3) & ~3)
        at += (length + 3) & ~3
    return True


def inodes(pids: Iterable[int]) -> set[int]:
    """The sockets that these processes hold open."""
    found = set()
    for pid in pids:
        try:
            with os.scandir(f"/proc/{pid}/fd") as descriptors:
                for each in descriptors:
                    with contextlib.suppress(OSError):  # closed meanwhile
                        facts = each.stat()
                        if stat.S_ISSOCK(facts.st_mode):
                            found.add(facts.st_ino)
        except OSError:  # it has ended, or is somebody else's
            continue
    return found
