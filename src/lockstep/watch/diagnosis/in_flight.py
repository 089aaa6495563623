"""Judges collectives that all members have entered but not all complete, and collectives with too little evidence."""

from collections.abc import Collection
from operator import attrgetter

import numpy as np

from lockstep.base.text import summarize_list
from lockstep.watch.diagnosis.deadlock import find_out_of_order
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, all_proven_inactive
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import BoolArray, WaitGraph

MAX_COMPARED = 32
"""The most collectives in flight that are compared with each other."""
_MAX_WAITERS = 256
"""The most waiting processes whose activity is checked."""


def find_in_flight(
    context: DiagnosisContext, graph: WaitGraph, reached: BoolArray, explained: Collection[int] = ()
) -> list[Hypothesis]:
    """Hypotheses about stalled collectives without a known blocker, except those of `explained` communicators."""
    blocked = np.zeros(len(graph.seq), dtype=np.bool_)
    blocked[graph.block_node] = True
    doubtful = np.zeros(len(graph.seq), dtype=np.bool_)
    doubtful[graph.suspect_node] = True
    open_ = reached & graph.stalled & (graph.communicator >= 0) & ~blocked
    nodes = [node for node in np.flatnonzero(open_).tolist() if int(graph.communicator[node]) not in explained]
    complete = [node for node in nodes if not doubtful[node]]
    found = [_insufficient_evidence(context, graph, node) for node in nodes if doubtful[node]]
    lagging = [each for node in complete if (each := _lagging_members(context, graph, node)) is not None]
    if lagging:
        return found + lagging
    return found + _none_completes(context, graph, complete)


def _lagging_members(context: DiagnosisContext, graph: WaitGraph, node: int) -> Hypothesis | None:
    """Members that have not completed a collective that most others have."""
    waiters = graph.waiters(node) if graph.few_wait(node, _MAX_WAITERS) else []
    members = context.evidence.communicators
    rows = context.members(int(graph.communicator[node]))
    done = int((members.completed[rows] >= graph.seq[node]).sum())
    if not waiters or len(waiters) >= done:
        return None
    proven = all_proven_inactive(context, waiters[:_MAX_WAITERS], float(graph.since[node]))
    return Hypothesis(
        VerdictKind.DEVICE_LAG,
        VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE,
        0.7 if proven else 0.5,
        f"has entered {{collective}} and not completed it, as {done} others have",
        tuple(waiters),
        node=node,
        since=float(graph.since[node]),
        alternatives=(Alternative("gpu_hardware_fault", 0.3), Alternative("network_blocked", 0.3)),
        collect=("the device's counters and the kernel log of its host", "its native stack (py-spy dump --native)"),
    )


def _none_completes(context: DiagnosisContext, graph: WaitGraph, nodes: list[int]) -> list[Hypothesis]:
    if not nodes:
        return []
    nodes = sorted(nodes, key=lambda each: (graph.since[each], each))
    collectives = [(int(graph.communicator[each]), int(graph.seq[each])) for each in nodes[:MAX_COMPARED]]
    odd = find_out_of_order(context, collectives) if len(nodes) > 1 else []
    waits = np.zeros(len(graph.seq), dtype=np.bool_)
    waits[nodes] = True
    waiters = graph.wait_process[waits[graph.wait_node]][:_MAX_WAITERS].tolist()
    since = float(graph.since[nodes[0]])
    if (
        _any_active(context, waiters)
        and context.at - since < context.thresholds.busy_factor * context.thresholds.notice_s
    ):
        return []  # bytes are under way
    proven = all_proven_inactive(context, waiters, since)
    if odd:
        return [
            Hypothesis(
                VerdictKind.CYCLE, VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE, 0.65 if proven else 0.5,
                "entered its collectives in a different order than the others", tuple(odd), node=nodes[0], since=since,
                alternatives=(Alternative("rank_divergent_branch", 0.5),), others=tuple(waiters),
            )
        ]  # fmt: skip
    culprits, hosts = _common_host(context, graph, nodes)
    several = len(hosts) > 1
    links = summarize_list(sorted(hosts), 4)
    return [
        Hypothesis(
            VerdictKind.IN_FLIGHT,
            VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE,
            0.6 if proven else 0.45,
            "all members have entered {collective} and none completes it",
            tuple(culprits),
            node=nodes[0],
            since=since,
            alternatives=(Alternative("network_blocked", 0.5),) if several else (Alternative("p2p_path_broken", 0.3),),
            facts=(Fact(f"it spans the hosts {links}", "communicators"),) if several else (),
            collect=(
                "bytes and retransmits of the links between its hosts" if several else "GPU and link counters",
                "native stacks of two members (py-spy dump --native)",
            ),
        )
    ]


def _any_active(context: DiagnosisContext, processes: list[int]) -> bool:
    """Whether any of the processes uses CPU, a network or a GPU."""
    rows = np.array(processes, dtype=np.int64)
    return bool((context.at - context.evidence.processes.active_at[rows] < context.thresholds.notice_s).any())


def _common_host(context: DiagnosisContext, graph: WaitGraph, nodes: list[int]) -> tuple[list[int], set[str]]:
    """The waiting processes of the only host that all collectives in flight share, if there is one; and all hosts."""
    info = context.evidence.processes.info
    spans: list[set[str]] = []
    for node in nodes[:MAX_COMPARED]:
        rows = context.members(int(graph.communicator[node]))
        processes = map(info.__getitem__, context.evidence.communicators.process[rows].tolist())
        spans.append(set(map(attrgetter("host"), processes)))
    hosts, common = set().union(*spans), set.intersection(*spans)
    if len(common) != 1 or all(span == hosts for span in spans):
        return [], hosts
    waiting = np.unique(graph.wait_process[np.isin(graph.wait_node, nodes)]).tolist()
    return [each for each in waiting if info[each].host in common], hosts


def _insufficient_evidence(context: DiagnosisContext, graph: WaitGraph, node: int) -> Hypothesis:
    """All members whose progress is known have entered; a late one can only be among the others."""
    suspects = graph.suspects(node)
    info = context.evidence.processes.info
    names = summarize_list(suspects, 4, lambda each: info[each].name)
    unseen = [each for each in suspects if context.liveness(each) is Liveness.UNSEEN]
    what = "a beacon, a dump or the log" if unseen else "the stack and the counts"
    return Hypothesis(
        VerdictKind.UNKNOWN,
        VerdictLevel.NOTICE,
        0.4,
        "cannot tell which rank is late for {collective}",
        node=node,
        since=float(graph.since[node]),
        alternatives=(Alternative("absent", 0.5), Alternative("in_flight", 0.2)),
        collect=(f"{what} of {names}",),
        more=f"Nothing is known of {names}.",
        others=tuple(suspects),
    )
