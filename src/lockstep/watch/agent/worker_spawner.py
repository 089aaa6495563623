"""The agent's children: templates that fork workers, and the workers themselves.

Knows nothing of sockets to clients. `WorkerSpawner` is driven by the agent's loop: it registers what it wants to hear
with the loop's selector, and reports through callbacks.
"""

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lockstep.base.text import log_tail
from lockstep.watch.agent.fork_server import can_fork
from lockstep.watch.procfs.processes import start_ticks

log = logging.getLogger(__name__)

_IMPORT_TIME_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "TORCH", "PYTORCH", "HF_",
                "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "CUDA_", "NCCL_", "LOCKSTEP_BEACONS")  # fmt: skip
"""Variables read while modules are imported: workers that differ in them do not share a template."""
_MAX_DEATHS = 3
"""A template that died this often is given up; its workers are started plainly."""


@dataclass
class SpawnRequest:
    """A worker that is wanted, and whom to tell."""

    name: str
    argv: list[str]
    env: dict[str, str]
    log: str
    cwd: str
    preload: tuple[str, ...]
    note: str | None
    """The starter's own; given back with the worker's facts."""
    started: Callable[["WorkerProcess"], None]
    refused: Callable[[str], None]


@dataclass
class WorkerProcess:
    """A worker that was started."""

    name: str
    pid: int
    start_ticks: int
    argv: list[str]
    log: str
    warm: bool
    started_wall: float
    exit_code: int | None = None
    """Minus the number of the signal that ended it."""
    ended_wall: float | None = None
    note: str | None = None

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name, "pid": self.pid, "start_ticks": self.start_ticks, "alive": self.exit_code is None,
            "exit_code": self.exit_code, "argv": self.argv, "log": self.log, "warm": self.warm,
            "started_wall": self.started_wall, "ended_wall": self.ended_wall, "note": self.note,
        }  # fmt: skip

    def said(self) -> str:
        """The end of its log, for those on other hosts."""
        return log_tail(Path(self.log))


@dataclass
class _ForkServer:
    key: tuple[Any, ...]
    preload: tuple[str, ...]
    popen: "subprocess.Popen[bytes]"
    socket: socket.socket
    ready: bool = False
    waiting: deque[SpawnRequest] = field(default_factory=deque)
    forking: SpawnRequest | None = None
    received: bytes = b""


class WorkerSpawner:
    """Starts, watches and kills workers. `exited` is told of each worker's end."""

    def __init__(self, selector: selectors.BaseSelector, exited: Callable[[WorkerProcess], None]) -> None:
        self.children: dict[str, WorkerProcess] = {}
        self._selector = selector
        self._exited = exited
        self._templates: dict[tuple[Any, ...], _ForkServer] = {}
        self._deaths: dict[tuple[Any, ...], int] = {}
        self._strays: dict[int, int] = {}
        """Exit codes of children nobody has named yet: a worker may end before its template reports its pid."""

    def living(self) -> list[WorkerProcess]:
        return [child for child in self.children.values() if child.exit_code is None]

    def busy(self) -> bool:
        return any(template.waiting or template.forking for template in self._templates.values())

    def spawn(self, order: SpawnRequest) -> None:
        """Starts a worker; `order.started` or `order.refused` is called, now or later."""
        under_way = [o.name for t in self._templates.values() for o in (*t.waiting, t.forking) if o is not None]
        child = self.children.get(order.name)
        if order.name in under_way or (child is not None and child.exit_code is None):
            order.refused(f"a worker named {order.name!r} is running already")
            return
        warm = bool(order.preload) and can_fork(order.argv)
        self._dispatch(order, order.preload if warm else ())

    def _dispatch(self, order: SpawnRequest, preload: tuple[str, ...]) -> None:
        key: tuple[Any, ...] = (preload, *self._import_variables(order.env)) if preload else ()
        if preload and self._deaths.get(key, 0) >= _MAX_DEATHS:
            self._dispatch(order, ())
            return
        template = self._templates.get(key)
        if template is None:
            try:
                template = self._start_template(key, preload, order)
            except OSError as error:
                order.refused(f"cannot start a template process: {error}")
                return
        template.waiting.append(order)
        self._next(template)

    @staticmethod
    def _import_variables(env: dict[str, str]) -> Iterator[tuple[str, str]]:
        return ((name, env[name]) for name in sorted(env) if name.startswith(_IMPORT_TIME_PREFIXES))

    def _start_template(self, key: tuple[Any, ...], preload: tuple[str, ...], order: SpawnRequest) -> _ForkServer:
        ours, theirs = socket.socketpair()
        argv = [
            sys.executable, "-m", "lockstep.watch.agent.fork_server", "--socket", str(theirs.fileno()),
            "--agent", str(os.getpid()), "--preload", ",".join(preload),
        ]  # fmt: skip
        # What a process starts with stays readable in its /proc/PID/environ, and in that of all it forks. The token
        # reaches a worker with its order: a user's function then finds it neither there nor in `os.environ`.
        env = {name: value for name, value in order.env.items() if name != "LOCKSTEP_TOKEN"} if preload else None
        try:
            popen = subprocess.Popen(
                argv, env=env, cwd=order.cwd if preload else None,
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        template = self._templates[key] = _ForkServer(key, preload, popen, ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda mask: self._hear(template))
        log.info("template %d for %s", popen.pid, ", ".join(preload) or "plain starts")
        return template

    def _next(self, template: _ForkServer) -> None:
        """Hands the template its next order; one at a time, so that a message fits its socket's buffer."""
        if not template.ready or template.forking is not None or not template.waiting:
            return
        order = template.forking = template.waiting.popleft()
        message = {
            "name": order.name, "argv": order.argv, "env": order.env, "log": order.log, "cwd": order.cwd,
            "warm": bool(template.preload),
        }  # fmt: skip
        data = json.dumps(message).encode() + b"\n"
        try:
            template.socket.settimeout(5.0)
            template.socket.sendall(data)
            template.socket.setblocking(False)
        except OSError:
            self._bury(template)

    def _hear(self, template: _ForkServer) -> None:
        try:
            data = template.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._bury(template)
            return
        template.received += data
        while b"\n" in template.received and self._templates.get(template.key) is template:
            line, template.received = template.received.split(b"\n", 1)
            self._understand(template, json.loads(line))

    def _understand(self, template: _ForkServer, message: dict[str, Any]) -> None:
        if "failed" in message:
            log.warning("cannot preload %s; its workers start plainly:\n%s", template.preload, message["failed"])
            self._deaths[template.key] = _MAX_DEATHS
            self._bury(template)
            return
        if "ready" in message:
            template.ready = True
        order, template.forking = template.forking, None
        if order is not None and "pid" in message:
            self._welcome(order, message["pid"], warm=bool(template.preload))
        elif order is not None and template.preload:
            log.warning("%s starts plainly: %s", order.name, message["error"])
            self._dispatch(order, ())
        elif order is not None:
            order.refused(message["error"])
        if not self.busy():
            self._strays.clear()
        self._next(template)

    def _welcome(self, order: SpawnRequest, pid: int, warm: bool) -> None:
        child = WorkerProcess(
            order.name, pid, start_ticks(pid) or 0, order.argv, order.log, warm, time.time(), note=order.note
        )
        self.children[order.name] = child
        order.started(child)
        if pid in self._strays:
            self._end(child, self._strays.pop(pid))

    def _bury(self, template: _ForkServer) -> None:
        """A template is gone (or is to go): its orders are given to a new one, or to a plain start."""
        if self._templates.get(template.key) is not template:
            return
        del self._templates[template.key]
        self._deaths[template.key] = self._deaths.get(template.key, 0) + 1
        self._selector.unregister(template.socket)
        template.socket.close()
        if template.popen.returncode is None:
            template.popen.kill()
        orders = [order for order in (template.forking, *template.waiting) if order is not None]
        if template.forking is not None:
            self._kill_unreported(template, template.forking)
        for order in orders:
            if template.preload:
                self._dispatch(order, template.preload)
            elif self._deaths[template.key] < _MAX_DEATHS:
                self._dispatch(order, ())
            else:
                order.refused("the process that starts workers died again and again; see the agent's log")

    def _kill_unreported(self, template: _ForkServer, order: SpawnRequest) -> None:
        """The template may have died between forking a worker and saying so: that worker must not run twice."""
        known = {child.pid for child in self.living()} | {t.popen.pid for t in (template, *self._templates.values())}
        for process in psutil.Process().children():
            try:
                ours = process.pid not in known and process.cmdline() in (template.popen.args, order.argv)
            except psutil.Error:
                continue
            if ours:
                process.kill()

    def reap(self) -> None:
        """Collects every child that ended. Call it on SIGCHLD."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            child = next((child for child in self.living() if child.pid == pid), None)
            if child is not None:  # while the zombie keeps the group's number taken: no straggler survives its worker
                _signal_group(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            template = next((t for t in self._templates.values() if t.popen.pid == pid), None)
            if child is not None:
                self._end(child, code)
            elif template is not None:
                template.popen.returncode = code
                log.warning("template %d ended with %d", pid, code)
                self._hear(template)  # what it said last counts
                self._bury(template)
            elif self.busy():
                self._strays[pid] = code

    def _end(self, child: WorkerProcess, code: int) -> None:
        child.exit_code, child.ended_wall = code, time.time()
        log.info("worker %s (%d) ended with %d", child.name, child.pid, code)
        self._exited(child)

    def kill(self, name: str, number: int) -> bool:
        """Sends a signal to a worker; whether it was alive."""
        child = self.children.get(name)
        if child is None or child.exit_code is not None:
            return False
        os.kill(child.pid, number)  # it is our child and not reaped: the pid is still its own
        return True

    def withdraw(self, why: str) -> None:
        """Orders that are not carried out yet are not wanted any more."""
        for template in list(self._templates.values()):
            orders = [order for order in (template.forking, *template.waiting) if order is not None]
            template.waiting.clear()
            if template.forking is not None:  # its worker is nobody's: it may not take the name of another
                template.forking = None
                self._bury(template)
            for order in orders:
                order.refused(why)

    def terminate(self) -> None:
        """Asks all workers to leave and starts no more."""
        self.withdraw("the agent is leaving")
        for template in list(self._templates.values()):
            self._bury(template)
        for child in self.living():
            _signal_group(child.pid, signal.SIGTERM)

    def kill_all(self) -> int:
        """SIGKILL to every descendant, whatever it made of itself; how many there were."""
        descendants = psutil.Process().children(recursive=True)
        for process in descendants:
            try:
                process.kill()
            except psutil.Error:
                continue
        return len(descendants)


def _signal_group(pid: int, number: int) -> None:
    for send in (os.killpg, os.kill):  # the group does not exist yet right after the fork
        try:
            send(pid, number)
        except ProcessLookupError:
            continue
        return
