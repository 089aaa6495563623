"""Which processes are asked for evidence in an incident: the culprits, processes that wait for them directly, and a
sample of the others. In a small job that is every process. In a large one the number is bounded, because all logs,
beacons and stacks of 16,000 processes take minutes to send and to write, and most of them say the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from lockstep.watch.diagnosis.evidence import Evidence, IntArray, with_parts
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.pending import find_pending
from lockstep.watch.diagnosis.verdict import Verdict
from lockstep.watch.diagnosis.wait_graph import WaitGraph, build_wait_graph

SMALL_JOB = 64
"""Every process of a job with at most this many is asked."""
MAX_CULPRITS = 32
MAX_WAITERS = 32
WAITS_PER_CULPRIT = 4
"""For so many waits that a culprit holds up, the longest first, a process that waits there is asked."""
MAX_PEERS = 16
"""The most processes that neither are culprits nor wait for one, in a large job."""


@dataclass(frozen=True, slots=True)
class IncidentSelection:
    """The processes to ask, as indices of the evidence. None occurs twice."""

    culprits: tuple[int, ...]
    waiters: tuple[int, ...]
    """Processes that wait for a culprit directly; at least one for each culprit that another process waits for."""
    peers: tuple[int, ...]
    complete: bool
    """Whether these are all processes of the job."""
    culprits_left_out: int = 0

    @property
    def asked(self) -> tuple[int, ...]:
        """All of them, the most important first."""
        return (*self.culprits, *self.waiters, *self.peers)


def select_processes(evidence: Evidence, verdict: Verdict) -> IncidentSelection:
    """The processes to ask: all of a small job, else at most `MAX_CULPRITS + MAX_WAITERS + MAX_PEERS`."""
    info = evidence.processes.info
    all_culprits = with_parts(info, {(each.host, each.name) for each in verdict.culprits})
    culprits = _spread(all_culprits, MAX_CULPRITS)
    graph = build_wait_graph(evidence, find_pending(evidence), 0.0, always=True)
    waits = [_waits_for(graph, each) for each in culprits] or [_waits_in_collective(evidence, graph, verdict)]
    waiters = _choose_waiters(graph, waits, frozenset(all_culprits))
    if not culprits:
        waiters = list(dict.fromkeys([*_chain(evidence, verdict), *waiters]))[:MAX_WAITERS]
    chosen = {*culprits, *waiters}
    complete = len(info) <= SMALL_JOB
    others = [index for index in range(len(info)) if index not in chosen]
    peers = others if complete else _sample(evidence, others, chosen)
    return IncidentSelection(tuple(culprits), tuple(waiters), tuple(peers), complete, len(all_culprits) - len(culprits))


def _waits_for(graph: WaitGraph, culprit: int) -> list[int]:
    """The nodes of the waits that a culprit holds up, the longest first; without one, of those that it shares with
    others."""
    nodes = np.unique(graph.block_node[graph.block_process == culprit])
    if not len(nodes):  # all are inside: a mismatch, or a device that does not complete the collective
        nodes = np.unique(graph.wait_node[graph.wait_process == culprit])
    return _longest_first(graph, nodes)


def _waits_in_collective(evidence: Evidence, graph: WaitGraph, verdict: Verdict) -> list[int]:
    """Without a culprit: the nodes of the waits in the collective of the verdict, or in its communicator."""
    if verdict.collective is None:
        return []
    name = verdict.collective.communicator
    numbers = [number for number, each in enumerate(evidence.communicators.info) if each.name == name]
    nodes = np.flatnonzero(np.isin(graph.communicator, numbers) & (graph.edge < 0))
    same = nodes[graph.seq[nodes] == verdict.collective.seq]
    return _longest_first(graph, same if len(same) else nodes)


def _longest_first(graph: WaitGraph, nodes: IntArray) -> list[int]:
    ordered: list[int] = nodes[np.argsort(graph.since[nodes], kind="stable")][:WAITS_PER_CULPRIT].tolist()
    return ordered


def _choose_waiters(graph: WaitGraph, waits: Sequence[Sequence[int]], culprits: frozenset[int]) -> list[int]:
    """A process for the longest wait of each culprit, then for the others while there is room. Culprits often hold up
    the same wait: one process that waits there is enough."""
    found: dict[int, None] = {}
    known: set[int] = set()
    for each in waits:
        for node in each:  # the first in which another process than the culprits waits
            if node in known or _add_waiter(found, graph.waiters(node), culprits):
                known.add(node)
                break
    for node in chain.from_iterable(waits):
        if len(found) >= MAX_WAITERS:
            break
        if node not in known and _add_waiter(found, graph.waiters(node), culprits):
            known.add(node)
    return list(found)


def _add_waiter(found: dict[int, None], waiting: Iterable[int], culprits: frozenset[int]) -> bool:
    """Adds a process that waits and is no culprit; returns whether one is among the chosen now."""
    candidates = [each for each in waiting if each not in culprits]
    if candidates and found.keys().isdisjoint(candidates):
        found[candidates[0]] = None
    return bool(candidates)


def _chain(evidence: Evidence, verdict: Verdict) -> Iterator[int]:
    """The processes in the verdict's chain of waits, which may end outside of the job."""
    named = {each.who for each in verdict.waiting}
    for index, each in enumerate(evidence.processes.info):
        if each.name in named or f"rank {each.rank}" in named:
            yield index


def _sample(evidence: Evidence, others: Sequence[int], chosen: Iterable[int]) -> list[int]:
    """Running processes: one of each role that has none yet, the rest spread evenly over all hosts."""
    info, liveness = evidence.processes.info, evidence.processes.liveness
    running = [index for index in others if liveness[index] == Liveness.RUNNING]
    roles = {info[index].role for index in chosen}
    first: dict[str, int] = {}
    for index in running:
        if info[index].role not in roles:
            first.setdefault(info[index].role, index)
    found = list(first.values())[:MAX_PEERS]
    taken = set(found)
    return found + _spread([index for index in running if index not in taken], MAX_PEERS - len(found))


def _spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spread."""
    if len(items) <= most:
        return list(items)
    return [items[number * len(items) // most] for number in range(most)]
