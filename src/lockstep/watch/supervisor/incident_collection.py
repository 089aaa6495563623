"""Collects the evidence of an incident from the agents of the hosts whose processes `incident_selection` chooses.

All requests leave at once, each with its own answer, so that a host that is slow or gone delays and loses no other.
What does not come in time is named in the incident.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.base.text import count_noun, summarize_list
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.supervisor.agent_connections import AgentConnection, ReplyHandler
from lockstep.watch.supervisor.incident import IncidentContents
from lockstep.watch.supervisor.incident_selection import SMALL_JOB, select_processes
from lockstep.watch.supervisor.verdict_tracker import VerdictUpdate

COLLECT_LIMIT_S = 1.0
"""A confirmed verdict is held back for its incident until no answer has come for this long. Subscribers may act on a
verdict at once, which changes the stacks."""
NATIVE_LIMIT_S = 4.0
"""The same if native stacks are collected."""
MAX_COLLECT_S = 4.0
"""The longest that a verdict is held back, while answers come."""
REQUEST_S = 30.0
"""When a request is forgotten; the incident does not wait for it that long."""
LISTEN_S = 0.1
"""How much the time between two looks for answers counts at most: while the supervisor is busy with the reports of
other hosts, or gets no processor, answers wait in its sockets."""
DUMP_WAIT_S = 0.5
"""How long ranks get to dump their flight recorders. A rank reads its commands ten times a second, and a dump takes
about 30 ms."""
LOG_LINES = 200
"""Of each process, in a job of which all processes are asked."""
STACKS_PER_HOST = 3
"""A host takes one stack after the other, those of culprits first and all of them, then of others up to this number."""
MAX_DUMPS = 32
"""The most flight recorders that are collected of a large job: they are megabytes each."""
_MAX_NAMED = 8


class IncidentCollection:
    """Collects the evidence of one incident from the agents."""

    def __init__(
        self, update: VerdictUpdate, evidence: Evidence, links: Sequence[AgentConnection], native: bool
    ) -> None:
        self.update, self.evidence = update, evidence
        self._wall, self._began_ns = time.time(), time.monotonic_ns()
        self._limit_s = NATIVE_LIMIT_S if native else COLLECT_LIMIT_S
        self._listened_at = time.monotonic()
        self._listened_s = self._answered_s = 0.0
        """Seconds of listening so far, and up to the last answer."""
        self._pending: Counter[str] = Counter()
        """The number of missing answers of each host."""
        self._bundles: dict[str, dict[str, Any]] = {}
        self._stacks: dict[str, Any] = {}
        self._native: dict[str, Any] = {}
        self._offsets = {link.host: link.clock.ns for link in links}
        self._dumps: dict[str, str] = {}
        self._agents_to_dump: list[AgentConnection] = []
        self._selection = select_processes(evidence, update.verdict)
        by_host = self._by_host()
        self._gaps = self._left_out(by_host)
        asked = [link for link in links if self._selection.complete or link.host in by_host]
        for link in asked:
            self._request_stacks(link, by_host.get(link.host, []), native)
        for link in asked:
            self._request_dump(link, by_host.get(link.host, []))
            self._request_evidence(link, by_host.get(link.host, []))

    def done(self) -> bool:
        """Whether all agents have answered or the time is over. Requests the dumps as soon as ranks have had time to
        write them."""
        now = time.monotonic()
        self._listened_s += min(now - self._listened_at, LISTEN_S)
        self._listened_at = now
        if self._agents_to_dump and self._listened_s >= DUMP_WAIT_S:
            for link in self._agents_to_dump:
                link.request("dumps", self._received(link.host, self._on_dumps), REQUEST_S)
            self._agents_to_dump = []
        complete = not self._pending and not self._agents_to_dump
        return complete or self._listened_s >= min(self._answered_s + self._limit_s, MAX_COLLECT_S)

    def contents(self, facts: Mapping[str, Any], frames: Sequence[Mapping[str, Any]]) -> IncidentContents:
        """The content of the incident, as far as it has been collected."""
        gaps = [*self.evidence.gaps, *self._gaps]
        if self._pending:
            missing = summarize_list(sorted(self._pending), _MAX_NAMED)
            gaps.append(f"no complete answer in time from {missing}")
        return IncidentContents(
            self.update.verdict, self._wall, self._began_ns, self._bundles, self._stacks, self._native, self._offsets,
            dict(facts), list(frames), gaps, self._dumps,
        )  # fmt: skip

    def _by_host(self) -> dict[str, list[int]]:
        """The processes to ask on each host, the most important first."""
        found: dict[str, list[int]] = {}
        for index in self._selection.asked:
            found.setdefault(self.evidence.processes.info[index].host, []).append(index)
        return found

    def _left_out(self, by_host: Mapping[str, Sequence[int]]) -> list[str]:
        """What a selection leaves out, as text."""
        selection, info = self._selection, self.evidence.processes.info
        if selection.complete:
            return []
        hosts = count_noun(len(by_host), "host")
        text = (
            f"{len(selection.asked):,} of {count_noun(len(info), 'process')} were asked, on {hosts}: the culprits, "
            "processes that wait for them, and a sample of the others"
        )
        if selection.culprits_left_out:
            text += f"; {selection.culprits_left_out:,} culprits are left out"
        return [text]

    def _received(self, host: str, handle: Callable[[dict[str, Any] | None], None]) -> ReplyHandler:
        """Counts a missing answer of the host, and passes it to `handle` when it comes."""
        self._pending[host] += 1

        def on_reply(reply: dict[str, Any] | None) -> None:
            self._answered_s = self._listened_s
            self._pending[host] -= 1
            if not self._pending[host]:
                del self._pending[host]
            handle(reply)

        return on_reply

    def _request_stacks(self, link: AgentConnection, on_host: Sequence[int], native: bool) -> None:
        """Stacks of culprits first. Native stacks, which take longer, are of culprits and of one other process."""
        culprits = set(self._selection.culprits)
        first = [index for index in on_host if index in culprits]
        others = [index for index in on_host if index not in culprits]
        chosen = [*first, *others[: max(0, STACKS_PER_HOST - len(first))]]
        for index in chosen:
            self._request_stack(link, index, self._stacks)
        with_native = set(self._selection.asked[: len(culprits) + 1]) if native else set()
        for index in with_native.intersection(chosen):
            self._request_stack(link, index, self._native, native=True)

    def _request_stack(self, link: AgentConnection, process: int, into: dict[str, Any], **more: Any) -> None:
        each = self.evidence.processes.info[process]

        def on_stacks(reply: dict[str, Any] | None) -> None:
            for threads in (reply or {"stacks": {}})["stacks"].values():
                into[each.name] = threads

        link.request("stacks", self._received(link.host, on_stacks), REQUEST_S, pids=[each.pid], **more)

    def _request_dump(self, link: AgentConnection, on_host: Sequence[int]) -> None:
        asked = self._selection.asked
        dumped = set(asked if self._selection.complete else asked[:MAX_DUMPS])
        names = [self.evidence.processes.info[index].name for index in on_host if index in dumped]
        if names and len(self.evidence.communicators.info):
            self._agents_to_dump.append(link)
            link.request("dump", lambda reply: None, REQUEST_S, names=names)

    def _request_evidence(self, link: AgentConnection, on_host: Sequence[int]) -> None:
        def on_evidence(reply: dict[str, Any] | None) -> None:
            if reply is None:
                self._gaps.append(f"host {link} did not answer")
            else:
                self._bundles[link.host] = {key: value for key, value in reply.items() if key != "reply"}

        names = [self.evidence.processes.info[index].name for index in on_host]
        lines = LOG_LINES * SMALL_JOB // max(SMALL_JOB, len(self._selection.asked))
        link.request("collect", self._received(link.host, on_evidence), REQUEST_S, names=names, lines=lines)

    def _on_dumps(self, reply: dict[str, Any] | None) -> None:
        self._dumps.update((reply or {"dumps": {}})["dumps"])
