"""Root causes: processes that others wait for and that wait for no other process."""

from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.watch.diagnosis.diagnosis_context import (
    MAX_INACTIVITY_CONFIDENCE,
    DiagnosisContext,
    Hypothesis,
    Inactivity,
    inactivity_facts,
    measure_inactivity,
    proven_inactive,
)
from lockstep.watch.diagnosis.error_classes import class_of_exit, describe_exit
from lockstep.watch.diagnosis.evidence import WaitEdge
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import BoolArray, WaitGraph

_MAX_RUNNING = 64
"""So many running processes at most are looked at one by one: those that are still for the longest time."""


def find_root_causes(case: DiagnosisContext, graph: WaitGraph, reached: BoolArray) -> list[Hypothesis]:
    """Findings about everybody at an end, the dead excepted (they are judged whether waited for or not)."""
    waiting = graph.waiting()
    rows = np.flatnonzero(reached[graph.block_node] & ~waiting[graph.block_process])
    blocked: dict[int, list[int]] = {}
    for process, node in zip(graph.block_process[rows].tolist(), graph.block_node[rows].tolist(), strict=True):
        if not _has_alternative(case, graph, waiting, node, process):
            blocked.setdefault(process, []).append(node)
    found = _exited_early(case, graph, {p: nodes for p, nodes in blocked.items() if case.life(p) is Liveness.LEFT})
    running = {p: nodes for p, nodes in blocked.items() if case.life(p) is Liveness.RUNNING and not case.note(p).ours}
    for process in _least_active(case, running):
        found += _judge_running(case, graph, process, running[process])
    for process, nodes in blocked.items():
        if case.life(process) is Liveness.UNSEEN:
            found += _never_joined(case, graph, process, nodes)
    return found


def _has_alternative(case: DiagnosisContext, graph: WaitGraph, waiting: BoolArray, node: int, process: int) -> bool:
    """One of several is enough, and there is another that can still come."""
    if not graph.any_of[node]:
        return False
    for other in graph.blockers(node):
        if other == process or case.life(other) is not Liveness.RUNNING or waiting[other]:
            continue
        if not measure_inactivity(case, other).all_s >= case.patience.notice_s:
            return True
    return False


def _least_active(case: DiagnosisContext, running: Iterable[int]) -> list[int]:
    everybody = list(running)
    if len(everybody) <= _MAX_RUNNING:
        return everybody
    processes = np.array(everybody, dtype=np.int64)
    last = np.nan_to_num(case.last_moved[processes], nan=np.inf)
    chosen = processes[np.argsort(last, kind="stable")[:_MAX_RUNNING]]
    late = case.at - case.last_moved[chosen] >= case.patience.notice_s
    return [int(each) for each in chosen[late]]


def find_stopped(case: DiagnosisContext, reached: BoolArray | None) -> list[Hypothesis]:
    """Who is stopped by a signal or a debugger, waited for or not; not when all are: somebody suspended the job."""
    life = case.evidence.processes.life
    all_stopped = not ((life == Liveness.RUNNING) | (life == Liveness.DEAD)).any()
    found = []
    for process in np.flatnonzero(life == Liveness.STOPPED).tolist():
        if case.note(process).ours:
            continue
        node, since = longest_wait_on(case, process, reached)
        began = float(case.evidence.processes.ended_at[process])
        if np.isnan(began):
            last = case.moved(process)
            began = since if np.isnan(last) else last
        if not case.now(process) - began >= case.patience.notice_s:
            continue  # a look at its stack stops a process for a moment; what was since the last look nobody knows
        sure = not all_stopped
        found.append(
            Hypothesis(
                VerdictKind.ABSENT,
                VerdictLevel.CONFIRMED if sure else VerdictLevel.NOTICE,
                0.95 if sure else 0.5,
                "is stopped by a signal or a debugger",
                (process,),
                node=node,
                since=began,
                facts=(Fact(f"{case.evidence.processes.who[process].name}: state T (stopped)", "/proc"),),
                structural=True,
            )
        )
    return found


def longest_wait_on(case: DiagnosisContext, process: int, reached: BoolArray | None) -> tuple[int | None, float]:
    """The node that it blocks in which somebody waits for the longest time, and since when."""
    graph = case.graph
    if graph is None or reached is None:
        return None, float("nan")
    nodes = graph.block_node[graph.block_process == process]
    if reached[nodes].any():
        nodes = nodes[reached[nodes]]
    return longest_waiting_node(graph, nodes.tolist())


def longest_waiting_node(graph: WaitGraph, nodes: Sequence[int]) -> tuple[int | None, float]:
    """The node in which somebody waits for the longest time, and since when; collectives before other waits, which
    only tell that somebody waits for the one who waits."""
    if not nodes:
        return None, float("nan")
    node = min(nodes, key=lambda each: (bool(graph.edge[each] >= 0), graph.since[each], each))
    since = float(graph.since[node])
    return node, since if np.isfinite(since) else float("nan")


def find_lost_hosts(case: DiagnosisContext, graph: WaitGraph | None, reached: BoolArray | None) -> list[Hypothesis]:
    """Hosts that are not heard of, one finding for each whose processes are waited for."""
    if graph is None or reached is None:
        return []
    life = case.evidence.processes.life
    rows = reached[graph.block_node] & (life[graph.block_process] == Liveness.LOST)
    hosts: dict[str, list[int]] = {}
    for process in np.unique(graph.block_process[rows]).tolist():
        hosts.setdefault(case.evidence.processes.who[process].host, []).append(process)
    found = []
    seen_at = case.evidence.processes.seen_at
    for host, processes in hosts.items():
        nodes = graph.block_node[rows & np.isin(graph.block_process, processes)]
        node, since = longest_waiting_node(graph, nodes.tolist())
        seen = since if seen_at is None else float(np.max(seen_at[processes]))
        proven = case.at - seen >= case.patience.still_s
        found.append(
            Hypothesis(
                VerdictKind.ABSENT,
                VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE,
                0.7 if proven else 0.5,
                f"cannot be asked: host {host} is not heard of",
                tuple(processes),
                node=node,
                since=seen if np.isfinite(seen) else since,
                alternatives=(Alternative("network_blocked", 0.5), Alternative("external_kill", 0.2)),
                facts=tuple(Fact(gap, "supervisor") for gap in case.evidence.gaps if host in gap),
                collect=(f"ping of host {host}, its power state and its kernel log",),
                structural=True,
            )
        )
    return found


def _exited_early(case: DiagnosisContext, graph: WaitGraph, blocked: dict[int, list[int]]) -> list[Hypothesis]:
    found: list[Hypothesis] = []
    extra: set[int] = set()
    for process, nodes in blocked.items():
        if case.note(process).ours:
            continue
        collectives = [node for node in nodes if graph.edge[node] < 0]
        minority = next((node for node in collectives if _minority_entered(case, graph, node)), None)
        if minority is not None:
            if minority not in extra:
                extra.add(minority)
                found.append(_extra_collective(case, graph, minority))
            continue
        node, _ = longest_waiting_node(graph, nodes)
        cause = class_of_exit(Liveness.LEFT, 0, case.note(process))
        sure = not collectives or any(_majority_entered(case, graph, each) for each in collectives)
        starved = all(graph.any_of[each] for each in nodes)
        found.append(
            Hypothesis(
                VerdictKind.STARVED if starved else VerdictKind.DEAD,
                VerdictLevel.CONFIRMED,
                cause.own if sure and not starved else 0.6,
                "has ended with exit code 0 and is still waited for",
                (process,),
                node=node,
                since=float(case.evidence.processes.ended_at[process]),
                cause=cause.name,
                alternatives=cause.alternatives,
                facts=(Fact(f"{case.evidence.processes.who[process].name}: exit code 0", "its parent"),),
                structural=True,
            )
        )
    return found


def _entry_counts(case: DiagnosisContext, graph: WaitGraph, node: int) -> tuple[int, int, int]:
    """How many members have entered, how many have left without, and how many there are."""
    members = case.members(int(graph.communicator[node]))
    entered = case.evidence.communicators.entered[members] >= graph.seq[node]
    life = case.evidence.processes.life[case.evidence.communicators.process[members]]
    return int(entered.sum()), int(((life == Liveness.LEFT) & ~entered).sum()), len(entered)


def _minority_entered(case: DiagnosisContext, graph: WaitGraph, node: int) -> bool:
    """More members have left in peace than have entered: those who entered made one too many."""
    entered, gone, size = _entry_counts(case, graph, node)
    return gone > entered and 2 * gone > size


def _majority_entered(case: DiagnosisContext, graph: WaitGraph, node: int) -> bool:
    entered, _, size = _entry_counts(case, graph, node)
    return 2 * entered > size


def _extra_collective(case: DiagnosisContext, graph: WaitGraph, node: int) -> Hypothesis:
    return Hypothesis(
        VerdictKind.MISMATCH,
        VerdictLevel.CONFIRMED,
        0.75,
        "has entered {collective}, which the others never did before they ended with exit code 0",
        tuple(graph.waiters(node)),
        node=node,
        since=float(graph.since[node]),
        cause="unknown",
        alternatives=(Alternative("uneven_data", 0.5), Alternative("rank_divergent_branch", 0.4)),
        structural=True,
    )


def _never_joined(case: DiagnosisContext, graph: WaitGraph, process: int, nodes: list[int]) -> list[Hypothesis]:
    node, since = longest_waiting_node(graph, nodes)
    unplaced = _unranked(case, case.role(process))
    looks = [measure_inactivity(case, each) for each in unplaced]
    if any(each.moves(case.patience.notice_s) and not each.burns(case.patience.notice_s) for each in looks):
        return []  # somebody is on the way
    proven = case.at - since >= case.patience.still_s and not unplaced
    meeting = _rendezvous_of(case, graph, node) if node is not None else ""
    perhaps = f"it may be {_name_candidates(case, unplaced)}" if unplaced else "no such process is known here"
    return [
        Hypothesis(
            VerdictKind.ABSENT,
            VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE,
            0.7 if proven else 0.5,
            f"has not joined {meeting}; {perhaps}" if meeting else "was never heard of",
            (process,),
            node=node,
            since=since,
            cause="rendezvous_incomplete",
            alternatives=(Alternative("unknown", 0.3),),
            collect=("the log of its launcher on its host",),
        )
    ]


def _unranked(case: DiagnosisContext, role: str) -> list[int]:
    """Living processes that are there and have no rank yet."""
    living = (Liveness.RUNNING, Liveness.STOPPED)
    who = case.evidence.processes.who
    return [p for p, each in enumerate(who) if each.role == role and each.rank < 0 and case.life(p) in living]


def _name_candidates(case: DiagnosisContext, processes: list[int]) -> str:
    """With the line that each is in."""
    named = [(case.evidence.processes.who[p].name, case.note(p).where) for p in processes[:3]]
    more = f" or one of {len(processes) - 3} more" if len(processes) > 3 else ""
    return " or ".join(f"{name} in {where}" if where else name for name, where in named) + more


def _judge_running(case: DiagnosisContext, graph: WaitGraph, process: int, nodes: list[int]) -> list[Hypothesis]:
    """A running process that others wait for and that waits for nobody, as far as is known."""
    node, since = longest_waiting_node(graph, [each for each in nodes if graph.stalled[each]] or nodes)
    assert node is not None
    order = case.idle.get(process)
    if order is not None and any(case.life(each) is not Liveness.RUNNING for each in order.on):
        return []  # who gives it its orders cannot
    found, notice_s = measure_inactivity(case, process), case.patience.notice_s
    collective, moves, burns = bool(graph.edge[node] < 0), found.moves(notice_s), found.burns(notice_s)
    slow = moves and not burns and _far_behind(case, graph, process, node)
    if moves and not burns and not slow and found.unproductive_s(case.at - since) < case.unhurried(process):
        return []  # it works, and nobody works faster
    unclear = bool(case.unclear[process])
    proven = proven_inactive(case, process, since) and not unclear
    confidence = 0.45 if burns else 0.3 if moves else 0.5
    if proven:
        confidence = 0.7 if np.isnan(found.stack_s) else MAX_INACTIVITY_CONFIDENCE
    return [
        Hypothesis(
            VerdictKind.SLOW if slow else VerdictKind.ABSENT,
            VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE,
            confidence,
            "has not entered {collective}" if collective else _absence_text(case, graph, node),
            (process,),
            node=node,
            since=since,
            cause="rendezvous_incomplete" if _rendezvous_of(case, graph, node) else "unknown",
            alternatives=_likely_causes(case, process, slow),
            facts=inactivity_facts(case, process),
            collect=_missing_evidence(case, process, found, unclear),
        )
    ]


def _rendezvous_of(case: DiagnosisContext, graph: WaitGraph, node: int) -> str:
    """The meeting that a node is about, if it is."""
    return case.evidence.edges[int(graph.edge[node])].meeting if graph.edge[node] >= 0 else ""


def _absence_text(case: DiagnosisContext, graph: WaitGraph, node: int) -> str:
    meeting = _rendezvous_of(case, graph, node)
    return f"has not joined {meeting}" if meeting else "does not answer"


def _missing_evidence(case: DiagnosisContext, process: int, found: Inactivity, unclear: bool) -> tuple[str, ...]:
    """What would tell more of it."""
    collect = []
    if np.isnan(found.all_s):
        collect.append("whether it uses CPU, disk or network")
    if np.isnan(found.stack_s) and not case.note(process).where:
        collect.append("its stack (py-spy dump)")
    if unclear:
        collect.append("how far it is in its other communicators, and whether it is in a receive")
    return tuple(collect)


def _far_behind(case: DiagnosisContext, graph: WaitGraph, process: int, node: int) -> bool:
    """It needs so many times what most of its peers needed since the collective before."""
    if graph.edge[node] >= 0:
        return False
    members = case.evidence.communicators
    rows = case.members(int(graph.communicator[node]))
    seq = int(graph.seq[node])
    there = members.completed[rows] == seq - 1
    arrived = there & (members.entered[rows] >= seq)
    needed = (members.entered_at[rows] - members.completed_at[rows])[arrived]
    own = members.process[rows] == process
    needs = (case.now(process) - members.completed_at[rows])[own & there]
    needed = needed[needed >= 0]
    if 2 * len(needed) < len(own) or not len(needs) or np.isnan(needs[0]):
        return False
    return bool(needs[0] >= case.patience.slow_factor * max(float(np.median(needed)), 1e-3))


def _likely_causes(case: DiagnosisContext, process: int, slow: bool) -> tuple[Alternative, ...]:
    stage = case.evidence.processes.stage[process] if case.evidence.processes.stage else ""
    if "checkpoint" in stage:
        return (Alternative("checkpoint_timeout", 0.4),)
    if "reward" in stage or "score" in stage:
        return (Alternative("remote_service_timeout", 0.3),)
    return (Alternative("slow_rank_preprocess", 0.4),) if slow else ()


def find_waits_without_blocker(case: DiagnosisContext, graph: WaitGraph, reached: BoolArray) -> list[Hypothesis]:
    """Waits for somebody outside of the job, and waits that nobody can end."""
    found = []
    blocked = np.zeros(len(graph.seq), dtype=np.bool_)
    blocked[graph.block_node] = True
    for node in np.flatnonzero(reached & (graph.edge >= 0) & ~blocked).tolist():
        edge = case.evidence.edges[int(graph.edge[node])]
        since = float(graph.since[node])
        # Nobody can look at a service outside; how long it may think is what the waiter grants it.
        granted = bool(edge.outside) and edge.kind == "http" and case.at < edge.until
        proven = proven_inactive(case, edge.process, since) and not granted
        level, confidence = (VerdictLevel.CONFIRMED, 0.7) if proven else (VerdictLevel.NOTICE, 0.5)
        if edge.outside:
            cause = "remote_service_timeout" if proven and edge.kind in ("http", "async function") else "unknown"
            finding = Hypothesis(
                VerdictKind.ABSENT, level, confidence, "does not answer", outside=edge.outside, node=node, since=since,
                cause=cause, alternatives=(Alternative("network_blocked", 0.2),), others=(edge.process,),
            )  # fmt: skip
        elif edge.meeting:
            if measure_inactivity(case, edge.process).moves(case.patience.notice_s):
                continue
            finding = _unwatched_ranks(edge, since) if edge.elsewhere else _complete_rendezvous(edge, since, level)
        else:
            finding = Hypothesis(
                VerdictKind.STARVED, level, min(confidence, 0.6), "waits and nobody is about to give", node=node, since=since,
                others=(edge.process, *edge.on), more="Whoever it waits for is idle.",
                collect=("what the idle ones were asked last",),
            )  # fmt: skip
        found.append(finding)
    return found


def _unwatched_ranks(edge: WaitEdge, since: float) -> Hypothesis:
    return Hypothesis(
        VerdictKind.UNKNOWN, VerdictLevel.NOTICE, 0.4,
        f"all who are known here have come to {edge.meeting}; of {edge.elsewhere} of its ranks nothing is known, they "
        "are on no host that is watched",
        since=since, cause="rendezvous_incomplete", others=(edge.process,),
        collect=("what their launchers say on their hosts",),
    )  # fmt: skip


def _complete_rendezvous(edge: WaitEdge, since: float, level: VerdictLevel) -> Hypothesis:
    return Hypothesis(
        VerdictKind.UNKNOWN, level, 0.5, f"all have come to {edge.meeting}, and nobody goes on",
        since=since, others=(edge.process,),
        alternatives=(Alternative("rank_divergent_branch", 0.4), Alternative("network_blocked", 0.3)),
        collect=("the members that each rank makes the communicator with", "whether they reach each other's ports"),
    )  # fmt: skip


def describe_end(case: DiagnosisContext, process: int) -> str:
    """How a process ended, in words, with its exception."""
    processes, note = case.evidence.processes, case.note(process)
    said = describe_exit(int(processes.life[process]), int(processes.exit_code[process]))
    return f"{said} ({note.error.strip().splitlines()[-1][:200]})" if note.error.strip() else said
