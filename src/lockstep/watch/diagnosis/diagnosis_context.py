"""What the detectors of `diagnose` share: the context (a snapshot and what is derived from it once), hypotheses, and
the measure of inactivity.

Progress, not patience: a process that moves is never proven to hang.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lockstep.watch.diagnosis.evidence import Evidence, FloatArray, IntArray, WaitEdge
from lockstep.watch.diagnosis.evidence_types import CollectiveCall, Liveness, ProcessNote
from lockstep.watch.diagnosis.verdict import Alternative, Fact, StallThresholds, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import BoolArray, PendingCollectives, WaitGraph

MAX_NOTICE_CONFIDENCE = 0.6
"""The confidence of a notice: it accuses nobody."""
MAX_INACTIVITY_CONFIDENCE = 0.78
"""Of a verdict by stillness: what is waited for may lie outside of what is seen. Only structure proves more."""

_NO_NOTE = ProcessNote()
_MAX_SITES = 64
"""Members at most that are asked for the line of a call."""


@dataclass(frozen=True)
class DiagnosisContext:
    """A snapshot, its graph (None when nobody waits), and how patient to be."""

    evidence: Evidence
    patience: StallThresholds
    inside: PendingCollectives
    graph: WaitGraph | None
    _communicators: dict[int, frozenset[int]] = field(default_factory=dict, repr=False)
    _called: dict[tuple[int, int], tuple[CollectiveCall | None, str]] = field(default_factory=dict, repr=False)

    @property
    def at(self) -> float:
        return self.evidence.at

    def now(self, process: int) -> float:
        """Until when something is known of a process."""
        seen = self.evidence.processes.seen_at
        return self.at if seen is None or not seen[process] < self.at else float(seen[process])

    def note(self, process: int) -> ProcessNote:
        return self.evidence.processes.notes.get(process, _NO_NOTE)

    def life(self, process: int) -> Liveness:
        return Liveness(int(self.evidence.processes.life[process]))

    def role(self, process: int) -> str:
        return self.evidence.processes.who[process].role

    @cached_property
    def last_moved(self) -> FloatArray:
        """`[processes]`: when a counter, the CPU, a disk, ... moved for the last time; NaN if not known."""
        processes = self.evidence.processes
        return np.fmax(processes.moved_at, processes.active_at)

    def moved(self, process: int) -> float:
        """When anything of a process moved for the last time, its collectives among it; NaN if nobody looks at it: that
        it entered no collective does not say that it is still."""
        last = float(self.last_moved[process])
        if np.isnan(last):
            return last
        members = self.evidence.communicators
        rows = members.process == process
        return float(np.fmax.reduce([last, *members.entered_at[rows], *members.completed_at[rows]]))

    def limit(self, process: int) -> float:
        """How long it may be still before that is proof."""
        expected = self.note(process).expected_s
        floor = self.patience.still_s
        return floor if np.isnan(expected) else max(floor, self.patience.history_factor * expected)

    def unhurried(self, process: int) -> float:
        """How long one that uses CPU or moves bytes may go without a counter before that is worth telling."""
        floor, expected = self.patience.busy_factor * self.patience.notice_s, self.note(process).expected_s
        return floor if np.isnan(expected) else max(floor, expected)

    @cached_property
    def idle(self) -> Mapping[int, WaitEdge]:
        """Processes that wait for their next order."""
        return {edge.process: edge for edge in self.evidence.edges if edge.idle and edge.main}

    @cached_property
    def unclear(self) -> BoolArray:
        """`[processes]`: there is a communicator of which is not known how far it is, so it may wait unseen."""
        members = self.evidence.communicators
        mask = np.zeros(len(self.evidence.processes.who), dtype=np.bool_)
        mask[members.process[members.entered < 0]] = True
        if members.blind is not None:
            mask[members.process[members.blind]] = True
        return mask

    @cached_property
    def ranked(self) -> BoolArray:
        """`[processes]`: members of a communicator or of a meeting, who are best known by their rank."""
        mask = np.zeros(len(self.evidence.processes.who), dtype=np.bool_)
        mask[self.evidence.communicators.process] = True
        for edge in self.evidence.edges:
            if edge.meeting:
                mask[[edge.process, *edge.on]] = True
        return mask

    @cached_property
    def _families(self) -> Mapping[tuple[str, int], list[int]]:
        """Communicators by description and size."""
        members, found = self.evidence.communicators, defaultdict(list)
        for number, (about, size) in enumerate(zip(members.about, np.diff(members.starts).tolist(), strict=True)):
            if about.description:
                found[about.description, size].append(number)
        return found

    def sisters(self, communicator: int) -> list[int]:
        """The other communicators of its description and size: what its members do, theirs should do."""
        members = self.evidence.communicators
        rows = self.members(communicator)
        key = (members.about[communicator].description, rows.stop - rows.start)
        return [each for each in self._families.get(key, ()) if each != communicator]

    @cached_property
    def incident_of(self) -> IntArray:
        """`[processes]`: equal for processes that communicators or waits connect, however indirectly."""
        members = self.evidence.communicators
        label = np.arange(len(self.evidence.processes.who))
        starts = members.starts[:-1][np.diff(members.starts) > 0]
        sizes = np.diff(members.starts)
        sizes = sizes[sizes > 0]
        edges = [(edge.process, *edge.on) for edge in self.evidence.edges if edge.on and not edge.idle]
        while True:
            before = label.copy()
            if len(starts):
                least = np.repeat(np.minimum.reduceat(label[members.process], starts), sizes)
                np.minimum.at(label, members.process, least)
            for joined in edges:
                rows = list(joined)
                label[rows] = label[rows].min()
            if (label == before).all():
                return label

    def members(self, communicator: int) -> slice:
        starts = self.evidence.communicators.starts
        return slice(int(starts[communicator]), int(starts[communicator + 1]))

    def communicators_of(self, process: int) -> frozenset[int]:
        if process not in self._communicators:
            rows = np.flatnonzero(self.evidence.communicators.process == process)
            self._communicators[process] = frozenset(self.inside.communicator[rows].tolist())
        return self._communicators[process]

    def call(self, communicator: int, seq: int) -> tuple[CollectiveCall | None, str]:
        """What was called most often under that number, and from which line."""
        if (communicator, seq) not in self._called:
            self._called[communicator, seq] = self._call(communicator, seq)
        return self._called[communicator, seq]

    def _call(self, communicator: int, seq: int) -> tuple[CollectiveCall | None, str]:
        calls = self.evidence.calls
        rows = np.flatnonzero(calls.seq == seq)
        rows = rows[self.inside.communicator[calls.membership[rows]] == communicator]
        if not len(rows):
            return None, ""
        said = calls.signature[rows]
        most = said[0]
        if (said != most).any():
            signatures, counts = np.unique(said, return_counts=True)
            most = signatures[np.argmax(counts)]
        call = calls.about.get(int(most))
        keys = ((int(calls.membership[row]), seq) for row in rows[:_MAX_SITES])
        return call, next((calls.sites[key] for key in keys if key in calls.sites), call.site if call else "")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One thing that is wrong. `text` says of the culprits what they do or did: `has not entered {collective}`."""

    kind: VerdictKind
    level: VerdictLevel
    confidence: float
    text: str
    culprits: tuple[int, ...] = ()
    outside: str = ""
    node: int | None = None
    """Of the graph: what the others wait in."""
    collective: tuple[int, int] | None = None
    """(communicator, sequence number), where it is not the node's."""
    since: float = float("nan")
    """When it began, as far as known."""
    cause: str = "unknown"
    alternatives: tuple[Alternative, ...] = ()
    facts: tuple[Fact, ...] = ()
    collect: tuple[str, ...] = ()
    more: str = ""
    """Further sentences."""
    structural: bool = False
    """Proven by what is, not by how long it lasts."""
    others: tuple[int, ...] = field(default=())
    """Processes of the incident that are not accused; they tell which findings belong together."""

    def capped(self) -> "Hypothesis":
        """With a confidence that its level allows."""
        if self.level is VerdictLevel.NOTICE:
            return replace(self, confidence=min(self.confidence, MAX_NOTICE_CONFIDENCE))
        return self


@dataclass(frozen=True, slots=True)
class Inactivity:
    """For how many seconds something of a process has not moved, until it was last seen; NaN if nobody looks at it."""

    all_s: float
    """Nothing at all moved."""
    counters_s: float
    activity_s: float
    """No CPU, disk, network or GPU was used."""
    stack_s: float
    """Every stack was the same."""

    def moves(self, within_s: float) -> bool:
        return self.all_s < within_s

    def counts(self, within_s: float) -> bool:
        """A counter moved: work is done, not only CPU used."""
        return self.counters_s < within_s

    def unproductive_s(self, waited_s: float) -> float:
        """Since when no counter moved; where nothing counts, since when somebody waits."""
        return waited_s if math.isnan(self.counters_s) else self.counters_s

    def burns(self, within_s: float) -> bool:
        """It uses CPU in one place, and no counter moves."""
        return self.moves(within_s) and self.stack_s >= within_s and not self.counters_s < self.stack_s


def measure_inactivity(case: DiagnosisContext, process: int) -> Inactivity:
    processes, now = case.evidence.processes, case.now(process)
    return Inactivity(
        now - case.moved(process),
        now - float(processes.moved_at[process]),
        now - float(processes.active_at[process]),
        now - float(processes.same_stack_since[process]),
    )


def proven_inactive(case: DiagnosisContext, process: int, since: float) -> bool:
    """Nothing of it moved for longer than its limit, all of it while somebody waits (`since`); or it burned CPU in one
    place for many times that."""
    found, limit, waited = measure_inactivity(case, process), case.limit(process), case.at - since
    if case.evidence.source == "dumps" and math.isnan(found.all_s):
        return waited >= limit  # nobody could look at it; that it wrote no entry for so long is what is left
    if found.all_s >= limit and waited >= limit and not found.stack_s < limit:
        return True
    limit *= case.patience.busy_factor
    return found.stack_s >= limit and waited >= limit and not found.counters_s < limit


def all_proven_inactive(case: DiagnosisContext, processes: Sequence[int], since: float) -> bool:
    """The same of several that are inside of a collective since then."""
    rows = np.array(processes, dtype=np.int64)
    seen = case.evidence.processes.seen_at
    now = case.at if seen is None else np.fmin(seen[rows], case.at)
    notes = case.evidence.processes.notes
    limit = np.full(len(rows), case.patience.still_s)
    if notes:
        limit[:] = [case.limit(each) for each in processes]
    still = now - case.last_moved[rows] >= limit
    same = ~(now - case.evidence.processes.same_stack_since[rows] < limit)
    return bool((still & same & (case.at - since >= limit)).all())


def inactivity_facts(case: DiagnosisContext, process: int) -> tuple[Fact, ...]:
    """What is known of its movement."""
    found, name = measure_inactivity(case, process), case.evidence.processes.who[process].name
    told = (
        ("no counter moved", found.counters_s),
        ("no CPU, disk, network or GPU used", found.activity_s),
        ("equal stacks", found.stack_s),
    )
    return tuple(
        Fact(f"{name}: {what} for {seconds:.0f} s", "agent")
        for what, seconds in told
        if seconds >= case.patience.notice_s
    )
