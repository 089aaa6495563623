"""The ranks of the self-test on one host, as its probe starts and ends them: one process that imports torch once and
forks the ranks."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lockstep.watch import waits

ALLOWED = ("NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES")
"""Beginnings of the variables that a head may set for ranks; nothing else of what it sends reaches a process."""
_STARTED_S = 60.0
_WORDS = 2000


class Ranks:
    """At most one process at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._output = self._errors = Path()

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """`start` them, take their `results`, or `end` them.

        Returns:
            Of `start`: `port` of the store where this host serves it. Of `results`: `lines`, what the ranks said, one
            object each; `ended`, the exit code; `errors`, the end of what was printed besides.
        """
        what = order.get("what")
        if what == "start":
            return self._start(order)
        if what == "results":
            return self._results(float(order["bound_s"]))
        self.end()
        return {}

    def end(self) -> None:
        """Kills what is left of them. Idempotent."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None:
            self._kill(process)
        if folder is not None:
            folder.cleanup()

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        with contextlib.suppress(waits.WaitTimeout):
            waits.process(process, whom="self-test", why="it is killed", timeout_s=5.0, notice_after_s=None)

    def _start(self, order: dict[str, Any]) -> dict[str, Any]:
        self.end()
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-check-")
        self._output, self._errors = Path(self._folder.name, "output"), Path(self._folder.name, "errors")
        given = {str(k): str(v) for k, v in order["environment"].items() if str(k).startswith(ALLOWED)}
        environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep.doctor.check.selftest"],
                env={"OMP_NUM_THREADS": "1", **environment, **given, "TORCH_CPP_LOG_LEVEL": "ERROR"},
                stdin=subprocess.PIPE, stdout=output, stderr=errors, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as given_to_it:
            given_to_it.write(json.dumps(order["spec"]).encode())
        return {"port": self._port() if order["spec"].get("serve") else 0}

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

    def _results(self, bound_s: float) -> dict[str, Any]:
        until = time.monotonic() + bound_s
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(waits.WaitTimeout):
                left = max(0.0, until - time.monotonic())
                code = waits.process(
                    self._process, whom="self-test", why="its results", timeout_s=left, notice_after_s=None
                )
        if self._folder is None:
            return {"lines": [], "ended": code, "errors": ""}
        lines = self._lines()
        errors = self._errors.read_bytes()[-_WORDS:].decode(errors="replace")
        self.end()
        return {"lines": lines, "ended": code, "errors": errors}

    def _lines(self) -> list[dict[str, Any]]:
        found = []
        for raw in self._output.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(raw)
                if isinstance(line, dict):
                    found.append(line)
        return found
