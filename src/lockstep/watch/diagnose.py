"""From evidence to verdicts: a pure function, the same for live beacons, flight-recorder dumps and recorded incidents.

What is structural is looked for first: deaths, stopped processes, calls that do not fit, cycles. Then the ends of the
wait graph are judged: who is waited for and waits for nobody. At last, what one finding explains of another is taken
out (the earliest cause wins), and findings of one kind about one wait become one verdict.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lockstep.watch import graph as graphs
from lockstep.watch.cycles import deadlocks
from lockstep.watch.deaths import OWN, deaths
from lockstep.watch.evidence import Evidence
from lockstep.watch.facts import Life
from lockstep.watch.finding import Case, Finding
from lockstep.watch.flight import in_flight
from lockstep.watch.graph import Bools
from lockstep.watch.mismatch import mismatches
from lockstep.watch.sinks import edges_without_process, lost, sinks, stopped
from lockstep.watch.stillness import stillness
from lockstep.watch.verdict import Kind, Level, Patience, Verdict
from lockstep.watch.words import verdict

_CONSEQUENCES = (Kind.IN_FLIGHT, Kind.DEVICE_LAG, Kind.UNKNOWN, Kind.STARVED, Kind.SLOW)
"""What a proven cause nearby explains."""


AT_MOST = 64
"""Verdicts on one snapshot."""


def diagnose(evidence: Evidence, patience: Patience | None = None) -> list[Verdict]:
    """What is wrong, the one that explains the others first; empty when nothing is.

    Notices say who waits for whom; only confirmed verdicts accuse. Several independent incidents give several.
    """
    patience = patience or Patience()
    life = evidence.processes.life
    trouble = bool(((life == Life.DEAD) | (life == Life.STOPPED)).any())
    inside = graphs.pending(evidence)
    graph = graphs.build(evidence, inside, patience.notice_s, always=trouble)
    case = Case(evidence, patience, inside, graph)
    reached = None if graph is None else graphs.reached(graph)
    found = mismatches(case, reached)
    if trouble:
        found += deaths(case, reached) + stopped(case, reached)
    if graph is not None and reached is not None and graph.stalled.any():
        found += deadlocks(case, graph)
        found += lost(case, graph, reached) + sinks(case, graph, reached)
        known = {each.collective[0] for each in found if each.kind is Kind.MISMATCH and each.collective is not None}
        found += in_flight(case, graph, reached, known) + edges_without_process(case, graph, reached)
    kept = _merged(case, _unexplained(case, [each.capped() for each in found]))
    return [verdict(case, each) for each in sorted(kept, key=lambda each: _order(case, each))[:AT_MOST]]


def _order(case: Case, finding: Finding) -> tuple[object, ...]:
    since = finding.since if np.isfinite(finding.since) else case.at
    who = case.evidence.processes.who
    names = tuple((who[p].role, who[p].rank, who[p].name) for p in finding.culprits)
    return finding.level is Level.NOTICE, not finding.structural, round(since, 3), -finding.confidence, names


def _unexplained(case: Case, found: list[Finding]) -> list[Finding]:
    """Without what another finding of the same incident explains."""
    causes = [each for each in found if each.structural and each.level is Level.CONFIRMED]
    if not causes or len(found) == 1:
        return found
    places = {id(each): _touches(case, each) for each in found}
    return [
        each
        for each in found
        if not any(
            _explains(case, c, each) for c in causes if c is not each and (places[id(c)] & places[id(each)]).any()
        )
    ]


def _touches(case: Case, finding: Finding) -> Bools:
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


def _explains(case: Case, cause: Finding, finding: Finding) -> bool:
    """Whether `finding` is what one would see of `cause`."""
    if finding.kind in _CONSEQUENCES:
        return not (finding.structural and finding.level is Level.CONFIRMED)
    if cause.kind is Kind.MISMATCH:
        return _follows_mismatch(case, cause, finding)
    if finding.kind is Kind.MISMATCH:
        return False
    if finding.kind is Kind.DEAD:  # other deaths are compared among themselves
        if _is_death(case, finding):
            return finding.confidence < OWN and not _is_death(case, cause) and not cause.since > finding.since + 1.0
        return _is_death(case, cause) and cause.confidence >= OWN and finding.since >= cause.since - 1.0
    if finding.kind is Kind.CYCLE:
        return cause.kind is Kind.DEAD and finding.since >= cause.since - 1.0
    if finding.structural:
        return False
    if cause.kind is Kind.CYCLE:
        return True
    return _came_after(case, cause, finding)


def _is_death(case: Case, finding: Finding) -> bool:
    return finding.kind is Kind.DEAD and any(case.life(p) is Life.DEAD for p in finding.culprits)


def _follows_mismatch(case: Case, cause: Finding, finding: Finding) -> bool:
    """Everything does that does not speak for itself: aborts, resets, absences, deadlocks."""
    if finding.kind is Kind.MISMATCH:
        return finding.confidence < cause.confidence and bool({*cause.culprits} & {*finding.culprits})
    if finding.kind is Kind.DEAD:
        return any(case.life(p) is Life.LEFT for p in finding.culprits) or finding.confidence < OWN
    return not finding.structural or finding.kind is Kind.CYCLE


def _came_after(case: Case, cause: Finding, finding: Finding) -> bool:
    """An absent process that moved until the cause came, or moves still, is one of its victims."""
    last = [case.moved(p) for p in finding.culprits]
    if not last or any(np.isnan(each) for each in last):
        return True
    if cause.kind is Kind.DEAD and np.isfinite(cause.since):
        return max(last) >= cause.since - 1.0
    return any(stillness(case, p).moves(case.patience.notice_s) for p in finding.culprits)


def _merged(case: Case, found: Iterable[Finding]) -> list[Finding]:
    """Findings of one kind and level about the same role and the same wait, or communicator, become one."""
    kept: list[Finding] = []
    for each in found:
        twin = next((i for i, other in enumerate(kept) if _belongs(case, other, each)), None)
        if twin is None:
            kept.append(each)
        else:
            kept[twin] = _together(case, kept[twin], each)
    return kept


def _belongs(case: Case, one: Finding, other: Finding) -> bool:
    if (one.kind, one.level, one.outside) != (other.kind, other.level, other.outside):
        return False
    if one.culprits and set(one.culprits) == set(other.culprits):
        return True
    if one.text != other.text:
        return False
    if not one.culprits and not other.culprits:
        return bool(one.outside) or one.kind in (Kind.UNKNOWN, Kind.STARVED)
    if one.kind is Kind.MISMATCH and one.collective != other.collective:
        return False
    if {case.role(p) for p in one.culprits} != {case.role(p) for p in other.culprits}:
        return False
    if set(one.culprits) & set(other.culprits) or (one.node is not None and one.node == other.node):
        return True
    shared = set().union(*(case.communicators_of(p) for p in one.culprits))
    return any(shared & case.communicators_of(p) for p in other.culprits)


def _together(case: Case, one: Finding, other: Finding) -> Finding:
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
