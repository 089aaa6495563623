"""The node agent: a process per node that is the parent of the workers (`python -m lockstep.watch.agent.node_agent`).

It spawns and kills workers and reports their ends. It watches the controller by pid, start time and connection
(`service_discovery.ControllerLiveness`). `orphan_grace_s` after the controller has ended, the agent terminates all
workers (SIGTERM, then SIGKILL), removes the run's beacons, and exits. If the agent itself is killed, the kernel kills
the workers.

The agent has one thread and one selector. It exchanges JSON frames over `base.transport`:

    {"id", "op": "attach", "pid", "start", "place", "patience_s", "after"}   from a controller: `place` is its pid
                                             namespace; events after number `after` are repeated; the controller may be
                                             disconnected for `patience_s`
    {"id", "op": "spawn", "name", "argv", "env", "token", "log", "cwd", "preload", "note"} -> {"pid", ...}
    {"id", "op": "take_over", "orphan_grace_s"} -> {}   a later controller takes over the workers
    {"id", "op": "lead", "leader"} -> {}     shows the workers the run's controller, which is on another host
    {"id", "op": "call_relay", "address"} -> {}     shows the workers where their call relay listens, if there is one
    {"id", "op": "list"} -> {"workers": [...]}     {"id", "op": "kill", "name", "signal"} -> {"alive"}
    {"id", "op": "expect_end", "name"} -> {}     the controller is about to end this worker in another way
    {"id", "op": "ping"} -> {"used_s"}     CPU time of the workers, for controllers on other hosts
    {"id", "op": "leave", "grace_s"} -> {}, when all workers have ended
    <- {"reply": id, ...} or {"reply": id, "error": why}
    <- {"event": n, "kind": "exit", "name", "pid", "exit_code", "at", "log_tail"}

A `note` is opaque to the agent, which writes it to its folder as `NAME.json` before the worker starts; `list` returns
it. A request that is repeated with the same id after a reconnect is carried out once. The requests of supervisors are
described in `monitoring_service`.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import selectors
import shutil
import signal
import socket
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base.folders import run_shm_dir, write_atomically
from lockstep.base.limits import raise_descriptor_limit
from lockstep.base.network import PortRange
from lockstep.base.transport.auth_handshake import Listener
from lockstep.base.transport.frames import Connection, ConnectionClosed, WireError
from lockstep.base.transport.run_token import TOKEN_VARIABLE, take_token
from lockstep.watch.agent.fork_server import become_subreaper
from lockstep.watch.agent.monitoring_service import MonitoringService
from lockstep.watch.agent.prepared_agent import PreparedForkServer
from lockstep.watch.agent.service_discovery import ControllerLiveness, Leader, ServiceAddress, Superseded
from lockstep.watch.agent.worker_spawner import SpawnRequest, WorkerProcess, WorkerSpawner
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon
from lockstep.watch.procfs import processes

log = logging.getLogger("lockstep.watch.agent.node_agent")

TICK_S = 0.2
REAP_S = 5.0
"""After SIGKILL, the agent waits this long for its workers (a driver may delay their end), then exits anyway."""
REMEMBERED_REPLIES = 4096
"""The number of replies kept for requests that are repeated."""


@dataclass
class AgentSettings:
    run: str
    generation: int
    token: str
    folder: Path
    """Where `agent.json`, the agent's address, is written."""
    controller: int | None
    """The controller's pid if the controller is on this host."""
    orphan_grace_s: float
    kill_grace_s: float
    host: str = "127.0.0.1"
    node: str = field(default_factory=platform.node)
    """The name of this host in verdicts."""
    ports: PortRange | None = None


@dataclass
class _Shutdown:
    reason: str
    kill_at: float
    end_at: float
    killed: bool = False
    requests: list[tuple[Connection, str]] = field(default_factory=list)


class NodeAgent:
    """The agent's state and main loop."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self._selector = selectors.DefaultSelector()
        self._spawner = WorkerSpawner(self._selector, self._worker_exited)
        address = settings.host, settings.ports
        self._listener = Listener(settings.token, settings.run, settings.generation, "agent", *address, 64 << 20)
        self._connections: dict[Connection, bool] = {}
        """Open connections, and whether each has attached: then it receives events."""
        self._events: list[dict[str, Any]] = []
        self._replies: OrderedDict[str, dict[str, Any] | None] = OrderedDict()
        self._requesters: dict[str, Connection] = {}
        self._controller = ControllerLiveness.expected(settings.controller)
        self._shutdown: _Shutdown | None = None
        self._selector.register(self._listener, selectors.EVENT_READ, lambda mask: self._accept())
        self._wake, wake_end = socket.socketpair()
        self._wake.setblocking(False)
        wake_end.setblocking(False)
        self._wake_end = wake_end
        self._selector.register(self._wake, selectors.EVENT_READ, lambda mask: self._drain_wakeups())
        self._shutdown_reason: str | None = None
        self._monitoring = MonitoringService(
            settings.run, settings.node, self._selector, self._spawner.workers, self._send, self._reply
        )

    def adopt(self, fork_server: PreparedForkServer) -> None:
        """Forks workers with these modules from a fork server that exists already."""
        self._spawner.adopt(fork_server)

    def run(self) -> None:
        """Serves until all workers have ended."""
        become_subreaper()
        self._handle_signals()
        own = open_beacon(self.settings.run, "agent", "agent", 0)
        own.stage("serving")
        path = self.settings.folder / "agent.json"
        generation, host, port = self._listener.highest_generation, self._listener.host, self._listener.port
        ServiceAddress(self.settings.run, generation, host, port, os.getpid()).publish(path)
        try:
            while not self._finished():
                for key, mask in self._selector.select(TICK_S):
                    key.data(mask)
                self._spawner.reap()
                self._tick()
                self._monitoring.tick()
                own.beat()
                own.progress("workers", len(self._spawner.living()))
        finally:
            self._monitoring.close()
            self._spawner.kill_all()
            self._clean_up()

    def _handle_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: object) -> None:
        self._shutdown_reason = "SIGTERM"

    def _clean_up(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(WireError):
                connection.flush()
            connection.close()
        self._listener.close()
        close_beacon(remove=True)
        shutil.rmtree(run_shm_dir(self.settings.run), ignore_errors=True)
        ServiceAddress.remove(self.settings.folder / "agent.json")

    # --- events

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _accept(self) -> None:
        while (connection := self._listener.accept(0)) is not None:
            generation = self._listener.highest_generation
            for older in [each for each in self._connections if each.peer.generation < generation]:
                log.warning("generation %d is superseded", older.peer.generation)
                self._drop(older)
            self._connections[connection] = False
            self._selector.register(connection, selectors.EVENT_READ, self._serving(connection))

    def _serving(self, connection: Connection) -> Any:
        def serve(mask: int) -> None:
            try:
                if mask & selectors.EVENT_WRITE:
                    self._flush(connection)
                while connection in self._connections and (frame := connection.recv(0)) is not None:
                    self._request(connection, bytes(frame))
            except ConnectionClosed:
                self._drop(connection)
            except (WireError, ValueError, KeyError, TypeError) as error:
                log.warning("%s sent an invalid request: %r", connection.peer.name, error, exc_info=True)
                self._drop(connection)

        return serve

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection, None) is not None:
            self._monitoring.disconnected(connection)
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection)
            connection.close()

    def _send(self, connection: Connection, message: dict[str, Any]) -> None:
        if connection in self._connections:
            try:
                connection.queue(json.dumps(message).encode())
                self._flush(connection)
            except WireError:
                self._drop(connection)

    def _flush(self, connection: Connection) -> None:
        """Writes as much as the socket accepts without blocking; the selector signals when the rest can follow."""
        all_written = connection.flush()
        mask = selectors.EVENT_READ if all_written else selectors.EVENT_READ | selectors.EVENT_WRITE
        key = self._selector.get_key(connection)
        if key.events != mask:
            self._selector.modify(connection, mask, key.data)

    def _worker_exited(self, child: WorkerProcess) -> None:
        event = {
            "event": len(self._events) + 1, "kind": "exit", "name": child.name, "pid": child.pid,
            "exit_code": child.exit_code, "at": child.ended_wall, "log_tail": child.log_tail(),
        }  # fmt: skip
        self._events.append(event)
        current_beacon().event("exit", f"{child.name} {child.exit_code}")
        self._monitoring.worker_exited()
        for connection, attached in list(self._connections.items()):
            if attached:
                self._send(connection, event)

    # --- requests

    def _request(self, connection: Connection, frame: bytes) -> None:
        message = json.loads(frame)
        number = str(message["id"])
        self._requesters[number] = connection
        if number in self._replies:  # repeated after a reconnect
            known = self._replies[number]
            if known is not None:
                self._send(connection, known)
            return
        self._replies[number] = None
        while len(self._replies) > REMEMBERED_REPLIES:
            oldest, _ = self._replies.popitem(last=False)
            self._requesters.pop(oldest, None)
        name = str(message["op"])
        operation = getattr(self, f"_op_{name}", None) or self._monitoring.operations.get(name)
        if operation is None:
            self._reply(number, {"error": f"unknown operation {name!r}"})
        else:
            operation(connection, number, message)

    def _reply(self, number: str, content: dict[str, Any]) -> None:
        reply = {"reply": number, **content}
        self._replies[number] = reply
        requester = self._requesters.pop(number, None)
        if requester is not None:
            self._send(requester, reply)

    def _op_attach(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        is_local = message["place"] == processes.pid_namespace()
        pid, start = (message["pid"], message["start"]) if is_local else (None, None)
        self._controller = ControllerLiveness(pid, start, float(message["patience_s"]))
        self._connections[connection] = True
        self._reply(number, {"pid": os.getpid(), "run": self.settings.run})
        for event in self._events[int(message["after"]) :]:
            self._send(connection, event)

    def _op_take_over(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        if self._shutdown is not None:
            self._reply(number, {"error": "the agent is shutting down"})
            return
        log.info("generation %d has taken over the workers", connection.peer.generation)
        self.settings.orphan_grace_s = float(message["orphan_grace_s"])
        self._spawner.cancel_pending(f"generation {connection.peer.generation} has taken over")
        self._reply(number, {})

    def _op_lead(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        try:
            Leader(**message["leader"]).publish(self.settings.run)
        except (Superseded, OSError) as error:
            self._reply(number, {"error": str(error)})
            return
        self._reply(number, {})

    def _op_call_relay(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        ServiceAddress.publish_relay(self.settings.run, message["address"])
        self._reply(number, {})

    def _op_ping(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._reply(number, {"used_s": processes.descendants_cpu_s(os.getpid())})

    def _op_spawn(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        if self._shutdown is not None:
            self._reply(number, {"error": "the agent is shutting down"})
            return
        if message["note"] is not None:
            write_atomically(self.settings.folder / f"{message['name']}.json", str(message["note"]).encode())
        token = {TOKEN_VARIABLE: self.settings.token} if message["token"] else {}  # never sent over the network
        self._spawner.spawn(SpawnRequest(
            name=str(message["name"]), argv=[str(word) for word in message["argv"]], env={**message["env"], **token},
            log=str(message["log"]), cwd=str(message["cwd"]), preload=tuple(message["preload"]), note=message["note"],
            on_started=lambda child: self._reply(number, child.facts()),
            on_refused=lambda why: self._reply(number, {"error": why}),
        ))  # fmt: skip

    def _op_list(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._reply(number, {"workers": [child.facts() for child in self._spawner.workers.values()]})

    def _op_kill(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        name = message["name"]
        if name not in self._spawner.workers:
            self._reply(number, {"error": f"no worker is named {name!r}"})
            return
        self._monitoring.expect_end(name, self._spawner.workers[name].pid)
        self._reply(number, {"alive": self._spawner.send_signal(name, int(message["signal"]))})

    def _op_expect_end(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        if (child := self._spawner.workers.get(message["name"])) is not None:
            self._monitoring.expect_end(child.name, child.pid)
        self._reply(number, {})

    def _op_leave(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._begin_shutdown(f"requested by {connection.peer.name}", float(message["grace_s"]))
        if self._shutdown is not None:
            self._shutdown.requests.append((connection, number))

    # --- the end of the controller, and shutting down

    def _tick(self) -> None:
        if self._shutdown is not None:
            self._continue_shutdown(self._shutdown)
            return
        if self._shutdown_reason is not None:
            self._begin_shutdown(self._shutdown_reason, self.settings.kill_grace_s)
            return
        controller = self._controller
        was_alive, grace_s = controller.missing_since is None, controller.grace_s(self.settings.orphan_grace_s)
        missing_s = controller.missing_s(any(self._connections.values()))
        if missing_s is None:
            return
        if was_alive:
            log.warning("%s is gone: terminating its workers in %.1f s", controller, grace_s)
        if missing_s >= grace_s:
            self._begin_shutdown(f"{controller} is gone", self.settings.kill_grace_s)

    def _begin_shutdown(self, reason: str, grace_s: float) -> None:
        if self._shutdown is not None:
            self._shutdown.kill_at = min(self._shutdown.kill_at, time.monotonic() + grace_s)
            return
        log.info("shutting down: %s", reason)
        current_beacon().stage("shutting down")
        self._monitoring.announce_shutdown(reason)
        kill_at = time.monotonic() + grace_s
        self._shutdown = _Shutdown(reason, kill_at, kill_at + REAP_S)
        self._spawner.terminate()

    def _continue_shutdown(self, shutdown: _Shutdown) -> None:
        if not shutdown.killed and time.monotonic() >= shutdown.kill_at:
            shutdown.killed = True
            left = [child.name for child in self._spawner.living()]
            if left:
                log.warning("killing %s, which did not exit on SIGTERM", ", ".join(left))
            self._spawner.kill_all()

    def _finished(self) -> bool:
        shutdown = self._shutdown
        if shutdown is None or (self._spawner.living() and time.monotonic() < shutdown.end_at):
            return False
        self._spawner.kill_all()
        remaining = [child.name for child in self._spawner.living()]
        if remaining:
            log.error("exiting although %s survived SIGKILL", ", ".join(remaining))
        for connection, number in shutdown.requests:
            self._requesters[number] = connection
            self._reply(number, {"remaining": remaining})
        return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lockstep.watch.agent.node_agent")
    parser.add_argument("--run", required=True)
    parser.add_argument("--generation", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--controller", type=int, help="the controller's pid if it is on this host")
    parser.add_argument("--orphan-grace", type=float, default=0.0)
    parser.add_argument("--kill-grace", type=float, default=2.0, help="between SIGTERM and SIGKILL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--node", default=platform.node(), help="the name of this host in verdicts")
    parser.add_argument("--ports", type=int, nargs=2, help="the first and the last port that may be used")
    parser.add_argument("--fork-server", type=PreparedForkServer.from_json, help="forked from the controller")
    chosen = parser.parse_args()
    try:
        token = take_token("the agent")
    except ValueError as error:
        sys.exit(str(error))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_descriptor_limit()
    settings = AgentSettings(
        chosen.run, chosen.generation, token, chosen.folder, chosen.controller, chosen.orphan_grace,
        chosen.kill_grace, chosen.host, chosen.node, chosen.ports and tuple(chosen.ports),
    )  # fmt: skip
    agent = NodeAgent(settings)
    if chosen.fork_server is not None:
        agent.adopt(chosen.fork_server)
    agent.run()


if __name__ == "__main__":
    main()
