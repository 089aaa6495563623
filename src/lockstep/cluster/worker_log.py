"""A worker's log: what it and the users' code in it print, without secrets."""

import faulthandler
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection
from typing import BinaryIO

from lockstep.watch.secrets import redact_text, secret_values


class RedactedStream(io.TextIOWrapper):
    """Text that is searched for secrets before it is written, line by line; each thread has its own unfinished line.

    Args:
        known: values that are secrets, besides what looks like one.
    """

    def __init__(self, buffer: BinaryIO, known: Collection[str]) -> None:
        super().__init__(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._known = known
        self._unfinished = threading.local()

    def write(self, text: str) -> int:
        whole, newline, rest = (getattr(self._unfinished, "text", "") + text).rpartition("\n")
        self._unfinished.text = rest
        if newline:
            super().write(redact_text(whole, self._known) + newline)
        return len(text)

    def flush(self) -> None:
        """Writes an unfinished line as well, as progress bars want it. A secret in two such pieces is not seen."""
        rest = getattr(self._unfinished, "text", "")
        if rest:
            self._unfinished.text = ""
            super().write(redact_text(rest, self._known))
        super().flush()


def prepare_log(name: str) -> None:
    """Sends what Python prints in this process, its loggers and tracebacks to stdout and stderr without what looks like
    a secret or is the value of a variable that is called like one; SIGUSR1 and crashes write all stacks to stderr.

    What is written past Python, by a library in C or a child process, stays as it is.
    """
    known = secret_values(os.environ)
    sys.stdout, sys.stderr = (RedactedStream(stream.buffer, known) for stream in (sys.stdout, sys.stderr))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname).1s %(name)s: %(message)s"
    )
    logging.getLogger("lockstep").setLevel(logging.INFO)
