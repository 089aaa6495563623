"""The rungs of `lockstep check` that go beyond one host: rendezvous, pairs, collectives."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import psutil
import typer

from lockstep.base import waits
from lockstep.base.bounded_wait import WaitTimeout
from lockstep.cli.check_arguments import HostSelection, split_address
from lockstep.cli.terminal import show_note
from lockstep.cluster.local_cluster import LocalProbes
from lockstep.config.cluster import RayClusterConfig
from lockstep.doctor.check.cluster import collective_test, host_comparison, host_pairs, nccl_isolation, rendezvous_rules
from lockstep.doctor.check.cluster.collective_test import (
    PlannedCommunicator,
    SelfTestResult,
    communicator_processes,
    on_gloo,
    planned_communicators,
)
from lockstep.doctor.check.cluster.probe_rendezvous import (
    CheckHead,
    CombinedLauncher,
    MissingHost,
    PrintedLauncher,
    ProbeRendezvous,
)
from lockstep.doctor.check.facts.host_requirements import requirements_of
from lockstep.doctor.check.facts.network_facts import INTERNET_ADDRESSES, local_address_towards
from lockstep.doctor.check.probe.host_probe import JOIN_TIMEOUT_S, host_interfaces, resolve_host, serve_probe
from lockstep.doctor.check.probe.probe_protocol import TOKEN_VARIABLE, ProbeLauncher, new_token
from lockstep.doctor.check.rules.memory_fit import ProcessMemory
from lockstep.doctor.output.findings import CheckReport, Finding
from lockstep.run.planning.node_placement import list_cluster_nodes, uses_existing_cluster

if TYPE_CHECKING:
    from lockstep.config.run_config import RunConfig
    from lockstep.run.planning.run_plan import RunPlan

ShowNote = Callable[[str], None]

LOCAL_START_S = 30.0
"""How long probes that are started by a program are waited for: a busy host takes its time to start Python. Who is not
there is told meanwhile."""
MAX_MISSING_LINES = 8
"""Of hosts that are not there yet, at a time."""
NCCL_BOUND_S = 60.0
"""Of one self-test on NCCL: bringing it up takes seconds on one host, and tens of them on many."""


def check_hosts(
    report: CheckReport, config: "RunConfig | None", beyond: HostSelection, say: ShowNote, plan: "RunPlan | None" = None
) -> None:
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
        launcher, address = _local_probes(), beyond.address
        before = [_unknown_cluster(error)]
    several = len(launcher.hosts) > 1
    made = planned_communicators(config, _device(config)) if config is not None else []
    if not several and not made:
        if before:
            report.add("rendezvous", "Rendezvous", before)
        return
    address = address or (_own_address(launcher.hosts) if several else "127.0.0.1")
    useless = [each for each in _head_address_findings(address, several) if each.severity == "error"] if address else []
    if several and not address:
        useless = [_no_address(launcher.hosts)]
    if useless:
        report.add("rendezvous", "Rendezvous", [*before, *useless])
        return
    try:
        with CheckHead(token, address) as head:
            _run_rendezvous(report, config, beyond, say, head, launcher, made, planned_hosts(plan), before)
    finally:
        launcher.stop()


def _head_address_findings(address: str, several: bool, reached: bool = False) -> list[Finding]:
    fix = "give an address of this host that the others reach with --address"
    return rendezvous_rules.judge_advertised_address(
        socket.gethostname(), address, "the head of the check", fix, several, host_interfaces(), reached
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


class MissingHostNotes:
    """Tells of hosts that are awaited: all that is known of each once, and again when it is something else."""

    def __init__(self, say: ShowNote) -> None:
        self._say = say
        self._told: dict[str, str] = {}

    def __call__(self, missing: Sequence[MissingHost]) -> None:
        lines = {each.name: rendezvous_rules.describe_missing(each) for each in missing}
        new = [name for name, line in lines.items() if self._told.get(name) != line]
        for name in new[:MAX_MISSING_LINES]:
            self._told[name] = lines[name]
            self._say(lines[name])
        rest = [name for name in lines if name not in new[:MAX_MISSING_LINES]]
        if rest:
            self._say(f"not here yet either: {', '.join(rest)}" if new else f"still not here: {', '.join(rest)}")


def _run_rendezvous(
    report: CheckReport, config: "RunConfig | None", beyond: HostSelection, say: ShowNote, head: CheckHead, launcher: ProbeLauncher,
    made: Sequence[PlannedCommunicator], planned: Mapping[str, str], before: Sequence[Finding],
) -> None:  # fmt: skip
    by_people = any(
        isinstance(each, PrintedLauncher) and each.hosts for each in getattr(launcher, "parts", (launcher,))
    )
    began = time.monotonic()
    meeting = head.gather(
        launcher, beyond.wait_s if by_people else LOCAL_START_S, beyond.ports, tell=MissingHostNotes(say)
    )
    several = len(launcher.hosts) > 1
    if several or before or set(meeting.joined) != set(launcher.hosts):
        of_head = _head_address_findings(meeting.head, several, rendezvous_rules.reached_from_outside(meeting))
        findings = [*before, *of_head, *rendezvous_rules.judge_rendezvous(meeting)]
        report.add("rendezvous", "Rendezvous", findings, time.monotonic() - began)
    if several:
        found = host_pairs.test_host_pairs(head, meeting.joined)
        report.add("pairs", "Pairs of hosts", host_pairs.judge_pairs(found), found.took_s)
        _compare_hosts(report, config, head, meeting)
    if made:
        _run_self_test(report, config, head, meeting, made, planned, say)


def _compare_hosts(report: CheckReport, config: "RunConfig | None", head: CheckHead, meeting: ProbeRendezvous) -> None:
    began = time.monotonic()
    own = {address for each in host_interfaces() for address in each.plain}
    here = {name for name, card in meeting.joined.items() if card.address in own}
    needs = requirements_of(config, several=True)
    facts, lost = host_comparison.gather_from_hosts(head, list(head.members), needs)
    findings = host_comparison.judge_other_hosts(facts, lost, needs, here.__contains__)
    report.add("hosts", "All hosts", findings, time.monotonic() - began)
    began = time.monotonic()
    found = host_comparison.compare_environments(head, list(head.members))
    report.add("environments", "Environments of all hosts", found, time.monotonic() - began)


def _run_self_test(
    report: CheckReport, config: "RunConfig | None", head: CheckHead, meeting: ProbeRendezvous, made: Sequence[PlannedCommunicator],
    planned: Mapping[str, str], say: ShowNote,
) -> None:  # fmt: skip
    device = _device(config)
    here = sorted(set(meeting.joined) & head.members.keys())
    hosts = spread_over_hosts(communicator_processes(made), here)
    if set(planned.values()) <= set(here):
        hosts |= {name: planned[name] for name in hosts if name in planned}
    if not hosts:
        why = "no host has joined"
        report.add("collectives", "Collectives", [Finding("collectives", "unchecked", "", why)])
        return

    def test(
        which: Sequence[PlannedCommunicator], bound_s: float, environment: Mapping[str, str] | None = None
    ) -> SelfTestResult:
        return collective_test.run_self_test(head, meeting.joined, which, hosts, device, bound_s, environment)

    nccl = any(each.backend == "nccl" for each in made)
    tested = test(made, NCCL_BOUND_S if nccl else collective_test.SELF_TEST_TIMEOUT_S)
    findings = collective_test.judge_collectives(tested)
    if nccl and not tested.passed:
        interface = meeting.joined[next(iter(hosts.values()))].interface

        def again(variables: Mapping[str, str]) -> SelfTestResult:
            words = " ".join(f"{name}={value}" for name, value in variables.items())
            say(f"the test on NCCL failed; it is run again with {words}, for up to {NCCL_BOUND_S:.0f} s")
            return test(made, NCCL_BOUND_S, variables)

        outcome = nccl_isolation.run_isolation(tested, again, interface)
        say(f"and on gloo, for up to {collective_test.SELF_TEST_TIMEOUT_S:.0f} s")
        gloo = test(on_gloo(made), collective_test.SELF_TEST_TIMEOUT_S)
        findings += [
            *nccl_isolation.judge_isolation(outcome, gloo, interface),
            *collective_test.judge_collectives(gloo),
        ]
    report.add("collectives", "Collectives", findings, tested.took_s)


def planned_hosts(plan: "RunPlan | None") -> dict[str, str]:
    """The host of each process, where a placement says it."""
    if plan is None or plan.assignment is None:
        return {}
    return {name: node.name for name, node in plan.assignment.node_of.items()}


def spread_over_hosts(names: Sequence[str], hosts: Sequence[str]) -> dict[str, str]:
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


def process_memory(config: "RunConfig | None") -> ProcessMemory:
    """What one process of a run has on this host: a GPU, or the host's memory."""
    if _device(config) == "cpu":
        return ProcessMemory("cpu", psutil.virtual_memory().available)
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        rows = waits.run(query, why="name and memory of the GPUs", timeout_s=5.0).stdout.splitlines()
        name, size = rows[0].rsplit(",", 1)
        return ProcessMemory("cuda", int(size) << 20, name.strip())
    except (OSError, ValueError, IndexError, WaitTimeout):
        return ProcessMemory("cuda", 0)


def _launcher(beyond: HostSelection, say: ShowNote, show_token: bool) -> tuple[ProbeLauncher, str | None]:
    """Who starts the probes, and the address of this host where the launcher knows it.

    Raises:
        ConnectionError: the cluster cannot be reached.
        UnreachableAddress: its nodes do not reach this process.
    """
    if beyond.hosts:
        here = [name for name in beyond.hosts if _is_this_host(name)]
        others = [name for name in beyond.hosts if name not in here]
        local = LocalProbes(dict.fromkeys(here, ()), TOKEN_VARIABLE)
        return CombinedLauncher([local, PrintedLauncher(others, say, show_token)]), beyond.address
    if isinstance(beyond.cluster, RayClusterConfig) and uses_existing_cluster(beyond.cluster):
        nodes = list_cluster_nodes(beyond.cluster)
        from lockstep.cluster.ray.ray_nodes import RayProbes  # imports ray

        launcher = RayProbes(beyond.cluster, nodes, TOKEN_VARIABLE)
        return launcher, beyond.address or launcher.address
    return _local_probes(), beyond.address


def _local_probes() -> LocalProbes:
    return LocalProbes({socket.gethostname(): ()}, TOKEN_VARIABLE)


def _is_this_host(name: str) -> bool:
    addresses = {address for each in host_interfaces() for address in each.plain}
    return name in (socket.gethostname(), "localhost") or bool(addresses & set(resolve_host(name)))


def _own_address(hosts: Sequence[str]) -> str:
    """Of this host on the way to the first of the others that has an address, else to the internet; empty where there
    is no way."""
    others = (peer for name in hosts if not _is_this_host(name) for peer in resolve_host(name)[:1])
    return next(filter(None, map(local_address_towards, chain(others, INTERNET_ADDRESSES))), "")


def run_probe(where: str, name: str | None, address: str | None, wait_s: float | None) -> None:
    """Is the probe of this host until the head lets it go.

    Args:
        wait_s: how long the head is tried, when not as usual.

    Raises:
        ValueError: what was given cannot be.
        OSError: the head is not reached or does not take this probe, or this host does not have the address.
    """
    host, port = split_address(where)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        if not sys.stdin.isatty():
            raise ValueError(f"there is no token: set {TOKEN_VARIABLE} to the one that the check on the head printed")
        token = str(typer.prompt("token of the check", hide_input=True)).strip()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _exit_on_signal)
    serve_probe(host, port, token, name or socket.gethostname(), address, _look, wait_s or JOIN_TIMEOUT_S, show_note)


def _look(order: Mapping[str, Any]) -> dict[str, Any]:
    from lockstep.doctor.check.cluster.host_comparison import answer_look

    return answer_look(order)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """In order: ranks of a self-test are ended on the way."""
    raise SystemExit(128 + number)
