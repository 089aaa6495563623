"""Turns a hypothesis into a verdict with texts: what the culprits did, which processes wait for them, and the fix."""

import numpy as np

from lockstep.base.text import summarize_list
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis
from lockstep.watch.diagnosis.evidence import IntArray
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.failure_classes import CLASS_FIXES
from lockstep.watch.diagnosis.live_weights import live_weights
from lockstep.watch.diagnosis.verdict import Culprit, StalledCollective, Verdict, VerdictKind, WaitLink
from lockstep.watch.diagnosis.wait_graph import BoolArray, WaitGraph, mask_of

MAX_LINKS = 6
"""The longest wait chain in a verdict, in links."""
MAX_NAMED = 4
"""The most processes that a sentence names individually."""

_PLURALS = (
    ("has ", "have "), ("is ", "are "), ("was ", "were "), ("waits ", "wait "), ("does ", "do "), ("uses ", "use "),
)  # fmt: skip
_KIND_FIXES = {
    VerdictKind.CYCLE: "Enter the collectives of different communicators in one order on every rank.",
    VerdictKind.STARVED: "Check the process that fills the queue: it is idle.",
    VerdictKind.DEVICE_LAG: "Check the device of the lagging rank: its kernel still runs, or its link is down.",
    VerdictKind.IN_FLIGHT: "Test the links between the members (bandwidth probe), then the transport's settings.",
}


def to_verdict(context: DiagnosisContext, hypothesis: Hypothesis) -> Verdict:
    """The verdict of a hypothesis."""
    info = context.evidence.processes.info
    lines: dict[int, str] = {}
    for process in hypothesis.culprits:
        lines.setdefault(context.whole(process), context.note(process).where)
    if hypothesis.part is not None:
        lines[context.whole(hypothesis.part)] = context.note(hypothesis.part).where
    culprits = tuple(
        Culprit(
            info[p].rank if info[p].rank >= 0 else None, info[p].role, info[p].host, info[p].pid or None, where,
            info[p].name,
        )
        for p, where in lines.items()
    )  # fmt: skip
    if hypothesis.outside:
        culprits = (Culprit(None, "outside", name=hypothesis.outside),)
    chain, nodes = _wait_chain(context, hypothesis)
    return Verdict(
        kind=hypothesis.kind,
        level=hypothesis.level,
        culprits=culprits,
        cause=hypothesis.cause,
        collective=_stalled_collective(context, hypothesis, nodes),
        waiting=chain,
        confidence=context.confidence(hypothesis),
        alternatives=hypothesis.alternatives,
        evidence=(*hypothesis.facts, *live_weights().facts(hypothesis.answers)),
        explanation=_explanation(context, hypothesis, chain),
        fix=CLASS_FIXES.get(hypothesis.cause) or _KIND_FIXES.get(hypothesis.kind, ""),
        collect=hypothesis.collect,
        not_excluded=tuple(sorted(info[p].rank for p in hypothesis.not_excluded if info[p].rank >= 0)),
    )


def process_label(context: DiagnosisContext, process: int, short: bool = False) -> str:
    """`rank 1 (policy, host b)`, or `scorer-0 (host b)` for a process in no communicator; a part with its process. If
    `short`, without role and host."""
    each = context.evidence.processes.info[process]
    if process in context.wholes:
        return f"child {each.pid} of {process_label(context, context.wholes[process], short)}"
    has_rank = each.rank >= 0 and bool(context.named_by_rank[process])
    about = [_role_text(each.role) if has_rank else "", f"host {each.host}" if each.host else ""]
    details = "" if short else ", ".join(filter(None, about))
    name = f"rank {each.rank}" if has_rank else each.name
    return f"{name} ({details})" if details else name


def join_labels(context: DiagnosisContext, processes: tuple[int, ...]) -> str:
    """`rank 1 (policy, host b)`, `ranks 1 and 3 (policy)`, `rank 1 (policy) and scorer-0`."""
    if len(processes) == 1:
        return process_label(context, processes[0])
    info = context.evidence.processes.info
    roles = {info[p].role for p in processes}
    if len(roles) == 1 and all(
        info[p].rank >= 0 and context.named_by_rank[p] and p not in context.wholes for p in processes
    ):
        numbers = [str(info[p].rank) for p in sorted(processes, key=lambda p: info[p].rank)]
        role = _role_text(roles.pop())
        return f"ranks {_join_words(numbers)}" + (f" ({role})" if role else "")
    return _join_words([process_label(context, p) for p in processes])


def _role_text(role: str) -> str:
    """The role, empty in jobs without roles."""
    return "" if role == "rank" else role


def _join_words(words: list[str]) -> str:
    if len(words) > MAX_NAMED + 1:
        return summarize_list(words, MAX_NAMED)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _collective_key(context: DiagnosisContext, hypothesis: Hypothesis) -> tuple[int, int] | None:
    """Communicator and sequence number of the collective of the hypothesis; None if it has none."""
    if hypothesis.collective is not None:
        return hypothesis.collective
    if hypothesis.node is None or not context.graph.is_collective(hypothesis.node):
        return None
    return context.graph.collective(hypothesis.node)


def _stalled_collective(
    context: DiagnosisContext, hypothesis: Hypothesis, nodes: list[int]
) -> StalledCollective | None:
    """The collective of the hypothesis. If the others wait outside collectives, the nearest collective that this wait
    delays."""
    key, graph = _collective_key(context, hypothesis), context.graph
    if key is None:
        key = next((graph.collective(node) for node in nodes if graph.is_collective(node)), None)
    if key is None:
        return None
    call, site = context.call(*key)
    name = context.evidence.communicators.info[key[0]].name
    return StalledCollective(name, key[1], call.operation if call else "", site)


def collective_text(context: DiagnosisContext, communicator: int, seq: int) -> str:
    """`all_reduce #412 on 'fsdp'`"""
    call, _ = context.call(communicator, seq)
    name = context.evidence.communicators.info[communicator].name
    return f"{call.operation if call else 'collective'} #{seq} on '{name}'"


def _node_text(context: DiagnosisContext, node: int) -> str:
    """What the processes of a node wait in, as text."""
    graph = context.graph
    if graph.is_collective(node):
        return collective_text(context, *graph.collective(node))
    edge = context.evidence.edges[int(graph.edge[node])]
    return f"{edge.kind}: {edge.why}" if edge.kind and edge.why else edge.why or edge.kind or "a wait"


def _wait_chain(context: DiagnosisContext, hypothesis: Hypothesis) -> tuple[tuple[WaitLink, ...], list[int]]:
    """The chain of waits that ends at the culprit, and the nodes of its links; collectives are preferred to other
    waits."""
    graph, node = context.graph, hypothesis.node
    if node is None:
        return (), []
    links: list[WaitLink] = []
    nodes: list[int] = []
    on = hypothesis.outside or (
        process_label(context, hypothesis.culprits[0], short=True) if hypothesis.culprits else ""
    )
    seen = mask_of(graph.processes, list(hypothesis.culprits))
    while node is not None and len(links) < MAX_LINKS:
        waiters = mask_of(graph.processes, graph.wait_process[graph.wait_node == node])
        new_waiters = np.flatnonzero(waiters & ~seen)
        if not len(new_waiters):
            break
        seen[new_waiters] = True
        waiter, behind = _next_link(graph, seen, new_waiters)
        since = context.at - float(graph.since[node])
        links.append(
            WaitLink(
                process_label(context, waiter, short=True),
                on,
                _node_text(context, node),
                round(since, 1) if np.isfinite(since) else None,
            )
        )
        nodes.append(node)
        on, node = process_label(context, waiter, short=True), behind
    return tuple(reversed(links)), nodes


def _next_link(graph: WaitGraph, seen: BoolArray, waiters: IntArray) -> tuple[int, int | None]:
    """One of the waiting processes and the node that it blocks, preferably a collective. The node is None if the
    process blocks none."""
    candidates = mask_of(graph.processes, waiters)
    blocks = candidates[graph.block_process]
    nodes = mask_of(len(graph.seq), graph.wait_node[~seen[graph.wait_process]])
    blocks &= nodes[graph.block_node]
    if not blocks.any():
        return int(waiters[0]), None
    if (graph.edge[graph.block_node[blocks]] < 0).any():
        blocks &= graph.edge[graph.block_node] < 0
    waiter = int(graph.block_process[blocks].min())
    behind = graph.block_node[blocks & (graph.block_process == waiter)]
    return waiter, int(behind[np.lexsort((behind, graph.since[behind], graph.edge[behind] >= 0))[0]])


def _explanation(context: DiagnosisContext, hypothesis: Hypothesis, chain: tuple[WaitLink, ...]) -> str:
    key = _collective_key(context, hypothesis)
    text = hypothesis.text
    if key is not None:
        text = text.replace("{collective}", collective_text(context, *key))
        text = text.replace("{communicator}", f"'{context.evidence.communicators.info[key[0]].name}'")
    text = text.replace("{collective}", "the collective that the others wait in").replace(
        "{communicator}", "the communicator"
    )
    subject = hypothesis.outside or (join_labels(context, hypothesis.culprits) if hypothesis.culprits else "")
    if not subject and hypothesis.kind is VerdictKind.STARVED and hypothesis.others:
        subject = process_label(context, hypothesis.others[0])
    if len(hypothesis.culprits) > 1:
        text = next(
            (plural + text[len(singular) :] for singular, plural in _PLURALS if text.startswith(singular)), text
        )
    sentences = [
        f"{subject} {text}{_locations_text(context, hypothesis)}." if subject else f"{text[:1].upper()}{text[1:]}."
    ]
    if chain:
        sentences.append(_chain_text(context, hypothesis, chain))
    if hypothesis.details:
        sentences.append(hypothesis.details)
    if hypothesis.not_excluded:
        sentences.append(f"Not excluded: {join_labels(context, hypothesis.not_excluded)}.")
    return " ".join(sentences)


def _locations_text(context: DiagnosisContext, hypothesis: Hypothesis) -> str:
    """`; it has been in score() at reward.py:31 for 41 s`, one clause per culprit."""
    if hypothesis.kind in (VerdictKind.MISMATCH, VerdictKind.CYCLE) or len(hypothesis.culprits) > MAX_NAMED:
        return ""
    if hypothesis.part is not None:
        where = _location_text(context, hypothesis.part)
        return f"; its child {context.evidence.processes.info[hypothesis.part].pid} {where}" if where else ""
    one = len(hypothesis.culprits) == 1
    found = [(process, _location_text(context, process)) for process in hypothesis.culprits]
    return "".join(f"; {'it' if one else process_label(context, p, short=True)} {where}" for p, where in found if where)


def _location_text(context: DiagnosisContext, process: int) -> str:
    if context.liveness(process) not in (Liveness.RUNNING, Liveness.STOPPED):
        return ""
    if process in context.idle_waits and not context.note(process).where:
        waited = context.at - context.idle_waits[process].since
        return (
            f"has waited {waited:.0f} s for its next request" if np.isfinite(waited) else "waits for its next request"
        )
    stage = context.evidence.processes.stage[process] if context.evidence.processes.stage else ""
    where = context.note(process).where or (f"stage {stage!r}" if stage else "")
    since = context.observed_at(process) - float(
        np.fmin(context.evidence.processes.same_stack_since[process], context.last_activity(process))
    )
    if not where:
        return ""
    return f"has been in {where} for {since:.0f} s" if np.isfinite(since) else f"is in {where}"


def _chain_text(context: DiagnosisContext, hypothesis: Hypothesis, chain: tuple[WaitLink, ...]) -> str:
    """`rank 2 has waited 41 s for rank 1 (all_reduce #5 on 'fsdp'), which waits for scorer-0 (future: scores of step
    7).`"""
    graph = context.graph
    assert hypothesis.node is not None
    first = chain[0]
    waits = f"has waited {first.since_s:.0f} s" if first.since_s else "waits"
    words = f"{first.who} {waits} for {first.on} ({first.what})" if first.on else f"{first.who} {waits} in {first.what}"
    words += "".join(f", which waits for {link.on} ({link.what})" for link in chain[1:])
    waiters = graph.wait_process[graph.wait_node == hypothesis.node]
    others = len(waiters) - int(np.isin(hypothesis.culprits, waiters).sum()) - 1
    if others > 0:
        words += f"; {others} other{'s' if others > 1 else ''} wait{'s' if others == 1 else ''} in the last of these"
    return f"{words[:1].upper()}{words[1:]}."
