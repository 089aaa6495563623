"""Compares the calls that the members of communicators on different hosts have completed.

Agents report digests of windows of calls (`agent.call_windows`). If two hosts have different digests of the same calls,
the supervisor asks both for these calls, finds the first that differs, and has all hosts with members report their
calls from there on. From then on the difference is in the evidence, and the diagnosis names the ranks that differ.

A digest costs 24 bytes per host, communicator and window of 32 calls, and is compared with one other digest.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.watch.agent.call_windows import WINDOW, CallDigest, first_difference
from lockstep.watch.agent.report_messages import DIGEST_RECORD, Roster
from lockstep.watch.beacon.call_follower import FollowedCall
from lockstep.watch.supervisor.agent_connections import AgentConnection
from lockstep.watch.supervisor.evidence_builder import HostState

KEPT_DIGESTS = 64
"""Digests of windows that are kept of a communicator, and as many of the calls before pauses; hosts further apart are
not compared."""
MAX_ATTEMPTS = 3
"""After so many differences of digests without a call that proves one, a communicator is no longer compared: its
members number their calls differently."""
REQUEST_S = 5.0


class _Communicator(NamedTuple):
    """A communicator, by its key in rosters, from its creation to its end."""

    key: str
    incarnation: int


class DigestDifference(NamedTuple):
    """Two hosts with different digests of the same calls."""

    digest: CallDigest
    hosts: tuple[str, str]


@dataclass(slots=True)
class DigestTable:
    """The digests of one communicator, each from the host that reported it first."""

    _windows: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Digest and host, by the last call of complete windows."""
    _pauses: dict[int, tuple[int, str]] = field(default_factory=dict)
    """The same for the calls before a pause."""

    def add(self, host: str, digest: CallDigest) -> DigestDifference | None:
        """Adds a host's digest. Returns the difference from another host, if there is one."""
        known = self._pauses if digest.last % WINDOW else self._windows
        value, other = known.setdefault(digest.last, (digest.value, host))
        if len(known) > KEPT_DIGESTS:
            del known[next(iter(known))]
        return None if value == digest.value or other == host else DigestDifference(digest, (other, host))


@dataclass(slots=True)
class _Comparison:
    """What is known of a communicator."""

    table: DigestTable = field(default_factory=DigestTable)
    attempts: int = 0
    asking: bool = False
    shown: int | None = None
    """The call from which on all hosts report their calls."""
    asked: set[str] = field(default_factory=set)
    """The hosts that do so, and those whose answer is missing."""


class DigestComparison:
    """Compares hosts by their reports, and asks their agents for calls where these differ."""

    def __init__(self, links: Callable[[], Iterable[AgentConnection]]) -> None:
        self._links = links
        self._known: defaultdict[_Communicator, _Comparison] = defaultdict(_Comparison)
        self._shown: set[_Communicator] = set()
        """Those whose members differ."""
        self._members: dict[str, dict[str, frozenset[tuple[int, int]]]] = {}
        """The members of communicators on each host: pid and rank."""

    def forget(self, host: str) -> None:
        """Removes a host that has left the job."""
        self._replace_members(host, {})

    def update(self, host: HostState) -> None:
        """Compares a host's newest report with those of the others, or begins anew with the communicators of which
        members have left by a new roster: those that replace them may number their calls from 1 again.

        Raises:
            ValueError: the report names a communicator that the roster does not have.
        """
        if host.state is None:
            self._replace_members(host.roster.host, _members(host.roster))
            return
        roster, state = host.roster, host.state
        try:
            for communicator, incarnation, seq in state.differences:
                about = _Communicator(roster.communicators[_index(communicator)].key, incarnation)
                self._show(about, self._known[about], seq)
            for communicator, incarnation, last, value in DIGEST_RECORD.iter_unpack(state.digests):
                about = _Communicator(roster.communicators[communicator].key, incarnation)
                self._compare(about, roster.host, CallDigest(last, value))
            for about in self._shown:
                if roster.host not in self._known[about].asked and self._has_members(roster.host, about):
                    self._ask_to_show(about, self._known[about], {roster.host})
        except IndexError:
            raise ValueError(
                f"state of host {roster.host}: calls of a communicator that is none of {len(roster.communicators)}"
            ) from None

    def _has_members(self, host: str, about: _Communicator) -> bool:
        return about.key in self._members.get(host, ())

    def _replace_members(self, host: str, new: dict[str, frozenset[tuple[int, int]]]) -> None:
        old = self._members.pop(host, {})
        if new:
            self._members[host] = new
        left = {key for key, members in old.items() if not members <= new.get(key, frozenset())}
        for about in [each for each in self._known if each.key in left]:
            del self._known[about]
            self._shown.discard(about)

    def _compare(self, about: _Communicator, host: str, digest: CallDigest) -> None:
        known = self._known[about]
        found = known.table.add(host, digest)
        if found is not None and known.shown is None and not known.asking and known.attempts < MAX_ATTEMPTS:
            self._ask(about, known, found)

    def _ask(self, about: _Communicator, known: _Comparison, difference: DigestDifference) -> None:
        """Asks two hosts for the calls that their digests cover, then has all report those from the first difference
        on."""
        links = [link for link in self._links() if link.host in difference.hosts]
        if len(links) != 2:
            return
        answers: list[list[FollowedCall]] = []
        known.asking = True

        def on_reply(reply: dict[str, Any] | None) -> None:
            answers.append(_followed_calls(reply))
            if len(answers) < 2:
                return
            known.asking = False
            seq = first_difference(*answers)
            if seq is None:
                known.attempts += all(answers)
            elif self._known.get(about) is known:
                self._show(about, known, seq)

        first, last = difference.digest.first, difference.digest.last
        for link in links:
            link.request("calls", on_reply, REQUEST_S, first=first, last=last, **_address(about))

    def _show(self, about: _Communicator, known: _Comparison, seq: int) -> None:
        """Has all hosts with members report their calls from `seq` on."""
        if known.shown is not None and known.shown <= seq:
            return
        known.shown, known.asked = seq, set()
        self._shown.add(about)
        self._ask_to_show(about, known, self._members.keys())

    def _ask_to_show(self, about: _Communicator, known: _Comparison, hosts: Collection[str]) -> None:
        """Asks these hosts. One that does not know the communicator yet is asked again after its next report."""

        def ask(link: AgentConnection, asked: set[str]) -> None:
            def on_reply(reply: dict[str, Any] | None) -> None:
                if reply is None or not reply.get("known"):
                    asked.discard(link.host)

            asked.add(link.host)
            link.request("show", on_reply, REQUEST_S, seq=known.shown, **_address(about))

        for link in self._links():
            if link.host in hosts and self._has_members(link.host, about):
                ask(link, known.asked)


def _address(about: _Communicator) -> dict[str, Any]:
    return {"communicator": about.key, "incarnation": about.incarnation}


def _index(number: int) -> int:
    """The number as an index from the beginning of a list, which Python does not require."""
    if number < 0:
        raise IndexError(number)
    return number


def _members(roster: Roster) -> dict[str, frozenset[tuple[int, int]]]:
    found: dict[str, set[tuple[int, int]]] = {}
    for each in roster.members:
        key = roster.communicators[each.communicator].key
        found.setdefault(key, set()).add((roster.processes[each.process].pid, each.rank))
    return {key: frozenset(members) for key, members in found.items()}


def _followed_calls(reply: dict[str, Any] | None) -> list[FollowedCall]:
    """The calls of an answer; none if it is missing or has another form."""
    calls = None if reply is None else reply.get("calls")
    if not isinstance(calls, list):
        return []
    return [FollowedCall(*each) for each in calls if _is_call(each)]


def _is_call(fields: object) -> bool:
    return isinstance(fields, list) and len(fields) == 4 and all(isinstance(each, int) for each in fields)
