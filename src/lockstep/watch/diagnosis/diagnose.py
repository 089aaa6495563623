"""From evidence to verdicts: a pure function, the same for live beacons, flight-recorder dumps and recorded incidents.

Structural causes come first: deaths, stopped processes, mismatched calls, cycles. Then the ends of the wait graph
are judged: processes that others wait for and that wait for no other. Last, hypotheses that another one explains
are dropped (the earliest cause wins), and hypotheses of one kind about one wait are merged into one verdict.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lockstep.watch.diagnosis import wait_graph as graphs
from lockstep.watch.diagnosis.deadlock import find_deadlocks
from lockstep.watch.diagnosis.deaths import SELF_CAUSED, find_deaths
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, measure_inactivity
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.in_flight import find_in_flight
from lockstep.watch.diagnosis.mismatch import find_mismatches
from lockstep.watch.diagnosis.root_cause import (
    find_lost_hosts,
    find_root_causes,
    find_stopped,
    find_waits_without_blocker,
)
from lockstep.watch.diagnosis.verdict import StallThresholds, Verdict, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.verdict_text import to_verdict
from lockstep.watch.diagnosis.wait_graph import BoolArray

_CONSEQUENCES = (
    VerdictKind.IN_FLIGHT,
    VerdictKind.DEVICE_LAG,
    VerdictKind.UNKNOWN,
    VerdictKind.STARVED,
    VerdictKind.SLOW,
)
"""What a proven cause nearby explains."""


MAX_VERDICTS = 64
"""Verdicts on one snapshot."""


def diagnose(evidence: Evidence, patience: StallThresholds | None = None) -> list[Verdict]:
    """What is wrong, the one that explains the others first; empty when nothing is.

    Notices say who waits for whom; only confirmed verdicts accuse. Several independent incidents give several.
    """
    patience = patience or StallThresholds()
    life = evidence.processes.life
    trouble = bool(((life == Liveness.DEAD) | (life == Liveness.STOPPED)).any())
    inside = graphs.find_pending(evidence)
    graph = graphs.build_wait_graph(evidence, inside, patience.notice_s, always=trouble)
    case = DiagnosisContext(evidence, patience, inside, graph)
    reached = None if graph is None else graphs.reachable_from_stalled(graph)
    found = find_mismatches(case, reached)
    if trouble:
        found += find_deaths(case, reached) + find_stopped(case, reached)
    if graph is not None and reached is not None and graph.stalled.any():
        found += find_deadlocks(case, graph)
        found += find_lost_hosts(case, graph, reached) + find_root_causes(case, graph, reached)
        known = {
            each.collective[0] for each in found if each.kind is VerdictKind.MISMATCH and each.collective is not None
        }
        found += find_in_flight(case, graph, reached, known) + find_waits_without_blocker(case, graph, reached)
    kept = _merge_alike(case, _drop_explained(case, [each.capped() for each in found]))
    return [to_verdict(case, each) for each in sorted(kept, key=lambda each: _sort_key(case, each))[:MAX_VERDICTS]]


def _sort_key(case: DiagnosisContext, finding: Hypothesis) -> tuple[object, ...]:
    since = finding.since if np.isfinite(finding.since) else case.at
    who = case.evidence.processes.who
    names = tuple((who[p].role, who[p].rank, who[p].name) for p in finding.culprits)
    return finding.level is VerdictLevel.NOTICE, not finding.structural, round(since, 3), -finding.confidence, names


def _drop_explained(case: DiagnosisContext, found: list[Hypothesis]) -> list[Hypothesis]:
    """Without what another finding of the same incident explains."""
    causes = [each for each in found if each.structural and each.level is VerdictLevel.CONFIRMED]
    if not causes or len(found) == 1:
        return found
    places = {id(each): _footprint(case, each) for each in found}
    return [
        each
        for each in found
        if not any(
            _explains(case, c, each) for c in causes if c is not each and (places[id(c)] & places[id(each)]).any()
        )
    ]


def _footprint(case: DiagnosisContext, finding: Hypothesis) -> BoolArray:
    """`[processes + communicators]`: what findings of one incident have in common."""
    members, graph = case.evidence.communicators, case.graph
    who = np.zeros(len(case.evidence.processes.who), dtype=np.bool_)
    where = np.zeros(len(members.about), dtype=np.bool_)
    who[list(finding.culprits)] = True
    who[list(finding.others)] = True
    if finding.node is not None and graph is not None:
        who[graph.wait_process[graph.wait_node == finding.node]] = True
        if graph.communicator[finding.node] >= 0:
            where[graph.communicator[finding.node]] = True
    if finding.collective is not None:
        where[finding.collective[0]] = True
    where[case.inside.communicator[who[members.process]]] = True
    return np.concatenate([who, where])


def _explains(case: DiagnosisContext, cause: Hypothesis, finding: Hypothesis) -> bool:
    """Whether `explain_nccl_failure` is what one would see of `cause`."""
    if finding.kind in _CONSEQUENCES:
        return not (finding.structural and finding.level is VerdictLevel.CONFIRMED)
    if cause.kind is VerdictKind.MISMATCH:
        return _follows_mismatch(case, cause, finding)
    if finding.kind is VerdictKind.MISMATCH:
        return False
    if finding.kind is VerdictKind.DEAD:  # other deaths are compared among themselves
        if _is_death(case, finding):
            return (
                finding.confidence < SELF_CAUSED
                and not _is_death(case, cause)
                and not cause.since > finding.since + 1.0
            )
        return _is_death(case, cause) and cause.confidence >= SELF_CAUSED and finding.since >= cause.since - 1.0
    if finding.kind is VerdictKind.CYCLE:
        return cause.kind is VerdictKind.DEAD and finding.since >= cause.since - 1.0
    if finding.structural:
        return False
    if cause.kind is VerdictKind.CYCLE:
        return True
    return _came_after(case, cause, finding)


def _is_death(case: DiagnosisContext, finding: Hypothesis) -> bool:
    return finding.kind is VerdictKind.DEAD and any(case.life(p) is Liveness.DEAD for p in finding.culprits)


def _follows_mismatch(case: DiagnosisContext, cause: Hypothesis, finding: Hypothesis) -> bool:
    """Everything does that does not speak for itself: aborts, resets, absences, deadlocks."""
    if finding.kind is VerdictKind.MISMATCH:
        return finding.confidence < cause.confidence and bool({*cause.culprits} & {*finding.culprits})
    if finding.kind is VerdictKind.DEAD:
        return any(case.life(p) is Liveness.LEFT for p in finding.culprits) or finding.confidence < SELF_CAUSED
    return not finding.structural or finding.kind is VerdictKind.CYCLE


def _came_after(case: DiagnosisContext, cause: Hypothesis, finding: Hypothesis) -> bool:
    """An absent process that moved until the cause came, or moves still, is one of its victims."""
    last = [case.moved(p) for p in finding.culprits]
    if not last or any(np.isnan(each) for each in last):
        return True
    if cause.kind is VerdictKind.DEAD and np.isfinite(cause.since):
        return max(last) >= cause.since - 1.0
    return any(measure_inactivity(case, p).moves(case.patience.notice_s) for p in finding.culprits)


def _merge_alike(case: DiagnosisContext, found: Iterable[Hypothesis]) -> list[Hypothesis]:
    """Findings of one kind and level about the same role and the same wait, or communicator, become one."""
    kept: list[Hypothesis] = []
    for each in found:
        twin = next((i for i, other in enumerate(kept) if _are_alike(case, other, each)), None)
        if twin is None:
            kept.append(each)
        else:
            kept[twin] = _merge_pair(case, kept[twin], each)
    return kept


def _are_alike(case: DiagnosisContext, one: Hypothesis, other: Hypothesis) -> bool:
    if (one.kind, one.level, one.outside) != (other.kind, other.level, other.outside):
        return False
    if one.culprits and set(one.culprits) == set(other.culprits):
        return True
    if one.text != other.text:
        return False
    if not one.culprits and not other.culprits:
        return bool(one.outside) or one.kind in (VerdictKind.UNKNOWN, VerdictKind.STARVED)
    if one.kind is VerdictKind.MISMATCH and one.collective != other.collective:
        return False
    if {case.role(p) for p in one.culprits} != {case.role(p) for p in other.culprits}:
        return False
    if set(one.culprits) & set(other.culprits) or (one.node is not None and one.node == other.node):
        return True
    shared = set().union(*(case.communicators_of(p) for p in one.culprits))
    return any(shared & case.communicators_of(p) for p in other.culprits)


def _merge_pair(case: DiagnosisContext, one: Hypothesis, other: Hypothesis) -> Hypothesis:
    first = one if not other.since < one.since else other
    who = case.evidence.processes.who
    culprits = {*one.culprits, *other.culprits}
    cause = one.cause if one.cause == other.cause else "unknown"
    return replace(
        first,
        culprits=tuple(sorted(culprits, key=lambda p: (who[p].role, who[p].rank, who[p].name))),
        confidence=(max if set(one.culprits) == culprits else min)(one.confidence, other.confidence),
        cause=cause,
        facts=tuple(dict.fromkeys((*one.facts, *other.facts)))[:16],
        collect=tuple(dict.fromkeys((*one.collect, *other.collect)))[:8],
        others=tuple({*one.others, *other.others} - culprits),
    )
