"""A process of a watched command joins the watched run: its beacon, and the recorder in it.

Who is a rank is known from the launcher's environment, or at the latest when its first communicator is made. The first
process of a rank claims it: what it starts (data loader workers, compilers) has the same environment and is none.
"""

import functools
import importlib
import os
from typing import Any

from lockstep.watch import beacon, recorder
from lockstep.watch.waiting import waiting

CLAIM = "LOCKSTEP_WATCH_RANK"
"""`rank pid` of the process that is the rank, for those below it."""
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
ROLE = "rank"
"""Of every rank of a job that says nothing of roles."""


def join(run: str) -> None:
    """Called once `torch.distributed` is imported. Raises what keeps this process from being recorded."""
    dist = importlib.import_module("torch.distributed")
    if not dist.is_available():
        return
    rank = rank_of_environment()
    if rank is not None and not claimed():
        _open(run, rank)
        recorder.install()
        _show_rendezvous(dist)
    else:
        _join_with_the_first_communicator(run, dist)


def rank_of_environment() -> int | None:
    """The rank that the launcher gave this process."""
    values = (os.environ.get(name, "") for name in RANKS)
    return next((int(value) for value in values if value.isdecimal()), None)


def claimed() -> bool:
    """Whether a living process above this one is the rank that the environment speaks of."""
    words = os.environ.get(CLAIM, "").split()
    return len(words) == 2 and words[1] != str(os.getpid()) and beacon.alive(int(words[1]))


def _open(run: str, rank: int) -> None:
    """The process's beacon, under a name that no living process has."""
    name = f"{ROLE}-{rank}"
    found = beacon.read_beacon(beacon.run_dir(run) / f"{name}.beacon")
    if found is not None and found.pid != os.getpid() and beacon.alive(found.pid, found.start_ticks):
        name = f"{name}.{os.getpid()}"
    beacon.open_beacon(run, name, ROLE, rank).stage("begin")
    os.environ[CLAIM] = f"{rank} {os.getpid()}"


def _join_with_the_first_communicator(run: str, dist: Any) -> None:
    c10d = dist.distributed_c10d
    create = c10d._new_process_group_helper

    @functools.wraps(create)
    def created(group_size: int, group_rank: int, *args: Any, **kwargs: Any) -> Any:
        c10d._new_process_group_helper = create
        try:
            _open(run, group_rank)
            recorder.install()
        except (OSError, ValueError, RuntimeError, AttributeError) as error:  # the job goes on unrecorded
            recorder.log.warning("this process is not recorded: %r", error)
        return c10d._new_process_group_helper(group_size, group_rank, *args, **kwargs)

    c10d._new_process_group_helper = created


def _show_rendezvous(dist: Any) -> None:
    """Says in the beacon that this rank waits for the others to come, while it does."""
    c10d = dist.distributed_c10d
    meet = c10d.init_process_group

    @functools.wraps(meet)
    def met(*args: Any, **kwargs: Any) -> Any:
        with waiting("rendezvous", ROLE, f"{os.environ.get('WORLD_SIZE', 'all')} ranks meet"):
            return meet(*args, **kwargs)

    c10d.init_process_group = dist.init_process_group = met
