"""Stores the reports of agents for the supervisor's periodic diagnosis:

    store = MessageStore(aliases={"the scorers": WaitAlias("reward", WaitCondition.ANY)})
    store.receive(parse_report(frame), now)  # for each message of an agent
    diagnose(store.evidence(now), thresholds)  # periodically

The store keeps the newest report of each host.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.watch.agent.report_messages import (
    CALL_RECORD,
    DIGEST_RECORD,
    MEMBER_RECORD,
    PROCESS_RECORD,
    Roster,
    StateReport,
    decode_report,
)
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.evidence_types import ProcessInfo, WaitAlias
from lockstep.watch.supervisor.evidence_builder import HostState, build_evidence
from lockstep.watch.supervisor.job_layout import JobLayout, build_layout

_REMEMBERED_SIGNATURES = 4096
"""The most signatures kept per host, so that a job with ever new shapes does not fill the supervisor's memory."""


class MessageStore:
    """The newest reports of each host, and the layout built from their rosters."""

    def __init__(
        self,
        expected: Iterable[ProcessInfo] = (),
        aliases: Mapping[str, WaitAlias] | None = None,
        host_s: float = 5.0,
    ) -> None:
        self._expected, self._aliases, self._host_s = tuple(expected), dict(aliases or {}), host_s
        self._hosts: dict[str, HostState] = {}
        self._rendezvous_by_host: dict[str, frozenset[tuple[str, int, int]]] = {}
        """The ranks (role, first, last) for which the processes of each host wait in a rendezvous; keys are hosts."""
        self._layout: JobLayout | None = None
        self._diagnosed_at = self._listening_since = float("-inf")

    def receive(self, message: Mapping[str, Any], at: float) -> bool:
        """Stores a message received at `at`. Returns False for a state report whose roster is unknown.

        Raises:
            ValueError: the message is not a report of an agent.
        """
        report = decode_report(message)
        known = self._hosts.get(report.host)
        if isinstance(report, Roster):
            if known is None or known.roster != report:
                self._layout = None
                self._hosts[report.host] = HostState(report, at=at)
            return True
        if known is None or known.roster.number != report.number:
            return False
        self._hosts[report.host] = _updated_host(known, report, at)
        rendezvous = _rendezvous_ranks(known.roster, report)
        if rendezvous != self._rendezvous_by_host.get(report.host, frozenset()):
            self._rendezvous_by_host[report.host], self._layout = rendezvous, None
        return True

    def host(self, host: str) -> HostState | None:
        """The newest reports of a host; None if there are none."""
        return self._hosts.get(host)

    def expect(self, processes: Iterable[ProcessInfo]) -> None:
        """Sets the processes that should exist, whether a host reports them or not."""
        self._expected, self._layout = tuple(processes), None

    def forget(self, host: str) -> None:
        """Removes a host that has left the job, so that it does not count as lost."""
        self._rendezvous_by_host.pop(host, None)
        if self._hosts.pop(host, None) is not None:
            self._layout = None

    def evidence(self, at: float) -> Evidence:
        """The evidence at `at`. Call this several times in `host_s`. After a longer pause the supervisor itself was
        stopped, and hosts count as silent only after it has listened for `host_s` again."""
        if at - self._diagnosed_at > self._host_s / 2:
            self._listening_since = at
        self._diagnosed_at = at
        if self._layout is None:
            self._hosts = dict(sorted(self._hosts.items()))
            expected = [*self._expected, *_expected_processes(self._rendezvous_by_host.values())]
            self._layout = build_layout([each.roster for each in self._hosts.values()], expected)
        hosts = list(self._hosts.values())
        return build_evidence(self._layout, hosts, at, self._host_s, self._aliases, self._listening_since)


def _rendezvous_ranks(roster: Roster, report: StateReport) -> frozenset[tuple[str, int, int]]:
    """The ranks (role, first, last) for which the processes of a host wait in a rendezvous."""
    if not report.waits:
        return frozenset()
    return frozenset(
        (roster.processes[wait.process].role, wait.expected.first, wait.expected.last)
        for wait in report.waits
        if wait.expected is not None
    )


def _expected_processes(rendezvous: Iterable[frozenset[tuple[str, int, int]]]) -> list[ProcessInfo]:
    expected = {
        (role, rank) for ranges in rendezvous for role, first, last in ranges for rank in range(first, last + 1)
    }
    return [ProcessInfo(f"{role}-{rank}", role, rank) for role, rank in sorted(expected)]


def _updated_host(known: HostState, report: StateReport, at: float) -> HostState:
    """Combines a new state report with what is known of the host.

    Raises:
        ValueError: the report does not match the roster.
    """
    processes, members = len(known.roster.processes), len(known.roster.members)
    if len(report.processes) != processes * PROCESS_RECORD.size or len(report.members) != members * MEMBER_RECORD.size:
        raise ValueError(
            f"state of host {report.host}: {len(report.processes)} and {len(report.members)} bytes, "
            f"expected {processes} and {members} records of {PROCESS_RECORD.size} and {MEMBER_RECORD.size}"
        )
    if len(report.calls) % CALL_RECORD.size:
        raise ValueError(
            f"state of host {report.host}: {len(report.calls)} bytes of calls, not a multiple of {CALL_RECORD.size}"
        )
    if len(report.digests) % DIGEST_RECORD.size:
        raise ValueError(
            f"state of host {report.host}: {len(report.digests)} bytes of digests, not a multiple of "
            f"{DIGEST_RECORD.size}"
        )
    if not report.about:
        return HostState(known.roster, report, at, known.about)
    about = {**known.about, **report.about}
    for old in list(about)[: max(0, len(about) - _REMEMBERED_SIGNATURES)]:
        del about[old]
    return HostState(known.roster, report, at, about)
