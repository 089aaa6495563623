"""What agents have said, kept between the supervisor's ticks.

inbox = Inbox(expected=processes_of_the_run, aliases={"the scorers": Alias("reward", Needs.ANY)})
inbox.receive(parse(frame), now)           # every message of every agent
diagnose(inbox.evidence(now), patience)    # at every tick
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.watch.assemble import Alias, Heard, Layout, assemble, lay_out
from lockstep.watch.evidence import Evidence
from lockstep.watch.facts import Process
from lockstep.watch.messages import CALL, MEMBER, PROCESS, Roster, State, decode

_REMEMBERED = 4096
"""Signatures of a host that are kept; a job with ever new shapes must not fill the supervisor's memory."""


class Inbox:
    """What was heard, by host, and the layout that goes with it."""

    def __init__(
        self,
        expected: Iterable[Process] = (),
        aliases: Mapping[str, Alias] | None = None,
        host_s: float = 5.0,
    ) -> None:
        self._expected, self._aliases, self._host_s = tuple(expected), dict(aliases or {}), host_s
        self._hosts: dict[str, Heard] = {}
        self._meetings: dict[str, frozenset[tuple[str, int, int]]] = {}
        """By host: role, first and last rank of those who should come to its meetings."""
        self._layout: Layout | None = None
        self._asked = self._listening_since = float("-inf")

    def receive(self, message: Mapping[str, Any], at: float) -> bool:
        """Takes a message that came at `at`. False when its roster is not known: the agent should send it again.

        Raises:
            ValueError: it is no message of an agent.
        """
        said = decode(message)
        known = self._hosts.get(said.host)
        if isinstance(said, Roster):
            if known is None or known.roster != said:
                self._layout = None
                self._hosts[said.host] = Heard(said, at=at)
            return True
        if known is None or known.roster.number != said.number:
            return False
        self._hosts[said.host] = _updated(known, said, at)
        meetings = _meetings(known.roster, said)
        if meetings != self._meetings.get(said.host, frozenset()):
            self._meetings[said.host], self._layout = meetings, None
        return True

    def expect(self, processes: Iterable[Process]) -> None:
        """Who should be there from now on."""
        self._expected, self._layout = tuple(processes), None

    def forget(self, host: str) -> None:
        """A host that has left the job: its silence means nothing."""
        self._meetings.pop(host, None)
        if self._hosts.pop(host, None) is not None:
            self._layout = None

    def evidence(self, at: float) -> Evidence:
        """All that is known at `at`. To be asked several times in `host_s`: who does not ask for long was stopped
        itself, and hears of silent hosts only after that."""
        if at - self._asked > self._host_s / 2:
            self._listening_since = at
        self._asked = at
        if self._layout is None:
            self._hosts = dict(sorted(self._hosts.items()))
            expected = [*self._expected, *_who_should_come(self._meetings.values())]
            self._layout = lay_out([each.roster for each in self._hosts.values()], expected)
        hosts = list(self._hosts.values())
        return assemble(self._layout, hosts, at, self._host_s, self._aliases, self._listening_since)


def _meetings(roster: Roster, said: State) -> frozenset[tuple[str, int, int]]:
    """Role, first and last rank of those who should come to the meetings of a host's processes."""
    if not said.waits:
        return frozenset()
    return frozenset(
        (roster.processes[wait.process].role, wait.expected.first, wait.expected.last)
        for wait in said.waits
        if wait.expected is not None
    )


def _who_should_come(meetings: Iterable[frozenset[tuple[str, int, int]]]) -> list[Process]:
    wanted = {(role, rank) for some in meetings for role, first, last in some for rank in range(first, last + 1)}
    return [Process(f"{role}-{rank}", role, rank) for role, rank in sorted(wanted)]


def _updated(known: Heard, said: State, at: float) -> Heard:
    processes, members = len(known.roster.processes), len(known.roster.members)
    if len(said.processes) != processes * PROCESS.size or len(said.members) != members * MEMBER.size:
        raise ValueError(
            f"state of host {said.host}: {len(said.processes)} and {len(said.members)} bytes, "
            f"expected {processes} and {members} records of {PROCESS.size} and {MEMBER.size}"
        )
    if len(said.calls) % CALL.size:
        raise ValueError(f"state of host {said.host}: {len(said.calls)} bytes of calls, not a multiple of {CALL.size}")
    if not said.about:
        return Heard(known.roster, said, at, known.about)
    about = {**known.about, **said.about}
    for old in list(about)[: max(0, len(about) - _REMEMBERED)]:
        del about[old]
    return Heard(known.roster, said, at, about)
