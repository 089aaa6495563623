"""Finds deadlocks (cycles of AND waits, knots of OR waits) and the rank whose order of calls is the outlier."""

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
"""In cycles of at most this many nodes, a process without which there is no deadlock is searched for."""


def find_deadlocks(context: DiagnosisContext, graph: WaitGraph) -> list[Hypothesis]:
    """A hypothesis for each cycle or knot in which all waits last longer than the notice: shorter ones may come from
    observations at different moments. Waits outside collectives name processes, and another thread of that process may
    be about to answer, so only inactivity proves a cycle with such a wait."""
    found = []
    for core in find_cycles_and_knots(graph):
        if graph.stalled[core].all():
            found.append(_deadlock_hypothesis(context, graph, core))
    return found


def _deadlock_hypothesis(context: DiagnosisContext, graph: WaitGraph, core: IntArray) -> Hypothesis:
    sides = [_participants(graph, core, node) for node in core.tolist()]
    involved = sorted(set().union(*sides))
    counted = _outliers_by_count(context, graph, core, sides)
    odd = [] if counted else _outliers(graph, core, sides)
    waiters = np.bincount(graph.wait_node, minlength=len(graph.seq))
    node = max(core.tolist(), key=lambda each: (waiters[each], -graph.since[each]))
    collectives = bool((graph.edge[core] < 0).all())
    since = float(np.max(graph.since[core]))
    text = "waits in a different order than the others" if odd else "wait for each other"
    if counted is not None:
        odd, text = counted
    proven = all_proven_inactive(context, involved, since)
    if collectives and not proven:  # an asynchronous collective may still complete
        proven = not any(
            measure_inactivity(context, each).progresses(context.thresholds.notice_s) for each in involved[:_MAX_TRIED]
        )
    return Hypothesis(
        VerdictKind.CYCLE,
        VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE,
        OUTLIER_CONFIDENCE if odd else SYMMETRIC_CONFIDENCE,
        text,
        tuple(odd or involved),
        node=node,
        since=since,
        cause="unknown",
        alternatives=(
            Alternative("rank_divergent_branch", 0.6 if collectives else 0.3),
            Alternative("framework_bug", 0.3),
        ),
        facts=tuple(
            _wait_fact(context, graph, each, side) for each, side in zip(core[:16].tolist(), sides, strict=False)
        ),
        proven_by_structure=True,
        others=tuple(involved),
    )


def _participants(graph: WaitGraph, core: IntArray, node: int) -> set[int]:
    """Processes that wait in a node and hold up others of the core."""
    blocks = np.zeros(graph.processes, dtype=np.bool_)
    blocks[graph.block_process[np.isin(graph.block_node, core)]] = True
    waiters = graph.wait_process[graph.wait_node == node]
    return set(waiters[blocks[waiters]].tolist())


def _outliers(graph: WaitGraph, core: IntArray, sides: Sequence[set[int]]) -> list[int]:
    """The processes without which there were no deadlock, if they are fewer than the others; else empty."""
    if len(core) == 2:
        small, large = sorted(sides, key=len)
        return sorted(small) if len(small) < len(large) else []
    alone = [each for each in sorted(set().union(*sides)) if _resolves(graph, core, each)]
    return alone if len(alone) == 1 else []


def _outliers_by_count(
    context: DiagnosisContext, graph: WaitGraph, core: IntArray, sides: Sequence[set[int]]
) -> tuple[list[int], str] | None:
    """Processes that have entered more or fewer collectives than their peers had when those reached the cycle."""
    involved = set().union(*sides)
    for x in core.tolist():
        for y, side in zip(core.tolist(), sides, strict=True):
            if x == y or graph.edge[x] >= 0 or graph.edge[y] >= 0:
                continue
            usual, unusual = _typical_count(context, graph, x, y)
            odd = sorted(unusual & involved)
            if not odd and usual is not None and graph.seq[y] > usual:
                odd = sorted(side)
            if odd and len(odd) < len(involved):
                there = int(graph.communicator[y])
                rows = context.members(there)
                own = context.evidence.communicators.entered[rows][
                    context.evidence.communicators.process[rows] == odd[0]
                ]
                name = context.evidence.communicators.info[there].name
                return odd, f"has entered {int(own[0])} collectives of '{name}' where its peers have entered {usual}"
    return None


def _typical_count(context: DiagnosisContext, graph: WaitGraph, x: int, y: int) -> tuple[int | None, set[int]]:
    """Of the processes that reached x: how many collectives of y's sister communicators (equal description and size)
    most have entered, and which have entered a different number; None if there is no majority."""
    members = context.evidence.communicators
    here, there = int(graph.communicator[x]), int(graph.communicator[y])
    if not members.info[there].description or here == there:
        return None, set()
    family = [each for each in (there, *context.parallel_groups(there)) if each != here]
    rows = context.members(here)
    came = np.zeros(graph.processes, dtype=np.bool_)
    came[members.process[rows][members.entered[rows] >= graph.seq[x]]] = True
    inside = np.zeros(len(members.info), dtype=np.bool_)
    inside[family] = True
    of = np.flatnonzero(inside[context.pending.communicator] & came[members.process])
    counts = members.entered[of]
    if len(counts) < 3 or (counts < 0).any():
        return None, set()
    values, votes = np.unique(counts, return_counts=True)
    if 2 * votes.max() <= len(counts):
        return None, set()
    usual = int(values[np.argmax(votes)])
    return usual, set(members.process[of[counts != usual]].tolist())


def _resolves(graph: WaitGraph, core: IntArray, process: int) -> bool:
    """Whether there were no deadlock if this process did not wait."""
    if len(core) > _MAX_TRIED:
        return False
    within = np.isin(graph.block_node, core)
    blocks = list(zip(graph.block_node[within].tolist(), graph.block_process[within].tolist(), strict=True))
    within = np.isin(graph.wait_node, core) & (graph.wait_process != process)
    waits = list(zip(graph.wait_process[within].tolist(), graph.wait_node[within].tolist(), strict=True))
    held = set(core.tolist())
    while held:
        stuck = {each for each, node in waits if node in held}
        now = {node for node, each in blocks if each in stuck and node in held}
        if now == held:
            return False
        held = now
    return True


def _wait_fact(context: DiagnosisContext, graph: WaitGraph, node: int, side: set[int]) -> Fact:
    names = context.evidence.processes.info
    waiting = summarize_list(sorted(side), 4, lambda each: names[each].name)
    blockers = graph.blockers(node)
    waits_for = summarize_list(blockers, 4, lambda each: names[each].name)
    if graph.edge[node] >= 0:
        edge = context.evidence.edges[int(graph.edge[node])]
        return Fact(f"{waiting} waits for {waits_for} ({edge.kind}): {edge.why}", "waits")
    communicator, seq = int(graph.communicator[node]), int(graph.seq[node])
    call, site = context.call(communicator, seq)
    name = context.evidence.communicators.info[communicator].name
    operation = call.operation if call else "collective"
    at = f" at {site}" if site else ""
    return Fact(f"{waiting} in {operation} #{seq} on '{name}'{at}, which {waits_for} has not entered", "waits")


def find_out_of_order(context: DiagnosisContext, nodes: Sequence[tuple[int, int]]) -> list[int]:
    """Of collectives that all members have entered and none completes: the processes that entered two of them in a
    different order than the others (kernels of two communicators wait for each other on the device)."""
    members = context.evidence.communicators
    votes: dict[int, int] = {}
    for i, (first, _) in enumerate(nodes):
        for second, _ in nodes[i + 1 :]:
            a, b = context.members(first), context.members(second)
            common, ia, ib = np.intersect1d(members.process[a], members.process[b], return_indices=True)
            lead = members.entered_at[b][ib] - members.entered_at[a][ia]
            before, after = common[lead > 0], common[lead < 0]
            if not len(before) or not len(after) or len(before) == len(after):
                continue
            for process in (before if len(before) < len(after) else after).tolist():
                votes[process] = votes.get(process, 0) + 1
    return sorted(votes)
