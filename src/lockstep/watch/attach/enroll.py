"""Enrolls a process of a watched command in the watched run: opens its beacon and installs the recorder.

A process that its launcher clearly marks as a rank is enrolled at once; others when they join the rendezvous, or at
the latest when their first communicator is made. The first process of a rank claims the rank: its children (data
loader workers, compilers) have the same environment and are no ranks.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlparse

from lockstep.base.folders import run_shm_dir
from lockstep.base.wait_state import track_wait
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.beacon.writer import open_beacon
from lockstep.watch.procfs import launcher_env
from lockstep.watch.procfs.processes import is_alive
from lockstep.watch.recorder import recorder, rendezvous_wait

CLAIM_VARIABLE = "LOCKSTEP_WATCH_RANK"
"""Tells the children of a rank that their parent is the rank; the value is `RANK PID` of the parent."""
WATCHED_ROLE = "rank"
"""The role of every rank of a job without roles."""
DEVICE_MESH_MODULE = "torch.distributed.device_mesh"
"""This module imports `init_process_group` by name, so its copy has to be replaced as well."""


def enroll_process(run: str) -> None:
    """Enrolls this process, once `torch.distributed` has been imported. Errors that prevent recording propagate."""
    dist = importlib.import_module("torch.distributed")
    if not dist.is_available():
        return
    rank = launcher_env.certain_rank(os.environ)
    if rank is not None and not rank_is_claimed():
        _open_rank_beacon(run, rank)
        recorder.install()
    _enroll_with_first_communicator(run, dist)
    _show_rendezvous(run, dist)


def rank_is_claimed() -> bool:
    """Whether a living ancestor of this process is the rank that the environment names."""
    words = os.environ.get(CLAIM_VARIABLE, "").split()
    return len(words) == 2 and words[1] != str(os.getpid()) and is_alive(int(words[1]))


def _open_rank_beacon(run: str, rank: int) -> None:
    """Opens the beacon of this process, under a name that no other living process uses."""
    name = f"{WATCHED_ROLE}-{rank}"
    found = read_beacon(run_shm_dir(run) / f"{name}.beacon")
    if found is not None and found.pid != os.getpid() and is_alive(found.pid, found.start_ticks):
        name = f"{name}.{os.getpid()}"
    open_beacon(run, name, WATCHED_ROLE, rank).stage("begin")
    os.environ[CLAIM_VARIABLE] = f"{rank} {os.getpid()}"


def _enroll_rank(run: str, rank: int) -> None:
    """Starts recording this process, unless it is recorded already. The job continues if that fails."""
    if recorder.current() is not None:
        return
    try:
        _open_rank_beacon(run, rank)
        recorder.install()
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        recorder.log.warning("this process is not recorded: %r", error)


def _enroll_with_first_communicator(run: str, dist: Any) -> None:
    c10d = dist.distributed_c10d
    create = c10d._new_process_group_helper

    @functools.wraps(create)
    def created(group_size: int, group_rank: int, *args: Any, **kwargs: Any) -> Any:
        if recorder.current() is None:
            _enroll_rank(run, group_rank)
            if recorder.current() is not None:  # the recorder has replaced this wrapper
                return c10d._new_process_group_helper(group_size, group_rank, *args, **kwargs)
        return create(group_size, group_rank, *args, **kwargs)

    c10d._new_process_group_helper = created


@dataclass(frozen=True, slots=True)
class _RendezvousArguments:
    """Rank, world size and URL of a call of `init_process_group`; the environment fills in what the call omits. -1 is
    unknown."""

    rank: int
    world: int
    url: str

    @staticmethod
    def read(args: Sequence[Any], given: Mapping[str, Any], variables: Mapping[str, str]) -> "_RendezvousArguments":
        def argument(position: int, name: str, default: Any) -> Any:
            return args[position] if len(args) > position else given.get(name, default)

        method = argument(1, "init_method", None)
        url = str(method or "env://") if argument(5, "store", None) is None else ""
        query = parse_qs(urlparse(url).query)
        launched = launcher_env.launcher_rank(variables)
        ranks = (argument(4, "rank", -1), *query.get("rank", ()), -1 if launched is None else launched[0])
        world_sizes = (
            argument(3, "world_size", -1),
            *query.get("world_size", ()),
            launcher_env.launcher_world_size(variables) or -1,
        )
        rank, world = (next((int(each) for each in found if int(each) >= 0), -1) for found in (ranks, world_sizes))
        return _RendezvousArguments(rank, world, url)


def _show_rendezvous(run: str, dist: Any) -> None:
    """Shows in the beacon that this rank waits in a rendezvous, while it does."""
    c10d = dist.distributed_c10d
    original: Callable[..., Any] = c10d.init_process_group

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        try:
            joins = _RendezvousArguments.read(args, kwargs, os.environ)
        except (TypeError, ValueError, AttributeError):  # torch itself reports the wrong argument
            return original(*args, **kwargs)
        if joins.rank < 0 or joins.world < 1:
            return original(*args, **kwargs)
        _enroll_rank(run, joins.rank)
        first, last = launcher_env.ranks_on_this_host(joins.rank, joins.world, joins.url, os.environ)
        waits_for = rendezvous_wait.rendezvous_target(rendezvous_wait.ExpectedRanks(first, last, joins.world))
        with track_wait(
            rendezvous_wait.RENDEZVOUS,
            waits_for,
            rendezvous_wait.rendezvous_reason(joins.rank, f"the rendezvous of {joins.world} ranks"),
        ):
            return original(*args, **kwargs)

    for module in (c10d, dist, sys.modules.get(DEVICE_MESH_MODULE)):
        if getattr(module, "init_process_group", None) is original:
            module.init_process_group = initialize  # type: ignore[union-attr]
