"""One process per run: an advisory lock that the kernel takes back when its holder dies."""

import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path

from lockstep.ledger.errors import RunIsActive

log = logging.getLogger(__name__)


class RunLock:
    """Held from construction to `close` (or the end of the process). RunIsActive names who has it.

    `force` goes on without the lock, for a holder on another host that is known to be gone; the generation in
    the index then refuses that holder's writes, should it still live."""

    def __init__(self, path: Path, force: bool = False) -> None:
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES) and not force:
                pid, host = self._holder()
                self._file.close()
                raise RunIsActive(path.parent, pid, host) from None
            log.warning("no lock on %s (%s): the generation in the ledger alone keeps other processes out", path, error)
        self._file.seek(0)
        self._file.truncate()
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, self._file)
        self._file.flush()

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        self._file.close()

    def _holder(self) -> tuple[int | None, str | None]:
        self._file.seek(0)
        try:
            holder = json.loads(self._file.read())
            return int(holder["pid"]), str(holder["host"])
        except (ValueError, KeyError, TypeError):
            return None, None
