"""Stores the reports of agents for the supervisor's periodic diagnosis:

    store = MessageStore(aliases={"the scorers": WaitAlias("reward", WaitCondition.ANY)})
    store.receive(decode_report(frame), now)  # for each message of an agent
    diagnose(store.evidence(now), patience)  # periodically

The store keeps the newest report of each host.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.watch.agent.report_messages import (
    CALL_RECORD,
    MEMBER_RECORD,
    PROCESS_RECORD,
    Roster,
    StateReport,
    decode_report,
)
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.evidence_types import ProcessInfo, WaitAlias
from lockstep.watch.supervisor.evidence_builder import HostState, JobLayout, build_evidence, build_layout

_REMEMBERED_SIGNATURES = 4096
"""Signatures of a host that are kept; a job with ever new shapes must not fill the supervisor's memory."""


class MessageStore:
    """The newest reports by host, and the layout built from their rosters."""

    def __init__(
        self,
        expected: Iterable[ProcessInfo] = (),
        aliases: Mapping[str, WaitAlias] | None = None,
        host_s: float = 5.0,
    ) -> None:
        self._expected, self._aliases, self._host_s = tuple(expected), dict(aliases or {}), host_s
        self._hosts: dict[str, HostState] = {}
        self._meetings: dict[str, frozenset[tuple[str, int, int]]] = {}
        """The role, first and last rank that the rendezvous of each host expect; keys are hosts."""
        self._layout: JobLayout | None = None
        self._judged_at = self._listening_since = float("-inf")

    def receive(self, message: Mapping[str, Any], at: float) -> bool:
        """Stores a message received at `at`. False when its roster is unknown: the agent should send it again.

        Raises:
            ValueError: it is no report of an agent.
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
        meetings = _rendezvous_ranks(known.roster, report)
        if meetings != self._meetings.get(report.host, frozenset()):
            self._meetings[report.host], self._layout = meetings, None
        return True

    def expect(self, processes: Iterable[ProcessInfo]) -> None:
        """Sets the processes expected from now on."""
        self._expected, self._layout = tuple(processes), None

    def forget(self, host: str) -> None:
        """Removes a host that has left the job: its silence means nothing."""
        self._meetings.pop(host, None)
        if self._hosts.pop(host, None) is not None:
            self._layout = None

    def evidence(self, at: float) -> Evidence:
        """The evidence at `at`. Call it several times in `host_s`: a supervisor that was stopped itself counts hosts as
        silent only after listening again for that long."""
        if at - self._judged_at > self._host_s / 2:
            self._listening_since = at
        self._judged_at = at
        if self._layout is None:
            self._hosts = dict(sorted(self._hosts.items()))
            expected = [*self._expected, *_expected_processes(self._meetings.values())]
            self._layout = build_layout([each.roster for each in self._hosts.values()], expected)
        hosts = list(self._hosts.values())
        return build_evidence(self._layout, hosts, at, self._host_s, self._aliases, self._listening_since)


def _rendezvous_ranks(roster: Roster, report: StateReport) -> frozenset[tuple[str, int, int]]:
    """Role, first and last of the ranks that the rendezvous of a host's processes expect."""
    if not report.waits:
        return frozenset()
    return frozenset(
        (roster.processes[wait.process].role, wait.expected.first, wait.expected.last)
        for wait in report.waits
        if wait.expected is not None
    )


def _expected_processes(meetings: Iterable[frozenset[tuple[str, int, int]]]) -> list[ProcessInfo]:
    expected = {(role, rank) for some in meetings for role, first, last in some for rank in range(first, last + 1)}
    return [ProcessInfo(f"{role}-{rank}", role, rank) for role, rank in sorted(expected)]


def _updated_host(known: HostState, report: StateReport, at: float) -> HostState:
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
    if not report.about:
        return HostState(known.roster, report, at, known.about)
    about = {**known.about, **report.about}
    for old in list(about)[: max(0, len(about) - _REMEMBERED_SIGNATURES)]:
        del about[old]
    return HostState(known.roster, report, at, about)
