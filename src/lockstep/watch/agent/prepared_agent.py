"""A process that waits to become the agent of a run, with a fork server that shares this process's modules.

A controller imports torch and transformers anyway. Forking the fork server from it, instead of having it import them
once more, takes seconds off the start of a run and lets controller and workers share these modules' memory.

Two forks: the first child waits for the agent's command line and then executes it. Its own child, which is so a child
of the agent, is the fork server. Both end if this process ends before it starts the agent.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.base.errors import ForkedWorker
from lockstep.watch.agent.fork_server import die_with_parent, end_process, run_as_worker, serve_requests

_IMPORT_TIME_PREFIXES = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "TORCH", "PYTORCH", "HF_",
    "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "CUDA_", "NCCL_", "LOCKSTEP_BEACONS",
)  # fmt: skip


def import_time_variables(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables that modules read while they are imported. Workers that differ in one do not share a fork
    server."""
    return ((name, env[name]) for name in sorted(env) if name.startswith(_IMPORT_TIME_PREFIXES))


@dataclass(frozen=True, slots=True)
class PreparedForkServer:
    """A fork server that was forked before the agent began, as the agent's command line describes it."""

    pid: int
    descriptor: int
    """The agent's end of the socket pair."""
    preload: tuple[str, ...]
    """The modules that it has imported."""
    variables: tuple[tuple[str, str], ...]
    """The `import_time_variables` of its environment."""

    def to_json(self) -> str:
        """The value of the agent's option `--fork-server`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "PreparedForkServer":
        """The reverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        variables = tuple((str(name), str(value)) for name, value in fields["variables"])
        return PreparedForkServer(fields["pid"], fields["descriptor"], tuple(fields["preload"]), variables)


class PreparedAgent:
    """The process that waits to become the agent. Created by `prepare_agent`."""

    def __init__(self, pid: int, orders: socket.socket, fork_server: PreparedForkServer) -> None:
        self.pid, self.fork_server = pid, fork_server
        self.returncode: int | None = None
        self._orders = orders
        self._reaping = threading.Lock()

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: int) -> None:
        """Makes the process execute the agent's command, with its output in the file of the descriptor `log`.

        Raises:
            OSError: the process has ended.
        """
        command = [*argv, "--fork-server", self.fork_server.to_json()]
        data = json.dumps({"argv": command, "env": dict(env)}).encode() + b"\n"
        with self._orders:
            sent = socket.send_fds(self._orders, [data], [log])
            if data[sent:]:  # after the last byte, the process has closed its end
                self._orders.sendall(data[sent:])

    def discard(self) -> None:
        """Ends the process and the fork server, as no agent is needed."""
        self._orders.close()
        threading.Thread(target=self.wait, name="agent-reaper", daemon=True).start()

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self) -> int | None:
        """Waits until the process has ended, and returns its exit code."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return self.poll()

    def kill(self) -> None:
        """Kills the process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def prepare_agent(preload: Sequence[str]) -> PreparedAgent | None:
    """Forks the two processes. Call it when `preload` is all that is imported, and before anything runs a thread;
    returns None if a thread runs already, as its locks might be held forever in the forks.

    Raises:
        ForkedWorker: in every worker, which is to run in place of the caller. `lockstep.__main__` does so.
    """
    if threading.active_count() > 1:
        return None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is buffered would be written by every fork
    gc.collect()
    gc.freeze()  # so that no garbage collector writes to shared pages; the run's own collections come later
    orders, received = socket.socketpair()
    agents_end, servers_end = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        orders.close()
        _become_agent(received, agents_end, servers_end, preload)
    descriptor = agents_end.fileno()  # the same number in the fork
    for end in (received, agents_end, servers_end):
        end.close()
    server = int.from_bytes(orders.recv(8), "little")
    if not server:
        raise ChildProcessError("the fork that becomes the agent has ended")
    variables = tuple(import_time_variables(os.environ))
    return PreparedAgent(pid, orders, PreparedForkServer(server, descriptor, tuple(preload), variables))


def _become_agent(
    orders: socket.socket, agents_end: socket.socket, servers_end: socket.socket, preload: Sequence[str]
) -> None:
    """Forks the fork server, waits for the command of the agent and executes it. Never returns."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = os.getpid()
    server = os.fork()
    if server == 0:
        orders.close()
        agents_end.close()
        _become_fork_server(servers_end, own, list(preload))
    code = 1
    try:
        servers_end.close()
        orders.sendall(server.to_bytes(8, "little"))
        data, logs, _, _ = socket.recv_fds(orders, 1 << 16, 1)
        while data and not data.endswith(b"\n"):
            data += orders.recv(1 << 16)
        if data:
            order = json.loads(data)
            os.set_inheritable(agents_end.fileno(), True)
            _redirect(logs[0])
            os.execve(order["argv"][0], order["argv"], order["env"])
        code = 0
    finally:
        os.kill(server, signal.SIGKILL)
        os._exit(code)


def _become_fork_server(control: socket.socket, agent: int, preload: list[str]) -> None:
    """Serves until the agent ends. Raises ForkedWorker in every worker, and never returns."""
    os.setsid()
    die_with_parent()
    if os.getppid() != agent:
        os._exit(1)
    _redirect(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of the program
    Path("/proc/self/comm").write_text("fork-server")
    request = None
    try:
        request = serve_requests(control, agent, preload)
    finally:
        if request is None:  # the agent has ended, or an error, which nothing on the controller's stack may catch
            os._exit(0)
    control.close()
    raise ForkedWorker(lambda: end_process(lambda: run_as_worker(request, agent)))


def _redirect(output: int) -> None:
    """Lets stdin be empty, and writes stdout and stderr to the file `output`."""
    for source, targets in ((os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), (0,)), (output, (1, 2))):
        for target in targets:
            os.dup2(source, target)
        os.close(source)
