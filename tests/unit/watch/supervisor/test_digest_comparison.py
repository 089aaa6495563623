"""Calls on different hosts are compared through digests, in the messages of two agents, without their processes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.watch.agent.call_comparison import CallComparison, CommunicatorLife
from lockstep.watch.agent.call_windows import WINDOW, CallDigest
from lockstep.watch.agent.process_monitor import ProcessMonitor
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.agent.report_messages import DIGEST_RECORD, Roster, StateReport, decode_report, encode_report
from lockstep.watch.beacon import writer
from lockstep.watch.beacon.beacon_records import MAX_COMMUNICATORS
from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind, VerdictLevel
from lockstep.watch.supervisor.agent_connections import ReplyHandler, parse_report
from lockstep.watch.supervisor.digest_comparison import (
    KEPT_DIGESTS,
    MAX_ATTEMPTS,
    DigestComparison,
    DigestTable,
    _followed_calls,
)
from lockstep.watch.supervisor.evidence_builder import HostState
from lockstep.watch.supervisor.message_store import MessageStore
from tests.unit.watch.agent.recorded_members import Member


class Host:
    """An agent's reports, and its answers to the supervisor, each as JSON."""

    def __init__(self, host: str, members: list[Member]) -> None:
        self.host, self.members = host, members
        self.builder, self.monitor = ReportBuilder(host), ProcessMonitor("run-1")
        self.requests: list[str] = []

    def messages(self) -> Iterator[dict[str, Any]]:
        self.monitor.tracked = {state.name: state for state in (each.state() for each in self.members)}
        for report in self.builder.build(self.monitor):
            yield parse_report(json.dumps(encode_report(report)).encode())

    def request(self, operation: str, on_reply: ReplyHandler, timeout_s: float, **content: Any) -> None:
        self.requests.append(operation)
        comparison, life = self.builder.comparison, CommunicatorLife(int(content["communicator"], 16), 0)
        life = life._replace(incarnation=content["incarnation"])
        if operation == "show":
            on_reply({"known": comparison.show(life, content["seq"])})
        else:
            found = comparison.calls_between(life, content["first"], content["last"])
            on_reply(json.loads(json.dumps({"calls": found})))


class Job:
    """Hosts and their supervisor."""

    def __init__(self, *hosts: list[int]) -> None:
        size = sum(map(len, hosts))
        self.hosts = [Host("ab"[n], [Member(rank, size) for rank in ranks]) for n, ranks in enumerate(hosts)]
        self.store, self.now = MessageStore(), 10.0
        self.comparison = DigestComparison(lambda: self.hosts)  # type: ignore[arg-type, return-value]

    @property
    def ranks(self) -> list[Member]:
        return [each for host in self.hosts for each in host.members]

    def call(self, what: str = "[4]", **wrong: str) -> None:
        """All ranks make a call; `rank1="[12]"` makes that of rank 1 another one."""
        for each in self.ranks:
            each.call(wrong.get(f"rank{each.rank}", what))

    def report(self, *hosts: int) -> None:
        """These hosts report, or all."""
        self.now += 0.5
        for number in hosts or range(len(self.hosts)):
            for message in self.hosts[number].messages():
                self.receive(message)

    def receive(self, message: dict[str, Any]) -> None:
        if self.store.receive(message, self.now):
            host = self.store.host(message["host"])
            assert host is not None
            self.comparison.update(host)

    def verdicts(self) -> list[Verdict]:
        return diagnose(self.store.evidence(self.now))

    def close(self) -> None:
        for each in self.ranks:
            each.beacon.close(remove=True)
        writer._current = writer._NullBeacon()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    made = Job([0, 1], [2, 3])
    yield made
    made.close()


def test_a_rank_of_another_host_is_named_while_the_job_runs_on(job: Job) -> None:
    """Rank 3 alone differs, on a host of two, where there is no majority."""
    for step in range(1, 200):
        job.call(rank3="[12]" if step == 70 else "[4]")
        if step % 10 == 0:
            job.report()
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.level, verdict.confidence) == (VerdictKind.MISMATCH, VerdictLevel.CONFIRMED, 0.95)
    assert [(each.rank, each.host) for each in verdict.culprits] == [(3, "b")]
    assert verdict.collective is not None and verdict.collective.seq == 70
    assert "train.py:31" in json.dumps(verdict.json())


def test_hosts_of_one_member_each_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    job = Job([0], [1])
    try:
        for step in range(1, 120):
            job.call(rank1="[12]" if step == 20 else "[4]")
            if step % 10 == 0:
                job.report()
        assert [host.requests for host in job.hosts] == [["calls", "show"]] * 2
        assert job.verdicts()[0].kind is VerdictKind.MISMATCH
    finally:
        job.close()


def test_a_difference_before_a_pause_is_found_without_a_full_window(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.watch.beacon.call_follower.SETTLED_NS", 1)
    monkeypatch.setattr("lockstep.watch.agent.call_comparison.PATIENCE_S", 0.0)
    for _ in range(3):
        job.call()
    job.call(rank2="[12]", rank3="[12]")
    for _ in range(5):
        job.report()
    assert job.hosts[0].requests == ["calls", "show"]
    (verdict,) = job.verdicts()
    assert verdict.collective is not None and verdict.collective.seq == 4


def test_a_communicator_that_was_created_again_is_not_compared_with_the_old_one(job: Job) -> None:
    for _ in range(100):
        job.call()
    job.report()
    for host in job.hosts:  # an agent may see this much later than the other
        for each in host.members:
            each.reopen()
            for _ in range(100):
                each.call("[9]")
        for _ in range(3):
            job.report(0)
            job.report()
    assert [host.requests for host in job.hosts] == [[], []] and job.verdicts() == []
    for step in range(60):
        job.call(rank1="[7]" if step == 3 else "[9]")
    for _ in range(3):
        job.report()
    (verdict,) = job.verdicts()
    assert [each.rank for each in verdict.culprits] == [1], "the new one is compared"


@settings(max_examples=15, deadline=None)
@example(paces=[(0, 1, False)] * 3 + [(0, 6, False)], wrong=(0, 1))  # host b does not know the communicator yet
@given(
    paces=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.booleans()), min_size=4, max_size=20),
    wrong=st.none() | st.tuples(st.integers(0, 3), st.integers(1, 100)),
)
def test_hosts_at_any_pace_differ_only_if_a_rank_does(
    tmp_path_factory: pytest.TempPathFactory, paces: list[tuple[int, int, bool]], wrong: tuple[int, int] | None
) -> None:
    """Ranks run ahead of each other; every host has caught up in the end, and the job goes on for two windows."""
    os.environ["LOCKSTEP_BEACONS"] = str(tmp_path_factory.mktemp("beacons"))
    job = Job([0, 1], [2, 3])

    def call(member: Member) -> None:
        member.call("[77]" if wrong == (member.rank, member.seq + 1) else f"[{member.seq % 7}]")

    try:
        for rank, count, which in paces:
            member = job.ranks[rank]
            furthest = max(each.seq for each in job.ranks)
            for _ in range(min(count, furthest + 60 - member.seq)):
                call(member)
            job.report(int(which))
        last = max(each.seq for each in job.ranks) + 3 * WINDOW + 100
        while (slowest := min(job.ranks, key=lambda each: each.seq)).seq < last:
            for _ in range(40):
                call(slowest)
            job.report()
        verdicts = job.verdicts()
        assert all(host.requests.count("calls") == 0 for host in job.hosts) or wrong is not None
        assert [(each.kind, [who.rank for who in each.culprits]) for each in verdicts] == (
            [] if wrong is None else [(VerdictKind.MISMATCH, [wrong[0]])]
        )
    finally:
        job.close()
        del os.environ["LOCKSTEP_BEACONS"]


DIGESTS = st.dictionaries(st.integers(1, 20).map(lambda n: n * WINDOW), st.integers(0, 2**64 - 1), min_size=1)


@given(digests=DIGESTS, wrong=st.integers(0, 19), order=st.randoms(use_true_random=False))
def test_digests_are_compared_in_any_order_of_arrival(digests: dict[int, int], wrong: int, order: Any) -> None:
    last = list(digests)[wrong % len(digests)]
    of_hosts = [("a", each) for each in digests.items()] + [("b", each) for each in digests.items()]
    for different in (False, True):
        order.shuffle(of_hosts)
        table = DigestTable()
        found = [
            table.add(host, CallDigest(at, value ^ (different and host == "b" and at == last)))
            for host, (at, value) in of_hosts
        ]
        assert [each.digest.last for each in found if each is not None] == [last] * different


def test_few_digests_are_kept() -> None:
    table = DigestTable()
    for last in range(1, 10_000):
        table.add("a", CallDigest(last, last))
    assert len(table._windows) == len(table._pauses) == KEPT_DIGESTS


def test_members_that_are_numbered_differently_are_soon_left_alone(job: Job) -> None:
    """Rank 2 and rank 3 count a call from C++ that the others do not: their calls prove nothing."""
    for step in range(1, 400):
        for each in job.ranks:
            each.call(f"[{step % 5}]", lead=int(each.rank >= 2))
        if step % 10 == 0:
            job.report()
    assert [host.requests for host in job.hosts] == [["calls"] * MAX_ATTEMPTS] * 2


def test_a_host_that_has_left_is_forgotten(job: Job) -> None:
    for _ in range(100):
        job.call()
    job.report(0)
    assert job.comparison._known
    job.comparison.forget("a")
    assert not job.comparison._known


def test_a_communicator_that_the_roster_lacks_is_an_error(job: Job) -> None:
    state = StateReport("a", 1, digests=DIGEST_RECORD.pack(3, 0, 64, 1))
    with pytest.raises(ValueError, match="state of host a: calls of a communicator that is none of 0"):
        job.comparison.update(HostState(Roster("a", 1), state))


def test_messages_of_another_form_are_refused_or_ignored() -> None:
    """They must not end the supervisor."""
    roster = Roster("a", 1)
    with pytest.raises(ValueError, match="state of host a: calls of a communicator that is none of 0"):
        DigestComparison(list).update(HostState(roster, StateReport("a", 1, differences=((-1, 0, 5),))))
    message = encode_report(StateReport("a", 1))
    for wrong in ([["x", 0, 5]], [[0, None, 5]], [[0, 5]], 7):
        with pytest.raises(ValueError, match="not a report of an agent"):
            decode_report(message | {"differences": wrong})
    assert _followed_calls({"calls": [[1, None, 1, 7], ["x", 1, 1, 7], [1, 2], 3, [1, 2, 3, 4]]}) == [(1, 2, 3, 4)]


def test_a_beacon_without_unused_slots_does_not_show_how_often_a_communicator_was_created(job: Job) -> None:
    """Else two of the same name might be compared with each other, one after the other has been destroyed."""
    for each in job.ranks:
        while each.slot.index < MAX_COMMUNICATORS - 1:
            each.reopen()
    for step in range(100):
        job.call(rank0="[12]" if step == 50 else "[4]")
    job.report()
    assert job.comparison._known == {}


def test_a_comparison_without_members_elsewhere_has_no_digests(job: Job) -> None:
    comparison = CallComparison()
    for _ in range(100):
        job.call()
    states = [each.state() for each in job.ranks]
    comparison.update((state, state.beacon.communicators[0]) for state in states if state.beacon is not None)
    assert comparison.digests() == []


def test_ranks_are_named_with_their_line_after_their_rings_were_overwritten(job: Job) -> None:
    """The messages of host a arrive 300 calls after the different one."""
    late: list[dict[str, Any]] = []
    for step in range(1, 420):
        job.call(rank2="[12]" if step == 100 else "[4]", rank3="[12]" if step == 100 else "[4]")
        if step % 40 == 0:
            job.report(1)
            late += job.hosts[0].messages()
    assert job.hosts[1].requests == []
    for message in late:
        job.receive(message)
    for _ in range(2):
        job.report()
    (verdict,) = job.verdicts()
    assert verdict.collective is not None and verdict.collective.seq == 100
    (fact,) = [each.text for each in verdict.evidence if "policy-2 called" in each.text]
    assert fact == "policy-2 called broadcast([12], float32) from 0 as #100 at train.py:31 in f"
