"""Workers on this host: spawned by a node agent, called over loopback."""

import atexit
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lockstep.cluster.calls import gather
from lockstep.cluster.charge import CHARGE, Charge, fitness
from lockstep.cluster.heirs import Heirs
from lockstep.cluster.hub import Hub
from lockstep.cluster.predecessor import Heritage, end_predecessor
from lockstep.cluster.protocol import NodeInfo, Worker, WorkerSpec
from lockstep.cluster.remote import RemoteWorker
from lockstep.cluster.spawning import cpu_seconds_below, environment_of, order
from lockstep.cluster.worker import TOKEN
from lockstep.config.cluster import LocalCluster as Config
from lockstep.watch import procs, waits
from lockstep.watch.agent_client import Address, AgentClient, AgentError, AgentGone, WorkerExit, start_agent
from lockstep.watch.assemble import Alias
from lockstep.watch.beacon import read_beacons
from lockstep.watch.folders import run_dir
from lockstep.watch.leader import Leader, Superseded, superseded
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


class LocalCluster:
    """The processes of one run on this host. Implements `lockstep.cluster.protocol.Cluster`.

    Logs of the workers are in `folder/logs`, the agent's affairs and the charges in `folder/cluster`.

    Args:
        token: shared by all processes of the run; made here when None. It travels by environment only.
        heritage: of the generation before, where `run` is its run. Its workers that `start` is asked for again are
            adopted, as they are; `release` ends the others.

    Raises:
        AgentError: the node agent did not come up.
        Superseded: a later generation has the run.
    """

    def __init__(
        self,
        config: Config,
        run: str,
        folder: Path,
        generation: int,
        token: str | None = None,
        heritage: Heritage | None = None,
    ) -> None:
        self._config, self._run, self._folder, self._generation = config, run, folder.absolute(), generation
        self._token = token or (secrets.token_hex(32) if heritage is None else heritage.token)
        self._store: TCPStore | None = None
        self._affairs = self._folder / "cluster"
        self._heirs = Heirs(self._affairs, self._handle, self._dismiss)
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
            if heritage is None:
                end_predecessor(self._affairs, generation)
                self._lead()
                self._agent = self._start_agent()
            else:
                self._agent, self._address = heritage.agent, replace(heritage.agent.address, generation=generation)
                self._agent.on_exit = self._exited
                with contextlib.suppress(AgentGone):  # then another is started, and all workers are new
                    self._heirs.meet(self._agent.list())
                self._lead()
        except BaseException:
            self.close()
            raise

    def start(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        """Starts all workers in parallel, but for those that an earlier generation has left and that do for it: they
        are adopted, with the names that they have. Returns when every service is constructed.

        Raises:
            RemoteError: a constructor raised.
            WorkerDied: a worker ended while it started.
            Stalled: one showed no progress for the configured limit.
            ValueError: a name is taken.
        When one fails, the others of this call are ended as well.
        """
        agent = self._living_agent()
        claimed = self._heirs.claim(specs, self._fitness)
        workers = dict(claimed)
        others = [number for number in range(len(specs)) if number not in claimed]
        self._check_names([specs[number] for number in others])
        try:
            self._spawn(agent, specs, others, workers)
            self._spawn(agent, specs, self._heirs.lost(claimed), workers)
            gather([worker.started for worker in workers.values()], why="start")
        except BaseException:
            self._kill(list(workers.values()))
            raise
        return [workers[number] for number in range(len(specs))]

    def release(self) -> None:
        """Ends what an earlier generation has left and nobody has asked for."""
        self._heirs.release()

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

    def nodes(self) -> list[NodeInfo]:
        """This host."""
        return [NodeInfo(socket.gethostname(), "127.0.0.1", run_dir(self._run))]

    def node_of(self, worker: Worker) -> NodeInfo:
        """This host."""
        return self.nodes()[0]

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
            if self._superseded and self._agent is not None:
                self._agent.close()
            elif self._agent is None:
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

    def _lead(self) -> None:
        """From here on workers find this controller and no other."""
        pid, (host, port), grace_s = os.getpid(), self._hub.address, self._config.orphan_grace_s
        Leader(self._generation, host, port, pid, procs.start_ticks(pid), grace_s).publish(self._run)

    @property
    def _superseded(self) -> bool:
        """Whether a later generation has the run: what there is of it belongs to that one."""
        return superseded(self._run, self._generation)

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
                gone, leader = self._agent.address, Leader.read(self._run)
                if leader is not None and leader.generation > self._generation:
                    raise AgentGone("start", str(Superseded(self._run, self._generation, leader.generation)))
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

    def _spawn(
        self, agent: AgentClient, specs: Sequence[WorkerSpec], which: Sequence[int], workers: dict[int, RemoteWorker]
    ) -> None:
        """Adds those to `workers` by their numbers, as processes that begin."""
        pids = []
        for number in which:
            worker = workers[number] = self._handle(specs[number])
            pids.append(self._order(agent, worker))
        for number, pid in zip(which, pids, strict=True):
            # The first of a kind waits for its template's imports, which take as long as they take.
            waits.future(
                pid, whom="agent", why=f"start of {workers[number].name}", stall_s=self._config.stall_limit_s,
                progress=lambda: cpu_seconds_below(agent.address.pid), notice_after_s=self._config.notice_after_s,
            )  # fmt: skip

    def _handle(self, spec: WorkerSpec) -> RemoteWorker:
        log_path = self._folder / "logs" / f"{spec.name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        limits = self._config.stall_limit_s, self._config.notice_after_s
        worker = RemoteWorker(spec, self._run, self._generation, log_path, *limits, self._hub.restless)
        self._hub.add(worker)
        return worker

    def _order(self, agent: AgentClient, worker: RemoteWorker) -> "Future[int]":
        spec, environment = worker.spec, environment_of(worker.spec)
        fit = fitness(spec, environment, self._token) if spec.adoptable else ""
        what = spec.name, spec.role, spec.rank, spec.service, spec.arguments
        charge = Charge(*what, self._run, self._generation, fit).write(self._affairs)
        environment |= {CHARGE: str(charge), TOKEN: self._token}
        return order(agent, worker, environment, self._config.device)

    def _fitness(self, spec: WorkerSpec) -> str:
        return fitness(spec, environment_of(spec), self._token)

    def _dismiss(self, workers: Sequence[RemoteWorker]) -> None:
        """Ends workers that others come in place of, or nobody."""
        self._kill(workers)
        for worker in workers:
            with contextlib.suppress(AgentError):
                if self._agent is not None:
                    self._agent.forget(worker.name)

    # --- ends

    def _exited(self, end: WorkerExit) -> None:
        """In the agent client's thread."""
        self._hub.ended(end.name, end.pid, end.exit_code)

    def _tick(self) -> None:
        """In the hub's thread, twice a second: progress that no message tells, and deaths the agent cannot tell."""
        agent = self._agent
        gone = agent is None or not agent.alive
        lost = gone and self._superseded
        for worker in self._hub.workers:
            if worker.dead or worker.pid == 0:
                continue
            connection = worker.connection
            if connection is not None:
                worker.probe(connection.bulk)
            elif lost or (gone and not procs.alive(worker.pid)):
                worker.die(None)
            elif not worker.connected_once:
                used = procs.usage(worker.pid)  # what moves while it imports and cannot speak yet
                worker.probe(None if used is None else used.cpu_s)

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
        if self._superseded:
            return
        address = self._address
        if address is not None and procs.alive(address.pid, address.start_ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(address.pid, signal.SIGKILL)
        shutil.rmtree(run_dir(self._run), ignore_errors=True)
