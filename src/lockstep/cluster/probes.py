"""Starts the probes of a check as processes of this host. Knows nothing of what they do."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.watch import waits

_LAST_WORDS = 400


def probe_command(head: str, port: int, name: str, python: str = sys.executable) -> list[str]:
    """What starts a probe; the token is in its environment."""
    where = f"[{head}]:{port}" if ":" in head else f"{head}:{port}"
    return [python, "-m", "lockstep", "check", "--join", where, "--name", name]


class LocalProbes:
    """One probe per name.

    Args:
        hosts: by name, words that come before the command: those that enter a namespace or container, or none.
        token_variable: where a probe looks for the token.
    """

    def __init__(self, hosts: Mapping[str, Sequence[str]], token_variable: str) -> None:
        self._prefixes, self._variable = dict(hosts), token_variable
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-check-")

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._prefixes)

    @property
    def addresses(self) -> Mapping[str, str]:
        return {}

    def start(self, head: str, port: int, token: str) -> None:
        """Returns at once."""
        for name, prefix in self._prefixes.items():
            with self._said(name).open("wb") as output, contextlib.suppress(OSError):
                self._started[name] = subprocess.Popen(
                    [*prefix, *probe_command(head, port, name)], env={**os.environ, self._variable: token},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip

    def failed(self) -> Mapping[str, str]:
        """By host, the last words of a probe that has ended."""
        found = {}
        for name in self._prefixes:
            process = self._started.get(name)
            if process is None or process.poll() is not None:
                with contextlib.suppress(OSError):
                    words = self._said(name).read_bytes()[-_LAST_WORDS:].decode(errors="replace").split()
                    code = "could not be started" if process is None else f"ended with {process.returncode}"
                    found[name] = f"its probe {code}: {' '.join(words)}"
        return found

    def pid(self, name: str) -> int:
        """Of a probe that was started."""
        return self._started[name].pid

    def stop(self) -> None:
        """Idempotent. Probes leave by themselves when their head has gone."""
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
        self._folder.cleanup()

    def _said(self, name: str) -> Path:
        return Path(self._folder.name, f"{list(self._prefixes).index(name)}.log")
