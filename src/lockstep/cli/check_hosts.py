"""The rungs of `lockstep check` that go beyond one host: rendezvous, pairs, collectives."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from lockstep.cli.check_arguments import Beyond
from lockstep.cluster.probes import LocalProbes
from lockstep.config.cluster import RayCluster
from lockstep.doctor.check import collectives, isolation, others, pairs, rendezvous
from lockstep.doctor.check.collectives import Tested
from lockstep.doctor.check.communicators import Communicator, communicators, on_gloo, processes
from lockstep.doctor.check.launchers import Printed, Several
from lockstep.doctor.check.meeting import Head, Meeting, Missing
from lockstep.doctor.check.memory import Room
from lockstep.doctor.check.network import INTERNET, own_address_towards
from lockstep.doctor.check.probe import interfaces, resolved
from lockstep.doctor.check.protocol import TOKEN_VARIABLE, Launcher, new_token
from lockstep.doctor.check.wanted import needs_of
from lockstep.doctor.finding import Finding, Report
from lockstep.run.places import look_at_nodes, names_cluster
from lockstep.watch import waits

if TYPE_CHECKING:
    from lockstep.config.run import RunConfig
    from lockstep.run.plan import Plan

Say = Callable[[str], None]

START_S = 30.0
"""How long probes that are started by a program are waited for: a busy host takes its time to start Python. Who is not
there is told meanwhile."""
MOST_LINES = 8
"""Of hosts that are not there yet, at a time."""
NCCL_BOUND_S = 60.0
"""Of one self-test on NCCL: bringing it up takes seconds on one host, and tens of them on many."""


def climb(report: Report, config: "RunConfig | None", beyond: Beyond, say: Say, plan: "Plan | None" = None) -> None:
    """All rungs beyond this host, as far as there are others or a config.

    Args:
        plan: of the run, which says where its processes are to be.
    """
    given = os.environ.get(TOKEN_VARIABLE, "")
    token = given or new_token()
    try:
        launcher, address = _launcher(beyond, say, show_token=not given)
        before = []
    except (OSError, ValueError) as error:
        # Of a cluster; what there is on this host is tried all the same.
        launcher, address = _of_this_host(), beyond.address
        before = [_unknown_cluster(error)]
    several = len(launcher.hosts) > 1
    made = communicators(config, _device(config)) if config is not None else []
    if not several and not made:
        if before:
            report.add("rendezvous", "Rendezvous", before)
        return
    address = address or (_own_address(launcher.hosts) if several else "127.0.0.1")
    useless = [each for each in _of_head(address, several) if each.severity == "error"] if address else []
    if several and not address:
        useless = [_no_address(launcher.hosts)]
    if useless:
        report.add("rendezvous", "Rendezvous", [*before, *useless])
        return
    try:
        with Head(token, address) as head:
            _meet(report, config, beyond, say, head, launcher, made, places(plan), before)
    finally:
        launcher.stop()


def _of_head(address: str, several: bool, reached: bool = False) -> list[Finding]:
    fix = "give an address of this host that the others reach with --address"
    return rendezvous.advertised(
        socket.gethostname(), address, "the head of the check", fix, several, interfaces(), reached
    )


def _unknown_cluster(error: Exception) -> Finding:
    return Finding(
        "cluster-unknown", "error", "", f"the hosts of the cluster are not known: {error}",
        "a run on it would not start; only this host is tried",
        "look at its head with `ray status`, or name another one: --cluster HOST:PORT",
    )  # fmt: skip


def _no_address(hosts: Sequence[str]) -> Finding:
    return Finding(
        "head-address", "error", socket.gethostname(),
        f"none of {', '.join(hosts)} has an address that this host has a route to, nor has the internet",
        "the head of the check cannot say by which address it is reached",
        "give an address of this host that the others reach with --address, or look at `ip route` and their names",
    )  # fmt: skip


class Absence:
    """Tells of hosts that are awaited: all that is known of each once, and again when it is something else."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._told: dict[str, str] = {}

    def __call__(self, missing: Sequence[Missing]) -> None:
        lines = {each.name: rendezvous.absent(each) for each in missing}
        new = [name for name, line in lines.items() if self._told.get(name) != line]
        for name in new[:MOST_LINES]:
            self._told[name] = lines[name]
            self._say(lines[name])
        rest = [name for name in lines if name not in new[:MOST_LINES]]
        if rest:
            self._say(f"not here yet either: {', '.join(rest)}" if new else f"still not here: {', '.join(rest)}")


def _meet(
    report: Report, config: "RunConfig | None", beyond: Beyond, say: Say, head: Head, launcher: Launcher,
    made: Sequence[Communicator], planned: Mapping[str, str], before: Sequence[Finding],
) -> None:  # fmt: skip
    by_people = any(isinstance(each, Printed) and each.hosts for each in getattr(launcher, "parts", (launcher,)))
    began = time.monotonic()
    meeting = head.gather(launcher, beyond.wait_s if by_people else START_S, beyond.ports, tell=Absence(say))
    several = len(launcher.hosts) > 1
    if several or before or set(meeting.joined) != set(launcher.hosts):
        of_head = _of_head(meeting.head, several, rendezvous.reached(meeting))
        findings = [*before, *of_head, *rendezvous.judge(meeting)]
        report.add("rendezvous", "Rendezvous", findings, time.monotonic() - began)
    if several:
        found = pairs.try_pairs(head, meeting.joined)
        report.add("pairs", "Pairs of hosts", pairs.judge(found), found.took_s)
        _look_at_others(report, config, head, meeting)
    if made:
        _test(report, config, head, meeting, made, planned, say)


def _look_at_others(report: Report, config: "RunConfig | None", head: Head, meeting: Meeting) -> None:
    began = time.monotonic()
    own = {address for each in interfaces() for address in each.plain}
    here = {name for name, card in meeting.joined.items() if card.address in own}
    needs = needs_of(config, several=True)
    facts, lost = others.look_at(head, list(head.members), needs)
    findings = others.judge_others(facts, lost, needs, here.__contains__)
    report.add("hosts", "All hosts", findings, time.monotonic() - began)
    began = time.monotonic()
    found = others.compare_environments(head, list(head.members))
    report.add("environments", "Environments of all hosts", found, time.monotonic() - began)


def _test(
    report: Report, config: "RunConfig | None", head: Head, meeting: Meeting, made: Sequence[Communicator],
    planned: Mapping[str, str], say: Say,
) -> None:  # fmt: skip
    device = _device(config)
    here = sorted(set(meeting.joined) & head.members.keys())
    hosts = spread(processes(made), here)
    if set(planned.values()) <= set(here):
        hosts |= {name: planned[name] for name in hosts if name in planned}
    if not hosts:
        why = "no host has joined"
        report.add("collectives", "Collectives", [Finding("collectives", "unchecked", "", why)])
        return

    def test(which: Sequence[Communicator], bound_s: float, environment: Mapping[str, str] | None = None) -> Tested:
        return collectives.self_test(head, meeting.joined, which, hosts, device, bound_s, environment)

    nccl = any(each.backend == "nccl" for each in made)
    tested = test(made, NCCL_BOUND_S if nccl else collectives.BOUND_S)
    findings = collectives.judge(tested)
    if nccl and not tested.passed:
        interface = meeting.joined[next(iter(hosts.values()))].interface

        def again(variables: Mapping[str, str]) -> Tested:
            words = " ".join(f"{name}={value}" for name, value in variables.items())
            say(f"the test on NCCL failed; it is run again with {words}, for up to {NCCL_BOUND_S:.0f} s")
            return test(made, NCCL_BOUND_S, variables)

        outcome = isolation.isolate(tested, again, interface)
        say(f"and on gloo, for up to {collectives.BOUND_S:.0f} s")
        gloo = test(on_gloo(made), collectives.BOUND_S)
        findings += [*isolation.judge(outcome, gloo, interface), *collectives.judge(gloo)]
    report.add("collectives", "Collectives", findings, tested.took_s)


def places(plan: "Plan | None") -> dict[str, str]:
    """The host of each process, where a placement says it."""
    if plan is None or plan.assignment is None:
        return {}
    return {name: node.name for name, node in plan.assignment.node_of.items()}


def spread(names: Sequence[str], hosts: Sequence[str]) -> dict[str, str]:
    """A host for each process where no placement says so: neighbours together, as many on each."""
    if not hosts:
        return {}
    each = -(-len(names) // len(hosts))
    return {name: hosts[place // each] for place, name in enumerate(names)}


def _device(config: "RunConfig | None") -> Literal["cpu", "cuda"]:
    if config is not None and config.cluster.device != "auto":
        return config.cluster.device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"


def room_of_process(config: "RunConfig | None") -> Room:
    """What one process of a run has on this host: a GPU, or the host's memory."""
    if _device(config) == "cpu":
        return Room("cpu", psutil.virtual_memory().available)
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        rows = waits.run(query, why="name and memory of the GPUs", timeout_s=5.0).stdout.splitlines()
        name, size = rows[0].rsplit(",", 1)
        return Room("cuda", int(size) << 20, name.strip())
    except (OSError, ValueError, IndexError, waits.WaitTimeout):
        return Room("cuda", 0)


def _launcher(beyond: Beyond, say: Say, show_token: bool) -> tuple[Launcher, str | None]:
    """Who starts the probes, and the address of this host where the launcher knows it.

    Raises:
        ConnectionError: the cluster cannot be reached.
        UnreachableAddress: its nodes do not reach this process.
    """
    if beyond.hosts:
        here = [name for name in beyond.hosts if _is_here(name)]
        others = [name for name in beyond.hosts if name not in here]
        local = LocalProbes(dict.fromkeys(here, ()), TOKEN_VARIABLE)
        return Several([local, Printed(others, say, show_token)]), beyond.address
    if isinstance(beyond.cluster, RayCluster) and names_cluster(beyond.cluster):
        nodes = look_at_nodes(beyond.cluster)
        from lockstep.cluster.ray.probes import RayProbes  # imports ray

        launcher = RayProbes(beyond.cluster, nodes, TOKEN_VARIABLE)
        return launcher, beyond.address or launcher.address
    return _of_this_host(), beyond.address


def _of_this_host() -> LocalProbes:
    return LocalProbes({socket.gethostname(): ()}, TOKEN_VARIABLE)


def _is_here(name: str) -> bool:
    addresses = {address for each in interfaces() for address in each.plain}
    return name in (socket.gethostname(), "localhost") or bool(addresses & set(resolved(name)))


def _own_address(hosts: Sequence[str]) -> str:
    """Of this host on the way to the first of the others that has an address, else to the internet; empty where there
    is no way."""
    others = (peer for name in hosts if not _is_here(name) for peer in resolved(name)[:1])
    return next(filter(None, map(own_address_towards, chain(others, INTERNET))), "")
