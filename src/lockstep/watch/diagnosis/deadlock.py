"""Finds deadlocks, and the rank that makes its calls in a different order than the others.

A deadlock is a cycle of waits for all of several processes, or a knot of waits for any of them.
"""

from collections.abc import Sequence

import numpy as np

from lockstep.base.text import summarize_list
from lockstep.watch.diagnosis.diagnosis_context import (
    DiagnosisContext,
    Hypothesis,
    all_proven_inactive,
    measure_inactivity,
)
from lockstep.watch.diagnosis.evidence import IntArray
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import WaitGraph, find_cycles_and_knots

OUTLIER_CONFIDENCE, SYMMETRIC_CONFIDENCE = 0.75, 0.7
_MAX_TRIED = 64
"""The largest cycle in which each process is tried as the outlier, and the most processes whose progress is checked."""


def find_deadlocks(context: DiagnosisContext, graph: WaitGraph) -> list[Hypothesis]:
    """A hypothesis for each cycle or knot whose waits all last longer than `notice_s`; a shorter one may result from
    observations at different moments.

    A cycle with waits outside collectives is confirmed only if all its processes are inactive, because another thread
    of a process may be about to answer.
    """
    found = []
    for deadlock in find_cycles_and_knots(graph):
        if graph.stalled[deadlock].all():
            found.append(_deadlock_hypothesis(context, graph, deadlock))
    return found


def _deadlock_hypothesis(context: DiagnosisContext, graph: WaitGraph, deadlock: IntArray) -> Hypothesis:
    waiters_by_node = [_participants(graph, deadlock, node) for node in deadlock.tolist()]
    involved = sorted(set().union(*waiters_by_node))
    by_count = _outliers_by_count(context, graph, deadlock, waiters_by_node)
    outliers = [] if by_count else _outliers_by_removal(graph, deadlock, waiters_by_node)
    waiters = np.bincount(graph.wait_node, minlength=len(graph.seq))
    node = max(deadlock.tolist(), key=lambda each: (waiters[each], -graph.since[each]))
    only_collectives = bool((graph.edge[deadlock] < 0).all())
    since = float(np.max(graph.since[deadlock]))
    text = "waits in a different order than the others" if outliers else "wait for each other"
    if by_count is not None:
        outliers, text = by_count
    proven = all_proven_inactive(context, involved, since)
    if only_collectives and not proven:  # an asynchronous collective may still complete
        proven = not any(
            measure_inactivity(context, each).progresses(context.thresholds.notice_s) for each in involved[:_MAX_TRIED]
        )
    return Hypothesis(
        VerdictKind.CYCLE,
        VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE,
        OUTLIER_CONFIDENCE if outliers else SYMMETRIC_CONFIDENCE,
        text,
        tuple(outliers or involved),
        node=node,
        since=since,
        cause="unknown",
        alternatives=(
            Alternative("rank_divergent_branch", 0.6 if only_collectives else 0.3),
            Alternative("framework_bug", 0.3),
        ),
        facts=tuple(
            _wait_fact(context, graph, each, waiting)
            for each, waiting in zip(deadlock[:16].tolist(), waiters_by_node, strict=False)
        ),
        proven_by_structure=True,
        others=tuple(involved),
    )


def _participants(graph: WaitGraph, deadlock: IntArray, node: int) -> set[int]:
    """The processes that wait in a node of the deadlock and block other nodes of it."""
    blocks = np.zeros(graph.processes, dtype=np.bool_)
    blocks[graph.block_process[np.isin(graph.block_node, deadlock)]] = True
    waiters = graph.wait_process[graph.wait_node == node]
    return set(waiters[blocks[waiters]].tolist())


def _outliers_by_removal(graph: WaitGraph, deadlock: IntArray, waiters_by_node: Sequence[set[int]]) -> list[int]:
    """The processes whose removal would resolve the deadlock, if they are fewer than the others; else empty."""
    if len(deadlock) == 2:
        small, large = sorted(waiters_by_node, key=len)
        return sorted(small) if len(small) < len(large) else []
    resolving = [each for each in sorted(set().union(*waiters_by_node)) if _resolves(graph, deadlock, each)]
    return resolving if len(resolving) == 1 else []


def _outliers_by_count(
    context: DiagnosisContext, graph: WaitGraph, deadlock: IntArray, waiters_by_node: Sequence[set[int]]
) -> tuple[list[int], str] | None:
    """The processes whose number of calls differs from that of their peers, and a text about it. Compares, for each two
    communicators x and y of the deadlock, the processes that have reached x by their calls on y and its parallel
    groups."""
    members, involved = context.evidence.communicators, set().union(*waiters_by_node)
    for x in deadlock.tolist():
        for y, waiters in zip(deadlock.tolist(), waiters_by_node, strict=True):
            if x == y or graph.edge[x] >= 0 or graph.edge[y] >= 0:
                continue
            usual, deviating = _typical_count(context, graph, x, y)
            outliers = sorted(deviating & involved)
            if not outliers and usual is not None and graph.seq[y] > usual:
                outliers = sorted(waiters)
            if outliers and len(outliers) < len(involved):
                communicator = int(graph.communicator[y])
                rows = context.members(communicator)
                entered = members.entered[rows][members.process[rows] == outliers[0]]
                name = members.info[communicator].name
                count = int(entered[0])
                return outliers, f"has entered {count} collectives of '{name}' where its peers have entered {usual}"
    return None


def _typical_count(context: DiagnosisContext, graph: WaitGraph, x: int, y: int) -> tuple[int | None, set[int]]:
    """How many collectives of y's parallel groups most of the processes that reached x have entered (None without a
    majority), and which processes have entered a different number."""
    members = context.evidence.communicators
    communicator, other = int(graph.communicator[x]), int(graph.communicator[y])
    if not members.info[other].description or communicator == other:
        return None, set()
    parallel = [each for each in (other, *context.parallel_groups(other)) if each != communicator]
    rows = context.members(communicator)
    arrived = np.zeros(graph.processes, dtype=np.bool_)
    arrived[members.process[rows][members.entered[rows] >= graph.seq[x]]] = True
    is_parallel = np.zeros(len(members.info), dtype=np.bool_)
    is_parallel[parallel] = True
    rows_of_arrived = np.flatnonzero(is_parallel[context.pending.communicator] & arrived[members.process])
    counts = members.entered[rows_of_arrived]
    if len(counts) < 3 or (counts < 0).any():
        return None, set()
    values, votes = np.unique(counts, return_counts=True)
    if 2 * votes.max() <= len(counts):
        return None, set()
    usual = int(values[np.argmax(votes)])
    return usual, set(members.process[rows_of_arrived[counts != usual]].tolist())


def _resolves(graph: WaitGraph, deadlock: IntArray, process: int) -> bool:
    """Whether the deadlock would be resolved if this process did not wait."""
    if len(deadlock) > _MAX_TRIED:
        return False
    inside = np.isin(graph.block_node, deadlock)
    blocks = list(zip(graph.block_node[inside].tolist(), graph.block_process[inside].tolist(), strict=True))
    inside = np.isin(graph.wait_node, deadlock) & (graph.wait_process != process)
    waits = list(zip(graph.wait_process[inside].tolist(), graph.wait_node[inside].tolist(), strict=True))
    blocked = set(deadlock.tolist())
    while blocked:
        waiting = {each for each, node in waits if node in blocked}
        still_blocked = {node for node, each in blocks if each in waiting and node in blocked}
        if still_blocked == blocked:
            return False
        blocked = still_blocked
    return True


def _wait_fact(context: DiagnosisContext, graph: WaitGraph, node: int, waiters: set[int]) -> Fact:
    names = context.evidence.processes.info
    waiting = summarize_list(sorted(waiters), 4, lambda each: names[each].name)
    blockers = graph.blockers(node)
    waits_for = summarize_list(blockers, 4, lambda each: names[each].name)
    if not graph.is_collective(node):
        edge = context.evidence.edges[int(graph.edge[node])]
        return Fact(f"{waiting} waits for {waits_for} ({edge.kind}): {edge.why}", "waits")
    communicator, seq = int(graph.communicator[node]), int(graph.seq[node])
    call, site = context.call(communicator, seq)
    name = context.evidence.communicators.info[communicator].name
    operation = call.operation if call else "collective"
    at = f" at {site}" if site else ""
    return Fact(f"{waiting} in {operation} #{seq} on '{name}'{at}, which {waits_for} has not entered", "waits")


def find_out_of_order(context: DiagnosisContext, collectives: Sequence[tuple[int, int]]) -> list[int]:
    """The processes that entered two of the given collectives (communicator, sequence number) in a different order than
    the others. All members have entered these collectives and none completes, so kernels of two communicators may wait
    for each other on the device."""
    members = context.evidence.communicators
    votes: dict[int, int] = {}
    for i, (first, _) in enumerate(collectives):
        for second, _ in collectives[i + 1 :]:
            a, b = context.members(first), context.members(second)
            common, ia, ib = np.intersect1d(members.process[a], members.process[b], return_indices=True)
            lead = members.entered_at[b][ib] - members.entered_at[a][ia]
            before, after = common[lead > 0], common[lead < 0]
            if not len(before) or not len(after) or len(before) == len(after):
                continue
            for process in (before if len(before) < len(after) else after).tolist():
                votes[process] = votes.get(process, 0) + 1
    return sorted(votes)
