"""Finds root causes: processes and outside services that others wait for and that wait for no other process."""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.watch.diagnosis.device_evidence import throttled_text
from lockstep.watch.diagnosis.diagnosis_context import (
    DiagnosisContext,
    Hypothesis,
    Inactivity,
    inactivity_facts,
    measure_inactivity,
    proven_inactive,
)
from lockstep.watch.diagnosis.evidence import WaitEdge
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.failure_classes import class_of_exit
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel, level_of
from lockstep.watch.diagnosis.wait_graph import BoolArray, WaitGraph, mask_of

_MAX_RUNNING = 64
"""The most running processes that are judged individually: those inactive for the longest time."""


def find_root_causes(context: DiagnosisContext) -> list[Hypothesis]:
    """Hypotheses about all processes at the end of a wait chain, except dead ones (`find_deaths` judges those)."""
    graph = context.graph
    waiting = graph.waiting()
    rows = np.flatnonzero(context.relevant[graph.block_node] & ~waiting[graph.block_process])
    blocked_by: dict[Liveness, dict[int, list[int]]] = {state: {} for state in Liveness}
    for process, node in zip(graph.block_process[rows].tolist(), graph.block_node[rows].tolist(), strict=True):
        if not _has_alternative(context, waiting, node, process):
            blocked_by[context.liveness(process)].setdefault(process, []).append(node)
    found = _exited_early(context, blocked_by[Liveness.EXITED])
    running = {p: nodes for p, nodes in blocked_by[Liveness.RUNNING].items() if not context.note(p).ours}
    for process in _least_active(context, running):
        found += _judge_running(context, process, running[process])
    for process, nodes in blocked_by[Liveness.UNSEEN].items():
        found += _never_joined(context, process, nodes)
    return found


def _has_alternative(context: DiagnosisContext, waiting: BoolArray, node: int, process: int) -> bool:
    """Whether a node waits for any one of several processes, and one besides `process` may still answer."""
    if not context.graph.any_of[node]:
        return False
    for other in context.graph.blockers(node):
        if other == process or context.liveness(other) is not Liveness.RUNNING or waiting[other]:
            continue
        inactive = measure_inactivity(context, other).any_activity_s >= context.thresholds.notice_s
        if not inactive:  # also if the activity is unknown (NaN)
            return True
    return False


def _least_active(context: DiagnosisContext, running: Iterable[int]) -> list[int]:
    """The given processes. If there are too many: those inactive for the longest time, without those that were active
    within `notice_s` or whose activity is unknown."""
    candidates = list(running)
    if len(candidates) <= _MAX_RUNNING:
        return candidates
    processes = np.array(candidates, dtype=np.int64)
    last = np.nan_to_num(context.last_active[processes], nan=np.inf)
    chosen = processes[np.argsort(last, kind="stable")[:_MAX_RUNNING]]
    is_late = context.at - context.last_active[chosen] >= context.thresholds.notice_s
    return [int(each) for each in chosen[is_late]]


def longest_wait_on(context: DiagnosisContext, process: int) -> tuple[int | None, float]:
    """Of the nodes that a process blocks, the one with the longest wait, and when that wait began. Relevant nodes take
    precedence. Waits on devices that have just begun are left out."""
    graph = context.graph
    nodes = graph.block_node[graph.block_process == process]
    if context.relevant[nodes].any():
        nodes = nodes[context.relevant[nodes]]
    return longest_waiting_node(graph, [node for node in nodes.tolist() if context.is_settled(node)])


def longest_waiting_node(graph: WaitGraph, nodes: Sequence[int]) -> tuple[int | None, float]:
    """The node with the longest wait, and when that wait began. Collectives are preferred, because other waits often
    only depend on them."""
    if not nodes:
        return None, float("nan")
    node = min(nodes, key=lambda each: (not graph.is_collective(each), graph.since[each], each))
    since = float(graph.since[node])
    return node, since if np.isfinite(since) else float("nan")


def find_lost_hosts(context: DiagnosisContext) -> list[Hypothesis]:
    """A hypothesis for each host that no longer reports and whose processes others wait for."""
    graph = context.graph
    liveness = context.evidence.processes.liveness
    rows = context.relevant[graph.block_node] & (liveness[graph.block_process] == Liveness.LOST)
    hosts: dict[str, list[int]] = {}
    for process in np.unique(graph.block_process[rows]).tolist():
        if process not in context.wholes:
            hosts.setdefault(context.evidence.processes.info[process].host, []).append(process)
    found = []
    seen_at = context.evidence.processes.seen_at
    for host, processes in hosts.items():
        nodes = graph.block_node[rows & np.isin(graph.block_process, processes)]
        node, since = longest_waiting_node(graph, nodes.tolist())
        seen = since if seen_at is None else float(np.max(seen_at[processes]))
        proven = context.at - seen >= context.thresholds.still_s
        found.append(
            Hypothesis(
                VerdictKind.ABSENT,
                level_of(proven),
                {"past_limit": proven},
                f"cannot be observed: host {host} no longer reports",
                tuple(processes),
                node=node,
                since=seen if np.isfinite(seen) else since,
                alternatives=(Alternative("network_blocked", 0.5), Alternative("external_kill", 0.2)),
                facts=tuple(Fact(gap, "supervisor") for gap in context.evidence.gaps if _names_host(gap, host)),
                collect=(f"ping of host {host}, its power state and its kernel log",),
                proven_by_structure=True,
            )
        )
    return found


def _names_host(text: str, host: str) -> bool:
    """Whether a text contains the name of a host, and not only that of another host which begins or ends with it."""
    return re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)", text) is not None


def _exited_early(context: DiagnosisContext, exited: dict[int, list[int]]) -> list[Hypothesis]:
    """Hypotheses about processes that exited normally while others wait for them: either they exited too early, or the
    waiting processes made an extra call. `exited` holds the nodes that each of them blocks."""
    graph = context.graph
    found: list[Hypothesis] = []
    for process, nodes in exited.items():
        ended_at = float(context.evidence.processes.ended_at[process])
        if context.note(process).ours or context.at - ended_at < context.thresholds.notice_s:
            continue  # it may have ended in order, some moments after the others were observed
        counts = {node: _entry_counts(context, node) for node in nodes if graph.is_collective(node)}
        # Most members exited normally instead of entering, so those that entered made an extra call.
        extra = next((node for node, (now, out, size) in counts.items() if out > now and 2 * out > size), None)
        if extra is not None:
            found.append(_extra_collective(context, extra))
            continue
        node, _ = longest_waiting_node(graph, nodes)
        cause = class_of_exit(Liveness.EXITED, 0, context.note(process))
        outvoted = bool(counts) and not any(2 * entered > size for entered, _, size in counts.values())
        # In every wait that it blocks, another process could have answered as well.
        starved = all(graph.any_of[each] for each in nodes)
        found.append(
            Hypothesis(
                VerdictKind.STARVED if starved else VerdictKind.DEAD,
                VerdictLevel.CONFIRMED,
                {cause.end: True, "outvoted": outvoted, "by_elimination": starved},
                "has ended with exit code 0 while others still wait for it",
                (process,),
                node=node,
                since=ended_at,
                cause=cause.name,
                alternatives=cause.alternatives,
                facts=(Fact(f"{context.name(process)}: exit code 0", "its parent"),),
                proven_by_structure=True,
            )
        )
    return found


def _entry_counts(context: DiagnosisContext, node: int) -> tuple[int, int, int]:
    """How many members have entered a collective, how many exited without entering it, and how many there are."""
    members = context.evidence.communicators
    rows = context.rows_of(node)
    entered = members.entered[rows] >= context.graph.seq[node]
    liveness = context.evidence.processes.liveness[members.process[rows]]
    return int(entered.sum()), int(((liveness == Liveness.EXITED) & ~entered).sum()), len(entered)


def _extra_collective(context: DiagnosisContext, node: int) -> Hypothesis:
    return Hypothesis(
        VerdictKind.MISMATCH,
        VerdictLevel.CONFIRMED,
        {"most_of_known": True},
        "has entered {collective}, which the others never entered before they ended with exit code 0",
        tuple(context.graph.waiters(node)),
        node=node,
        since=float(context.graph.since[node]),
        cause="unknown",
        alternatives=(Alternative("uneven_data", 0.5), Alternative("rank_divergent_branch", 0.4)),
        proven_by_structure=True,
    )


def _never_joined(context: DiagnosisContext, process: int, nodes: list[int]) -> list[Hypothesis]:
    node, since = longest_waiting_node(context.graph, nodes)
    candidates = _unranked(context, context.role(process))
    measures = [measure_inactivity(context, each) for each in candidates]
    if any(
        each.is_active(context.thresholds.notice_s) and not each.spins(context.thresholds.notice_s) for each in measures
    ):
        return []  # one of them may be on its way
    proven = context.at - since >= context.thresholds.still_s and not candidates
    rendezvous = _rendezvous_of(context, node) if node is not None else ""
    identity = f"it may be {_name_candidates(context, candidates)}" if candidates else "no such process is known"
    return [
        Hypothesis(
            VerdictKind.ABSENT,
            level_of(proven),
            {"past_limit": proven},
            f"has not joined {rendezvous}; {identity}" if rendezvous else "has never reported",
            (process,),
            node=node,
            since=since,
            cause="rendezvous_incomplete",
            alternatives=(Alternative("unknown", 0.3),),
            collect=("the log of its launcher on its host",),
        )
    ]


def _unranked(context: DiagnosisContext, role: str) -> list[int]:
    """Living processes of the role whose rank is not known yet."""
    living = (Liveness.RUNNING, Liveness.STOPPED)
    info = context.evidence.processes.info
    return [p for p, each in enumerate(info) if each.role == role and each.rank < 0 and context.liveness(p) in living]


def _name_candidates(context: DiagnosisContext, processes: list[int]) -> str:
    """The names of processes that may be the missing one, each with its current line."""
    named = [(context.name(p), context.note(p).where) for p in processes[:3]]
    more = f" or one of {len(processes) - 3} more" if len(processes) > 3 else ""
    return " or ".join(f"{name} in {where}" if where else name for name, where in named) + more


def _judge_running(context: DiagnosisContext, process: int, nodes: list[int]) -> list[Hypothesis]:
    """Judges a running process that others wait for and that is not known to wait for any other process."""
    graph = context.graph
    node, since = longest_waiting_node(graph, [each for each in nodes if graph.stalled[each]] or nodes)
    assert node is not None
    idle_wait = context.idle_waits.get(process)
    if idle_wait is not None and any(context.liveness(each) is not Liveness.RUNNING for each in idle_wait.on):
        return []  # the client that should send the next request is not running
    inactivity, notice_s = measure_inactivity(context, process), context.thresholds.notice_s
    has_issued = _has_issued(context, process, node)
    is_active, is_spinning = inactivity.is_active(notice_s), inactivity.spins(notice_s)
    works = is_active and not is_spinning
    is_slow = works and _far_behind(context, process, node)
    if works and not is_slow and inactivity.unproductive_s(context.at - since) < context.progress_limit_s(process):
        return []  # the process is working, and its peers are not faster
    progress_unknown = bool(context.progress_unknown[process])
    proven = proven_inactive(context, process, since) and not progress_unknown
    answers = {"past_limit": proven}
    if proven:
        # A long computation of the process, or of its device, looks the same: too little to act on.
        device_rests = context.device_idle_s(process) >= context.inactivity_limit_s(process)
        may_compute = is_active or (context.note(process).waits_for_device and not device_rests)
        answers["at_rest"] = not (np.isnan(inactivity.stack_s) or may_compute)
    else:
        answers |= {"spins": is_spinning, "works": works}
    rendezvous = _rendezvous_of(context, node)
    text = f"has not joined {rendezvous}" if rendezvous else "does not answer"
    if context.graph.is_collective(node):
        text = "has not entered {collective}"
    if has_issued:
        device_rests = context.device_idle_s(process) >= notice_s
        why = "it runs no kernel" if device_rests else "an earlier kernel has not ended"
        text = f"has issued {{collective}}, but its device has not started it: {why}"
    return [
        Hypothesis(
            VerdictKind.DEVICE_LAG if has_issued else VerdictKind.SLOW if is_slow else VerdictKind.ABSENT,
            level_of(proven),
            answers,
            text,
            (process,),
            node=node,
            since=since,
            cause="rendezvous_incomplete" if rendezvous else "unknown",
            alternatives=_likely_causes(context, process, is_slow),
            facts=inactivity_facts(context, process),
            collect=_missing_evidence(context, process, inactivity, progress_unknown),
            details=throttled_text(context.evidence.devices.get(process, ())),
        )
    ]


def _has_issued(context: DiagnosisContext, process: int, node: int) -> bool:
    """Whether the process has issued the collective of a node that its device has not reached."""
    graph = context.graph
    if not graph.is_collective(node):
        return False
    rows = context.rows_of(node)
    is_own = context.evidence.communicators.process[rows] == process
    issued, reached = context.evidence.communicators.entered[rows], context.pending.reached[rows]
    return bool((is_own & (issued >= graph.seq[node]) & (reached < graph.seq[node])).any())


def _rendezvous_of(context: DiagnosisContext, node: int) -> str:
    """The rendezvous that the processes of a node have joined; empty if the node is another wait."""
    return (
        context.evidence.edges[int(context.graph.edge[node])].rendezvous
        if not context.graph.is_collective(node)
        else ""
    )


def _missing_evidence(
    context: DiagnosisContext, process: int, inactivity: Inactivity, progress_unknown: bool
) -> tuple[str, ...]:
    """The evidence that would decide whether a process hangs."""
    collect = []
    if np.isnan(inactivity.any_activity_s):
        collect.append("whether it uses CPU, disk or network")
    if np.isnan(inactivity.stack_s) and not context.note(process).where:
        collect.append("its stack (py-spy dump)")
    if progress_unknown:
        collect.append("its progress in its other communicators, and whether it waits in a receive")
    return tuple(collect)


def _far_behind(context: DiagnosisContext, process: int, node: int) -> bool:
    """Whether the process has taken `slow_factor` times as long as most of its peers since the last collective."""
    graph = context.graph
    if not graph.is_collective(node):
        return False
    members = context.evidence.communicators
    rows = context.rows_of(node)
    seq = int(graph.seq[node])
    completed_previous = members.completed[rows] == seq - 1
    has_entered = completed_previous & (members.entered[rows] >= seq)
    durations = (members.entered_at[rows] - members.completed_at[rows])[has_entered]
    is_own = members.process[rows] == process
    own_duration = (context.observed_at(process) - members.completed_at[rows])[is_own & completed_previous]
    durations = durations[durations >= 0]
    if 2 * len(durations) < len(is_own) or not len(own_duration) or np.isnan(own_duration[0]):
        return False
    return bool(own_duration[0] >= context.thresholds.slow_factor * max(float(np.median(durations)), 1e-3))


def _likely_causes(context: DiagnosisContext, process: int, slow: bool) -> tuple[Alternative, ...]:
    stage = context.evidence.processes.stage[process] if context.evidence.processes.stage else ""
    if "checkpoint" in stage:
        return (Alternative("checkpoint_timeout", 0.4),)
    if "reward" in stage or "score" in stage:
        return (Alternative("remote_service_timeout", 0.3),)
    return (Alternative("slow_rank_preprocess", 0.4),) if slow else ()


def find_waits_without_blocker(context: DiagnosisContext) -> list[Hypothesis]:
    """Hypotheses about waits for a target outside the job, and about waits that no process can end."""
    graph = context.graph
    found = []
    has_blocker = mask_of(len(graph.seq), graph.block_node)
    for node in np.flatnonzero(context.relevant & (graph.edge >= 0) & ~has_blocker).tolist():
        edge = context.evidence.edges[int(graph.edge[node])]
        since = float(graph.since[node])
        if not (edge.outside or edge.rendezvous):
            found += _starved(context, edge, node, since)
            continue
        # A service outside the job cannot be observed; the timeout of the waiting process limits how long it may take.
        within_timeout = bool(edge.outside) and edge.kind == "http" and context.at < edge.until
        proven = proven_inactive(context, edge.process, since) and not within_timeout
        if edge.outside:
            cause = "remote_service_timeout" if proven and edge.kind in ("http", "async function") else "unknown"
            hypothesis = Hypothesis(
                VerdictKind.ABSENT, level_of(proven), {"past_limit": proven}, "does not answer", outside=edge.outside,
                node=node, since=since, cause=cause, alternatives=(Alternative("network_blocked", 0.2),),
                others=(edge.process,),
            )  # fmt: skip
        elif measure_inactivity(context, edge.process).is_active(context.thresholds.notice_s):
            continue
        elif edge.unwatched:
            hypothesis = _unwatched_ranks(edge, since)
        else:
            hypothesis = _complete_rendezvous(edge, since, level_of(proven))
        found.append(hypothesis)
    return found


def _starved(context: DiagnosisContext, edge: WaitEdge, node: int, since: float) -> list[Hypothesis]:
    """A hypothesis about a process that has waited since `since` for processes that are idle; none if they have not
    been idle for `notice_s`: it has an answer, which it had not seen when it was observed."""
    idle = [float(context.idle_waits[process].since) for process in edge.on if process in context.idle_waits]
    begun = max([since, *(each for each in idle if np.isfinite(each))])
    if context.at - begun < context.thresholds.notice_s:
        return []
    proven = proven_inactive(context, edge.process, begun)
    return [
        Hypothesis(
            VerdictKind.STARVED, level_of(proven), {"past_limit": proven, "by_elimination": True},
            "waits for processes that are idle", node=node, since=since, others=(edge.process, *edge.on),
            details="None of these processes is handling its request.",
            collect=("the last requests that the idle processes received",),
        )
    ]  # fmt: skip


def _unwatched_ranks(edge: WaitEdge, since: float) -> Hypothesis:
    return Hypothesis(
        VerdictKind.UNKNOWN, VerdictLevel.NOTICE, {"unobserved": True},
        f"all watched ranks have joined {edge.rendezvous}; {edge.unwatched} of its ranks are on hosts that are not "
        "watched",
        since=since, cause="rendezvous_incomplete", others=(edge.process,),
        collect=("the logs of their launchers on those hosts",),
    )  # fmt: skip


def _complete_rendezvous(edge: WaitEdge, since: float, level: VerdictLevel) -> Hypothesis:
    return Hypothesis(
        VerdictKind.UNKNOWN, level, {}, f"all ranks have joined {edge.rendezvous}, but none proceeds",
        since=since, others=(edge.process,),
        alternatives=(Alternative("rank_divergent_branch", 0.4), Alternative("network_blocked", 0.3)),
        collect=(
            "the member list that each rank creates the communicator with", "whether they can reach each other's ports",
        ),
    )  # fmt: skip
