"""What the supervisor asks of the agents for an incident, and what came in time."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.watch.evidence import Evidence
from lockstep.watch.facts import Life
from lockstep.watch.incident import Contents
from lockstep.watch.links import Link
from lockstep.watch.tracking import Told

LIMIT_S = 1.0
"""Who is told of a confirmed verdict may act at once, and then the stacks are others: nobody waits longer for them."""
NATIVE_S = 4.0
DUMPED_S = 0.5
"""A rank looks for orders ten times a second, and writes its flight recorder in some 30 ms."""
LINES = 200


class Collection:
    """One incident under way."""

    def __init__(self, told: Told, evidence: Evidence, links: Sequence[Link], native: bool) -> None:
        self.told, self.evidence = told, evidence
        self._wall, self._began_ns = time.time(), time.monotonic_ns()
        self._deadline = time.monotonic() + (NATIVE_S if native else LIMIT_S)
        self._pending = 0
        self._bundles: dict[str, dict[str, Any]] = {}
        self._stacks: dict[str, Any] = {}
        self._native: dict[str, Any] = {}
        self._offsets = {link.host: link.clock.ns for link in links}
        self._gaps: list[str] = []
        self._dumps: dict[str, str] = {}
        self._dumping: list[Link] = []
        self._dumped_at = time.monotonic() + DUMPED_S
        culprits = {(each.host, each.pid) for each in told.verdict.culprits}
        innocent = self._innocent(culprits)
        for link in links:
            self._ask(link, culprits, innocent, native)

    def done(self) -> bool:
        """Whether all that will come has come."""
        if self._dumping and time.monotonic() >= self._dumped_at:
            for link in self._dumping:
                link.ask("dumps", self._dumped, LIMIT_S)
            self._dumping = []
        return self._pending == 0 or time.monotonic() >= self._deadline

    def contents(self, facts: Mapping[str, Any], frames: Sequence[Mapping[str, Any]]) -> Contents:
        """What an incident is written from."""
        gaps = [*self.evidence.gaps, *self._gaps]
        if self._pending:
            gaps.append(f"{self._pending} answers of agents did not come within {LIMIT_S:g} s")
        return Contents(
            self.told.verdict, self._wall, self._began_ns, self._bundles, self._stacks, self._native, self._offsets,
            dict(facts), list(frames), gaps, self._dumps,
        )  # fmt: skip

    def _dumped(self, reply: dict[str, Any] | None) -> None:
        self._pending -= 1
        self._dumps.update((reply or {"dumps": {}})["dumps"])

    def _innocent(self, culprits: set[tuple[str, int | None]]) -> int | None:
        """Index of one that lives and is not accused, of those that wait if there are any."""
        processes = self.evidence.processes
        living = np.flatnonzero(processes.life == Life.RUNNING)
        others = [int(i) for i in living if (processes.who[i].host, processes.who[i].pid) not in culprits]
        waiting = {each.who for each in self.told.verdict.waiting}
        return next((i for i in others if processes.who[i].name in waiting), others[0] if others else None)

    def _ask(self, link: Link, culprits: set[tuple[str, int | None]], innocent: int | None, native: bool) -> None:
        here = [(i, who) for i, who in enumerate(self.evidence.processes.who) if who.host == link.host]
        ordered = sorted(here, key=lambda entry: ((entry[1].host, entry[1].pid) not in culprits, entry[0] != innocent))
        wanted = {who.pid: who.name for i, who in here if (who.host, who.pid) in culprits or i == innocent}
        self._pending += 1

        def collected(reply: dict[str, Any] | None) -> None:
            self._pending -= 1
            if reply is None:
                self._gaps.append(f"host {link} answered nothing")
            else:
                self._bundles[link.host] = {key: value for key, value in reply.items() if key != "reply"}

        def stacked(into: dict[str, Any]) -> Any:
            def answered(reply: dict[str, Any] | None) -> None:
                self._pending -= 1
                for pid, threads in (reply or {"stacks": {}})["stacks"].items():
                    into[wanted.get(int(pid), pid)] = threads

            return answered

        if wanted:
            self._pending += 1
            link.ask("stacks", stacked(self._stacks), LIMIT_S, pids=list(wanted))
            if native:
                self._pending += 1
                link.ask("stacks", stacked(self._native), NATIVE_S, pids=list(wanted), native=True)
        if here and len(self.evidence.communicators.about):
            self._pending += 1  # of the answer to the question that follows
            self._dumping.append(link)
            link.ask("dump", lambda reply: None, LIMIT_S, names=[who.name for _, who in ordered])
        link.ask("collect", collected, LIMIT_S, names=[who.name for _, who in ordered], lines=LINES)
