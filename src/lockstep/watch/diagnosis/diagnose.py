"""Derives verdicts from evidence: a pure function, used for live beacons, flight-recorder dumps and recorded incidents.

First come causes that the structure of the evidence proves: mismatched calls, deaths, stopped processes, deadlocks.
Then come processes that others wait for and that wait for no other process. Finally, hypotheses that another hypothesis
explains are dropped (the earliest cause wins), and those of one kind about one wait are merged into one verdict.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lockstep.watch.diagnosis import wait_graph as graphs
from lockstep.watch.diagnosis.deadlock import find_deadlocks
from lockstep.watch.diagnosis.deaths import SELF_CAUSED, find_deaths, find_stopped
from lockstep.watch.diagnosis.device_faults import find_device_faults
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, measure_inactivity
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.in_flight import find_in_flight
from lockstep.watch.diagnosis.mismatch import find_mismatches
from lockstep.watch.diagnosis.pending import find_pending
from lockstep.watch.diagnosis.root_cause import find_lost_hosts, find_root_causes, find_waits_without_blocker
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
"""Kinds that a proven cause of the same incident explains."""


_INACTIVE = (VerdictKind.ABSENT, VerdictKind.DEVICE_LAG, VerdictKind.SLOW)
"""Kinds of a living process that others wait for."""

MAX_VERDICTS = 64
"""The most verdicts on one snapshot."""


def diagnose(evidence: Evidence, thresholds: StallThresholds | None = None) -> list[Verdict]:
    """The verdicts on a snapshot, the one that explains the others first; empty if nothing is wrong.

    Notices only say which process waits for which. Independent incidents give separate verdicts.
    """
    thresholds = thresholds or StallThresholds()
    liveness = evidence.processes.liveness
    any_ended = bool(((liveness == Liveness.DEAD) | (liveness == Liveness.STOPPED)).any())
    pending = find_pending(evidence)
    graph = graphs.build_wait_graph(evidence, pending, thresholds.notice_s, always=any_ended)
    context = DiagnosisContext(evidence, thresholds, pending, graph)
    relevant = None if graph is None else graphs.reachable_from_stalled(graph)
    found = find_mismatches(context, relevant)
    if any_ended:
        found += find_deaths(context, relevant) + find_stopped(context, relevant)
    if graph is not None and relevant is not None and graph.stalled.any():
        found += find_deadlocks(context, graph) + find_device_faults(context, graph, relevant)
        found += find_lost_hosts(context, graph, relevant) + find_root_causes(context, graph, relevant)
        mismatched = {
            each.collective[0] for each in found if each.kind is VerdictKind.MISMATCH and each.collective is not None
        }
        found += find_in_flight(context, graph, relevant, mismatched) + find_waits_without_blocker(
            context, graph, relevant
        )
    kept = _drop_explained(context, [each.capped() for each in found])
    kept = _merge_alike(context, _fold_parts(context, kept))
    return [
        to_verdict(context, each) for each in sorted(kept, key=lambda each: _sort_key(context, each))[:MAX_VERDICTS]
    ]


def _sort_key(context: DiagnosisContext, hypothesis: Hypothesis) -> tuple[object, ...]:
    since = hypothesis.since if np.isfinite(hypothesis.since) else context.at
    info = context.evidence.processes.info
    names = tuple((info[p].role, info[p].rank, info[p].name) for p in hypothesis.culprits)
    return (
        hypothesis.level is VerdictLevel.NOTICE,
        hypothesis.kind is VerdictKind.UNKNOWN,
        not hypothesis.proven_by_structure,
        round(since, 3),
        -hypothesis.confidence,
        names,
    )


def _drop_explained(context: DiagnosisContext, found: list[Hypothesis]) -> list[Hypothesis]:
    """Drops hypotheses that another one of the same incident explains."""
    causes = [each for each in found if each.proven_by_structure and each.level is VerdictLevel.CONFIRMED]
    if not causes or len(found) == 1:
        return found
    footprints = {id(each): _footprint(context, each) for each in found}
    return [
        each
        for each in found
        if not any(
            _explains(context, c, each)
            for c in causes
            if c is not each and (footprints[id(c)] & footprints[id(each)]).any()
        )
    ]


def _footprint(context: DiagnosisContext, hypothesis: Hypothesis) -> BoolArray:
    """`[processes + communicators]`: true for those that a hypothesis involves; hypotheses of one incident overlap."""
    members, graph = context.evidence.communicators, context.graph
    involved = np.zeros(len(context.evidence.processes.info), dtype=np.bool_)
    communicators = np.zeros(len(members.info), dtype=np.bool_)
    involved[list(hypothesis.culprits)] = True
    involved[list(hypothesis.others)] = True
    if hypothesis.node is not None and graph is not None:
        involved[graph.wait_process[graph.wait_node == hypothesis.node]] = True
        if graph.communicator[hypothesis.node] >= 0:
            communicators[graph.communicator[hypothesis.node]] = True
    if hypothesis.collective is not None:
        communicators[hypothesis.collective[0]] = True
    involved[[whole for part, whole in context.wholes.items() if involved[part]]] = True
    communicators[context.pending.communicator[involved[members.process]]] = True
    return np.concatenate([involved, communicators])


def _explains(context: DiagnosisContext, cause: Hypothesis, hypothesis: Hypothesis) -> bool:
    """Whether `hypothesis` is an observable effect of `cause`."""
    if hypothesis.kind in _CONSEQUENCES:
        return not (hypothesis.proven_by_structure and hypothesis.level is VerdictLevel.CONFIRMED)
    if cause.kind is VerdictKind.MISMATCH:
        return _follows_mismatch(context, cause, hypothesis)
    if hypothesis.kind is VerdictKind.MISMATCH:
        return False
    if hypothesis.kind is VerdictKind.DEAD:  # `find_deaths` compares deaths with each other
        if _is_death(context, hypothesis):
            return (
                hypothesis.confidence < SELF_CAUSED
                and not _is_death(context, cause)
                and not cause.since > hypothesis.since + 1.0
            )
        return _is_death(context, cause) and cause.confidence >= SELF_CAUSED and hypothesis.since >= cause.since - 1.0
    if hypothesis.kind is VerdictKind.CYCLE:
        return cause.kind is VerdictKind.DEAD and hypothesis.since >= cause.since - 1.0
    if hypothesis.proven_by_structure:
        return False
    if cause.kind is VerdictKind.DEVICE and {*cause.culprits} >= {*hypothesis.culprits}:
        return True
    if cause.kind is VerdictKind.CYCLE:
        return True
    return _may_be_victim(context, cause, hypothesis)


def _is_death(context: DiagnosisContext, hypothesis: Hypothesis) -> bool:
    return hypothesis.kind is VerdictKind.DEAD and any(
        context.liveness(p) is Liveness.DEAD for p in hypothesis.culprits
    )


def _follows_mismatch(context: DiagnosisContext, cause: Hypothesis, hypothesis: Hypothesis) -> bool:
    """Whether a mismatch explains the hypothesis: aborts, reset connections, absences and deadlocks follow from it
    unless another cause of them is proven."""
    if hypothesis.kind is VerdictKind.MISMATCH:
        return hypothesis.confidence < cause.confidence and bool({*cause.culprits} & {*hypothesis.culprits})
    if hypothesis.kind is VerdictKind.DEAD:
        return (
            any(context.liveness(p) is Liveness.EXITED for p in hypothesis.culprits)
            or hypothesis.confidence < SELF_CAUSED
        )
    return not hypothesis.proven_by_structure or hypothesis.kind is VerdictKind.CYCLE


def _may_be_victim(context: DiagnosisContext, cause: Hypothesis, hypothesis: Hypothesis) -> bool:
    """Whether an absent process may be a victim of the cause, because it was active until then or still is."""
    if cause.kind is VerdictKind.DEAD and {context.whole(p) for p in cause.culprits} >= {*hypothesis.culprits}:
        return True  # a process waits for its part that died
    last = [context.last_activity(p) for p in hypothesis.culprits]
    if not last or any(np.isnan(each) for each in last):
        return True
    if cause.kind is VerdictKind.DEAD and np.isfinite(cause.since):
        return max(last) >= cause.since - 1.0
    return any(measure_inactivity(context, p).is_active(context.thresholds.notice_s) for p in hypothesis.culprits)


def _fold_parts(context: DiagnosisContext, found: list[Hypothesis]) -> list[Hypothesis]:
    """Joins the hypotheses about a process with those about its parts: a process whose part hangs is waited for as
    well. The others wait for the process; the line is that of the part."""
    parts: dict[int, list[Hypothesis]] = {}
    for each in found:
        wholes = {context.whole(p) for p in each.culprits}
        if each.kind in _INACTIVE and len(wholes) == 1 and wholes.isdisjoint(each.culprits):
            parts.setdefault(wholes.pop(), []).append(each)
    if not parts:
        return found
    joined, folded = [], set[int]()
    for each in found:
        inner = next((parts[p] for p in each.culprits if p in parts), []) if each.kind in _INACTIVE else []
        for part in inner:
            folded.add(id(part))
        joined.append(_join_part(each, inner[0]) if inner else each)
    return [now for now, before in zip(joined, found, strict=True) if id(before) not in folded]


def _join_part(whole: Hypothesis, part: Hypothesis) -> Hypothesis:
    proof = part if part.level is VerdictLevel.CONFIRMED else whole
    return replace(
        whole,
        part=part.culprits[0],
        level=proof.level,
        confidence=max(whole.confidence, part.confidence),
        facts=(*part.facts, *whole.facts)[:16],
        collect=part.collect,
    )


def _merge_alike(context: DiagnosisContext, found: Iterable[Hypothesis]) -> list[Hypothesis]:
    """Merges hypotheses of one kind and level about the same role and the same wait or communicator."""
    kept: list[Hypothesis] = []
    for each in found:
        alike = next((i for i, other in enumerate(kept) if _are_alike(context, other, each)), None)
        if alike is None:
            kept.append(each)
        else:
            kept[alike] = _merge_pair(context, kept[alike], each)
    return kept


def _are_alike(context: DiagnosisContext, one: Hypothesis, other: Hypothesis) -> bool:
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
    if {context.role(p) for p in one.culprits} != {context.role(p) for p in other.culprits}:
        return False
    if set(one.culprits) & set(other.culprits) or (one.node is not None and one.node == other.node):
        return True
    shared = set().union(*(context.communicators_of(p) for p in one.culprits))
    return any(shared & context.communicators_of(p) for p in other.culprits)


def _merge_pair(context: DiagnosisContext, one: Hypothesis, other: Hypothesis) -> Hypothesis:
    first = one if not other.since < one.since else other
    info = context.evidence.processes.info
    culprits = {*one.culprits, *other.culprits}
    cause = one.cause if one.cause == other.cause else "unknown"
    return replace(
        first,
        culprits=tuple(sorted(culprits, key=lambda p: (info[p].role, info[p].rank, info[p].name))),
        confidence=(max if set(one.culprits) == culprits else min)(one.confidence, other.confidence),
        cause=cause,
        facts=tuple(dict.fromkeys((*one.facts, *other.facts)))[:16],
        collect=tuple(dict.fromkeys((*one.collect, *other.collect)))[:8],
        not_excluded=tuple(sorted({*one.not_excluded, *other.not_excluded} - culprits)),
        others=tuple({*one.others, *other.others} - culprits),
    )
