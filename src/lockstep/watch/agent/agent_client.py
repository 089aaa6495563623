"""Starts node agents, and sends a controller's requests to them."""

import builtins
import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.base import waits
from lockstep.base.errors import PicklableError
from lockstep.base.folders import make_folder, open_file
from lockstep.base.network import PortRange
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, HandshakeRefused, WireError
from lockstep.base.transport.run_token import TOKEN_VARIABLE
from lockstep.watch.agent.prepared_agent import PreparedAgent
from lockstep.watch.agent.service_discovery import AGENT_MODULE, Leader, PeerHeartbeat, ServiceAddress
from lockstep.watch.procfs import processes

log = logging.getLogger(__name__)


class AgentError(PicklableError, RuntimeError):
    """The agent refused a request (`why`), or has ended."""

    error_code = "agent"

    def __init__(self, operation: str, why: str) -> None:
        super().__init__(f"{operation}: {why}")
        self.operation, self.why = operation, why


class AgentGone(AgentError):
    """The agent has ended, and its workers with it."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The end of a worker. `exit_code` is minus the signal's number if a signal ended the worker."""

    number: int
    name: str
    pid: int
    exit_code: int
    at: float
    log_tail: str = ""
    """The end of the worker's log."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What an agent knows about a worker."""

    name: str
    pid: int
    start_ticks: int
    alive: bool
    exit_code: int | None
    argv: list[str]
    log: str
    warm: bool
    started_wall: float
    ended_wall: float | None
    note: str | None
    """The note that the controller gave when it started the worker."""


class AgentClient:
    """Sends requests to an agent and receives its events. Thread-safe. Reconnects while the agent is alive, and then
    repeats unanswered requests; the agent carries out each request once.

    Args:
        on_exit: called in the client's thread once for every worker that ends; must be quick, and may be set later.
        after: the number of the last event that is known already.
        lost_after_s: for an agent on another host: counts as ended once it has been silent for this long.
    """

    def __init__(
        self, address: ServiceAddress, token: str, *, generation: int | None = None, name: str = "controller",
        on_exit: Callable[[WorkerExit], None] | None = None, after: int = 0, timeout_s: float = 20.0,
        lost_after_s: float | None = None,
    ) -> None:  # fmt: skip
        self.address = address
        self.generation = address.generation if generation is None else generation
        self._token, self._name, self.on_exit, self._timeout_s = token, name, on_exit, timeout_s
        self._heartbeat = None if lost_after_s is None else PeerHeartbeat(lost_after_s)
        self._lock = threading.Lock()
        self._prefix, self._count = secrets.token_hex(6), 0
        self._requests: dict[str, tuple[bytes, str, Future[dict[str, Any]]]] = {}
        self._exits: dict[str, WorkerExit] = {}
        self._last_event = after
        self.workers_cpu_s = 0.0
        """CPU time of the workers of an agent on another host, as of the agent's last answer."""
        self._closed = False
        self.superseded = False
        """Whether the agent has refused this controller because a later one has taken over the run."""
        self._gone: AgentGone | None = None
        self._connection = self._connect(timeout_s)
        self._thread = threading.Thread(target=self._listen, name="agent-client", daemon=True)
        self._thread.start()

    def spawn(
        self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None,
        cwd: Path | None = None, preload: Sequence[str] = (), timeout_s: float = 120.0,
    ) -> int:  # fmt: skip
        """Starts a worker and returns its pid; see `submit_spawn`. Raises AgentError."""
        pending = self.submit_spawn(name, argv, log_path=log_path, env=env, cwd=cwd, preload=preload)
        return waits.future(pending, waits_for="agent", why=f"start of {name}", timeout_s=timeout_s)

    def submit_spawn(
        self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None,
        cwd: Path | None = None, preload: Sequence[str] = (), note: str | None = None, trusted: bool = False,
    ) -> "Future[int]":  # fmt: skip
        """Requests the start of a worker, and returns a future of its pid.

        Args:
            name: a name that no running worker has.
            env: the whole environment of the worker; None: that of this process.
            preload: modules that a fork server imports before it forks the worker, which runs
                `[sys.executable, "-m", module, ...]`. Where a fork is impossible, the worker starts as a new process.
            note: the agent writes this text to its folder as `NAME.json`.
            trusted: the agent adds the run's token to the environment; the token itself is not sent.
        """
        pid: Future[int] = Future()
        reply = self._submit(
            "spawn", name=name, argv=list(argv), env=dict(os.environ if env is None else env), token=trusted,
            log=str(log_path.absolute()), cwd=str((cwd or Path.cwd()).absolute()), preload=list(preload), note=note,
        )  # fmt: skip

        def answered(done: "Future[dict[str, Any]]") -> None:
            error = done.exception()
            if error is not None:
                pid.set_exception(error)
            else:
                pid.set_result(int(done.result()["pid"]))

        reply.add_done_callback(answered)
        return pid

    def take_over(self, orphan_grace_s: float) -> None:
        """Takes over the workers of the previous controller. They outlive this controller by `orphan_grace_s`.
        Raises AgentError if the agent is shutting down because the previous grace is over."""
        self._call("take_over", orphan_grace_s=orphan_grace_s)

    def publish_leader(self, leader: Leader) -> None:
        """Publishes the controller to the workers of the agent's host. Raises AgentError if a later controller has
        taken over the run."""
        self._call("lead", leader=asdict(leader))

    def show_call_relay(self, address: ServiceAddress | None) -> None:
        """Shows the workers of the agent's host where their call relay listens; None: there is none. Does not wait.
        Raises AgentGone."""
        self._submit("call_relay", address=None if address is None else asdict(address))

    def list(self) -> "builtins.list[WorkerFacts]":
        """All workers of the run on this node, including ended ones."""
        found = [WorkerFacts(**facts) for facts in self._call("list")["workers"]]
        with self._lock:  # an ended worker of an earlier generation may have had the name of a living one
            for facts in found:
                known = self._exits.get(facts.name)
                if facts.alive and known is not None and known.pid != facts.pid:
                    del self._exits[facts.name]
        return found

    def kill(self, name: str, number: int = signal.SIGKILL) -> bool:
        """Sends a signal to a worker; returns whether the worker was alive. Raises AgentError for an unknown name."""
        return bool(self._call("kill", name=name, signal=int(number))["alive"])

    def expect_end(self, name: str) -> None:
        """Tells the agent that this controller is about to end a worker by a message, so that the end of the worker is
        no failure, whatever its exit code. Does not wait. Raises AgentGone."""
        self._submit("expect_end", name=name)

    def forget(self, name: str) -> None:
        """Has the agent stop reporting an ended worker, because the worker was replaced. Does not wait. Raises
        AgentGone."""
        self._submit("forget", name=name)

    def exit_of(self, name: str) -> WorkerExit | None:
        """Returns how the latest worker of that name ended; None while the worker runs."""
        with self._lock:
            return self._exits.get(name)

    def wait_exit(self, name: str, why: str, timeout_s: float) -> WorkerExit:
        """Waits until a worker has ended. Raises AgentGone, WaitTimeout."""

        def ended() -> WorkerExit | None:
            if self._gone is not None:
                raise self._gone
            return self.exit_of(name)

        return waits.poll(ended, kind="process", waits_for=name, why=why, timeout_s=timeout_s)

    def shut_down(self, grace_s: float = 2.0) -> "builtins.list[str]":
        """Ends all workers (SIGTERM, after `grace_s` SIGKILL) and the agent. Returns the names of workers that
        survived SIGKILL for several seconds. Idempotent."""
        try:
            pending = self._submit("leave", grace_s=grace_s)
            reply = waits.future(pending, waits_for="agent", why="the end of all workers", timeout_s=grace_s + 15.0)
            remaining = [str(name) for name in reply["remaining"]]
        except AgentGone:
            remaining = []
        self.close()
        if self._heartbeat is None:
            waits.poll(
                lambda: None if processes.is_alive(self.address.pid, self.address.start_ticks) else True,
                kind="process", waits_for="agent", why="its end", timeout_s=10.0,
            )  # fmt: skip
        return remaining

    def close(self) -> None:
        """Disconnects without ending the agent, to which another client may attach. Idempotent."""
        self._closed = True
        self._connection.close()
        if threading.current_thread() is not self._thread:
            waits.join(self._thread, waits_for="agent client", why="its thread ends", timeout_s=5.0)

    @property
    def alive(self) -> bool:
        return self._gone is None and self._why_gone() is None

    @property
    def why_gone(self) -> str | None:
        """Why the agent counts as ended: it exited, or has been silent too long; None while it is alive."""
        return self._gone.why if self._gone is not None else self._why_gone()

    def _why_gone(self) -> str | None:
        if self._heartbeat is not None:
            return f"it has been silent for {self._heartbeat.limit_s:g} s" if self._heartbeat.too_long else None
        alive = processes.is_alive(self.address.pid, self.address.start_ticks)
        return None if alive else f"the agent (pid {self.address.pid}) has ended"

    # --- the connection

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        pending = self._submit(operation, **arguments)
        return waits.future(pending, waits_for="agent", why=operation, timeout_s=self._timeout_s)

    def _submit(self, operation: str, **arguments: Any) -> "Future[dict[str, Any]]":
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._gone is not None or self._closed:
                raise AgentGone(operation, self._gone.why if self._gone else "the client is closed")
            self._count += 1
            number = f"{self._prefix}-{self._count}"
            frame = json.dumps({"id": number, "op": operation, **arguments}).encode()
            self._requests[number] = (frame, operation, answer)
            if operation == "spawn":
                self._exits.pop(arguments["name"], None)
            connection = self._connection
        with contextlib.suppress(WireError):  # the listening thread reconnects and repeats the request
            connection.send(frame)
        return answer

    def _connect(self, timeout_s: float) -> Connection:
        connection = auth_handshake.connect(
            self.address.host, self.address.port, token=self._token, run=self.address.run,
            generation=self.generation, name=self._name, timeout_s=timeout_s, max_frame=64 << 20,
        )  # fmt: skip
        pid = os.getpid()
        attach = {
            "id": f"{self._prefix}-attach-{secrets.token_hex(4)}", "op": "attach", "pid": pid,
            "start": processes.start_ticks(pid),
            "place": processes.pid_namespace() if self._heartbeat is None else "elsewhere",
            "patience_s": 0.0 if self._heartbeat is None else self._heartbeat.limit_s, "after": self._last_event,
        }  # fmt: skip
        connection.send(json.dumps(attach).encode())
        return connection

    def _listen(self) -> None:
        try:
            self._receive()
        finally:  # whatever ends this thread, nobody waits for it
            why = "the client was closed" if self._closed else "its thread ended unexpectedly"
            self._fail(self._gone or AgentGone("request", why))

    def _receive(self) -> None:
        """Handles the agent's messages until the client is closed or the agent is gone."""
        while not self._closed:
            try:
                if self._heartbeat is not None and self._heartbeat.tick():
                    ping = {"id": f"{self._prefix}-ping-{secrets.token_hex(4)}", "op": "ping"}
                    self._connection.send(json.dumps(ping).encode(), timeout_s=1.0)
                frame = self._connection.recv(1.0)
            except WireError as error:
                if not self._closed and not self._reconnect(str(error)):
                    break
                continue
            if frame is not None:
                if self._heartbeat is not None:
                    self._heartbeat.received()
                self._handle_message(json.loads(frame))
            elif self._heartbeat is not None and self._heartbeat.too_long:
                self._gone = AgentGone("request", self._why_gone() or "")
                break

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self._handle_event(message)
            return
        self.workers_cpu_s = message.get("used_s", self.workers_cpu_s)
        with self._lock:
            _, operation, answer = self._requests.pop(message["reply"], (b"", "", None))
        if answer is None:
            return
        if "error" in message:
            answer.set_exception(AgentError(operation, message["error"]))
        else:
            answer.set_result(message)

    def _handle_event(self, message: dict[str, Any]) -> None:
        if message["event"] <= self._last_event:
            return
        done = WorkerExit(
            message["event"], message["name"], message["pid"], int(message["exit_code"]), message["at"],
            str(message["log_tail"]),
        )  # fmt: skip
        with self._lock:
            self._last_event = done.number
            self._exits[done.name] = done
        if self.on_exit is not None:
            self.on_exit(done)

    def _reconnect(self, why: str) -> bool:
        """Reconnects while the agent lives, and repeats unanswered requests. Returns whether the connection is up."""
        while not self._closed:
            if self._heartbeat is not None:
                self._heartbeat.tick()
            if (gone := self._why_gone()) is not None:
                self._gone = AgentGone("request", gone)
                return False
            try:
                connection = self._connect(5.0 if self._heartbeat is None else 1.0)
            except WireError as error:
                if isinstance(error, HandshakeRefused) and error.proven:
                    self.superseded = error.code == "generation"
                    self._gone = AgentGone("request", str(error))
                    return False
                time.sleep(0.1)
                continue
            log.info("reconnected to the agent (%s)", why)
            with self._lock:
                self._connection = connection
                frames = [frame for frame, _, _ in self._requests.values()]
            with contextlib.suppress(WireError):
                for frame in frames:
                    connection.send(frame)
                return True
        return False

    def _fail(self, error: AgentGone) -> None:
        with self._lock:
            self._gone = self._gone or error
            waiting, self._requests = list(self._requests.values()), {}
        for _, operation, answer in waiting:
            answer.set_exception(AgentGone(operation, error.why))


def start_agent(
    run: str, token: str, folder: Path, *, generation: int = 1, orphan_grace_s: float = 0.0,
    kill_grace_s: float = 2.0, timeout_s: float = 60.0, host: str = "127.0.0.1", node: str = "",
    controller: int | None = 0, ports: PortRange | None = None, prepared: PreparedAgent | None = None,
) -> ServiceAddress:  # fmt: skip
    """Starts an agent in a new session, with its output in `folder/agent.log`. `controller` is the pid of its
    controller, 0 for this process, None if the controller is on another host. `prepared` is a process that becomes the
    agent. Raises AgentError if the agent does not start."""
    make_folder(folder)
    (folder / "agent.json").unlink(missing_ok=True)
    controller_option = [] if controller is None else ["--controller", str(controller or os.getpid())]
    argv = [
        sys.executable, "-P", "-m", AGENT_MODULE, "--run", run, "--generation", str(generation),
        "--folder", str(folder), *controller_option, "--orphan-grace", str(orphan_grace_s),
        "--kill-grace", str(kill_grace_s), "--host", host, *(["--node", node] if node else []),
        *(["--ports", *map(str, ports)] if ports else []),
    ]  # fmt: skip
    with os.fdopen(open_file(folder / "agent.log", os.O_WRONLY | os.O_APPEND), "ab") as output:
        env = {**os.environ, TOKEN_VARIABLE: token}
        popen: subprocess.Popen[bytes] | PreparedAgent
        if prepared is None:
            popen = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        else:
            popen = prepared
            prepared.start(argv, env, output.fileno())

    # a thread waits for the agent, so that it does not remain as a zombie
    threading.Thread(target=popen.wait, name="agent-reaper", daemon=True).start()

    def up() -> ServiceAddress | None:
        if popen.poll() is not None:
            output = (folder / "agent.log").read_text(errors="replace")[-2000:]
            raise AgentError("start", f"the agent ended with {popen.returncode}\n{output}")
        with contextlib.suppress(FileNotFoundError, ValueError):
            address = ServiceAddress.read(folder)
            return address if address.pid == popen.pid else None
        return None

    try:
        return waits.poll(up, kind="process", waits_for="agent", why="its address", timeout_s=timeout_s)
    except BaseException:
        popen.kill()
        raise
