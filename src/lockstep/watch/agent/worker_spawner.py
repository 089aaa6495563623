"""The agent's children: fork servers, and the workers they fork.

The agent's loop drives `WorkerSpawner`, which registers its sockets with the loop's selector and reports through
callbacks.
"""

import contextlib
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lockstep.base.text import log_tail
from lockstep.base.transport.run_token import TOKEN_VARIABLE
from lockstep.watch.agent.fork_server import can_fork
from lockstep.watch.agent.prepared_agent import PreparedForkServer, import_time_variables
from lockstep.watch.procfs.processes import start_ticks

log = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""After this many failures of a fork server, its workers start without preloaded modules."""


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
    on_started: Callable[["WorkerProcess"], None]
    on_refused: Callable[[str], None]


@dataclass
class WorkerProcess:
    """A worker of this agent, running or ended."""

    name: str
    pid: int
    start_ticks: int
    argv: list[str]
    log: str
    preloaded: bool
    """Whether the worker was forked from a fork server with preloaded modules."""
    started_wall: float
    exit_code: int | None = None
    """Minus the signal's number if a signal ended the worker; None while it runs."""
    ended_wall: float | None = None
    note: str | None = None

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name, "pid": self.pid, "start_ticks": self.start_ticks, "alive": self.exit_code is None,
            "exit_code": self.exit_code, "argv": self.argv, "log": self.log, "warm": self.preloaded,
            "started_wall": self.started_wall, "ended_wall": self.ended_wall, "note": self.note,
        }  # fmt: skip

    def log_tail(self) -> str:
        """The end of the worker's log, for controllers on other hosts."""
        return log_tail(Path(self.log))


class _AdoptedProcess:
    """A child that another program started before this process executed the agent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.args: list[str] = []
        with contextlib.suppress(psutil.Error):  # it has ended, which the next look at the children finds out
            self.args = psutil.Process(pid).cmdline()

    def kill(self) -> None:
        """Kills the process, which is not waited for yet, so that its pid is its own."""
        os.kill(self.pid, signal.SIGKILL)


@dataclass
class _ForkServer:
    """A fork server and its requests. See `lockstep.watch.agent.fork_server` for the messages."""

    key: tuple[Any, ...]
    """The modules to preload, and the variables that affect their import; empty for the fork server without preloaded
    modules, whose workers may have any variables."""
    preload: tuple[str, ...]
    process: "subprocess.Popen[bytes] | _AdoptedProcess"
    socket: socket.socket
    ready: bool = False
    waiting: deque[SpawnRequest] = field(default_factory=deque)
    forking: SpawnRequest | None = None
    """The request that was sent and is not answered yet."""
    received: bytes = b""

    def unfinished(self) -> list[SpawnRequest]:
        """Requests that have not been answered."""
        return [request for request in (self.forking, *self.waiting) if request is not None]


class WorkerSpawner:
    """Starts, watches and kills workers. `on_exit` is called when a worker has ended."""

    def __init__(self, selector: selectors.BaseSelector, on_exit: Callable[[WorkerProcess], None]) -> None:
        self.workers: dict[str, WorkerProcess] = {}
        self._selector = selector
        self._on_exit = on_exit
        self._servers: dict[tuple[Any, ...], _ForkServer] = {}
        self._failures: dict[tuple[Any, ...], int] = {}
        """How often fork servers have failed, by their key."""
        self._unreported_exits: dict[int, int] = {}
        """Exit codes by pid of workers that ended before their fork server reported them."""

    def living(self) -> list[WorkerProcess]:
        """The workers that have not ended."""
        return [child for child in self.workers.values() if child.exit_code is None]

    def busy(self) -> bool:
        """Whether a worker is being started."""
        return any(server.waiting or server.forking for server in self._servers.values())

    def spawn(self, request: SpawnRequest) -> None:
        """Starts a worker; calls `request.on_started` or `request.on_refused`, now or later."""
        pending = [each.name for server in self._servers.values() for each in server.unfinished()]
        child = self.workers.get(request.name)
        if request.name in pending or (child is not None and child.exit_code is None):
            request.on_refused(f"a worker named {request.name!r} is running already")
            return
        self._dispatch(request, request.preload if can_fork(request.argv) else ())

    def _dispatch(self, request: SpawnRequest, preload: tuple[str, ...]) -> None:
        key: tuple[Any, ...] = (preload, *import_time_variables(request.env)) if preload else ()
        if preload and self._failures.get(key, 0) >= _MAX_FAILURES:
            self._dispatch(request, ())
            return
        server = self._servers.get(key)
        if server is None:
            try:
                server = self._start_fork_server(key, preload, request)
            except OSError as error:
                request.on_refused(f"cannot start a fork server: {error}")
                return
        server.waiting.append(request)
        self._send_next(server)

    def adopt(self, prepared: PreparedForkServer) -> None:
        """Takes over a fork server that was forked from the controller, a child of this process."""
        own_end = socket.socket(fileno=prepared.descriptor)
        own_end.set_inheritable(False)
        key = (prepared.preload, *prepared.variables)
        self._add(_ForkServer(key, prepared.preload, _AdoptedProcess(prepared.pid), own_end))

    def _start_fork_server(self, key: tuple[Any, ...], preload: tuple[str, ...], request: SpawnRequest) -> _ForkServer:
        own_end, its_end = socket.socketpair()
        argv = [
            sys.executable, "-P", "-m", "lockstep.watch.agent.fork_server",
            "--socket", str(its_end.fileno()), "--agent", str(os.getpid()), "--preload", ",".join(preload),
        ]  # fmt: skip
        # Users' functions can read /proc/PID/environ, which shows the environment that a process was started with. So
        # the token is not in it; it reaches the worker with its request. The fork server without preloaded modules
        # serves workers of any environment, so it inherits the agent's.
        env = {name: value for name, value in request.env.items() if name != TOKEN_VARIABLE} if preload else None
        try:
            popen = subprocess.Popen(
                argv, env=env, cwd=request.cwd if preload else None,
                stdin=subprocess.DEVNULL, pass_fds=[its_end.fileno()], start_new_session=True,
            )  # fmt: skip
        except OSError:
            own_end.close()
            raise
        finally:
            its_end.close()
        return self._add(_ForkServer(key, preload, popen, own_end))

    def _add(self, server: _ForkServer) -> _ForkServer:
        self._servers[server.key] = server
        server.socket.setblocking(False)
        self._selector.register(server.socket, selectors.EVENT_READ, lambda mask: self._receive(server))
        log.info("fork server %d for %s", server.process.pid, ", ".join(server.preload) or "workers without preloads")
        return server

    def _send_next(self, server: _ForkServer) -> None:
        """Sends the fork server its next request: one at a time, so that the message fits the socket's buffer."""
        if not server.ready or server.forking is not None or not server.waiting:
            return
        request = server.forking = server.waiting.popleft()
        message = {
            "name": request.name, "argv": request.argv, "env": request.env, "log": request.log, "cwd": request.cwd,
            "warm": bool(server.preload),
        }  # fmt: skip
        data = json.dumps(message).encode() + b"\n"
        try:
            server.socket.settimeout(5.0)
            server.socket.sendall(data)
            server.socket.setblocking(False)
        except OSError:
            self._discard(server)

    def _receive(self, server: _ForkServer) -> None:
        try:
            data = server.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._discard(server)
            return
        server.received += data
        while b"\n" in server.received and self._servers.get(server.key) is server:
            line, server.received = server.received.split(b"\n", 1)
            self._handle_message(server, json.loads(line))

    def _handle_message(self, server: _ForkServer, message: dict[str, Any]) -> None:
        if "failed" in message:
            log.warning(
                "cannot preload %s; workers start without preloaded modules:\n%s", server.preload, message["failed"]
            )
            self._failures[server.key] = _MAX_FAILURES
            self._discard(server)
            return
        if "ready" in message:
            server.ready = True
        request, server.forking = server.forking, None
        if request is not None and "pid" in message:
            self._register(request, message["pid"], preloaded=bool(server.preload))
        elif request is not None and server.preload:
            log.warning("%s starts without preloaded modules: %s", request.name, message["error"])
            self._dispatch(request, ())
        elif request is not None:
            request.on_refused(message["error"])
        if not self.busy():  # no worker is pending, so these exits belong to none
            self._unreported_exits.clear()
        self._send_next(server)

    def _register(self, request: SpawnRequest, pid: int, preloaded: bool) -> None:
        child = WorkerProcess(
            request.name,
            pid,
            start_ticks(pid) or 0,
            request.argv,
            request.log,
            preloaded,
            time.time(),
            note=request.note,
        )
        self.workers[request.name] = child
        request.on_started(child)
        if pid in self._unreported_exits:
            self._end(child, self._unreported_exits.pop(pid))

    def _discard(self, server: _ForkServer, failed: bool = True) -> None:
        """Discards a fork server that ended or must end, and starts its pending workers with a new fork
        server with the same modules or, after too many failures, the one without preloaded modules."""
        if self._servers.get(server.key) is not server:
            return
        del self._servers[server.key]
        self._failures[server.key] = self._failures.get(server.key, 0) + failed
        self._selector.unregister(server.socket)
        server.socket.close()
        if server.process.returncode is None:
            server.process.kill()
        requests = server.unfinished()
        if server.forking is not None:
            self._kill_unreported(server, server.forking)
        for request in requests:
            if server.preload:
                self._dispatch(request, server.preload)
            elif self._failures[server.key] < _MAX_FAILURES:
                self._dispatch(request, ())
            else:
                request.on_refused("the fork server died repeatedly; see the agent's log")

    def _kill_unreported(self, server: _ForkServer, request: SpawnRequest) -> None:
        """Kills a worker that the fork server may have forked but not reported before it died, so that the worker does
        not run twice."""
        known = {child.pid for child in self.living()} | {
            each.process.pid for each in (server, *self._servers.values())
        }
        for process in psutil.Process().children():
            try:
                # The worker has the fork server's command line until it has taken its own.
                is_worker = process.pid not in known and process.cmdline() in (server.process.args, request.argv)
            except psutil.Error:
                continue
            if is_worker:
                process.kill()

    def reap(self) -> None:
        """Collects the exit codes of all children that ended. Call it on SIGCHLD."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            child = next((child for child in self.living() if child.pid == pid), None)
            if child is not None:  # no descendant may survive; the uncollected zombie keeps its group id from reuse
                _signal_group(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            server = next((each for each in self._servers.values() if each.process.pid == pid), None)
            if child is not None:
                self._end(child, code)
            elif server is not None:
                server.process.returncode = code
                log.warning("fork server %d ended with %d", pid, code)
                self._receive(server)  # messages that it sent before its end
                self._discard(server)
            elif self.busy():
                self._unreported_exits[pid] = code

    def _end(self, child: WorkerProcess, code: int) -> None:
        child.exit_code, child.ended_wall = code, time.time()
        log.info("worker %s (%d) ended with %d", child.name, child.pid, code)
        self._on_exit(child)

    def send_signal(self, name: str, signum: int) -> bool:
        """Sends a signal to a worker. Returns whether the worker was alive."""
        child = self.workers.get(name)
        if child is None or child.exit_code is not None:
            return False
        os.kill(child.pid, signum)  # a child that is not reaped keeps its pid
        return True

    def cancel_pending(self, why: str) -> None:
        """Refuses all pending requests."""
        for server in list(self._servers.values()):
            requests = server.unfinished()
            server.waiting.clear()
            if server.forking is not None:  # discard the server, so that its worker does not start without an owner
                server.forking = None
                self._discard(server, failed=False)
            for request in requests:
                request.on_refused(why)

    def terminate(self) -> None:
        """Sends SIGTERM to all workers, and stops starting new ones."""
        self.cancel_pending("the agent is shutting down")
        for server in list(self._servers.values()):
            self._discard(server, failed=False)
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


def _signal_group(pid: int, signum: int) -> None:
    for send in (os.killpg, os.kill):  # the group does not exist yet right after the fork
        try:
            send(pid, signum)
        except ProcessLookupError:
            continue
        return
