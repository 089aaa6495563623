"""A finding in plain words: who did what, who waits for it and through whom, and what helps."""

import numpy as np

from lockstep.watch.classify import FIXES
from lockstep.watch.facts import Life
from lockstep.watch.finding import Case, Finding
from lockstep.watch.verdict import Collective, Culprit, Kind, Verdict, Waiting

LINKS = 6
"""Links of a wait chain that are told."""
NAMED = 4
"""Processes that a sentence names one by one."""

_PLURALS = (("has ", "have "), ("is ", "are "), ("was ", "were "), ("waits ", "wait "), ("does ", "do "))
_KIND_FIXES = {
    Kind.CYCLE: "Enter the collectives of different communicators in one order on every rank.",
    Kind.STARVED: "Look at who fills the queue: it believes that it has nothing to do.",
    Kind.DEVICE_LAG: "Look at the device of the rank that lags: its kernel runs on, or its link is down.",
    Kind.IN_FLIGHT: "Test the links between the members (bandwidth probe), then the transport's settings.",
}


def verdict(case: Case, finding: Finding) -> Verdict:
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
    chain = _chain(case, finding)
    return Verdict(
        kind=finding.kind,
        level=finding.level,
        culprits=culprits,
        cause=finding.cause,
        collective=_collective(case, finding),
        waiting=chain,
        confidence=finding.confidence,
        alternatives=finding.alternatives,
        evidence=finding.facts,
        explanation=_explanation(case, finding, chain),
        fix=FIXES.get(finding.cause) or _KIND_FIXES.get(finding.kind, ""),
        collect=finding.collect,
    )


def label(case: Case, process: int) -> str:
    """`rank 1 (policy, host b)`, or `scorer-0 (host b)` for who is no member of a communicator."""
    each = case.evidence.processes.who[process]
    host = f"host {each.host}" if each.host else ""
    if each.rank >= 0 and process in case.ranked:
        about = ", ".join(part for part in (each.role, host) if part)
        return f"rank {each.rank} ({about})" if about else f"rank {each.rank}"
    return f"{each.name} ({host})" if host else each.name


def short(case: Case, process: int) -> str:
    each = case.evidence.processes.who[process]
    return f"rank {each.rank}" if each.rank >= 0 and process in case.ranked else each.name


def several(case: Case, processes: tuple[int, ...]) -> str:
    """`rank 1 (policy, host b)`, `ranks 1 and 3 (policy)`, `rank 1 (policy) and scorer-0`."""
    if len(processes) == 1:
        return label(case, processes[0])
    who = case.evidence.processes.who
    roles = {who[p].role for p in processes}
    if len(roles) == 1 and all(who[p].rank >= 0 and p in case.ranked for p in processes):
        numbers = [str(who[p].rank) for p in sorted(processes, key=lambda p: who[p].rank)]
        role = roles.pop()
        return f"ranks {_and(numbers)}" + (f" ({role})" if role else "")
    return _and([label(case, p) for p in processes])


def _and(words: list[str]) -> str:
    if len(words) > NAMED + 1:
        return f"{', '.join(words[:NAMED])} and {len(words) - NAMED} more"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _place(case: Case, finding: Finding) -> tuple[int, int] | None:
    """Communicator and sequence number."""
    if finding.collective is not None:
        return finding.collective
    if finding.node is None or case.graph is None or case.graph.communicator[finding.node] < 0:
        return None
    return int(case.graph.communicator[finding.node]), int(case.graph.seq[finding.node])


def _collective(case: Case, finding: Finding) -> Collective | None:
    place = _place(case, finding)
    if place is None:
        return None
    call, site = case.call(*place)
    name = case.evidence.communicators.about[place[0]].name
    return Collective(name, place[1], call.operation if call else "", site)


def in_words(case: Case, communicator: int, seq: int) -> str:
    """`all_reduce #412 on 'fsdp'`"""
    call, _ = case.call(communicator, seq)
    name = case.evidence.communicators.about[communicator].name
    return f"{call.operation if call else 'collective'} #{seq} on '{name}'"


def _what(case: Case, node: int) -> str:
    """What a node's waiters wait in."""
    graph = case.graph
    assert graph is not None
    if graph.edge[node] < 0:
        return in_words(case, int(graph.communicator[node]), int(graph.seq[node]))
    edge = case.evidence.edges[int(graph.edge[node])]
    return f"{edge.kind}: {edge.why}" if edge.kind and edge.why else edge.why or edge.kind or "a wait"


def _chain(case: Case, finding: Finding) -> tuple[Waiting, ...]:
    """From somebody far behind to the culprit, link by link; of several who wait, the one that waits longest."""
    graph, node = case.graph, finding.node
    if graph is None or node is None:
        return ()
    links: list[Waiting] = []
    on = finding.outside or (short(case, finding.culprits[0]) if finding.culprits else "")
    seen = {int(p) for p in finding.culprits}
    while node is not None and len(links) < LINKS:
        fresh = [p for p in graph.waiters(node) if p not in seen]
        if not fresh:
            break
        following = None
        for waiter in fresh[:32]:  # who in turn keeps somebody else waiting tells more
            behind = [n for n in graph.blocks(waiter) if set(graph.waiters(n)) - seen - set(fresh)]
            if behind:
                following = (waiter, min(behind, key=lambda n: (graph.since[n], n)))
                break
        waiter = following[0] if following else fresh[0]
        since = case.at - float(graph.since[node])
        links.append(
            Waiting(short(case, waiter), on, _what(case, node), round(since, 1) if np.isfinite(since) else None)
        )
        seen.update(fresh)
        on, node = short(case, waiter), following[1] if following else None
    return tuple(reversed(links))


def _explanation(case: Case, finding: Finding, chain: tuple[Waiting, ...]) -> str:
    place = _place(case, finding)
    text = finding.text
    if place is not None:
        text = text.replace("{collective}", in_words(case, *place))
        text = text.replace("{communicator}", f"'{case.evidence.communicators.about[place[0]].name}'")
    text = text.replace("{collective}", "what the others wait in").replace("{communicator}", "the communicator")
    subject = finding.outside or (several(case, finding.culprits) if finding.culprits else "")
    if not subject and finding.kind is Kind.STARVED and finding.others:
        subject = label(case, finding.others[0])
    if len(finding.culprits) > 1:
        text = next((more + text[len(one) :] for one, more in _PLURALS if text.startswith(one)), text)
    sentences = [f"{subject} {text}{_whereabouts(case, finding)}." if subject else f"{text[:1].upper()}{text[1:]}."]
    if chain:
        sentences.append(_who_waits(case, finding, chain))
    if finding.more:
        sentences.append(finding.more)
    return " ".join(sentences)


def _whereabouts(case: Case, finding: Finding) -> str:
    """`; it is in score() at reward.py:31 since 41 s`"""
    if len(finding.culprits) != 1:
        return ""
    process = finding.culprits[0]
    if case.life(process) not in (Life.RUNNING, Life.STOPPED):
        return ""
    if process in case.idle and not case.note(process).where:
        edge = case.idle[process]
        return f"; it waits for its next order{_for(case.at - edge.since)}"
    stage = case.evidence.processes.stage[process] if case.evidence.processes.stage else ""
    where = case.note(process).where or (f"stage {stage!r}" if stage else "")
    if not where or finding.kind in (Kind.MISMATCH, Kind.CYCLE):
        return ""
    since = case.at - float(np.fmin(case.evidence.processes.same_stack_since[process], case.last_moved[process]))
    return f"; it is in {where}{_for(since)}"


def _for(seconds: float) -> str:
    return f" since {seconds:.0f} s" if np.isfinite(seconds) else ""


def _who_waits(case: Case, finding: Finding, chain: tuple[Waiting, ...]) -> str:
    """`rank 2 waits in all_reduce #5 on 'fsdp' for rank 1, which waits for scorer-0 (future: scores of step 7).`"""
    graph = case.graph
    assert graph is not None
    assert finding.node is not None
    words = f"{chain[0].who} waits for {chain[0].on} ({chain[0].what}){_for(chain[0].since_s or float('nan'))}"
    words += "".join(f", which waits for {link.on} ({link.what})" for link in chain[1:])
    others = len(set(graph.waiters(finding.node)) - set(finding.culprits)) - 1
    if others > 0:
        words += f"; {others} other{'s' if others > 1 else ''} wait{'s' if others == 1 else ''} in the last of these"
    return f"{words[:1].upper()}{words[1:]}."
