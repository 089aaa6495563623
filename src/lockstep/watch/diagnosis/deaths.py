"""Deaths: which processes died on their own, and which died as an effect of another's end."""

from collections.abc import Sequence

import numpy as np

from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, measure_inactivity, proven_inactive
from lockstep.watch.diagnosis.error_classes import (
    FailureClass,
    class_of_exit,
    is_collective_refused,
    is_collective_stalled,
)
from lockstep.watch.diagnosis.evidence_types import NO_EXIT_CODE, Liveness
from lockstep.watch.diagnosis.root_cause import describe_end, longest_wait_on
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import BoolArray

SELF_CAUSED = 0.85
"""From here on an end speaks for itself (a crash, a kill, an exception of its own)."""
SIMULTANEOUS_S = 0.1
"""Deaths this near to each other have no order: clocks and reapers are no better."""
TEARDOWN_S = 10.0
"""A process that raised may need so long to end, while those that its sockets' end tells of it end at once."""
AFTERMATH_S = 5.0
"""Who is killed so long after another died was killed for it, by a launcher."""


def find_deaths(case: DiagnosisContext, reached: BoolArray | None) -> list[Hypothesis]:
    """The deaths that are causes; of each incident the first, and those that do not look like effects."""
    life = case.evidence.processes.life
    dead = [int(p) for p in np.flatnonzero(life == Liveness.DEAD) if not _was_intended(case, int(p))]
    dead = [p for p in dead if not _is_unobserved(case, p, reached)]
    if not dead:
        return []
    causes = {p: class_of_exit(Liveness.DEAD, int(case.evidence.processes.exit_code[p]), case.note(p)) for p in dead}
    groups: dict[int, list[int]] = {}
    label = case.incident_of if len(dead) > 1 else np.zeros(len(life), dtype=np.int64)
    for process in dead:
        groups.setdefault(int(label[process]), []).append(process)
    found = []
    for group in groups.values():
        culprits = _first_deaths(case, group, causes)
        if all(causes[p].own < SELF_CAUSED for p in culprits):
            behind = _late_members(case, culprits)
            found += behind
            if any(each.level is VerdictLevel.CONFIRMED for each in behind):
                continue
        for process in culprits:
            found.append(_death_hypothesis(case, process, causes[process], sorted(set(group) - set(culprits)), reached))
    return found


def _was_intended(case: DiagnosisContext, process: int) -> bool:
    """Its end was asked for, or it ended by the verdict that freed it: that has been told."""
    note = case.note(process)
    return note.ours or is_collective_stalled(note.error)


def _is_unobserved(case: DiagnosisContext, process: int, reached: BoolArray | None) -> bool:
    """Nobody knows how it ended, and nobody has waited for it for long: so do those end whose job is over, whoever
    looked too late to see it."""
    note = case.note(process)
    if int(case.evidence.processes.exit_code[process]) != NO_EXIT_CODE or note.error or note.cause:
        return False
    if case.graph is None or reached is None:
        return True
    nodes = case.graph.block_node[case.graph.block_process == process]
    waited = case.graph.since[nodes[reached[nodes]]]
    return not (case.at - waited >= case.patience.notice_s).any()


def _first_deaths(case: DiagnosisContext, group: Sequence[int], causes: dict[int, FailureClass]) -> list[int]:
    """Who died of itself. Where no end speaks for itself: who died first."""
    ended_at = {p: float(np.nan_to_num(case.evidence.processes.ended_at[p], nan=np.inf)) for p in group}
    own = [p for p in group if causes[p].own >= SELF_CAUSED]
    if own:
        first = min(ended_at[p] for p in own)
        kept = [p for p in own if not (_is_kill(case, p) and ended_at[p] > first + AFTERMATH_S)]
        earlier = [p for p in group if p not in own and ended_at[p] < first - TEARDOWN_S]
        return sorted(kept + (_earliest(earlier, ended_at, causes) if earlier else []))
    return _earliest(group, ended_at, causes)


def _earliest(group: Sequence[int], ended_at: dict[int, float], causes: dict[int, FailureClass]) -> list[int]:
    real = [p for p in group if causes[p].own > 0.3] or list(group)
    first = min(ended_at[p] for p in real)
    together = [p for p in real if ended_at[p] <= first + SIMULTANEOUS_S or not np.isfinite(ended_at[p])]
    best = max(causes[p].own for p in together)
    return sorted(p for p in together if causes[p].own == best)


def _late_members(case: DiagnosisContext, dead: Sequence[int]) -> list[Hypothesis]:
    """Whom those waited for that ended by what looks like an effect: members that had not entered what they were in,
    and that left before them, or stand still since before their end."""
    members, processes = case.evidence.communicators, case.evidence.processes
    late: dict[int, tuple[int, int, float, float]] = {}
    for process in dead:
        for row in np.flatnonzero((members.process == process) & (members.entered > 0)).tolist():
            rows = case.members(int(case.inside.communicator[row]))
            behind = (members.entered[rows] >= 0) & (members.entered[rows] < members.entered[row])
            for other in members.process[rows][behind].tolist():
                place = int(case.inside.communicator[row]), int(members.entered[row])
                late.setdefault(other, (*place, float(members.entered_at[row]), float(processes.ended_at[process])))
    found = []
    for other, (communicator, seq, since, ended_at) in sorted(late.items()):
        left = case.life(other) is Liveness.LEFT and not processes.ended_at[other] > ended_at + 1.0
        still = measure_inactivity(case, other).all_s >= case.patience.notice_s and case.moved(other) <= ended_at
        if case.note(other).ours or not (left or (still and case.life(other) is Liveness.RUNNING)):
            continue
        proven = left or (proven_inactive(case, other, since) and not case.unclear[other])
        found.append(
            Hypothesis(
                VerdictKind.DEAD if left else VerdictKind.ABSENT, VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE, 0.7 if proven else 0.5,
                f"has {'ended with exit code 0' if left else 'not entered {collective}, for which others gave up'}",
                (other,), collective=(communicator, seq), structural=left, others=tuple(dead),
                since=float(processes.ended_at[other]) if left else since,
                alternatives=(Alternative("uneven_data", 0.5),) if left else (),
                facts=tuple(Fact(f"{processes.who[p].name} {describe_end(case, p)}", "its parent") for p in dead[:4]),
            )
        )  # fmt: skip
    return found


def _is_kill(case: DiagnosisContext, process: int) -> bool:
    return int(case.evidence.processes.exit_code[process]) in (-9, 137)


def _death_hypothesis(
    case: DiagnosisContext, process: int, cause: FailureClass, effects: list[int], reached: BoolArray | None
) -> Hypothesis:
    node, _ = longest_wait_on(case, process, reached)
    who = case.evidence.processes.who
    later = [f"{who[p].name} {describe_end(case, p)}" for p in effects[:4]]
    facts = [Fact(f"{who[process].name} {describe_end(case, process)}", "its parent")]
    facts += [Fact(f"{each}, later or as an effect", "its parent") for each in later]
    unknown = cause.name == "unknown"
    return Hypothesis(
        VerdictKind.DEAD,
        VerdictLevel.NOTICE
        if is_collective_refused(case.note(process).error)
        else VerdictLevel.CONFIRMED,  # the calls tell who was wrong
        cause.own,
        describe_end(case, process),
        (process,),
        node=node,
        since=float(case.evidence.processes.ended_at[process]),
        cause=cause.name,
        alternatives=cause.alternatives,
        facts=tuple(facts),
        collect=("the last lines of its log, and the kernel log of its host (dmesg)",) if unknown else (),
        structural=True,
        others=tuple(effects),
    )
