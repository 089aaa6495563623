"""Derives verdicts from evidence: a pure function, used for live beacons, flight-recorder dumps and recorded incidents.

First come causes that the structure of the evidence proves: mismatched calls, deaths, stopped processes, deadlocks.
Then come processes that others wait for and that wait for no other process. Of these hypotheses the cheapest set that
covers everything anomalous is chosen, and those of one kind about one wait are merged into one verdict.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from lockstep.watch.diagnosis import wait_graph as graphs
from lockstep.watch.diagnosis.deadlock import find_deadlocks
from lockstep.watch.diagnosis.deaths import find_deaths, find_stopped
from lockstep.watch.diagnosis.device_faults import find_device_faults
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis
from lockstep.watch.diagnosis.effects import choose_explanation
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.in_flight import find_in_flight
from lockstep.watch.diagnosis.mismatch import find_mismatches
from lockstep.watch.diagnosis.pending import find_pending
from lockstep.watch.diagnosis.root_cause import find_lost_hosts, find_root_causes, find_waits_without_blocker
from lockstep.watch.diagnosis.verdict import StallThresholds, Verdict, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.verdict_text import to_verdict

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
    found = find_mismatches(context)
    if any_ended:
        found += find_deaths(context) + find_stopped(context)
    if graph.stalled.any():
        found += find_deadlocks(context) + find_device_faults(context)
        found += find_lost_hosts(context) + find_root_causes(context)
        mismatched = {
            each.collective[0] for each in found if each.kind is VerdictKind.MISMATCH and each.collective is not None
        }
        found += find_in_flight(context, mismatched) + find_waits_without_blocker(context)
    kept = choose_explanation(context, found)
    kept.sort(key=lambda each: not context.wholes.keys().isdisjoint(each.culprits))  # parts of processes last
    kept = _merge(context, _merge(context, kept, _is_part_of, _join_part), _are_alike, _merge_pair)
    return [
        to_verdict(context, each) for each in sorted(kept, key=lambda each: _sort_key(context, each))[:MAX_VERDICTS]
    ]


def _sort_key(context: DiagnosisContext, hypothesis: Hypothesis) -> tuple[object, ...]:
    since = hypothesis.since if np.isfinite(hypothesis.since) else context.at
    return (
        hypothesis.level is VerdictLevel.NOTICE,
        hypothesis.kind is VerdictKind.UNKNOWN,
        not hypothesis.proven_by_structure,
        round(since, 3),
        -context.confidence(hypothesis),
        tuple(context.rank_key(p) for p in hypothesis.culprits),
    )


def _merge(
    context: DiagnosisContext, found: Iterable[Hypothesis], belong: Callable[..., bool], join: Callable[..., Hypothesis]
) -> list[Hypothesis]:
    """Joins each hypothesis with the first before it to which it belongs."""
    kept: list[Hypothesis] = []
    for each in found:
        at = next((i for i, other in enumerate(kept) if belong(context, other, each)), None)
        if at is None:
            kept.append(each)
        else:
            kept[at] = join(context, kept[at], each)
    return kept


def _are_alike(context: DiagnosisContext, one: Hypothesis, other: Hypothesis) -> bool:
    """Whether both are of one kind and level, about the same role and the same wait or communicator."""
    if (one.kind, one.level, one.outside) != (other.kind, other.level, other.outside):
        return False
    if one.culprits and set(one.culprits) == set(other.culprits):
        return True
    if one.text != other.text:
        return False
    if not one.culprits and not other.culprits:
        return True
    if one.kind is VerdictKind.MISMATCH and one.collective != other.collective:
        return False
    if {context.role(p) for p in one.culprits} != {context.role(p) for p in other.culprits}:
        return False
    if one.node is not None and one.node == other.node:
        return True
    shared = set().union(*(context.communicators_of(p) for p in one.culprits))
    return any(shared & context.communicators_of(p) for p in other.culprits)


def _is_part_of(context: DiagnosisContext, whole: Hypothesis, part: Hypothesis) -> bool:
    """Whether one hypothesis is about a process that others wait for, and the other about a part of it that hangs."""
    if part.kind not in _INACTIVE or whole.kind not in _INACTIVE or not context.wholes:
        return False
    wholes = {context.whole(p) for p in part.culprits}
    return len(wholes) == 1 and wholes.isdisjoint(part.culprits) and wholes <= {*whole.culprits}


def _join_part(context: DiagnosisContext, whole: Hypothesis, part: Hypothesis) -> Hypothesis:
    """The others wait for the process; the line is that of the part."""
    surer = max(whole, part, key=context.confidence)
    return replace(
        whole,
        part=part.culprits[0] if whole.part is None else whole.part,
        level=surer.level,
        answers=surer.answers,
        proven_by_structure=surer.proven_by_structure,
        facts=(*part.facts, *whole.facts)[:16],
        collect=part.collect,
    )


def _merge_pair(context: DiagnosisContext, one: Hypothesis, other: Hypothesis) -> Hypothesis:
    first = one if not other.since < one.since else other
    culprits = {*one.culprits, *other.culprits}
    cause = one.cause if one.cause == other.cause else "unknown"
    return replace(
        first,
        culprits=tuple(sorted(culprits, key=context.rank_key)),
        answers=(max if set(one.culprits) == culprits else min)(one, other, key=context.confidence).answers,
        cause=cause,
        facts=tuple(dict.fromkeys((*one.facts, *other.facts)))[:16],
        collect=tuple(dict.fromkeys((*one.collect, *other.collect)))[:8],
        not_excluded=tuple(sorted({*one.not_excluded, *other.not_excluded} - culprits)),
    )
