"""Facts of several hosts: real probes of this host under several names, and findings about simulated hosts."""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from lockstep.base import waits
from lockstep.doctor.check.cluster.host_comparison import (
    answer_facts_order,
    compare_environments,
    gather_from_hosts,
    judge_other_hosts,
    merge_findings,
)
from lockstep.doctor.check.cluster.probe_rendezvous import CheckHead
from lockstep.doctor.check.facts.host_facts import HostFacts, HostVersions, KernelEvent, KernelLog, ShmSpace
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.probe.host_probe import FactsGatherer, ProbeDismissed, serve_probe
from lockstep.doctor.check.probe.probe_protocol import ProbeMessage, new_token
from lockstep.doctor.output.findings import Finding

from .test_host_resources import FINE


@dataclass
class Threads:
    """A launcher whose probes are threads of this process."""

    hosts: tuple[str, ...]
    looks: Mapping[str, FactsGatherer]
    started: list[threading.Thread] = field(default_factory=list)

    def start(self, head: str, port: int, token: str) -> None:
        for name in self.hosts:
            arguments = (head, port, token, name, self.looks.get(name, answer_facts_order))
            self.started.append(threading.Thread(target=_serve, args=arguments, daemon=True))
            self.started[-1].start()

    def failed(self) -> Mapping[str, str]:
        return {}

    @property
    def addresses(self) -> Mapping[str, str]:
        return {}

    def stop(self) -> None:
        for thread in self.started:
            waits.join(thread, waits_for="probe", why="the end of a test", timeout_s=20)


def _serve(head: str, port: int, token: str, name: str, look: FactsGatherer) -> None:
    with contextlib.suppress(ProbeDismissed):
        serve_probe(head, port, token, name, None, look)


def _nonsense(order: ProbeMessage) -> ProbeMessage:
    return {"host": ["not a name"]}


def test_facts_are_requested_from_all_hosts_in_parallel() -> None:
    token = new_token()
    launcher = Threads(("a", "b", "c"), {"c": _nonsense})
    needs = HostRequirements(several=True, folders={".": "the run's folder"})
    try:
        with CheckHead(token, "127.0.0.1") as head:
            head.gather(launcher)
            facts, lost = gather_from_hosts(head, sorted(head.members), needs)
    finally:
        launcher.stop()
    assert sorted(facts) == ["a", "b"] and [known.host for known in facts.values()] == ["a", "b"]
    assert all(known.limits and known.versions and known.disks for known in facts.values())
    assert "its answer is invalid" in lost["c"]
    said = {finding.id: finding for finding in judge_other_hosts(facts, lost, needs, {"a"})}
    assert said["host"].host == "c" and said["host"].severity == "unchecked"
    assert not [finding for finding in said.values() if finding.severity == "ok" and "a" in finding.host.split(",")]


def test_variables_of_hosts_are_compared_and_secrets_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_IB_DISABLE": "0", "NCCL_DEBG": "s3cret", "HF_TOKEN": "s3cret", "MINE": "s3cret"}.items():
        monkeypatch.setenv(name, value)
    assert "s3cret" not in str(answer_facts_order({"what": "environment"}))
    launcher = Threads(("a", "b", "c"), {"b": lambda order: {"variables": {"NCCL_IB_DISABLE": "1"}}, "c": _nonsense})
    try:
        with CheckHead(new_token(), "127.0.0.1") as head:
            head.gather(launcher)
            found = compare_environments(head, sorted(head.members))
    finally:
        launcher.stop()
    told = {each.id: each for each in found if "NCCL_IB_DISABLE" in each.seen or each.id == "env-misspelt"}
    assert told["env-differs"].severity == "warning"
    assert "=0 on a; NCCL_IB_DISABLE=1 on b" in told["env-differs"].seen
    assert next(each for each in found if each.severity == "unchecked").host == "c"
    assert told["env-misspelt"].host == "a"


def test_equal_findings_of_hosts_are_merged() -> None:
    small = replace(FINE, shm=ShmSpace(64 << 20, 64 << 20))
    facts = {f"h{number}": HostFacts(f"h{number}", limits=FINE) for number in range(5)}
    facts |= {f"s{number}": HostFacts(f"s{number}", limits=small) for number in range(3)}
    facts["odd"] = HostFacts("odd", limits=FINE, versions=HostVersions({"torch": "2.12.0"}))
    facts["h0"] = replace(facts["h0"], versions=HostVersions({"torch": "2.13.0"}))
    found = {each.id: each for each in judge_other_hosts(facts, {}, HostRequirements(packages=(), shared=True), ())}
    assert found["shm-size"].host == "s0,s1,s2" and found["shm-size"].severity == "error"
    assert found["differs-torch"].host == "odd" and found["hosts"].host == "h0,h1,h2,h3,h4"


def test_merging_keeps_what_differs_apart() -> None:
    first, second = Finding("x", "error", "a", "1"), Finding("x", "error", "b", "1")
    assert merge_findings([first, second, Finding("x", "error", "c", "2")]) == [
        Finding("x", "error", "a,b", "1"), Finding("x", "error", "c", "2"),
    ]  # fmt: skip


def test_facts_that_cannot_be_judged_do_not_affect_other_hosts() -> None:
    small = replace(FINE, shm=ShmSpace(64 << 20, 64 << 20))
    facts = {
        "odd": HostFacts("odd", kernel=KernelLog([KernelEvent("of a later version", "?")]), limits=FINE),
        "small": HostFacts("small", limits=small),
    }
    found = {each.id: each for each in judge_other_hosts(facts, {}, HostRequirements(packages=()), ())}
    assert found["shm-size"].host == "small" and found["host"].host == "odd" and found["host"].severity == "unchecked"
