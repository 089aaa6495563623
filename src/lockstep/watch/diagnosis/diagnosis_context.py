"""What the detectors of `diagnose` share: the context (a snapshot with cached derived values), the hypothesis, and the
measure of inactivity.

An active process is never proven to hang, however long others have waited for it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lockstep.base.text import summarize_list
from lockstep.watch.diagnosis.device_evidence import device_texts, idle_s, last_moved_at
from lockstep.watch.diagnosis.evidence import Evidence, FloatArray, IntArray, WaitEdge
from lockstep.watch.diagnosis.evidence_types import CollectiveCall, Liveness, ProcessNote
from lockstep.watch.diagnosis.live_weights import Answers, live_weights
from lockstep.watch.diagnosis.pending import PendingCollectives
from lockstep.watch.diagnosis.verdict import Alternative, Fact, StallThresholds, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import BoolArray, WaitGraph, mask_of, reachable_from_stalled

_NO_NOTE = ProcessNote()
_MAX_SITES = 64
"""The most members that are searched for the call site of a call."""
_SETTLED_S = 0.5
"""A wait on a device that began within this time may be over, because the counts of devices are polled and sampled."""


@dataclass(frozen=True)
class DiagnosisContext:
    """A snapshot, its pending collectives and wait graph, and the thresholds."""

    evidence: Evidence
    thresholds: StallThresholds
    pending: PendingCollectives
    graph: WaitGraph
    _communicators: dict[int, frozenset[int]] = field(default_factory=dict, repr=False)
    _call_cache: dict[tuple[int, int], tuple[CollectiveCall | None, str]] = field(default_factory=dict, repr=False)

    @cached_property
    def relevant(self) -> BoolArray:
        """`[nodes]`: true for nodes that a stalled wait depends on."""
        return reachable_from_stalled(self.graph)

    @property
    def at(self) -> float:
        """The time of the snapshot."""
        return self.evidence.at

    def observed_at(self, process: int) -> float:
        """The time of the last observation of a process."""
        seen = self.evidence.processes.seen_at
        return self.at if seen is None or not seen[process] < self.at else float(seen[process])

    def note(self, process: int) -> ProcessNote:
        return self.evidence.processes.notes.get(process, _NO_NOTE)

    def liveness(self, process: int) -> Liveness:
        return Liveness(int(self.evidence.processes.liveness[process]))

    def role(self, process: int) -> str:
        return self.evidence.processes.info[process].role

    def name(self, process: int) -> str:
        return self.evidence.processes.info[process].name

    def names(self, processes: Sequence[int]) -> str:
        """The names of the first four processes, and how many there are more."""
        return summarize_list(processes, 4, self.name)

    def rank_key(self, process: int) -> tuple[str, int, str]:
        """Role, rank and name, by which verdicts order processes."""
        each = self.evidence.processes.info[process]
        return each.role, each.rank, each.name

    @cached_property
    def wholes(self) -> Mapping[int, int]:
        """The process that each part (`ProcessInfo.parent`) belongs to, by part."""
        info = self.evidence.processes.info
        parts = [(number, each) for number, each in enumerate(info) if each.parent]
        if not parts:
            return {}
        index = {(each.host, each.name): number for number, each in enumerate(info)}
        return {part: index[each.host, each.parent] for part, each in parts if (each.host, each.parent) in index}

    def whole(self, process: int) -> int:
        """The process that a part belongs to; any other process itself."""
        return self.wholes.get(process, process)

    @cached_property
    def last_active(self) -> FloatArray:
        """`[processes]`: when a counter of the process last advanced or the process last used CPU, a disk, a network or
        a GPU; NaN if unknown."""
        return np.fmax(self.evidence.processes.progressed_at, self.worked_at)

    @cached_property
    def worked_at(self) -> FloatArray:
        """`[processes]`: when the process last used CPU, a disk, a network or a GPU; NaN if unknown. The use of a core
        in a wait for a device does not count, nor does a kernel that may only wait."""
        processes, devices = self.evidence.processes, self.evidence.devices
        waiting = [process for process, note in processes.notes.items() if note.waits_for_device]
        if not waiting and not devices:
            return processes.active_at
        found = processes.active_at.copy()
        found[waiting] = np.fmin(found[waiting], processes.same_stack_since[waiting])
        for process, each in devices.items():
            for user in {process, self.whole(process)}:
                found[user] = np.fmax(found[user], last_moved_at(each))
        return found

    def device_idle_s(self, process: int) -> float:
        """For how long all devices of a process have run no kernel; NaN if that is not known."""
        return idle_s(self.evidence.devices.get(process, ()), self.observed_at(process))

    def device_facts(self, processes: Sequence[int]) -> tuple[Fact, ...]:
        """The figures of the devices of these processes, as facts for a verdict."""
        info, devices = self.evidence.processes.info, self.evidence.devices
        return tuple(
            Fact(f"{info[process].name}: {text}", "NVML")
            for process in processes
            for text in device_texts(devices.get(process, ()), self.observed_at(process))
        )

    def last_activity(self, process: int) -> float:
        """When a process was last active, which includes entering or completing a collective; NaN if its activity is
        not observed, because a process that enters no collective may still be active."""
        last = float(self.last_active[process])
        if np.isnan(last):
            return last
        members = self.evidence.communicators
        rows = members.process == process
        return float(np.fmax.reduce([last, *members.entered_at[rows], *members.completed_at[rows]]))

    def inactivity_limit_s(self, process: int) -> float:
        """How many seconds of inactivity prove that a process is stalled."""
        expected = self.note(process).expected_s
        floor = self.thresholds.still_s
        return floor if np.isnan(expected) else max(floor, self.thresholds.history_factor * expected)

    def progress_limit_s(self, process: int) -> float:
        """How many seconds an active process may go without counter progress before a notice."""
        floor, expected = self.thresholds.busy_factor * self.thresholds.notice_s, self.note(process).expected_s
        return floor if np.isnan(expected) else max(floor, expected)

    @cached_property
    def idle_waits(self) -> Mapping[int, WaitEdge]:
        """The waits of processes for their next request, by process."""
        return {edge.process: edge for edge in self.evidence.edges if edge.idle and edge.main}

    @cached_property
    def progress_unknown(self) -> BoolArray:
        """`[processes]`: true for processes whose progress in some communicator is unknown, so that they may wait in a
        collective of it."""
        members = self.evidence.communicators
        mask = mask_of(len(self.evidence.processes.info), members.process[members.entered < 0])
        if members.uncertain is not None:
            mask[members.process[members.uncertain]] = True
        mask[[process for process, note in self.evidence.processes.notes.items() if note.unrecorded]] = True
        return mask

    @cached_property
    def named_by_rank(self) -> BoolArray:
        """`[processes]`: true for members of a communicator or a rendezvous, which texts name by rank."""
        mask = mask_of(len(self.evidence.processes.info), self.evidence.communicators.process)
        for edge in self.evidence.edges:
            if edge.rendezvous:
                mask[[edge.process, *edge.on]] = True
        return mask

    @cached_property
    def _groups_by_kind(self) -> Mapping[tuple[str, int], list[int]]:
        """The communicators of each description and size."""
        members, found = self.evidence.communicators, defaultdict(list)
        for number, (about, size) in enumerate(zip(members.info, np.diff(members.starts).tolist(), strict=True)):
            if about.description:
                found[about.description, size].append(number)
        return found

    def parallel_groups(self, communicator: int) -> list[int]:
        """The other communicators of the same description and size, whose members should make the same calls."""
        return [each for each in self._groups_by_kind.get(self.kind(communicator), ()) if each != communicator]

    def kind(self, communicator: int) -> tuple[str, int]:
        """Description and size of a communicator, which its parallel groups share."""
        rows = self.members(communicator)
        return self.evidence.communicators.info[communicator].description, rows.stop - rows.start

    @cached_property
    def connected_part(self) -> IntArray:
        """`[processes]`: a number that is equal for processes that communicators, waits, or a part and its process
        connect, directly or indirectly."""
        members = self.evidence.communicators
        label = np.arange(len(self.evidence.processes.info))
        starts = members.starts[:-1][np.diff(members.starts) > 0]
        sizes = np.diff(members.starts)
        sizes = sizes[sizes > 0]
        edges = [(edge.process, *edge.on) for edge in self.evidence.edges if edge.on and not edge.idle]
        edges += self.wholes.items()
        while True:
            before = label.copy()
            if len(starts):
                lowest = np.repeat(np.minimum.reduceat(label[members.process], starts), sizes)
                np.minimum.at(label, members.process, lowest)
            for edge_processes in edges:
                rows = list(edge_processes)
                label[rows] = label[rows].min()
            if (label == before).all():
                return label

    def members(self, communicator: int) -> slice:
        """The rows of a communicator's memberships."""
        starts = self.evidence.communicators.starts
        return slice(int(starts[communicator]), int(starts[communicator + 1]))

    def rows_of(self, node: int) -> slice:
        """The rows of the memberships in the communicator of a node, which must be a collective."""
        return self.members(int(self.graph.communicator[node]))

    def membership(self, process: int, communicator: int) -> int:
        """The row of a process's membership in a communicator."""
        rows = self.members(communicator)
        return int(rows.start + np.argmax(self.evidence.communicators.process[rows] == process))

    def is_settled(self, node: int) -> bool:
        """Whether a node of the wait graph is known to be waited in still."""
        graph, on_device = self.graph, self.evidence.communicators.on_device
        if on_device is None or graph.communicator[node] < 0:
            return True
        return not on_device[self.rows_of(node)].any() or self.at - float(graph.since[node]) >= _SETTLED_S

    def communicators_of(self, process: int) -> frozenset[int]:
        if process not in self._communicators:
            rows = np.flatnonzero(self.evidence.communicators.process == process)
            self._communicators[process] = frozenset(self.pending.communicator[rows].tolist())
        return self._communicators[process]

    def call(self, communicator: int, seq: int) -> tuple[CollectiveCall | None, str]:
        """The most frequent call at a sequence number (None if no call is known), and its call site."""
        if (communicator, seq) not in self._call_cache:
            self._call_cache[communicator, seq] = self._call(communicator, seq)
        return self._call_cache[communicator, seq]

    def _call(self, communicator: int, seq: int) -> tuple[CollectiveCall | None, str]:
        calls = self.evidence.calls
        rows = np.flatnonzero(calls.seq == seq)
        rows = rows[self.pending.communicator[calls.membership[rows]] == communicator]
        if not len(rows):
            return None, ""
        signatures_seen = calls.signature[rows]
        most_frequent = signatures_seen[0]
        if (signatures_seen != most_frequent).any():
            signatures, counts = np.unique(signatures_seen, return_counts=True)
            most_frequent = signatures[np.argmax(counts)]
        call = calls.by_signature.get(int(most_frequent))
        keys = ((int(calls.membership[row]), seq) for row in rows[:_MAX_SITES])
        return call, next((calls.sites[key] for key in keys if key in calls.sites), call.site if call else "")

    def confidence(self, hypothesis: "Hypothesis") -> float:
        """The confidence of a hypothesis, limited by its level and proof."""
        proof = "structure" if hypothesis.proven_by_structure else "inactivity"
        proof = "notice" if hypothesis.level is VerdictLevel.NOTICE else proof
        return live_weights().confidence(hypothesis.answers, self.evidence.source, proof)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A possible cause of the failure."""

    kind: VerdictKind
    level: VerdictLevel
    answers: Answers
    """What speaks for it and against it: the answers to factors of `live_weights.yaml`."""
    text: str
    """A verb phrase about the culprits: `has not entered {collective}`."""
    culprits: tuple[int, ...] = ()
    outside: str = ""
    """The culprit if it is a service outside the job."""
    node: int | None = None
    """The node of the wait graph in which the others wait."""
    collective: tuple[int, int] | None = None
    """(communicator, sequence number) if it differs from the collective of `node`."""
    since: float = float("nan")
    """When the failure began; NaN if unknown."""
    cause: str = "unknown"
    alternatives: tuple[Alternative, ...] = ()
    facts: tuple[Fact, ...] = ()
    collect: tuple[str, ...] = ()
    """Further evidence worth collecting."""
    details: str = ""
    """Further sentences of the explanation."""
    proven_by_structure: bool = False
    """True if the evidence proves the hypothesis however long the waits last, as a death or a mismatch does."""
    part: int | None = None
    """The part of the culprit that hangs: its line is shown."""
    not_excluded: tuple[int, ...] = ()
    """Processes of which the evidence cannot tell whether they are at fault."""
    others: tuple[int, ...] = field(default=())
    """Innocent processes of the incident. Hypotheses that share processes belong to one incident."""

    @property
    def log_odds(self) -> float:
        return live_weights().log_odds(self.answers)


@dataclass(frozen=True, slots=True)
class Inactivity:
    """How many seconds a process has been inactive, up to its last observation; NaN if it is not observed."""

    any_activity_s: float
    """Seconds without any activity."""
    counters_s: float
    """Seconds without counter progress."""
    activity_s: float
    """Seconds without use of CPU, disk, network or GPU, or in a wait for a device."""
    stack_s: float
    """Seconds for which all sampled stacks have been equal."""
    moved_s: float = float("nan")
    """Seconds since data were transferred or new memory touched, if that is later than the last counter progress."""

    def is_active(self, within_s: float) -> bool:
        """Whether the process was active in the last `within_s` seconds."""
        return self.any_activity_s < within_s

    def progresses(self, within_s: float) -> bool:
        """Whether a counter advanced in the last `within_s` seconds, which shows work and not only use of CPU."""
        return self.counters_s < within_s

    def unproductive_s(self, waited_s: float) -> float:
        """Seconds without counter progress; `waited_s`, the wait of another process, if counters are unknown."""
        return waited_s if math.isnan(self.counters_s) else self.counters_s

    def spins(self, within_s: float) -> bool:
        """Whether the process is active with equal stacks for `within_s` seconds and without counter progress or moving
        data, like a busy loop."""
        return self.is_active(within_s) and self.stack_s >= within_s and not self.works_within(self.stack_s)

    def works_within(self, seconds: float) -> bool:
        """Whether a counter advanced or data moved in the last `seconds`: a compiler at work advances no counter."""
        return self.counters_s < seconds or self.moved_s < seconds


def measure_inactivity(context: DiagnosisContext, process: int) -> Inactivity:
    """The inactivity of a process, up to its last observation."""
    processes, now = context.evidence.processes, context.observed_at(process)
    return Inactivity(
        now - context.last_activity(process),
        now - float(processes.progressed_at[process]),
        now - float(context.worked_at[process]),
        now - float(processes.same_stack_since[process]),
        now - float(processes.moved_at[process]) if processes.moved_at is not None else float("nan"),
    )


def proven_inactive(context: DiagnosisContext, process: int, since: float) -> bool:
    """Whether a process was inactive for longer than its limit while another process waited (since `since`), or had
    equal stacks without counter progress or moving data for `busy_factor` times as long."""
    found, limit, waited = measure_inactivity(context, process), context.inactivity_limit_s(process), context.at - since
    if context.evidence.source == "dumps" and math.isnan(found.any_activity_s):
        return waited >= limit  # dumps record no activity: the only evidence is the time without a new entry
    if found.any_activity_s >= limit and waited >= limit and not found.stack_s < limit:
        return True
    limit *= context.thresholds.busy_factor
    return found.stack_s >= limit and waited >= limit and not found.works_within(limit)


def all_proven_inactive(context: DiagnosisContext, processes: Sequence[int], since: float) -> bool:
    """Whether several processes that have been inside a collective since `since` are all proven inactive."""
    rows = np.array(processes, dtype=np.int64)
    seen = context.evidence.processes.seen_at
    now = context.at if seen is None else np.fmin(seen[rows], context.at)
    notes = context.evidence.processes.notes
    limit = np.full(len(rows), context.thresholds.still_s)
    if notes:
        limit[:] = [context.inactivity_limit_s(each) for each in processes]
    still = now - context.last_active[rows] >= limit
    same = ~(now - context.evidence.processes.same_stack_since[rows] < limit)
    return bool((still & same & (context.at - since >= limit)).all())


def inactivity_facts(context: DiagnosisContext, process: int) -> tuple[Fact, ...]:
    """The inactivity of a process as facts for a verdict."""
    found, name = measure_inactivity(context, process), context.name(process)
    synchronizing = context.note(process).waits_for_device
    measures = (
        ("no counter progress", found.counters_s),
        ("in a wait for its device" if synchronizing else "no use of CPU, disk, network or GPU", found.activity_s),
        ("equal stacks", found.stack_s),
    )
    facts = tuple(
        Fact(f"{name}: {what} for {seconds:.0f} s", "agent")
        for what, seconds in measures
        if seconds >= context.thresholds.notice_s
    )
    return facts + context.device_facts((process,))
