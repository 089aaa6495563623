"""Finds communicators that members created, or are creating, with different member lists.

The list of the majority is correct. Without a majority all members are reported with low confidence.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis
from lockstep.watch.diagnosis.evidence import WaitEdge
from lockstep.watch.diagnosis.live_weights import Answers
from lockstep.watch.diagnosis.verdict import Alternative, VerdictKind, VerdictLevel

CERTAIN, LIKELY, UNDECIDED = {"most_of_all": True}, {"most_of_known": True}, {"most_of_known": False}
"""What speaks for the culprits if most of all members agree, if most of the known members do, and if there is no
majority."""
OTHER_RANKS = "other ranks"
"""In place of a member list of which only a digest is known."""


def find_different_member_lists(context: DiagnosisContext) -> list[Hypothesis]:
    """Hypotheses about communicators, and about rendezvous for one, whose members have different lists."""
    rendezvous = _find_rendezvous(context)
    covered = {process for each in rendezvous for process in each.others}
    lists = [each for each in _find_created(context) if not covered.issuperset(each.culprits)]
    return lists + rendezvous


def _find_created(context: DiagnosisContext) -> list[Hypothesis]:
    """Hypotheses about communicators in which a process waits and whose members created them with different lists."""
    members, graph = context.evidence.communicators, context.graph
    if members.member_list is None or not len(members.member_list):
        return []
    nodes = np.flatnonzero(context.relevant & graph.stalled & (graph.communicator >= 0))
    filled = np.flatnonzero(np.diff(members.starts) > 0)
    most = np.full(len(members.info), -1, dtype=np.int64)
    least = most.copy()
    starts = members.starts[filled]
    most[filled] = np.maximum.reduceat(members.member_list, starts)
    lists = np.where(members.member_list < 0, most[context.pending.communicator], members.member_list)
    least[filled] = np.minimum.reduceat(lists, starts)
    node_of = {int(graph.communicator[node]): int(node) for node in nodes[::-1]}
    differing = sorted(c for c in np.flatnonzero(least < most).tolist() if c in node_of)
    return [_member_list_hypothesis(context, each, node_of[each]) for each in differing]


def _find_rendezvous(context: DiagnosisContext) -> list[Hypothesis]:
    """Hypotheses about stalled rendezvous that processes have joined with different member lists. A process that the
    others wait for may have created the communicator already, with a list of its own."""
    graph = context.graph
    rendezvous: dict[tuple[str, str], list[tuple[int, WaitEdge]]] = {}
    for node in np.flatnonzero(graph.edge >= 0).tolist():
        edge = context.evidence.edges[int(graph.edge[node])]
        if edge.members:
            rendezvous.setdefault((context.role(edge.process), edge.rendezvous), []).append((node, edge))
    found = []
    for (role, name), joined in rendezvous.items():
        edges = [edge for _, edge in joined]
        awaited = {each for edge in edges for each in edge.on} | {edge.process for edge in edges}
        lists = {p: made for p, made in _lists_of(context, name, role, edges).items() if p in awaited}
        if len(set(lists.values())) > 1 and any(graph.stalled[node] for node, _ in joined):
            size = max(len(edge.members.split(",")) for edge in edges)
            texts: dict[object, str] = {_list_of(edge): f"ranks {edge.members}" for edge in edges}
            hypothesis = _rendezvous_hypothesis(name, lists, texts, size, joined[0][0])
            found.append(replace(hypothesis, since=min(edge.since for edge in edges)))
    return found


def _lists_of(context: DiagnosisContext, rendezvous: str, role: str, edges: Sequence[WaitEdge]) -> dict[int, int | str]:
    """The member lists of the processes that are in a rendezvous or have left it: numbers, which are compared with each
    other, or texts if a wait has no number."""
    joining = {edge.process: _list_of(edge) for edge in edges}
    numbered = all(edge.member_list >= 0 for edge in edges)
    return {**(_created_by(context, rendezvous, role) if numbered else {}), **joining}


def _list_of(edge: WaitEdge) -> int | str:
    return edge.member_list if edge.member_list >= 0 else edge.members


def _created_by(context: DiagnosisContext, rendezvous: str, role: str) -> dict[int, int]:
    """The member lists with which processes of the role have created the communicator of a rendezvous."""
    members, found = context.evidence.communicators, dict[int, int]()
    if members.member_list is None:
        return found
    for number, about in enumerate(members.info):
        if about.rendezvous == rendezvous:
            rows = context.members(number)
            made = zip(members.process[rows].tolist(), members.member_list[rows].tolist(), strict=True)
            found.update({p: made_with for p, made_with in made if made_with >= 0 and context.role(p) == role})
    return found


def _rendezvous_hypothesis(
    name: str, lists: Mapping[int, int | str], texts: Mapping[object, str], size: int, node: int
) -> Hypothesis:
    """`lists` holds the list of each process, `texts` the lists of which more than the number is known."""
    processes = list(lists)
    vote = _vote(list(lists.values()), size)
    wrong = {processes[position] for position in vote.wrong}
    others = f", but the others with {texts.get(vote.most, OTHER_RANKS)}" if vote.most is not None else ""
    text = (
        f"creates {name} with {' and '.join(sorted({texts.get(lists[each], OTHER_RANKS) for each in wrong}))}{others}"
    )
    return replace(_membership_hypothesis(vote, text, wrong, node, of=len(processes)), others=tuple(processes))


def _member_list_hypothesis(context: DiagnosisContext, communicator: int, node: int) -> Hypothesis:
    members, rows = context.evidence.communicators, context.members(communicator)
    assert members.member_list is not None
    lists, process = members.member_list[rows], members.process[rows]
    known = lists >= 0
    vote = _vote(lists[known].tolist(), size=len(lists))
    wrong = process[known][vote.wrong].tolist()
    return _membership_hypothesis(
        vote, "created {communicator} with a different member list", wrong, node, of=len(lists)
    )


@dataclass(frozen=True, slots=True)
class _Vote:
    """A vote of members on their member list."""

    wrong: list[int]
    """Positions of the members with another list than the majority; all members if there is no majority."""
    most: object
    """The majority's list; None if there is no majority."""
    count: int
    """The number of members with the most frequent list."""
    answers: Answers


def _vote(lists: Sequence[object], size: int) -> _Vote:
    """Finds the majority among the members' lists. `size` counts all members, also those whose list is unknown."""
    most, count = Counter(lists).most_common(1)[0]
    if 2 * count <= len(lists) or count < 2:
        return _Vote(list(range(len(lists))), None, count, UNDECIDED)
    wrong = [position for position, each in enumerate(lists) if each != most]
    return _Vote(wrong, most, count, CERTAIN if 2 * count > size else LIKELY)


def _membership_hypothesis(vote: _Vote, text: str, culprits: Iterable[int], node: int, of: int) -> Hypothesis:
    agreed = f"{vote.count} of {of} members agree on one list."
    return Hypothesis(
        VerdictKind.MISMATCH,
        VerdictLevel.CONFIRMED,
        vote.answers,
        text,
        tuple(sorted(culprits)),
        node=node,
        cause="rank_divergent_branch",
        alternatives=(Alternative("config_error", 0.3),),
        details=agreed if vote.most is not None else "There is no majority.",
        proven_by_structure=True,
    )
