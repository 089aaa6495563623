"""Alternation of the two sides: each runs in its own process, which continues on request.

The sides begin every step with `Pacer.begin`, which blocks until the step may be done. So both start once, and the
measured steps alternate. One line of JSON in each direction: `{"go": 2}` or `{"stop": true}` to the side,
`{"ready": ...}` and `{"done": ...}` back. What a side prints goes to its log.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

START_S, STEPS_S, STOP_S = 300.0, 1800.0, 60.0


class Stopped(BaseException):
    """Raised when the side must end."""


class Pacer:
    """The side's end of the connection. Create it before anything prints."""

    def __init__(self) -> None:
        self._commands: TextIO = sys.stdin
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._left = 0
        self._said = "ready"
        self.facts: dict[str, Any] = {}
        """Sent with the next answer, for example `tokens` done."""
        self.detail = False
        """Whether the stages of a step are measured."""

    def begin(self) -> None:
        """Begin a step: returns at once if more steps were requested, else reports that they are done and waits for the
        next command. Raises Stopped."""
        if self._left == 0:
            self._answers.write(json.dumps({self._said: self.facts}) + "\n")
            self._said = "done"
            command = json.loads(self._commands.readline() or '{"stop": true}')
            if "stop" in command:
                raise Stopped
            self._left, self.detail = int(command["go"]), bool(command.get("detail"))
        self._left -= 1


class SideFailed(RuntimeError):
    """A side ended or did not answer; its log shows why."""

    def __init__(self, what: str, log: Path) -> None:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:]) if log.exists() else ""
        super().__init__(f"{what}\n--- end of {log} ---\n{tail}")


class SideProcess:
    """A started side, for the runner. A context manager that ends the side."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                env=environment, bufsize=0, start_new_session=True,
            )  # fmt: skip
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ready(self, waiting: Callable[[float], None] | None = None) -> dict[str, Any]:
        """Wait until the side is about to begin its first step; returns its facts."""
        return dict(self._answer("ready", START_S, waiting))

    def go(self, steps: int, detail: bool = False) -> dict[str, Any]:
        """Run so many steps; returns the side's report when they are done."""
        self._send({"go": steps, "detail": detail})
        return dict(self._answer("done", STEPS_S))

    def __enter__(self) -> "SideProcess":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send({"stop": True})
            self._popen.wait(STOP_S)
        except (BrokenPipeError, SideFailed, subprocess.TimeoutExpired):
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(STOP_S)
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                stream.close()

    def _send(self, command: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        if self._popen.poll() is None:
            self._popen.stdin.write(json.dumps(command).encode() + b"\n")

    def _answer(self, name: str, timeout_s: float, waiting: Callable[[float], None] | None = None) -> Any:
        assert self._popen.stdout is not None
        began = time.monotonic()
        while b"\n" not in self._buffer:
            if time.monotonic() - began > timeout_s:
                raise SideFailed(f"no answer within {timeout_s:g} s", self.log)
            if waiting is not None:
                waiting(time.monotonic() - began)
            if select.select([self._popen.stdout], [], [], 1.0)[0]:
                piece = os.read(self._popen.stdout.fileno(), 1 << 16)
                if not piece:
                    raise SideFailed(f"ended with {self._popen.wait(STOP_S)}", self.log)
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if name not in answer:
            raise SideFailed(f"sent {sorted(answer)} instead of {name!r}", self.log)
        return answer[name]
