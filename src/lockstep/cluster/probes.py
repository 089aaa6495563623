"""Starts the probes of a check as processes of this host. Knows nothing of what they do."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from lockstep.watch import waits

_TRY_S, _TRY_MORE_S = 3.0, 0.01
"""How long a probe that a program starts tries the head, which listens already; and how much longer for each one that
comes at the same time."""
_LAST_WORDS = 400


def probe_command(head: str, port: int, name: str, many: int) -> list[str]:
    """What starts one of so many probes; the token is in its environment."""
    where = f"[{head}]:{port}" if ":" in head else f"{head}:{port}"
    wait = f"{_TRY_S + many * _TRY_MORE_S:.0f}"
    return [sys.executable, "-m", "lockstep", "check", "--join", where, "--name", name, "--wait", wait]


def last_words(output: IO[bytes]) -> str:
    """The end of what a probe printed, without the notes that it makes on its way. The place at which it writes, which
    is shared, stays where it is."""
    size = os.fstat(output.fileno()).st_size
    text = os.pread(output.fileno(), 64 << 10, max(0, size - (64 << 10))).decode(errors="replace")
    lines = [line for line in text.splitlines() if not line.startswith("note ")]
    return " ".join(" ".join(lines).split())[-_LAST_WORDS:]


class LocalProbes:
    """One probe per name. What they print goes to files without a name, so that nothing of it is left however this
    process ends.

    Args:
        hosts: by name, words that come before the command: those that enter a namespace or container, or none.
        token_variable: where a probe looks for the token.
    """

    def __init__(self, hosts: Mapping[str, Sequence[str]], token_variable: str) -> None:
        self._prefixes, self._variable = dict(hosts), token_variable
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._output: dict[str, IO[bytes]] = {}
        self._why: dict[str, str] = {}

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._prefixes)

    @property
    def addresses(self) -> Mapping[str, str]:
        return {}

    def start(self, head: str, port: int, token: str) -> None:
        """Returns at once."""
        for name, prefix in self._prefixes.items():
            try:
                self._output[name] = output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
                command = [*prefix, *probe_command(head, port, name, len(self._prefixes))]
                self._started[name] = subprocess.Popen(
                    command, env={**os.environ, self._variable: token},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self._why[name] = f"its probe could not be started: {error}"

    def failed(self) -> Mapping[str, str]:
        """By host, the last words of a probe that has ended."""
        found = dict(self._why)
        for name, process in self._started.items():
            if process.poll() is not None and name in self._output:
                found[name] = f"its probe ended with {process.returncode}: {last_words(self._output[name])}"
        return found

    def pid(self, name: str) -> int:
        """Of a probe that was started."""
        return self._started[name].pid

    def stop(self) -> None:
        """Idempotent. Probes leave by themselves when their head lets them go or has gone."""
        for name, process in self._started.items():
            with contextlib.suppress(waits.WaitTimeout):
                waits.process(process, whom=name, why="its probe leaves", timeout_s=1.0, notice_after_s=None)
        for process in self._started.values():
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, 15)
        for name, process in self._started.items():
            try:
                waits.process(process, whom=name, why="its probe ends", timeout_s=3.0, notice_after_s=None)
            except waits.WaitTimeout:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
        for output in self._output.values():
            output.close()
        self._output.clear()
