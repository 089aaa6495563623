"""What an earlier generation of a run has left on this host: its agent, its workers, its shared memory.

A controller that was killed may leave workers behind for `orphan_grace_s`. Whoever holds the run now ends them before
anything else: a save that they still have under way would appear among the checkpoints of the new generation.
"""

import contextlib
import logging
import os
import shutil
import signal
from pathlib import Path

from lockstep.watch import procs, waits
from lockstep.watch.agent_client import Address
from lockstep.watch.beacon import read_beacons
from lockstep.watch.folders import run_dir
from lockstep.watch.waits import WaitTimeout

log = logging.getLogger(__name__)

END_S = 10.0
"""A process that SIGKILL has not removed after this long is in the kernel's hands (a driver's, say)."""


def end_predecessor(affairs: Path, generation: int) -> None:
    """Kills the agent that an earlier generation left in this folder, and with it its workers; waits for their ends
    and removes their shared memory. An agent that has left in order has left nothing."""
    try:
        agent = Address.read(affairs)
    except (OSError, ValueError, TypeError):
        return
    if agent.generation >= generation:
        return
    workers = [(state.pid, state.start_ticks) for state in read_beacons(agent.run) if state.role != "controller"]
    if procs.alive(agent.pid, agent.start_ticks):
        log.warning("ending what generation %d has left: agent %d and its workers", agent.generation, agent.pid)
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
