"""Explains a hypothesis in plain words: what the culprits did, which processes wait for them, and the fix."""

import numpy as np

from lockstep.base.text import summarize_list
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis
from lockstep.watch.diagnosis.error_classes import CLASS_FIXES
from lockstep.watch.diagnosis.evidence import IntArray
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.verdict import Culprit, StalledCollective, Verdict, VerdictKind, WaitLink
from lockstep.watch.diagnosis.wait_graph import BoolArray, WaitGraph

MAX_LINKS = 6
"""Links of a wait chain that are told."""
MAX_NAMED = 4
"""Processes that a sentence names one by one."""

_PLURALS = (("has ", "have "), ("is ", "are "), ("was ", "were "), ("waits ", "wait "), ("does ", "do "))
_KIND_FIXES = {
    VerdictKind.CYCLE: "Enter the collectives of different communicators in one order on every rank.",
    VerdictKind.STARVED: "Look at who fills the queue: it believes that it has nothing to do.",
    VerdictKind.DEVICE_LAG: "Look at the device of the rank that lags: its kernel runs on, or its link is down.",
    VerdictKind.IN_FLIGHT: "Test the links between the members (bandwidth probe), then the transport's settings.",
}


def to_verdict(case: DiagnosisContext, finding: Hypothesis) -> Verdict:
    """The finding for users and for JSON."""
    who = case.evidence.processes.who
    culprits = tuple(
        Culprit(
            who[p].rank if who[p].rank >= 0 else None, who[p].role, who[p].host, who[p].pid or None,
            case.note(p).where, who[p].name,
        )
        for p in finding.culprits
    )  # fmt: skip
    if finding.outside:
        culprits = (Culprit(None, "outside", name=finding.outside),)
    chain, nodes = _wait_chain(case, finding)
    return Verdict(
        kind=finding.kind,
        level=finding.level,
        culprits=culprits,
        cause=finding.cause,
        collective=_stalled_collective(case, finding, nodes),
        waiting=chain,
        confidence=finding.confidence,
        alternatives=finding.alternatives,
        evidence=finding.facts,
        explanation=_explanation(case, finding, chain),
        fix=CLASS_FIXES.get(finding.cause) or _KIND_FIXES.get(finding.kind, ""),
        collect=finding.collect,
    )


def process_label(case: DiagnosisContext, process: int) -> str:
    """`rank 1 (policy, host b)`, or `scorer-0 (host b)` for who is no member of a communicator."""
    each = case.evidence.processes.who[process]
    host = f"host {each.host}" if each.host else ""
    if each.rank >= 0 and case.ranked[process]:
        about = ", ".join(part for part in (_role_text(each.role), host) if part)
        return f"rank {each.rank} ({about})" if about else f"rank {each.rank}"
    return f"{each.name} ({host})" if host else each.name


def short_label(case: DiagnosisContext, process: int) -> str:
    each = case.evidence.processes.who[process]
    return f"rank {each.rank}" if each.rank >= 0 and case.ranked[process] else each.name


def join_labels(case: DiagnosisContext, processes: tuple[int, ...]) -> str:
    """`rank 1 (policy, host b)`, `ranks 1 and 3 (policy)`, `rank 1 (policy) and scorer-0`."""
    if len(processes) == 1:
        return process_label(case, processes[0])
    who = case.evidence.processes.who
    roles = {who[p].role for p in processes}
    if len(roles) == 1 and all(who[p].rank >= 0 and case.ranked[p] for p in processes):
        numbers = [str(who[p].rank) for p in sorted(processes, key=lambda p: who[p].rank)]
        role = _role_text(roles.pop())
        return f"ranks {_join_words(numbers)}" + (f" ({role})" if role else "")
    return _join_words([process_label(case, p) for p in processes])


def _role_text(role: str) -> str:
    """Not of those that are nothing but ranks."""
    return "" if role == "rank" else role


def _join_words(words: list[str]) -> str:
    if len(words) > MAX_NAMED + 1:
        return summarize_list(words, MAX_NAMED)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _collective_key(case: DiagnosisContext, finding: Hypothesis) -> tuple[int, int] | None:
    """Communicator and sequence number."""
    if finding.collective is not None:
        return finding.collective
    if finding.node is None or case.graph is None or case.graph.communicator[finding.node] < 0:
        return None
    return int(case.graph.communicator[finding.node]), int(case.graph.seq[finding.node])


def _stalled_collective(case: DiagnosisContext, finding: Hypothesis, nodes: list[int]) -> StalledCollective | None:
    """The collective of the finding; of a wait outside of collectives, the one that is held up by it."""
    place, graph = _collective_key(case, finding), case.graph
    if place is None and graph is not None:
        behind = [node for node in nodes if graph.communicator[node] >= 0]
        place = (int(graph.communicator[behind[0]]), int(graph.seq[behind[0]])) if behind else None
    if place is None:
        return None
    call, site = case.call(*place)
    name = case.evidence.communicators.about[place[0]].name
    return StalledCollective(name, place[1], call.operation if call else "", site)


def collective_text(case: DiagnosisContext, communicator: int, seq: int) -> str:
    """`all_reduce #412 on 'fsdp'`"""
    call, _ = case.call(communicator, seq)
    name = case.evidence.communicators.about[communicator].name
    return f"{call.operation if call else 'collective'} #{seq} on '{name}'"


def _node_text(case: DiagnosisContext, node: int) -> str:
    """What a node's waiters wait in."""
    graph = case.graph
    assert graph is not None
    if graph.edge[node] < 0:
        return collective_text(case, int(graph.communicator[node]), int(graph.seq[node]))
    edge = case.evidence.edges[int(graph.edge[node])]
    return f"{edge.kind}: {edge.why}" if edge.kind and edge.why else edge.why or edge.kind or "a wait"


def _wait_chain(case: DiagnosisContext, finding: Hypothesis) -> tuple[tuple[WaitLink, ...], list[int]]:
    """From somebody far behind to the culprit, link by link, and the nodes of the links; collectives are told rather
    than other waits."""
    graph, node = case.graph, finding.node
    if graph is None or node is None:
        return (), []
    links: list[WaitLink] = []
    nodes: list[int] = []
    on = finding.outside or (short_label(case, finding.culprits[0]) if finding.culprits else "")
    seen = np.zeros(graph.processes, dtype=np.bool_)
    seen[list(finding.culprits)] = True
    while node is not None and len(links) < MAX_LINKS:
        waiters = np.zeros(graph.processes, dtype=np.bool_)
        waiters[graph.wait_process[graph.wait_node == node]] = True
        fresh = np.flatnonzero(waiters & ~seen)
        if not len(fresh):
            break
        seen[fresh] = True
        waiter, behind = _next_link(graph, seen, fresh)
        since = case.at - float(graph.since[node])
        links.append(
            WaitLink(
                short_label(case, waiter), on, _node_text(case, node), round(since, 1) if np.isfinite(since) else None
            )
        )
        nodes.append(node)
        on, node = short_label(case, waiter), behind
    return tuple(reversed(links)), nodes


def _next_link(graph: WaitGraph, seen: BoolArray, waiters: IntArray) -> tuple[int, int | None]:
    """Of those who wait, one that in turn keeps somebody else waiting, and in what; else the first."""
    candidates = np.zeros(graph.processes, dtype=np.bool_)
    candidates[waiters] = True
    blocks = candidates[graph.block_process]
    nodes = np.zeros(len(graph.seq), dtype=np.bool_)
    nodes[graph.wait_node[~seen[graph.wait_process]]] = True
    blocks &= nodes[graph.block_node]
    if not blocks.any():
        return int(waiters[0]), None
    if (graph.edge[graph.block_node[blocks]] < 0).any():
        blocks &= graph.edge[graph.block_node] < 0
    waiter = int(graph.block_process[blocks].min())
    behind = graph.block_node[blocks & (graph.block_process == waiter)]
    return waiter, int(behind[np.lexsort((behind, graph.since[behind], graph.edge[behind] >= 0))[0]])


def _explanation(case: DiagnosisContext, finding: Hypothesis, chain: tuple[WaitLink, ...]) -> str:
    place = _collective_key(case, finding)
    text = finding.text
    if place is not None:
        text = text.replace("{collective}", collective_text(case, *place))
        text = text.replace("{communicator}", f"'{case.evidence.communicators.about[place[0]].name}'")
    text = text.replace("{collective}", "what the others wait in").replace("{communicator}", "the communicator")
    subject = finding.outside or (join_labels(case, finding.culprits) if finding.culprits else "")
    if not subject and finding.kind is VerdictKind.STARVED and finding.others:
        subject = process_label(case, finding.others[0])
    if len(finding.culprits) > 1:
        text = next((more + text[len(one) :] for one, more in _PLURALS if text.startswith(one)), text)
    sentences = [f"{subject} {text}{_locations_text(case, finding)}." if subject else f"{text[:1].upper()}{text[1:]}."]
    if chain:
        sentences.append(_chain_text(case, finding, chain))
    if finding.more:
        sentences.append(finding.more)
    return " ".join(sentences)


def _locations_text(case: DiagnosisContext, finding: Hypothesis) -> str:
    """`; it is in score() at reward.py:31 since 41 s`, of several culprits each in turn."""
    if finding.kind in (VerdictKind.MISMATCH, VerdictKind.CYCLE) or len(finding.culprits) > MAX_NAMED:
        return ""
    one = len(finding.culprits) == 1
    found = [(process, _location_text(case, process)) for process in finding.culprits]
    return "".join(f"; {'it' if one else short_label(case, p)} {where}" for p, where in found if where)


def _location_text(case: DiagnosisContext, process: int) -> str:
    if case.life(process) not in (Liveness.RUNNING, Liveness.STOPPED):
        return ""
    if process in case.idle and not case.note(process).where:
        return f"waits for its next order{_duration_text(case.at - case.idle[process].since)}"
    stage = case.evidence.processes.stage[process] if case.evidence.processes.stage else ""
    where = case.note(process).where or (f"stage {stage!r}" if stage else "")
    since = case.now(process) - float(np.fmin(case.evidence.processes.same_stack_since[process], case.moved(process)))
    return f"is in {where}{_duration_text(since)}" if where else ""


def _duration_text(seconds: float) -> str:
    return f" since {seconds:.0f} s" if np.isfinite(seconds) else ""


def _chain_text(case: DiagnosisContext, finding: Hypothesis, chain: tuple[WaitLink, ...]) -> str:
    """`rank 2 waits in all_reduce #5 on 'fsdp' for rank 1, which waits for scorer-0 (future: scores of step 7).`"""
    graph = case.graph
    assert graph is not None
    assert finding.node is not None
    words = (
        f"{chain[0].who} waits for {chain[0].on} ({chain[0].what}){_duration_text(chain[0].since_s or float('nan'))}"
    )
    words += "".join(f", which waits for {link.on} ({link.what})" for link in chain[1:])
    waiters = graph.wait_process[graph.wait_node == finding.node]
    others = len(waiters) - int(np.isin(finding.culprits, waiters).sum()) - 1
    if others > 0:
        words += f"; {others} other{'s' if others > 1 else ''} wait{'s' if others == 1 else ''} in the last of these"
    return f"{words[:1].upper()}{words[1:]}."
