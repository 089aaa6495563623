"""Enrolls a process of a watched command in the watched run: opens the process's beacon and installs the recorder.

A process that its launcher clearly marks as a rank is enrolled immediately; other processes when they join the
rendezvous, or at the latest when they create their first communicator. The first process of a rank claims the rank,
because its children (data loader workers, compilers) inherit its environment and are no ranks. A child that creates
communicators of its own (an engine's worker) is enrolled as a part of the rank.
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
"""Set for the children of a rank, so that they do not take themselves for the rank; the value is `NAME PID` of the
rank, NAME being that of its beacon."""
WATCHED_ROLE = "rank"
"""The role of every rank of a job without roles."""
DEVICE_MESH_MODULE = "torch.distributed.device_mesh"
"""This module has imported `init_process_group` by name, so the name has to be replaced there as well."""


def enroll_process(run: str) -> None:
    """Enrolls this process, which has imported `torch.distributed`. Errors that prevent recording propagate."""
    dist = importlib.import_module("torch.distributed")
    if not dist.is_available():
        return
    rank = launcher_env.certain_rank(os.environ)
    if rank is not None and not claimed_rank():
        _open_rank_beacon(run, rank)
        recorder.install()
    _enroll_at_first_communicator(run, dist)
    _show_rendezvous(run, dist)


def claimed_rank() -> str:
    """The name of the rank that this process is a descendant of, while that rank lives; else empty."""
    words = os.environ.get(CLAIM_VARIABLE, "").split()
    claimed = len(words) == 2 and words[1] != str(os.getpid()) and is_alive(int(words[1]))
    return words[0] if claimed else ""


def _open_rank_beacon(run: str, rank: int) -> None:
    """Opens the beacon of this process under a name that no other living process uses. A descendant of a rank becomes a
    part of it: its role is the name of that rank, so that its number is not mistaken for a rank of the job."""
    if parent := claimed_rank():
        open_beacon(run, f"{parent}.{os.getpid()}", parent, rank, parent).stage("begin")
        return
    name = f"{WATCHED_ROLE}-{rank}"
    other = read_beacon(run_shm_dir(run) / f"{name}.beacon")
    if other is not None and other.pid != os.getpid() and is_alive(other.pid, other.start_ticks):
        name = f"{name}.{os.getpid()}"
    open_beacon(run, name, WATCHED_ROLE, rank).stage("begin")
    os.environ[CLAIM_VARIABLE] = f"{name} {os.getpid()}"


def _enroll_rank(run: str, rank: int) -> None:
    """Starts recording this process unless it is recorded already. If this fails, the job continues unrecorded."""
    if recorder.current() is not None:
        return
    try:
        _open_rank_beacon(run, rank)
        recorder.install()
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        recorder.log.warning("this process is not recorded: %r", error)


def _enroll_at_first_communicator(run: str, dist: Any) -> None:
    """Has this process enrolled when it creates its first communicator."""
    c10d = dist.distributed_c10d
    create = c10d._new_process_group_helper

    @functools.wraps(create)
    def wrapper(group_size: int, group_rank: int, *args: Any, **kwargs: Any) -> Any:
        if recorder.current() is None:
            _enroll_rank(run, group_rank)
            if recorder.current() is not None:  # the recorder has replaced this wrapper
                return c10d._new_process_group_helper(group_size, group_rank, *args, **kwargs)
        return create(group_size, group_rank, *args, **kwargs)

    c10d._new_process_group_helper = wrapper


@dataclass(frozen=True, slots=True)
class _RendezvousArguments:
    """Rank, world size and URL of a call of `init_process_group`. Omitted arguments are read from the environment; -1
    means unknown."""

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
    """Has the beacon show while this rank waits in the rendezvous of `init_process_group`."""
    c10d = dist.distributed_c10d
    original: Callable[..., Any] = c10d.init_process_group

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        try:
            rendezvous = _RendezvousArguments.read(args, kwargs, os.environ)
        except (TypeError, ValueError, AttributeError):  # torch itself reports the wrong argument
            return original(*args, **kwargs)
        if rendezvous.rank < 0 or rendezvous.world < 1:
            return original(*args, **kwargs)
        _enroll_rank(run, rendezvous.rank)
        first, last = launcher_env.ranks_on_this_host(rendezvous.rank, rendezvous.world, rendezvous.url, os.environ)
        waits_for = rendezvous_wait.rendezvous_target(rendezvous_wait.ExpectedRanks(first, last, rendezvous.world))
        with track_wait(
            rendezvous_wait.RENDEZVOUS,
            waits_for,
            rendezvous_wait.rendezvous_reason(rendezvous.rank, f"the rendezvous of {rendezvous.world} ranks"),
        ):
            return original(*args, **kwargs)

    for module in (c10d, dist, sys.modules.get(DEVICE_MESH_MODULE)):
        if getattr(module, "init_process_group", None) is original:
            module.init_process_group = initialize  # type: ignore[union-attr]
