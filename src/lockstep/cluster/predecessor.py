"""What an earlier generation of a run has left on this host: its agent, its workers, its shared memory.

A controller that was killed leaves workers behind for `orphan_grace_s`. Whoever holds the run now takes over what is
of use, and ends the rest before anything else: a save that is still under way would appear among the checkpoints of
the new generation.
"""

import contextlib
import logging
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.cluster.freshness import changed_since
from lockstep.watch import procs, waits
from lockstep.watch.agent_client import Address, AgentClient, AgentError
from lockstep.watch.beacon import read_beacons
from lockstep.watch.folders import run_dir
from lockstep.watch.leader import Leader
from lockstep.watch.waits import WaitTimeout
from lockstep.watch.wire import WireError

log = logging.getLogger(__name__)

END_S = 10.0
"""A process that SIGKILL has not removed after this long is in the kernel's hands (a driver's, say)."""


@dataclass(frozen=True, slots=True)
class Heritage:
    """The agent of an earlier generation, which is ours from now on, with the workers that it has."""

    agent: AgentClient
    token: str

    @property
    def run(self) -> str:
        """Under which all of them have their shared memory."""
        return self.agent.address.run


def take_over(affairs: Path, generation: int, orphan_grace_s: float) -> Heritage | None:
    """Goes on with the agent that an earlier generation left in this folder, if there is one within its grace; not
    where the code on disk is newer than what it, and the processes that it forks workers from, have imported."""
    agent = _earlier_agent(affairs, generation)
    if agent is None or Leader.read(agent.run) is None or not procs.alive(agent.pid, agent.start_ticks):
        return None
    try:
        process = psutil.Process(agent.pid)
        token, changed = process.environ()["LOCKSTEP_TOKEN"], changed_since(process.create_time())
    except (psutil.Error, KeyError) as error:
        log.info("agent %d cannot be asked for its token: %r", agent.pid, error)
        return None
    if changed is not None:
        log.info("%s has changed since the run was last started: none of its processes is used again", changed)
        return None
    client = go_on_with(agent, token, generation, orphan_grace_s)
    return None if client is None else Heritage(client, token)


def go_on_with(
    agent: Address, token: str, generation: int, orphan_grace_s: float, lost_after_s: float | None = None
) -> AgentClient | None:
    """An agent of an earlier generation, which is ours from now on; None where it is leaving, or does not answer.

    Args:
        lost_after_s: of one on another host, see `AgentClient`.
    """
    try:
        client = AgentClient(agent, token, generation=generation, lost_after_s=lost_after_s)
    except WireError as error:
        log.info("agent %d on %s cannot be taken over: %s", agent.pid, agent.host, error)
        return None
    try:
        client.take_over(orphan_grace_s)
    except (AgentError, WaitTimeout) as error:
        log.info("agent %d on %s cannot be taken over: %s", agent.pid, agent.host, error)
        client.close()
        return None
    return client


def end_predecessor(affairs: Path, generation: int) -> None:
    """Kills the agent that an earlier generation left in this folder, and with it its workers; waits for their ends
    and removes their shared memory. An agent that has left in order has left nothing."""
    agent = _earlier_agent(affairs, generation)
    if agent is None:
        return
    if procs.alive(agent.pid, agent.start_ticks):
        log.warning("ending what generation %d has left: agent %d and its workers", agent.generation, agent.pid)
    end_agent(agent)


def end_agent(agent: Address) -> None:
    """Kills an agent of this host, and with it its workers; waits for their ends and removes the run's shared
    memory."""
    workers = [(state.pid, state.start_ticks) for state in read_beacons(agent.run) if state.role != "controller"]
    if procs.alive(agent.pid, agent.start_ticks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent.pid, signal.SIGKILL)  # the kernel kills its workers with it
    try:
        waits.poll(
            lambda: None if any(procs.alive(pid, start) for pid, start in workers) else True,
            kind="process", whom="workers of an earlier generation", why="their ends", timeout_s=END_S,
        )  # fmt: skip
    except WaitTimeout as error:
        log.warning("%s", error)
    shutil.rmtree(run_dir(agent.run), ignore_errors=True)


def _earlier_agent(affairs: Path, generation: int) -> Address | None:
    try:
        agent = Address.read(affairs)
    except (OSError, ValueError, TypeError):
        return None
    return agent if agent.generation < generation else None
