"""The faults that are put into running runs: what each does, to which process, and what a verdict may then name."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.machine_faults import CannotInject, break_message, shift_clock, slow_disk, use_up_memory
from benchmarks.faults.network_namespaces import why_no_namespaces
from benchmarks.faults.ray_hosts import Hosts
from benchmarks.launched_run import LaunchedRun

SLOW_DISK_S, SLOW_BYTES_PER_S = 12.0, 256 << 10
CUT_S = 20.0
"""A link is down for longer than a silent host is waited for (`Hosts` sets the time-outs of Ray and of runs)."""
MOST_STEPS = 5
"""A slow disk or a cut host does not last for more steps of a run that does without it."""
JUMP_S = 3600
OOM_S = 30.0


@dataclass(frozen=True, slots=True)
class RunFault:
    """A kind of fault."""

    how: str
    """A key of `HOW`."""
    target: str = ""
    """The process: a role, `agent`, `supervisor` or `controller`; empty for the machine."""
    silent: bool = False
    """The process lives on and does nothing: a verdict must be confirmed that names it."""
    may_end: bool = False
    """The run may end with an error that says why, and is then resumed."""
    exact: bool = True
    """The weights at the end are promised to be those of the undisturbed run bit by bit. A lost engine or controller
    changes which completions are generated together, and so the last bits of their log-probabilities."""

    @property
    def name(self) -> str:
        return f"{self.how} {self.target}".strip()

    @property
    def whole_host(self) -> bool:
        """All workers of a host end with it."""
        return self.target == "agent" or self.how in ("cut", "lose")


LOCAL = (
    RunFault("kill", "policy"),
    RunFault("stop", "policy", silent=True),
    RunFault("hold GIL of", "policy", silent=True),
    RunFault("out of memory in", "policy"),
    RunFault("kill", "controller", may_end=True, exact=False),
    RunFault("kill", "supervisor"),
    RunFault("kill", "agent", exact=False),
    RunFault("full", "disk", may_end=True, exact=False),
    RunFault("slow", "disk"),
    RunFault("jump of", "clock"),
)
"""Faults of every run on one host."""
GENERATION = (
    RunFault("kill", "engine", exact=False),
    RunFault("stop", "engine", exact=False),
    RunFault("out of memory in", "engine", exact=False),
    RunFault("broken message of", "engine", exact=False),
    RunFault("kill", "scorer"),
    RunFault("broken message of", "scorer"),
)
"""Faults of runs that generate."""
CRITIC = (RunFault("kill", "critic"), RunFault("stop", "critic", silent=True))
HOSTS = (RunFault("cut", "host", exact=False), RunFault("lose", "host", exact=False))
"""Faults of runs on two hosts."""


@dataclass
class Site:
    """What an injection needs to know of a run."""

    run: LaunchedRun
    chance: random.Random
    label: str
    """Names cgroups; unique on this machine."""
    scratch: Path
    hosts: Hosts | None = None
    disk: Path | None = None
    """The small disk that has the run's folder, if it has one of its own."""
    freeze: Path | None = None
    """A file whose creation freezes a trainer rank (`injected/sitecustomize.py`)."""
    clock: Path | None = None
    """The file with the shift of the run's clock."""

    @property
    def step(self) -> int:
        """The controller's step, counted from 1; 0 before the first."""
        position = self.run.position()
        return 0 if position is None or position.step is None else position.step + 1

    @property
    def shift(self) -> int:
        """Seconds by which the clock of the run's processes is wrong."""
        return 0 if self.clock is None else int.from_bytes(self.clock.read_bytes(), "little", signed=True)

    def wall_time(self) -> float:
        """The time of day in the run's processes, in seconds since the epoch."""
        return time.time() + self.shift

    def workers(self, role: str) -> dict[str, int]:
        """The pids of the living processes of a role, of `agent` or of `supervisor`, by name."""
        return {each.name: each.pid for each in self.run.beacons() if each.name.partition("-")[0] == role}

    def pick(self, role: str) -> tuple[str, int]:
        """One of the role's processes, and its pid. Raises CannotInject if it has none now."""
        found = {role: self.run.process.pid} if role == "controller" else self.workers(role)
        if not found:
            raise CannotInject(f"there is no {role} now")
        name = self.chance.choice(sorted(found))
        return name, found[name]

    def everybody(self) -> list[str]:
        """The names of all workers."""
        return [state.name for state in self.run.beacons() if state.name != "controller"]


def inject(fault: RunFault, site: Site) -> list[str]:
    """Make the fault. Returns the names of the processes that a verdict may name; raises CannotInject."""
    everybody = site.everybody()
    names = HOW[fault.how](fault, site)
    return everybody if fault.whole_host else names


def _kill(fault: RunFault, site: Site) -> list[str]:
    return _signal(fault, site, signal.SIGKILL)


def _stop(fault: RunFault, site: Site) -> list[str]:
    return _signal(fault, site, signal.SIGSTOP)


def _signal(fault: RunFault, site: Site, number: int) -> list[str]:
    name, pid = site.pick(fault.target)
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise CannotInject(f"{name} has just ended") from None
    return [name]


def _hold_gil(fault: RunFault, site: Site) -> list[str]:
    """The rank 1 of a trained role freezes in its next step; which role, the verdict says."""
    if site.freeze is None:
        raise CannotInject("the run's workers import no `sitecustomize` of ours")
    site.freeze.touch()
    return [
        name for name in (*site.workers("policy"), *site.workers("critic")) if name.partition("-")[2].startswith("1")
    ]


def _use_up_memory(fault: RunFault, site: Site) -> list[str]:
    name, pid = site.pick(fault.target)
    if not use_up_memory(pid, site.label, OOM_S):
        raise CannotInject(f"{name} has not allocated memory for {OOM_S:g} s")
    return [name]


def _fill_disk(fault: RunFault, site: Site) -> list[str]:
    if site.disk is None:
        raise CannotInject("the run's folder is on a disk that it shares")
    state = os.statvfs(site.disk)
    with suppress(OSError):  # full is full
        (site.disk / "ballast").write_bytes(b"x" * (state.f_bavail * state.f_frsize))
    return []


def _slow_disk(fault: RunFault, site: Site) -> list[str]:
    if site.disk is not None:
        raise CannotInject("the run's folder is in memory")
    with slow_disk(site.run.folder, site.label, SLOW_BYTES_PER_S) as group:
        for pid in (site.run.process.pid, *site.workers("policy").values()):
            with suppress(OSError):
                (group / "cgroup.procs").write_text(str(pid))
        _last(site, SLOW_DISK_S)
    return []


def _break_message(fault: RunFault, site: Site) -> list[str]:
    name, pid = site.pick(fault.target)
    controller = psutil.Process(site.run.process.pid)
    listening = {
        each.laddr.port for each in controller.net_connections("tcp") if each.status == psutil.CONN_LISTEN
    }  # fmt: skip
    break_message(pid, listening, site.chance)
    return [name]


def _shift_clock(fault: RunFault, site: Site) -> list[str]:
    if site.clock is None:
        raise CannotInject("the run's clock cannot be shifted")
    shift_clock(site.clock, 0 if site.shift else site.chance.choice((-JUMP_S, JUMP_S)))
    return []


def _cut(fault: RunFault, site: Site) -> list[str]:
    hosts = _hosts(site)
    hosts.cut()
    _last(site, CUT_S)
    hosts.mend()
    return []


def _last(site: Site, seconds: float) -> None:
    """Returns after some seconds, or before if the run does so many steps."""
    end, first = time.monotonic() + seconds, site.step
    while time.monotonic() < end and site.step - first < MOST_STEPS:
        time.sleep(0.02)


def _lose(fault: RunFault, site: Site) -> list[str]:
    hosts = _hosts(site)
    hosts.end_b()
    time.sleep(1.0)
    hosts.join_b()
    return []


def _hosts(site: Site) -> Hosts:
    if site.hosts is None:
        raise CannotInject(why_no_namespaces() or "the run has one host")
    return site.hosts


HOW: dict[str, Callable[[RunFault, Site], list[str]]] = {
    "kill": _kill,
    "stop": _stop,
    "hold GIL of": _hold_gil,
    "out of memory in": _use_up_memory,
    "full": _fill_disk,
    "slow": _slow_disk,
    "broken message of": _break_message,
    "jump of": _shift_clock,
    "cut": _cut,
    "lose": _lose,
}
