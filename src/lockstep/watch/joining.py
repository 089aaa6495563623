"""A process of a watched command joins the watched run: its beacon, and the recorder in it.

Where the launcher says for sure who is a rank, it joins at once; else when it meets the other ranks, or at the latest
when its first communicator is made. The first process of a rank claims it: what it starts (data loader workers,
compilers) has the same environment and is none.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlparse

from lockstep.watch import beacon, launchers, meeting, recorder
from lockstep.watch.waiting import waiting

CLAIM = "LOCKSTEP_WATCH_RANK"
"""`rank pid` of the process that is the rank, for those below it."""
ROLE = "rank"
"""Of every rank of a job that says nothing of roles."""
MESH = "torch.distributed.device_mesh"
"""Has its own name for `init_process_group`."""


def join(run: str) -> None:
    """Called once `torch.distributed` is imported. Raises what keeps this process from being recorded."""
    dist = importlib.import_module("torch.distributed")
    if not dist.is_available():
        return
    rank = launchers.sure_rank(os.environ)
    if rank is not None and not claimed():
        _open(run, rank)
        recorder.install()
    _join_with_the_first_communicator(run, dist)
    _show_rendezvous(run, dist)


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


def _enrol(run: str, rank: int) -> None:
    """Makes this process a recorded one, if it is none yet. The job goes on if that fails."""
    if recorder.current() is not None:
        return
    try:
        _open(run, rank)
        recorder.install()
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        recorder.log.warning("this process is not recorded: %r", error)


def _join_with_the_first_communicator(run: str, dist: Any) -> None:
    c10d = dist.distributed_c10d
    create = c10d._new_process_group_helper

    @functools.wraps(create)
    def created(group_size: int, group_rank: int, *args: Any, **kwargs: Any) -> Any:
        if recorder.current() is None:
            _enrol(run, group_rank)
            if recorder.current() is not None:  # it has put its own in this one's place
                return c10d._new_process_group_helper(group_size, group_rank, *args, **kwargs)
        return create(group_size, group_rank, *args, **kwargs)

    c10d._new_process_group_helper = created


@dataclass(frozen=True, slots=True)
class _Joins:
    """What a call of `init_process_group` says, the environment's word where it says nothing. -1: not known."""

    rank: int
    world: int
    place: str

    @staticmethod
    def read(args: Sequence[Any], given: Mapping[str, Any], variables: Mapping[str, str]) -> "_Joins":
        def argument(place: int, name: str, default: Any) -> Any:
            return args[place] if len(args) > place else given.get(name, default)

        method = argument(1, "init_method", None)
        url = str(method or "env://") if argument(5, "store", None) is None else ""
        query = parse_qs(urlparse(url).query)
        told = launchers.rank_of(variables)
        ranks = (argument(4, "rank", -1), *query.get("rank", ()), -1 if told is None else told[0])
        worlds = (argument(3, "world_size", -1), *query.get("world_size", ()), launchers.world_of(variables) or -1)
        rank, world = (next((int(each) for each in some if int(each) >= 0), -1) for some in (ranks, worlds))
        return _Joins(rank, world, url)


def _show_rendezvous(run: str, dist: Any) -> None:
    """Says in the beacon that this rank waits for the others to come, while it does."""
    c10d = dist.distributed_c10d
    meet: Callable[..., Any] = c10d.init_process_group

    @functools.wraps(meet)
    def met(*args: Any, **kwargs: Any) -> Any:
        try:
            joins = _Joins.read(args, kwargs, os.environ)
        except (TypeError, ValueError, AttributeError):  # torch itself will say what is wrong with it
            return meet(*args, **kwargs)
        if joins.rank < 0 or joins.world < 1:
            return meet(*args, **kwargs)
        _enrol(run, joins.rank)
        first, last = launchers.on_this_host(joins.rank, joins.world, joins.place, os.environ)
        whom = meeting.whom(meeting.Expected(first, last, joins.world))
        with waiting(meeting.KIND, whom, meeting.why(joins.rank, f"the rendezvous of {joins.world} ranks")):
            return meet(*args, **kwargs)

    for module in (c10d, dist, sys.modules.get(MESH)):
        if getattr(module, "init_process_group", None) is meet:
            module.init_process_group = met  # type: ignore[union-attr]
