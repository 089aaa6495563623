"""Controllers forked from a process that has imported what they need (`controller_fork_server.py`)."""

import atexit
import json
import os
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.launched_run import BOUND_S

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "LOCKSTEP_TEST_API_KEY": "sk-proj-7Gq1vR4nTz8LxWc2Yb5M",
}
"""The key is for servers that tests start; no run may write it to a file."""


class ForkServer:
    """Forks controllers from a process that has imported what they need (`controller_fork_server.py`)."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        program = str(Path(__file__).with_name("controller_fork_server.py"))
        self._process = subprocess.Popen(
            [sys.executable, program, str(theirs.fileno())], env=ENVIRONMENT, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        ours.settimeout(BOUND_S)
        self._socket, self._answers = ours, ours.makefile("r", encoding="utf-8")
        atexit.register(self.close)

    def ask(self, **request: Any) -> dict[str, Any]:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
        self._process.wait(30)


fork_server = cache(ForkServer)


class Forked:
    """A process that the fork server forked, with the needed part of the interface of `subprocess.Popen`."""

    def __init__(self, argv: list[str], output: Path, cwd: Path | None, hold: dict[str, Any] | None = None) -> None:
        self.returncode: int | None = None
        asked = {"argv": argv, "cwd": str(cwd or Path.cwd()), "env": ENVIRONMENT, "output": str(output), "hold": hold}
        self.pid: int = fork_server().ask(**asked)["pid"]

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = fork_server().ask(poll=self.pid)["code"]
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("lockstep", timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)  # it has not been waited for since poll(), so the pid is still its own
