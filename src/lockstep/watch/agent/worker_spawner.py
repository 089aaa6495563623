"""The agent's children: fork servers, and the workers they fork.

`WorkerSpawner` knows no clients. The agent's loop drives it: it registers its sockets with the loop's selector, and
reports through callbacks.
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

_IMPORT_TIME_PREFIXES = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "TORCH", "PYTORCH", "HF_",
    "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "CUDA_", "NCCL_", "LOCKSTEP_BEACONS",
)  # fmt: skip
"""Variables read while modules are imported: workers that differ in them do not share a fork server."""
_MAX_DEATHS = 3
"""A fork server that died this often is given up; its workers start without one."""


@dataclass
class SpawnRequest:
    """A request for a worker, with callbacks for the outcome."""

    name: str
    argv: list[str]
    env: dict[str, str]
    log: str
    cwd: str
    preload: tuple[str, ...]
    note: str | None
    """Opaque to the agent; returned with the worker's facts."""
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

    def log_tail(self) -> str:
        """The end of its log, for controllers on other hosts."""
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
    """Starts, watches and kills workers. `exited` is called at each worker's end."""

    def __init__(self, selector: selectors.BaseSelector, exited: Callable[[WorkerProcess], None]) -> None:
        self.children: dict[str, WorkerProcess] = {}
        self._selector = selector
        self._exited = exited
        self._templates: dict[tuple[Any, ...], _ForkServer] = {}
        self._deaths: dict[tuple[Any, ...], int] = {}
        self._unnamed_exits: dict[int, int] = {}
        """Exit codes of children without a name yet: a worker may end before its fork server reports its pid."""

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
                order.refused(f"cannot start a fork server: {error}")
                return
        template.waiting.append(order)
        self._next(template)

    @staticmethod
    def _import_variables(env: dict[str, str]) -> Iterator[tuple[str, str]]:
        return ((name, env[name]) for name in sorted(env) if name.startswith(_IMPORT_TIME_PREFIXES))

    def _start_template(self, key: tuple[Any, ...], preload: tuple[str, ...], order: SpawnRequest) -> _ForkServer:
        own_end, its_end = socket.socketpair()
        argv = [
            sys.executable, "-m", "lockstep.watch.agent.fork_server", "--socket", str(its_end.fileno()),
            "--agent", str(os.getpid()), "--preload", ",".join(preload),
        ]  # fmt: skip
        # What a process starts with stays readable in its /proc/PID/environ, and in that of all it forks. The token
        # reaches a worker with its request: a user's function then finds it neither there nor in `os.environ`.
        env = {name: value for name, value in order.env.items() if name != "LOCKSTEP_TOKEN"} if preload else None
        try:
            popen = subprocess.Popen(
                argv, env=env, cwd=order.cwd if preload else None,
                stdin=subprocess.DEVNULL, pass_fds=[its_end.fileno()], start_new_session=True,
            )  # fmt: skip
        except OSError:
            own_end.close()
            raise
        finally:
            its_end.close()
        own_end.setblocking(False)
        template = self._templates[key] = _ForkServer(key, preload, popen, own_end)
        self._selector.register(own_end, selectors.EVENT_READ, lambda mask: self._receive(template))
        log.info("fork server %d for %s", popen.pid, ", ".join(preload) or "workers without preloads")
        return template

    def _next(self, template: _ForkServer) -> None:
        """Sends the fork server its next request; one at a time, so that a message fits its socket's buffer."""
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
            self._discard(template)

    def _receive(self, template: _ForkServer) -> None:
        try:
            data = template.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._discard(template)
            return
        template.received += data
        while b"\n" in template.received and self._templates.get(template.key) is template:
            line, template.received = template.received.split(b"\n", 1)
            self._handle_message(template, json.loads(line))

    def _handle_message(self, template: _ForkServer, message: dict[str, Any]) -> None:
        if "failed" in message:
            log.warning(
                "cannot preload %s; its workers start without a fork server:\n%s", template.preload, message["failed"]
            )
            self._deaths[template.key] = _MAX_DEATHS
            self._discard(template)
            return
        if "ready" in message:
            template.ready = True
        order, template.forking = template.forking, None
        if order is not None and "pid" in message:
            self._register(order, message["pid"], warm=bool(template.preload))
        elif order is not None and template.preload:
            log.warning("%s starts without a fork server: %s", order.name, message["error"])
            self._dispatch(order, ())
        elif order is not None:
            order.refused(message["error"])
        if not self.busy():
            self._unnamed_exits.clear()
        self._next(template)

    def _register(self, order: SpawnRequest, pid: int, warm: bool) -> None:
        child = WorkerProcess(
            order.name, pid, start_ticks(pid) or 0, order.argv, order.log, warm, time.time(), note=order.note
        )
        self.children[order.name] = child
        order.started(child)
        if pid in self._unnamed_exits:
            self._end(child, self._unnamed_exits.pop(pid))

    def _discard(self, template: _ForkServer) -> None:
        """Discards a fork server that ended or must end: a new one gets its requests, or the workers start without
        one."""
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
                order.refused("the process that starts workers died repeatedly; see the agent's log")

    def _kill_unreported(self, template: _ForkServer, order: SpawnRequest) -> None:
        """The fork server may have died between forking a worker and reporting it: that worker must not run twice."""
        known = {child.pid for child in self.living()} | {t.popen.pid for t in (template, *self._templates.values())}
        for process in psutil.Process().children():
            try:
                is_worker = process.pid not in known and process.cmdline() in (template.popen.args, order.argv)
            except psutil.Error:
                continue
            if is_worker:
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
            if child is not None:  # while the zombie keeps the group's number taken: no descendant survives its worker
                _signal_group(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            template = next((t for t in self._templates.values() if t.popen.pid == pid), None)
            if child is not None:
                self._end(child, code)
            elif template is not None:
                template.popen.returncode = code
                log.warning("fork server %d ended with %d", pid, code)
                self._receive(template)  # its last messages count
                self._discard(template)
            elif self.busy():
                self._unnamed_exits[pid] = code

    def _end(self, child: WorkerProcess, code: int) -> None:
        child.exit_code, child.ended_wall = code, time.time()
        log.info("worker %s (%d) ended with %d", child.name, child.pid, code)
        self._exited(child)

    def kill(self, name: str, number: int) -> bool:
        """Sends a signal to a worker; whether it was alive."""
        child = self.children.get(name)
        if child is None or child.exit_code is not None:
            return False
        os.kill(child.pid, number)  # a child that is not reaped keeps its pid
        return True

    def withdraw(self, why: str) -> None:
        """Cancels all pending requests."""
        for template in list(self._templates.values()):
            orders = [order for order in (template.forking, *template.waiting) if order is not None]
            template.waiting.clear()
            if template.forking is not None:  # its worker would have no owner, and must not take a name
                template.forking = None
                self._discard(template)
            for order in orders:
                order.refused(why)

    def terminate(self) -> None:
        """Asks all workers to exit and starts no more."""
        self.withdraw("the agent is leaving")
        for template in list(self._templates.values()):
            self._discard(template)
        for child in self.living():
            _signal_group(child.pid, signal.SIGTERM)

    def kill_all(self) -> int:
        """Sends SIGKILL to every descendant; returns how many there were."""
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
