"""Starts agents by a fork instead of an import of torch; their fork servers are forked from the agents."""

import contextlib
import logging
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.base import waits
from lockstep.watch.agent import fork_server
from lockstep.watch.agent.node_agent import AgentSettings, NodeAgent
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.agent.worker_spawner import SpawnRequest, WorkerSpawner, _ForkServer

PRELOAD = ("torch", "torch.distributed", "lockstep.watch.recorder.recorder", "benchmarks.faults.rank")
START_S = 60.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*PRELOAD, "benchmarks.faults.forked_agents"])


class ForkingSpawner(WorkerSpawner):
    """Forks its fork servers from the agent, which has imported the preloaded modules already."""

    def _start_fork_server(self, key: tuple[Any, ...], preload: tuple[str, ...], request: SpawnRequest) -> _ForkServer:
        own_end, its_end = socket.socketpair()
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_fork_server(its_end.fileno(), agent, preload)
        its_end.close()
        own_end.setblocking(False)
        server = self._servers[key] = _ForkServer(key, preload, _ForkedProcess(pid), own_end)  # type: ignore[arg-type]
        self._selector.register(own_end, selectors.EVENT_READ, lambda mask: self._receive(server))
        return server


@dataclass
class _ForkedProcess:
    """The part of `subprocess.Popen` that a spawner uses of a fork server."""

    pid: int
    returncode: int | None = None
    args: tuple[str, ...] = ()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _become_fork_server(control: int, agent: int, preload: tuple[str, ...]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, control)
        os.closerange(control + 1, 1 << 16)
        sys.argv = ["fork_server", "--socket", str(control), "--agent", str(agent), "--preload", ",".join(preload)]
        fork_server.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _serve(run: str, token: str, folder: str, controller: int) -> None:
    os.setsid()
    with Path(folder, "agent.log").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    agent = NodeAgent(AgentSettings(run, 1, token, Path(folder), controller, 0.0, 0.2))
    agent._spawner = ForkingSpawner(agent._selector, agent._worker_exited)
    agent._monitoring._children = agent._spawner.workers
    agent.run()


def start(run: str, token: str, folder: Path) -> ServiceAddress:
    """Starts an agent that ends with this process, and returns its address."""
    process = context.Process(target=_serve, args=(run, token, str(folder), os.getpid()), daemon=True)
    process.start()

    def up() -> ServiceAddress | None:
        if process.exitcode is not None:
            raise RuntimeError(f"the agent ended with {process.exitcode}\n{(folder / 'agent.log').read_text()[-2000:]}")
        with contextlib.suppress(FileNotFoundError):
            return ServiceAddress.read(folder)
        return None

    return waits.poll(up, kind="process", waits_for="agent", why="its address", timeout_s=START_S)
