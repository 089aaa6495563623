"""The rungs of `lockstep check` that go beyond one host: rendezvous, pairs, collectives."""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
import typer

from lockstep.cluster.probes import LocalProbes
from lockstep.config.cluster import RayCluster
from lockstep.doctor.check import collectives, isolation, others, pairs, rendezvous
from lockstep.doctor.check.collectives import Tested
from lockstep.doctor.check.communicators import Communicator, communicators, on_gloo, processes
from lockstep.doctor.check.launchers import Printed, Several
from lockstep.doctor.check.meeting import Head, Meeting
from lockstep.doctor.check.memory import Room
from lockstep.doctor.check.others import answer_look
from lockstep.doctor.check.probe import interfaces, own_address_towards, resolved, serve
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
NCCL_BOUND_S = 60.0
"""Of one self-test on NCCL: bringing it up takes seconds on one host, and tens of them on many."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """What the command line says of other hosts."""

    hosts: tuple[str, ...] = ()
    address: str | None = None
    """Of this host, for the others."""
    ports: tuple[int, ...] = ()
    wait_s: float = 60.0
    """How long people have to start probes."""


def split_address(where: str) -> tuple[str, int]:
    """`HOST:PORT`, `[IPv6]:PORT`. Raises ValueError."""
    host, colon, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--join {where}: expected HOST:PORT, as the check on the head printed it")
    return host, int(port)


def split_names(hosts: str | None) -> tuple[str, ...]:
    """Of `a,b,c`, each once. Raises ValueError."""
    if hosts is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in hosts.split(",") if name.strip()))
    if len(names) < 2:
        raise ValueError(f"--hosts {hosts}: expected two hosts or more, such as a,b,c, this one among them or not")
    return names


def split_ports(ports: str | None) -> tuple[int, ...]:
    """Of `29500,10002-10100`: each port, and first, middle and last one of a range. Raises ValueError."""
    found: list[int] = []
    for part in (ports or "").split(","):
        low, dash, high = part.strip().partition("-")
        if not part.strip():
            continue
        first, last = (int(word) if word.isdecimal() else 0 for word in (low, high if dash else low))
        if not 0 < first <= last < 65536:
            raise ValueError(
                f"--ports {part.strip()}: expected a port or a range of ports, such as 29500 or 10002-10100"
            )
        found += [first, (first + last) // 2, last]
    return tuple(dict.fromkeys(found))


def join(where: str, name: str | None, address: str | None) -> None:
    """Is the probe of this host until the head lets it go.

    Raises:
        ValueError: what was given cannot be.
        OSError: the head is not reached, or this host does not have the address.
    """
    host, port = split_address(where)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        if not sys.stdin.isatty():
            raise ValueError(f"there is no token: set {TOKEN_VARIABLE} to the one that the check on the head printed")
        token = str(typer.prompt("token of the check", hide_input=True)).strip()
    serve(host, port, token, name or socket.gethostname(), address, answer_look)


def climb(report: Report, config: "RunConfig | None", beyond: Beyond, say: Say, plan: "Plan | None" = None) -> None:
    """All rungs beyond this host, as far as there are others or a config.

    Args:
        plan: of the run, which says where its processes are to be.
    """
    given = os.environ.get(TOKEN_VARIABLE, "")
    token = given or new_token()
    launcher, address = _launcher(config, beyond, say, show_token=not given)
    several = len(launcher.hosts) > 1
    made = communicators(config, _device(config)) if config is not None else []
    if not several and not made:
        return
    address = address or ("127.0.0.1" if not several else _own_address(launcher.hosts))
    wrong = rendezvous.advertised(
        socket.gethostname(), address, "the head of the check", "give an address of this host that the others reach "
        "with --address", several, interfaces(),
    )  # fmt: skip
    report.add("rendezvous", "Rendezvous", wrong)
    if any(each.severity == "error" for each in wrong):
        return
    try:
        with Head(token, address) as head:
            _meet(report, config, beyond, say, head, launcher, made, places(plan))
    finally:
        launcher.stop()


def _meet(
    report: Report, config: "RunConfig | None", beyond: Beyond, say: Say, head: Head, launcher: Launcher,
    made: Sequence[Communicator], planned: Mapping[str, str],
) -> None:  # fmt: skip
    by_people = any(isinstance(each, Printed) and each.hosts for each in getattr(launcher, "parts", (launcher,)))
    began = time.monotonic()
    meeting = head.gather(
        launcher, beyond.wait_s if by_people else START_S, beyond.ports,
        tell=lambda absent: say(f"not here yet: {', '.join(absent)}"),
    )  # fmt: skip
    several = len(launcher.hosts) > 1
    if several:
        _add(report, "rendezvous", rendezvous.judge(meeting), time.monotonic() - began)
        found = pairs.try_pairs(head, meeting.joined)
        report.add("pairs", "Pairs of hosts", pairs.judge(found), found.took_s)
        _look_at_others(report, config, head, meeting)
    elif meeting.missing or meeting.lost:
        _add(report, "rendezvous", rendezvous.judge(meeting), time.monotonic() - began)
    if made:
        _test(report, config, head, meeting, made, planned)


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


def _add(report: Report, name: str, findings: Sequence[Finding], seconds: float) -> None:
    """To the rung that is there already."""
    last = report.rungs.pop()
    report.add(name, last.title, [*last.findings, *findings], seconds)


def _test(
    report: Report, config: "RunConfig | None", head: Head, meeting: Meeting, made: Sequence[Communicator],
    planned: Mapping[str, str],
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
        outcome = isolation.isolate(tested, lambda variables: test(made, NCCL_BOUND_S, variables), interface)
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


def _launcher(config: "RunConfig | None", beyond: Beyond, say: Say, show_token: bool) -> tuple[Launcher, str | None]:
    """Who starts the probes, and the address of this host where the launcher knows it."""
    own = socket.gethostname()
    if beyond.hosts:
        here = [name for name in beyond.hosts if _is_here(name)]
        others = [name for name in beyond.hosts if name not in here]
        local = LocalProbes(dict.fromkeys(here, ()), TOKEN_VARIABLE)
        return Several([local, Printed(others, say, show_token)]), beyond.address
    if config is not None and isinstance(config.cluster, RayCluster) and names_cluster(config.cluster):
        from lockstep.cluster.ray.probes import RayProbes  # imports ray

        launcher = RayProbes(config.cluster, look_at_nodes(config.cluster), TOKEN_VARIABLE)
        return launcher, beyond.address or launcher.address
    return LocalProbes({own: ()}, TOKEN_VARIABLE), beyond.address


def _is_here(name: str) -> bool:
    addresses = {address for each in interfaces() for address in each.plain}
    return name in (socket.gethostname(), "localhost") or bool(addresses & set(resolved(name)))


def _own_address(hosts: Sequence[str]) -> str:
    """Of this host on the way to the first of the others that has an address."""
    for name in hosts:
        if not _is_here(name):
            for peer in resolved(name)[:1]:
                address = own_address_towards(peer)
                if address:
                    return address
    raise ValueError(
        f"none of {', '.join(hosts)} has an address that this host has a route to: say with --address by which of its "
        "own addresses they reach it"
    )
