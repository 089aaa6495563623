"""How processes end that are nobody's children here: the kernel tells by a pidfd, at once, and remembers the code."""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

_PIDFD_GET_INFO = 0xC040FF0B
"""`_IOWR(0xFF, 11, struct pidfd_info)`, 64 bytes in its first version (linux/pidfd.h)."""
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_AT = 60


class End:
    """A process that is watched for its end. `fileno` becomes readable when it has ended."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when there is no such process, or no pidfd (Linux before 5.3)."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._descriptor

    def exit_code(self) -> int | None:
        """Minus the number of the signal that ended it, or its exit code; None while nobody knows (kernels before
        6.15 tell its parent only)."""
        info = bytearray(struct.pack("<Q", _PIDFD_INFO_EXIT) + bytes(56))
        try:
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, info)
        except OSError:
            return self._zombie_code()
        (known,) = struct.unpack_from("<Q", info)
        if not known & _PIDFD_INFO_EXIT:
            return self._zombie_code()
        (status,) = struct.unpack_from("<i", info, _EXIT_CODE_AT)
        return os.waitstatus_to_exitcode(status)

    def _zombie_code(self) -> int | None:
        """The code of a zombie, which its parent has not collected yet."""
        try:
            facts = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return os.waitstatus_to_exitcode(int(facts[49])) if facts[0] == "Z" and len(facts) > 49 else None

    def close(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
