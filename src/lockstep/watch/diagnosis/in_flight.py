"""Judges stalled collectives without a known blocker: all members have entered but not all complete, or it is unknown
whether all members have entered."""

from collections.abc import Collection
from operator import attrgetter

import numpy as np

from lockstep.base.text import summarize_list
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, all_proven_inactive
from lockstep.watch.diagnosis.evidence_types import CALL_FROM_CPP, TRANSFER, Liveness, needs_all_members
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel, level_of
from lockstep.watch.diagnosis.wait_graph import BoolArray, WaitGraph, mask_of

MAX_COMPARED = 32
"""The most collectives in flight that are compared with each other."""
MAX_SHOWN = 4
"""The most processes whose devices a verdict shows."""
_MAX_WAITERS = 256
"""The most waiting processes whose activity is checked."""


def find_in_flight(context: DiagnosisContext, explained: Collection[int] = ()) -> list[Hypothesis]:
    """Hypotheses about stalled collectives without a known blocker, except collectives of `explained` communicators."""
    graph = context.graph
    blocked = mask_of(len(graph.seq), graph.block_node)
    has_suspects = mask_of(len(graph.seq), graph.suspect_node)
    unblocked = context.relevant & graph.stalled & (graph.communicator >= 0) & ~blocked
    unblocked &= ~_waited_in_beside(graph, blocked & graph.stalled)
    nodes = [node for node in np.flatnonzero(unblocked).tolist() if int(graph.communicator[node]) not in explained]
    complete = [node for node in nodes if not has_suspects[node]]
    found = [_insufficient_evidence(context, node) for node in nodes if has_suspects[node]]
    lagging = {node: each for node in complete if (each := _lagging_members(context, node)) is not None}
    if _is_of_dumps(context):
        held = [
            node
            for node in np.flatnonzero(context.relevant & graph.stalled & blocked).tolist()
            if graph.is_collective(node)
        ]
        found += [each for node in held if (each := _kept_from_starting(context, node)) is not None]
    elif lagging:
        complete = []  # counts that are polled may not show yet that the others have gone on
    found += lagging.values()
    complete = [node for node in complete if node not in lagging]
    uncertain = {node for node in complete if _uncertain_members(context, node)}
    certain = [node for node in complete if node not in uncertain]
    only = {node: each for node in certain if (each := _only_suspect(context, node)) is not None}
    found += only.values()
    found += [_insufficient_evidence(context, node) for node in uncertain]
    return found + _none_completes(context, [node for node in certain if node not in only])


def _is_of_dumps(context: DiagnosisContext) -> bool:
    """Whether the evidence is that of flight recorders, in which a rank waits only in its oldest operation."""
    return context.evidence.source == "dumps"


def _uncertain_members(context: DiagnosisContext, node: int) -> list[int]:
    """The members of which the evidence does not prove that they are inside a collective."""
    members, rows = context.evidence.communicators, context.rows_of(node)
    found: list[int] = [] if members.uncertain is None else members.process[rows][members.uncertain[rows]].tolist()
    return found


def _waited_in_beside(graph: WaitGraph, blocked: BoolArray) -> BoolArray:
    """`[nodes]`: those with a process that also waits in a `blocked` node. Such a process, in a batch of messages, may
    have what the first node waits for already, and be kept by the other."""
    held_up = mask_of(graph.processes, graph.wait_process[blocked[graph.wait_node]])
    return mask_of(len(graph.seq), graph.wait_node[held_up[graph.wait_process]])


def _lagging_members(context: DiagnosisContext, node: int) -> Hypothesis | None:
    """A hypothesis about members that have not completed a collective that others have completed, or whose devices have
    not started it; None if there are none."""
    done, waiters = _completed_by(context, node), _few_waiters(context.graph, node)
    if not done or not waiters or not _proves_lag(context, node, done, len(waiters)):
        return _kept_from_starting(context, node)
    return _stuck_devices(
        context, node, waiters, f"has entered {{collective}} and not completed it, as {_others_have(done)}"
    )


def _completed_by(context: DiagnosisContext, node: int) -> int:
    """How many members have completed a collective."""
    rows = context.rows_of(node)
    return int((context.evidence.communicators.completed[rows] >= context.graph.seq[node]).sum())


def _proves_lag(context: DiagnosisContext, node: int, done: int, waiting: int) -> bool:
    """Whether `done` members that completed a collective prove that the others should have as well. One of them proves
    it if the operation needs all members. In a broadcast or a reduction the others may wait for each other, as its root
    does in a reduction, but a single other one has nobody to wait for. Of an unknown operation, most members
    prove it."""
    communicator = int(context.graph.communicator[node])
    rows = context.members(communicator)
    if done == rows.stop - rows.start - 1:
        return True
    call, _ = context.call(communicator, int(context.graph.seq[node]))
    if call is not None and call.operation != CALL_FROM_CPP.operation:
        return call.operation == TRANSFER or needs_all_members(call.operation)
    return done > waiting


def _kept_from_starting(context: DiagnosisContext, node: int) -> Hypothesis | None:
    """A hypothesis about members whose devices have not started a collective that they have reached; None if there are
    none."""
    culprits = _not_started(context, node)
    if not culprits:
        return None
    others = len(_started(context, node))
    text = f"as {_others_have(others)}" if others else "though nothing older is unfinished"
    text = f"has issued {{collective}}, which its device has not started, {text}"
    return _stuck_devices(context, node, culprits, text)


def _stuck_devices(
    context: DiagnosisContext, node: int, culprits: list[int], text: str, by_elimination: bool = False
) -> Hypothesis:
    """A hypothesis that the devices of some members keep a collective from ending."""
    proven = all_proven_inactive(context, culprits[:_MAX_WAITERS], float(context.graph.since[node]))
    return Hypothesis(
        VerdictKind.DEVICE_LAG,
        level_of(proven),
        {"past_limit": proven, "by_elimination": by_elimination},
        text,
        tuple(culprits),
        node=node,
        since=float(context.graph.since[node]),
        alternatives=(Alternative("gpu_hardware_fault", 0.3), Alternative("network_blocked", 0.3)),
        facts=context.device_facts(culprits[:MAX_SHOWN]),
        collect=("the device's counters and the kernel log of its host", "its native stack (py-spy dump --native)"),
    )


def _others_have(count: int) -> str:
    return "another has" if count == 1 else f"{count} others have"


def _few_waiters(graph: WaitGraph, node: int) -> list[int]:
    """The processes that wait in a node; empty if there are too many to check each."""
    return graph.waiters(node) if graph.few_wait(node, _MAX_WAITERS) else []


def _started(context: DiagnosisContext, node: int) -> set[int]:
    """The members whose devices are known to have started a collective."""
    members, rows = context.evidence.communicators, context.rows_of(node)
    if members.started is None:
        return set()
    return set(members.process[rows][members.started[rows] >= context.graph.seq[node]].tolist())


def _not_started(context: DiagnosisContext, node: int) -> list[int]:
    """The waiting members whose devices have certainly not started a collective that is the oldest in their queues, so
    that they are kept by something else. Counts that are polled may lag; there it takes others that have started it."""
    graph = context.graph
    members = context.evidence.communicators
    if members.started is None:
        return []
    rows, seq = context.rows_of(node), int(graph.seq[node])
    started = members.started[rows]
    if not _is_of_dumps(context) and ((started < 0).any() or not (started >= seq).any()):
        return []
    waiters = _few_waiters(graph, node)
    return [p for p in members.process[rows][(started >= 0) & (started < seq)].tolist() if p in waiters]


def _may_have_stopped(context: DiagnosisContext, node: int) -> list[int]:
    """The members that wait in a collective and whose devices may have stopped before it: they are not known to have
    started it, nor to have ended anything that was issued later. Empty if the evidence is no dump: only dumps show what
    the devices have ended since."""
    if not _is_of_dumps(context):
        return []
    started = _started(context, node)
    return [p for p in _few_waiters(context.graph, node) if p not in started and not context.note(p).device_moves]


def _only_suspect(context: DiagnosisContext, node: int) -> Hypothesis | None:
    """A hypothesis about the only member of a collective whose device may have stopped; None if there are several, or
    none."""
    suspects = _may_have_stopped(context, node)
    if len(suspects) != 1 or len(context.graph.waiters(node)) < 2:
        return None
    text = (
        "has issued {collective} and ended nothing since, while the devices of all other members have ended operations "
    )
    return _stuck_devices(context, node, suspects, text + "that were issued later", by_elimination=True)


def _none_completes(context: DiagnosisContext, nodes: list[int]) -> list[Hypothesis]:
    """A hypothesis about collectives that all members have entered and none completes: the link or the kernel is at
    fault."""
    graph = context.graph
    if not nodes:
        return []
    nodes = sorted(nodes, key=lambda each: (graph.since[each], each))
    waits = mask_of(len(graph.seq), nodes)
    waiters = graph.wait_process[waits[graph.wait_node]][:_MAX_WAITERS].tolist()
    since = float(graph.since[nodes[0]])
    is_active = (context.at - context.worked_at[waiters] < context.thresholds.notice_s).any()
    if is_active and context.at - since < context.thresholds.busy_factor * context.thresholds.notice_s:
        return []  # the transfer may still be running
    proven = all_proven_inactive(context, waiters, since)
    how_many = "not all complete" if _completed_by(context, nodes[0]) else "none completes"
    culprits, hosts = _common_host(context, nodes)
    several_hosts = len(hosts) > 1
    host_names = summarize_list(sorted(hosts), 4)
    spans = (Fact(f"it spans the hosts {host_names}", "communicators"),) if several_hosts else ()
    found = Hypothesis(
        VerdictKind.IN_FLIGHT,
        level_of(proven),
        {"past_limit": proven, "by_elimination": True},
        f"all members have entered {{collective}} and {how_many} it",
        tuple(culprits),
        node=nodes[0],
        since=since,
        alternatives=(Alternative("network_blocked", 0.5),)
        if several_hosts
        else (Alternative("p2p_path_broken", 0.3),),
        facts=spans + context.device_facts(waiters[:MAX_SHOWN]),
        collect=(
            "bytes and retransmits of the links between its hosts" if several_hosts else "GPU and link counters",
            "native stacks of two members (py-spy dump --native)",
        ),
        not_excluded=tuple(each for node in nodes for each in _may_have_stopped(context, node)),
    )
    return [found]


def _common_host(context: DiagnosisContext, nodes: list[int]) -> tuple[list[int], set[str]]:
    """If all given collectives share exactly one host, their waiting processes on that host; and the names of all
    hosts."""
    graph = context.graph
    info = context.evidence.processes.info
    spans: list[set[str]] = []
    for node in nodes[:MAX_COMPARED]:
        rows = context.rows_of(node)
        processes = map(info.__getitem__, context.evidence.communicators.process[rows].tolist())
        spans.append(set(map(attrgetter("host"), processes)))
    hosts, common = set().union(*spans), set.intersection(*spans)
    if len(common) != 1 or all(span == hosts for span in spans):
        return [], hosts
    waiting = np.unique(graph.wait_process[np.isin(graph.wait_node, nodes)]).tolist()
    return [each for each in waiting if info[each].host in common], hosts


def _insufficient_evidence(context: DiagnosisContext, node: int) -> Hypothesis:
    """A notice: all members of known progress have entered, so a late one can only be among the others."""
    suspects = context.graph.suspects(node) or _uncertain_members(context, node)
    names = context.names(suspects)
    unseen = [each for each in suspects if context.liveness(each) is Liveness.UNSEEN]
    missing = "a beacon, a dump or the log" if unseen else "the stack and the counts"
    return Hypothesis(
        VerdictKind.UNKNOWN,
        VerdictLevel.NOTICE,
        {"unobserved": True},
        "cannot tell which rank is late for {collective}",
        node=node,
        since=float(context.graph.since[node]),
        alternatives=(Alternative("absent", 0.5), Alternative("in_flight", 0.2)),
        collect=(f"{missing} of {names}",),
        details=f"Nothing is known of {names}.",
        not_excluded=(*suspects, *_may_have_stopped(context, node)) if _is_of_dumps(context) else (),
        others=tuple(suspects),
    )
