"""Finds deadlocks, and the rank that makes its calls in a different order than the others.

A deadlock is a cycle of waits for all of several processes, or a knot of waits for any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.watch.diagnosis.diagnosis_context import (
    DiagnosisContext,
    Hypothesis,
    all_proven_inactive,
    measure_inactivity,
)
from lockstep.watch.diagnosis.evidence import IntArray
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, level_of
from lockstep.watch.diagnosis.verdict_text import collective_text
from lockstep.watch.diagnosis.wait_graph import WaitGraph, find_cycles_and_knots, join_ranges, mask_of

_OTHER_ORDER = "waits in a different order than the others"
_MAX_TRIED = 64
"""The largest cycle in which each process is tried as the outlier, and the most processes whose progress is checked."""


def find_deadlocks(context: DiagnosisContext) -> list[Hypothesis]:
    """A hypothesis for each cycle or knot whose waits all last longer than `notice_s`; a shorter one may result from
    observations at different moments.

    A cycle with waits outside collectives is confirmed only if all its processes are inactive, because another thread
    of a process may be about to answer. So is a cycle in which a process that waits only on its device has not issued a
    collective of the cycle, because its host does not wait and may be about to issue it.
    """
    found = []
    for deadlock in find_cycles_and_knots(context.graph):
        if context.graph.stalled[deadlock].all():
            found.append(_deadlock_hypothesis(context, deadlock))
    return found


def _deadlock_hypothesis(context: DiagnosisContext, deadlock: IntArray) -> Hypothesis:
    graph = context.graph
    waiters_by_node = _participants(graph, deadlock)
    involved = sorted(set().union(*waiters_by_node))
    outliers, text, stands_out = _find_outliers(context, deadlock, waiters_by_node)
    waiters = np.bincount(graph.wait_node, minlength=len(graph.seq))
    node = max(deadlock.tolist(), key=lambda each: (waiters[each], -graph.since[each]))
    only_collectives = bool((graph.edge[deadlock] < 0).all())
    proves = only_collectives and not _host_may_issue(context, deadlock, involved)
    since = float(np.max(graph.since[deadlock]))
    proven = all_proven_inactive(context, involved, since)
    if proves and not proven:  # an asynchronous collective may still complete
        proven = not any(
            measure_inactivity(context, each).progresses(context.thresholds.notice_s) for each in involved[:_MAX_TRIED]
        )
    return Hypothesis(
        VerdictKind.CYCLE,
        level_of(proven),
        {"closed_circle": True, "differs_from_peers": stands_out or None},
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
            _wait_fact(context, each, waiting)
            for each, waiting in zip(deadlock[:16].tolist(), waiters_by_node, strict=False)
        ),
        proven_by_structure=True,
        others=tuple(involved),
    )


def _host_may_issue(context: DiagnosisContext, deadlock: IntArray, involved: Sequence[int]) -> bool:
    """Whether a collective of the deadlock is missing only because a process of it has not issued the collective, while
    what that process waits for is on its device: an operation posted ahead does not keep its host from going on."""
    graph = context.graph
    members, pending = context.evidence.communicators, context.pending
    if members.on_device is None:
        return False
    waits_on_device = mask_of(graph.processes, members.process[pending.waits & members.on_device])
    suspects = [process for process in involved if waits_on_device[process]]
    for node in filter(graph.is_collective, deadlock.tolist()):
        rows = context.rows_of(node)
        missing = members.process[rows][members.entered[rows] < graph.seq[node]]
        if np.isin(suspects, missing).any():
            return True
    return False


def _participants(graph: WaitGraph, deadlock: IntArray) -> list[set[int]]:
    """For each node of the deadlock, the processes that wait in it and block other nodes of the deadlock."""
    blocks = mask_of(graph.processes, graph.block_process[np.isin(graph.block_node, deadlock)])
    waiters = (graph.wait_process[graph.wait_node == node] for node in deadlock.tolist())
    return [set(each[blocks[each]].tolist()) for each in waiters]


def _find_outliers(
    context: DiagnosisContext, deadlock: IntArray, waiters_by_node: Sequence[set[int]]
) -> tuple[list[int], str, bool]:
    """The processes of a deadlock that behave differently than the others (empty if all behave alike), a text about
    them, and whether all comparisons name them. If comparisons name different processes, all of these are named."""
    comparisons = _compare_counts(context, deadlock, waiters_by_node)
    if len({outliers for outliers, _, _ in comparisons}) == 1:
        outliers, _, text = min(comparisons)  # the text about the earliest wait
        return list(outliers), text, True
    contested = set().union(*(outliers for outliers, _, _ in comparisons))
    if contested:
        return sorted(contested), _OTHER_ORDER, False
    resolving = [each for each in sorted(set().union(*waiters_by_node)) if _resolves(context.graph, deadlock, each)]
    if len(resolving) == 1:
        return resolving, _OTHER_ORDER, True
    return [], "wait for each other", False


def _compare_counts(
    context: DiagnosisContext, deadlock: IntArray, waiters_by_node: Sequence[set[int]]
) -> list[tuple[tuple[int, ...], float, str]]:
    """The processes whose number of calls differs from that of their peers. Returns, for each comparison that finds
    any: these outliers, the start of the wait at which their peers are compared, and a text about one of the outliers.

    Peers are the processes that have reached a collective x of the deadlock; their calls on the parallel groups of
    another communicator of the deadlock are counted, without those that their devices have not reached. An outlier has
    reached x after a different number of these calls, or is missing at x because it waits in such a call that its peers
    have not made. A process that waits in such a call and is not missing at x may rightly be ahead of those at x.
    """
    graph = context.graph
    members, reached = context.evidence.communicators, context.pending.reached
    kinds = _find_kinds(context, deadlock, waiters_by_node)
    found = []
    for x in deadlock.tolist():
        communicator = int(graph.communicator[x])
        if not graph.is_collective(x):
            continue
        rows_of_x = context.members(communicator)
        arrived = members.process[rows_of_x][reached[rows_of_x] >= graph.seq[x]]
        missing = set(graph.blockers(x))
        for kind in kinds:
            rows = kind.rows_of(arrived)
            rows = rows[context.pending.communicator[rows] != communicator]
            usual = _typical_count(reached[rows])
            if usual is None:
                continue
            outlier_rows = rows[reached[rows] != usual].tolist() or [
                context.membership(process, int(graph.communicator[y]))
                for process in missing & kind.waits.keys()
                for y in kind.waits[process]
                if graph.seq[y] > usual
            ]
            if outlier_rows:
                outliers = tuple(sorted({int(members.process[row]) for row in outlier_rows}))
                text = min(_count_text(context, row, int(reached[row]), usual) for row in outlier_rows)
                found.append((outliers, float(graph.since[x]), text))
    return found


@dataclass(frozen=True, slots=True)
class _Kind:
    """Parallel groups of which at least one has a collective in a deadlock."""

    waits: dict[int, list[int]]
    """The nodes of the deadlock in which a process waits."""
    rows: IntArray
    """The rows of the memberships in all parallel groups, ordered by process."""
    process: IntArray
    """The process of each of these rows."""

    def rows_of(self, processes: IntArray) -> IntArray:
        first = np.searchsorted(self.process, processes)
        last = np.searchsorted(self.process, processes, side="right")
        found: IntArray = self.rows[join_ranges(first, last)]
        return found


def _find_kinds(context: DiagnosisContext, deadlock: IntArray, waiters_by_node: Sequence[set[int]]) -> list[_Kind]:
    """The kinds of the communicators with collectives in a deadlock, without those of unknown description."""
    members = context.evidence.communicators
    nodes_by_kind: dict[tuple[str, int], list[tuple[int, set[int]]]] = {}
    for node, waiters in zip(deadlock.tolist(), waiters_by_node, strict=True):
        communicator = int(context.graph.communicator[node])
        if communicator >= 0 and members.info[communicator].description:
            nodes_by_kind.setdefault(context.kind(communicator), []).append((node, waiters))
    found = []
    for nodes in nodes_by_kind.values():
        communicators = {int(context.graph.communicator[node]) for node, _ in nodes}
        waits: dict[int, list[int]] = {}
        for node, waiters in nodes:
            for process in waiters:
                waits.setdefault(process, []).append(node)
        is_parallel = mask_of(len(members.info), [*communicators, *context.parallel_groups(min(communicators))])
        rows = np.flatnonzero(is_parallel[context.pending.communicator])
        rows = rows[np.argsort(members.process[rows], kind="stable")]
        found.append(_Kind(waits, rows, members.process[rows]))
    return found


def _typical_count(counts: IntArray) -> int | None:
    """The number of collectives that most have entered; None without a majority of at least three known numbers."""
    if len(counts) < 3 or (counts < 0).any():
        return None
    if (counts == counts[0]).all():
        return int(counts[0])
    values, votes = np.unique(counts, return_counts=True)
    return int(values[np.argmax(votes)]) if 2 * votes.max() > len(counts) else None


def _count_text(context: DiagnosisContext, row: int, count: int, usual: int) -> str:
    name = context.evidence.communicators.info[int(context.pending.communicator[row])].name
    return f"has entered {count} collectives of '{name}' where its peers have entered {usual}"


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


def _wait_fact(context: DiagnosisContext, node: int, waiters: set[int]) -> Fact:
    graph = context.graph
    waiting, waits_for = context.names(sorted(waiters)), context.names(graph.blockers(node))
    if not graph.is_collective(node):
        edge = context.evidence.edges[int(graph.edge[node])]
        return Fact(f"{waiting} waits for {waits_for} ({edge.kind}): {edge.why}", "waits")
    collective = graph.collective(node)
    _, site = context.call(*collective)
    at = f" at {site}" if site else ""
    return Fact(f"{waiting} in {collective_text(context, *collective)}{at}, which {waits_for} has not entered", "waits")
