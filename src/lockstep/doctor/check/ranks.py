"""The ranks of the self-test on one host, as its probe starts and ends them: one process that imports torch once and
forks the ranks."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from typing import IO, Any

from lockstep.doctor.check.orders import AwaitRanks, StartRanks
from lockstep.watch import waits

_STARTED_S = 60.0
_WORDS = 2000
_OUTPUT = 64 << 20
"""Bytes of it that are read."""


class Ranks:
    """At most one process at a time. What it prints goes to files without a name, so that nothing of it is left however
    this process ends; and it ends when its standard input does, which this process holds open."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def start(self, order: StartRanks) -> dict[str, Any]:
        """Starts them: `port` of the store where this host serves it, -1 where it could not."""
        self.end()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
        given = {str(name): value for name, value in order.environment.items()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.doctor.check.selftest"],
            env={"OMP_NUM_THREADS": "1", **environment, **given, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.PIPE, stdout=self._output, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(order.spec.json()).encode() + b"\n")
            self._process.stdin.flush()
        return {"port": self._port() if order.spec.serve else 0}

    def results(self, order: AwaitRanks) -> dict[str, Any]:
        """What they said, when all have, or at the bound: `lines`, one object each; `ended`, the exit code; `errors`,
        the end of what was printed besides. They are ended then."""
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(waits.WaitTimeout):
                code = waits.process(
                    self._process, whom="self-test", why="its results", timeout_s=order.bound_s, notice_after_s=None
                )
        answer = {"lines": self._lines(), "ended": code, "errors": _end_of(self._errors)}
        self.end()
        return answer

    def end(self) -> None:
        """Kills what is left of them. Idempotent."""
        process, self._process = self._process, None
        files, self._output, self._errors = (self._output, self._errors), None, None
        if process is not None:
            self._kill(process)
        for file in files:
            if file is not None:
                file.close()

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        with contextlib.suppress(waits.WaitTimeout):
            waits.process(process, whom="self-test", why="it is killed", timeout_s=5.0, notice_after_s=None)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _port(self) -> int:
        def told() -> int | None:
            for line in self._lines():
                if "port" in line:
                    return int(line["port"])
            return -1 if self._process is None or self._process.poll() is not None else None

        try:
            return waits.poll(
                told, kind="rendezvous", whom="self-test", why="the port of its store", timeout_s=_STARTED_S,
                notice_after_s=None,
            )  # fmt: skip
        except waits.WaitTimeout:
            return -1

    def _lines(self) -> list[dict[str, Any]]:
        found = []
        for raw in _all_of(self._output).splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(raw)
                if isinstance(line, dict):
                    found.append(line)
        return found


def _all_of(file: IO[bytes] | None) -> bytes:
    """Without moving the place at which the process writes, which is shared."""
    return b"" if file is None else os.pread(file.fileno(), _OUTPUT, 0)


def _end_of(file: IO[bytes] | None) -> str:
    return _all_of(file)[-_WORDS:].decode(errors="replace")
