"""Workers on this host: spawned by a node agent, called over loopback."""

import atexit
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from lockstep.cluster.calls import gather
from lockstep.cluster.hub import Hub
from lockstep.cluster.predecessor import end_predecessor
from lockstep.cluster.protocol import Worker, WorkerSpec
from lockstep.cluster.remote import RemoteWorker
from lockstep.cluster.worker import CHARGE, TOKEN, Charge
from lockstep.config.cluster import LocalCluster as Config
from lockstep.watch import procs, waits
from lockstep.watch.agent_client import Address, AgentClient, AgentError, AgentGone, WorkerExit, start_agent
from lockstep.watch.assemble import Alias
from lockstep.watch.beacon import read_beacons
from lockstep.watch.folders import run_dir
from lockstep.watch.settings import Settings
from lockstep.watch.supervisor_client import Said, Supervision
from lockstep.watch.verdict import Patience
from lockstep.watch.waits import WaitTimeout

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
RESERVED = ("agent", "controller", "supervisor")
"""Names that beacons of this run have already."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,94}")
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
"""Gloo listens where the host's name points to, which others may see (or nobody resolve), and lets anybody in."""


class LocalCluster:
    """The processes of one run on this host. Implements `lockstep.cluster.protocol.Cluster`.

    Logs of the workers are in `folder/logs`, the agent's affairs and the charges in `folder/cluster`.

    Args:
        token: shared by all processes of the run; made here when None. It travels by environment only.

    Raises:
        AgentError: the node agent did not come up.
    """

    def __init__(self, config: Config, run: str, folder: Path, generation: int, token: str | None = None) -> None:
        self._config, self._run, self._folder, self._generation = config, run, folder.absolute(), generation
        self._token = token or secrets.token_hex(32)
        self._store: TCPStore | None = None
        self._affairs = self._folder / "cluster"
        self._closing = self._closed = False
        self._agent: AgentClient | None = None
        self._agent_lock = threading.Lock()
        """Of the agent's replacement: any thread may start workers."""
        self._address: Address | None = None
        self._supervision: Supervision | None = None
        self._pid = os.getpid()
        self._hub = Hub(self._token, run, generation, self._tick)
        atexit.register(self.close)
        try:
            self._affairs.mkdir(parents=True, exist_ok=True, mode=0o700)
            end_predecessor(self._affairs, generation)
            self._agent = self._start_agent()
        except BaseException:
            self.close()
            raise

    def start(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        """Starts all workers in parallel; returns when every service is constructed.

        Raises:
            RemoteError: a constructor raised.
            WorkerDied: a worker ended while it started.
            Stalled: one showed no progress for the configured limit.
            ValueError: a name is taken.
        When one fails, the others of this call are ended as well.
        """
        agent = self._living_agent()
        self._check_names(specs)
        workers: list[RemoteWorker] = []
        try:
            spawned = []
            for spec in specs:
                worker, pid = self._spawn(agent, spec)
                workers.append(worker)
                spawned.append(pid)
            for worker, pid in zip(workers, spawned, strict=True):
                # The first of a kind waits for its template's imports, which take as long as they take.
                waits.future(
                    pid, whom="agent", why=f"start of {worker.name}", stall_s=self._config.stall_limit_s,
                    progress=lambda: _cpu_seconds_below(agent.address.pid),
                    notice_after_s=self._config.notice_after_s,
                )  # fmt: skip
            gather([worker.started for worker in workers], why="start")
        except BaseException:
            self._kill(workers)
            raise
        return list(workers)

    def stop(self, worker: Worker, grace_s: float = 5.0) -> None:
        """Asks the worker to leave, kills it after the grace. Calls it still owes fail with WorkerDied. Whoever watches
        the run forgets it. Idempotent."""
        agent = self._agent
        if not isinstance(worker, RemoteWorker) or agent is None:
            return
        if not worker.dead:
            self._end(agent, worker, grace_s)
        self._hub.remove(worker)
        with contextlib.suppress(AgentError):
            agent.forget(worker.name)

    def _end(self, agent: AgentClient, worker: RemoteWorker, grace_s: float) -> None:
        worker.leave("stopped")
        with contextlib.suppress(AgentError):
            if worker.busy:
                agent.kill(worker.name, signal.SIGTERM)
            try:
                agent.wait_exit(worker.name, "its end", grace_s)
            except WaitTimeout:
                level = logging.WARNING if grace_s > 0 else logging.INFO  # without grace, killing it was the order
                log.log(
                    level, "%s did not leave within %g s, it is killed; it %s", worker.name, grace_s, worker.describe()
                )
                self._kill([worker])
        self._settle(agent, [worker])

    def kill(self, name: str) -> bool:
        """Ends a worker by SIGKILL; whether there was one of that name."""
        agent = self._agent
        living = {worker.name for worker in self._hub.workers if not worker.dead}
        if agent is None or self._closed or name not in living:
            return False
        with contextlib.suppress(AgentError):
            return agent.kill(name)
        return False

    def supervise(
        self,
        patience: Patience,
        on_said: Callable[[Said], None],
        *,
        on_stall: str = "report",
        aliases: Mapping[str, Alias] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Has a supervisor beside the run from now on, which tells `on_said` of stalls, in another thread. Incidents
        are in `folder/incidents`. The run neither waits for the supervisor nor fails with it."""
        if self._address is None or self._supervision is not None:
            return
        settings = Settings(
            self._run, self._generation, self._folder / "cluster", self._folder / "incidents", [self._address],
            self._pid, patience, on_stall, dict(aliases or {}), facts=dict(facts or {}),
        )  # fmt: skip
        self._supervision = Supervision(settings, self._token, on_said)

    def store(self) -> tuple[str, int]:
        """Host and port of a rendezvous store (torch TCPStore) that this process serves, on loopback only."""
        if self._store is None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
            port = listening.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )  # fmt: skip
        return "127.0.0.1", self._store.port

    def close(self) -> None:
        """Ends all workers and the agent. Idempotent; leaves no orphan, not even when it is interrupted."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._agent_lock:
            self._closing = True  # no other agent is started from here on
        try:
            if self._supervision is not None:
                self._supervision.close()
            if self._agent is None:
                self._kill_agent()
            else:
                remaining = self._agent.leave(CLOSE_GRACE_S)
                if remaining:
                    log.error("%s did not end, not even killed", ", ".join(remaining))
                shutil.rmtree(run_dir(self._run), ignore_errors=True)  # an agent that was killed has left it
        except BaseException as error:
            log.warning("closing was cut short (%r): the agent is killed, and the kernel kills its workers", error)
            self._kill_agent()
            raise
        finally:
            self._closed = True
            self._hub.close()
            self._store = None
            atexit.unregister(self.close)

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # --- starting

    def _start_agent(self) -> AgentClient:
        grace_s = self._config.orphan_grace_s
        self._address = start_agent(
            self._run, self._token, self._affairs, generation=self._generation, orphan_grace_s=grace_s
        )
        return AgentClient(self._address, self._token, on_exit=self._exited)

    def _living_agent(self) -> AgentClient:
        """The agent, or another where it was killed. Its workers went with it (the kernel sees to that, so that none is
        ever orphaned): whoever needs them starts them again. Raises AgentGone."""
        with self._agent_lock:
            if self._agent is None or self._closing:
                raise AgentGone("start", "the cluster is closed")
            if not self._agent.alive:
                gone = self._agent.address
                if not run_dir(self._run).is_dir():
                    raise AgentGone("start", f"the agent (pid {gone.pid}) has left, with the run's shared memory")
                log.warning("the node agent (pid %d) has ended, and its workers with it; another is started", gone.pid)
                self._agent.close()
                self._agent = self._start_agent()
                for state in read_beacons(self._run):
                    if state.name not in RESERVED:
                        self._agent.forget(state.name)
                if self._supervision is not None and self._address is not None:
                    self._supervision.watch([self._address])
            return self._agent

    def _check_names(self, specs: Sequence[WorkerSpec]) -> None:
        taken = {worker.name for worker in self._hub.workers if not worker.dead}
        for spec in specs:
            if not _NAME.fullmatch(spec.name) or spec.name in RESERVED:
                raise ValueError(
                    f"worker name {spec.name!r}: expected up to 95 letters, digits, '.', '_' or '-', and not one of "
                    f"{', '.join(RESERVED)}"
                )
            if spec.name in taken:
                raise ValueError(f"worker name {spec.name!r} is taken; names are unique in a run")
            taken.add(spec.name)

    def _spawn(self, agent: AgentClient, spec: WorkerSpec) -> "tuple[RemoteWorker, Future[int]]":
        log_path = self._folder / "logs" / f"{spec.name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        worker = RemoteWorker(
            spec, self._run, log_path, self._config.stall_limit_s, self._config.notice_after_s, self._hub.wake
        )
        self._hub.add(worker)
        charge = self._write_charge(spec)
        environment = {**_LOOPBACK, **os.environ, **spec.environment, CHARGE: str(charge), TOKEN: self._token}
        preload = () if uses_cuda(self._config.device, environment) else spec.preload
        argv = [sys.executable, "-m", "lockstep.cluster.worker"]
        pid = agent.submit_spawn(spec.name, argv, log_path=log_path, env=environment, preload=preload)
        pid.add_done_callback(lambda done: _set_pid(worker, done))  # in the thread that hears of its end, before it
        return worker, pid

    def _write_charge(self, spec: WorkerSpec) -> Path:
        host, port = self._hub.address
        pid = os.getpid()
        charge = Charge(
            name=spec.name, role=spec.role, rank=spec.rank, service=spec.service, arguments=spec.arguments,
            run=self._run, generation=self._generation, host=host, port=port, controller_pid=pid,
            controller_start=procs.start_ticks(pid), orphan_grace_s=self._config.orphan_grace_s,
        )  # fmt: skip
        try:
            data = json.dumps(msgspec.to_builtins(charge), allow_nan=True).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"arguments of worker {spec.name!r} are not JSON-like: {error}") from None
        path = self._folder / "cluster" / f"{spec.name}.json"
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(data)
        draft.rename(path)
        return path

    # --- ends

    def _exited(self, end: WorkerExit) -> None:
        """In the agent client's thread."""
        self._hub.ended(end.name, end.pid, end.exit_code)

    def _tick(self) -> None:
        """In the hub's thread, twice a second: progress that no message tells, and deaths the agent cannot tell."""
        agent = self._agent
        for worker in self._hub.workers:
            if worker.dead or worker.pid == 0:
                continue
            connection = worker.connection
            if connection is not None:
                worker.probe(connection.bulk)
            elif not procs.alive(worker.pid) and (agent is None or not agent.alive):
                worker.die(None)
            elif not worker.connected_once:
                worker.probe(_cpu_seconds(worker.pid))

    def _kill(self, workers: Sequence[RemoteWorker]) -> None:
        """Ends them by SIGKILL, and sees to it that they have ended."""
        agent = self._agent
        if agent is None:
            return
        with contextlib.suppress(AgentGone):
            for worker in workers:
                with contextlib.suppress(AgentError):
                    agent.kill(worker.name)
            for worker in workers:
                if worker.pid:
                    agent.wait_exit(worker.name, "its end after SIGKILL", 10.0)
        self._settle(agent, workers)

    def _settle(self, agent: AgentClient, workers: Sequence[RemoteWorker]) -> None:
        """Their calls fail and their names are free, whether the event has been heard or not."""
        for worker in workers:
            end = agent.exit_of(worker.name)
            worker.die(None if end is None else end.exit_code)
            self._hub.remove(worker)

    def _kill_agent(self) -> None:
        address = self._address
        if address is None:
            return
        if procs.alive(address.pid, address.start_ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(address.pid, signal.SIGKILL)
        shutil.rmtree(run_dir(self._run), ignore_errors=True)


def uses_cuda(device: str, environment: Mapping[str, str]) -> bool:
    """Whether workers may touch CUDA, whose state does not survive a fork; found out without importing torch."""
    if device == "auto":
        return environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and Path("/dev/nvidiactl").exists()
    return device == "cuda"


def _set_pid(worker: RemoteWorker, done: "Future[int]") -> None:
    if done.exception() is None:
        worker.pid = done.result(timeout=0)
        worker.moved()  # its stall clock starts with its life, not with the order for it


def _cpu_seconds_below(pid: int) -> float:
    """CPU time that all descendants of a process have used."""
    found = 0.0
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found += times.user + times.system
    return found


def _cpu_seconds(pid: int) -> Any:
    """CPU time a process has used: what moves while it imports and cannot speak yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])
