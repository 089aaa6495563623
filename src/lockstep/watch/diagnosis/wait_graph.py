"""The wait graph: which process waits for which and in what, its cycles and knots, and the ends of its wait chains.

Two kinds of nodes. A *wait node* is something that processes wait in: a collective (communicator, sequence number),
or an edge of the evidence. Processes wait in nodes; nodes are blocked by processes: a collective by its members
that have not entered it or can take no further part, an edge by the processes it names. A process is held up when
one of its nodes is (AND); a collective and an ALL edge are held up when one of their blockers is (AND); an ANY edge
when all are (OR).

The graph consists of arrays, because in a stalled job of 16,000 ranks every rank waits.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.diagnosis.evidence import Evidence, FloatArray, IntArray, MembershipTable, WaitEdge
from lockstep.watch.diagnosis.evidence_types import Liveness, WaitCondition

BoolArray = NDArray[np.bool_]

LEVELS = 8
"""Distinct sequence numbers at which members of one communicator wait; waits beyond the eighth count as the eighth."""
_TABLE = 1 << 22


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Nodes of collectives, by communicator and sequence number, followed by nodes of edges."""

    at: float
    processes: int
    communicator: IntArray
    """`[nodes]`; -1 for an edge."""
    seq: IntArray
    """`[nodes]`"""
    edge: IntArray
    """`[nodes]`: index in the evidence's edges, -1 for a collective."""
    any_of: BoolArray
    """`[nodes]`: true if any one of the blockers can end the wait."""
    since: FloatArray
    """`[nodes]`: the start of the longest wait in the node."""
    stalled: BoolArray
    """`[nodes]`: true if a wait in the node has lasted longer than `notice_s`."""
    wait_process: IntArray
    """Process of each (process, node) wait."""
    wait_node: IntArray
    """Node of each (process, node) wait."""
    block_process: IntArray
    block_node: IntArray
    suspect_process: IntArray
    """Processes of unknown progress, which may block a node."""
    suspect_node: IntArray

    def waiting(self) -> BoolArray:
        """`[processes]`: true for processes that wait in some node."""
        mask = np.zeros(self.processes, dtype=np.bool_)
        mask[self.wait_process] = True
        return mask

    def waiters(self, node: int) -> list[int]:
        return sorted(set(self.wait_process[self.wait_node == node].tolist()))

    def few_wait(self, node: int, most: int) -> bool:
        return int((self.wait_node == node).sum()) <= most

    def blockers(self, node: int) -> list[int]:
        return sorted(set(self.block_process[self.block_node == node].tolist()))

    def suspects(self, node: int) -> list[int]:
        return sorted(set(self.suspect_process[self.suspect_node == node].tolist()))

    def blocks(self, process: int) -> list[int]:
        """The nodes that a process blocks."""
        return sorted(set(self.block_node[self.block_process == process].tolist()))


@dataclass(frozen=True, slots=True)
class PendingCollectives:
    """For each membership, whether the process is inside a collective of the communicator, and in which;
    `[memberships]`."""

    communicator: IntArray
    waits: BoolArray
    seq: IntArray
    """The first collective that the process has not completed."""
    since: FloatArray
    """When the process last entered or completed a collective of the communicator; NaN if unknown."""


def find_pending(evidence: Evidence) -> PendingCollectives:
    """The memberships inside a collective. Without evidence of completion, the last one entered counts."""
    members = evidence.communicators
    sizes = np.diff(members.starts)
    communicator = np.repeat(np.arange(len(sizes)), sizes)
    completed = members.completed
    if (completed < 0).any():
        completed = np.where((completed < 0) & (members.entered >= 1), members.entered - 1, completed)
    waits = members.entered > completed
    waits &= evidence.processes.liveness[members.process] == Liveness.RUNNING
    if members.blocked is not None:
        waits &= members.blocked != 0
    return PendingCollectives(communicator, waits, completed + 1, np.fmax(members.entered_at, members.completed_at))


def build_wait_graph(
    evidence: Evidence, inside: PendingCollectives, notice_s: float, always: bool = False
) -> WaitGraph | None:
    """The graph; None if no wait is longer than `notice_s` or, with `always`, if there is no wait."""
    rows = np.flatnonzero(inside.waits)
    since = inside.since[rows]
    late = ~(_known_until(evidence, evidence.communicators.process[rows]) - since < notice_s)
    edges = _blocking_edges(evidence)
    late_edges = [not float(_known_until(evidence, edge.process)) - _since(edge) < notice_s for _, edge, _ in edges]
    any_late = late.any() or any(late_edges)
    if not any_late and not (always and (len(rows) or edges)):
        return None
    communicator, seq, node_of = _collective_nodes(inside, rows)
    collectives = len(communicator)
    node_since = np.full(collectives + len(edges), np.inf)
    np.minimum.at(node_since, node_of, np.where(np.isnan(since), -np.inf, since))
    stalled = np.zeros(collectives + len(edges), dtype=np.bool_)
    stalled[node_of[late]] = True
    blocks = _blockers(evidence, inside, communicator, seq, node_since)
    block_process, block_node, suspect_process, suspect_node = blocks
    for number, (_, edge, _) in enumerate(edges, collectives):
        node_since[number] = _since(edge)
        stalled[number] = late_edges[number - collectives]
    more = [(process, number) for number, (_, _, on) in enumerate(edges, collectives) for process in on]
    extra = np.array(more, dtype=np.int64).reshape(-1, 2)
    none = np.full(len(edges), -1, dtype=np.int64)
    return WaitGraph(
        at=evidence.at,
        processes=len(evidence.processes.info),
        communicator=np.concatenate([communicator, none]),
        seq=np.concatenate([seq, none]),
        edge=np.concatenate([np.full(collectives, -1), np.array([index for index, _, _ in edges], dtype=np.int64)]),
        any_of=np.array(
            [False] * collectives + [edge.needs is WaitCondition.ANY for _, edge, _ in edges], dtype=np.bool_
        ),
        since=node_since,
        stalled=stalled,
        wait_process=np.concatenate(
            [evidence.communicators.process[rows], np.array([edge.process for _, edge, _ in edges], dtype=np.int64)]
        ),
        wait_node=np.concatenate([node_of, np.arange(collectives, collectives + len(edges))]),
        block_process=np.concatenate([block_process, extra[:, 0]]),
        block_node=np.concatenate([block_node, extra[:, 1]]),
        suspect_process=suspect_process,
        suspect_node=suspect_node,
    )


def _known_until(evidence: Evidence, process: IntArray | int) -> FloatArray | float:
    """When processes were last observed; a wait may have ended since then."""
    seen = evidence.processes.seen_at
    return evidence.at if seen is None else np.asarray(np.fmin(seen[process], evidence.at))


def _collective_nodes(inside: PendingCollectives, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Communicator and sequence number of each node, and the node of each row; avoids sorting where possible."""
    if not len(rows):
        none = np.zeros(0, dtype=np.int64)
        return none, none, none
    communicator, seq = inside.communicator[rows], inside.seq[rows]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(communicator)) + 1])
    low = np.zeros(int(communicator[-1]) + 1, dtype=np.int64)
    low[communicator[starts]] = np.minimum.reduceat(seq, starts)
    offset = seq - low[communicator]
    width = int(offset.max()) + 1
    if width * len(low) > _TABLE:  # a member is far ahead: use ranks of the offsets instead of the offsets
        keys, dense = np.unique(np.stack([communicator, offset]), axis=1, return_inverse=True)
        first = np.searchsorted(keys[0], keys[0])
        offset = (np.arange(keys.shape[1]) - first)[dense.reshape(-1)]
        real = keys[1]
        offset = np.minimum(offset, LEVELS - 1)
        place = first + np.minimum(np.arange(keys.shape[1]) - first, LEVELS - 1)
        used, node_of = np.unique(place[dense.reshape(-1)], return_inverse=True)
        return keys[0][used], real[used] + low[keys[0][used]], node_of.reshape(-1)
    flags = np.zeros((len(low), width), dtype=np.bool_)
    flags[communicator, offset] = True
    if width > LEVELS:
        level = np.cumsum(flags, axis=1)
        last = np.argmax(level >= LEVELS, axis=1)
        behind = level[:, -1] > LEVELS
        offset = np.where(behind[communicator], np.minimum(offset, last[communicator]), offset)
        flags[:] = False
        flags[communicator, offset] = True
    number = np.cumsum(flags.reshape(-1)) - 1
    which, what = np.nonzero(flags)
    return which, low[which] + what, number[communicator * width + offset]


def _blockers(
    evidence: Evidence, inside: PendingCollectives, communicator: IntArray, seq: IntArray, since: FloatArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(blocker, node) and (suspect, node) rows of collective nodes."""
    members, liveness = evidence.communicators, evidence.processes.liveness[evidence.communicators.process]
    gone = (liveness != Liveness.RUNNING) & (liveness != Liveness.UNSEEN)
    firm = (members.entered >= 0) & (liveness != Liveness.UNSEEN)
    if members.uncertain is not None:
        firm &= ~members.uncertain
    seen = evidence.processes.seen_at
    seen = None if seen is None else seen[members.process]
    found: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    first = np.searchsorted(communicator, communicator)
    level = np.arange(len(communicator)) - first
    all_rows = np.arange(len(members.process))
    for depth in range(int(level.max()) + 1 if len(level) else 0):
        nodes = np.flatnonzero(level == depth)
        node_of = np.full(len(members.info), -1, dtype=np.int64)
        node_of[communicator[nodes]] = nodes
        rows = all_rows if len(nodes) == len(members.info) else _membership_rows(members, communicator[nodes])
        node = node_of[inside.communicator[rows]]
        late = members.entered[rows] < seq[node]
        out = gone[rows] & (members.completed[rows] < seq[node])
        sure = firm[rows]
        if seen is not None:  # a state from before the wait proves nothing
            sure = sure & (seen[rows] >= since[node])
        blocks, may = out | (late & sure), late & ~sure & ~gone[rows]
        found.append((members.process[rows[blocks]], node[blocks], members.process[rows[may]], node[may]))
    if not found:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none, none
    one, two, three, four = (np.concatenate(column) for column in zip(*found, strict=True))
    return one, two, three, four


def _membership_rows(members: MembershipTable, of: IntArray) -> IntArray:
    """The rows of the memberships of some communicators."""
    sizes = members.starts[of + 1] - members.starts[of]
    ends = np.cumsum(sizes)
    rows: IntArray = np.arange(int(ends[-1])) + np.repeat(members.starts[of] - (ends - sizes), sizes)
    return rows


def _blocking_edges(evidence: Evidence) -> list[tuple[int, WaitEdge, tuple[int, ...]]]:
    """The edges that hold up a process, by index, and their actual targets: in a rendezvous the processes that have not
    joined, and no idle processes, unless all targets are idle."""
    liveness = evidence.processes.liveness
    idle = {edge.process for edge in evidence.edges if edge.idle and edge.main}
    there: dict[str, set[int]] = {}
    for edge in evidence.edges:
        if edge.rendezvous:
            there.setdefault(edge.rendezvous, set()).add(edge.process)
    found = []
    for index, edge in enumerate(evidence.edges):
        if not edge.main or edge.idle or liveness[edge.process] != Liveness.RUNNING:
            continue
        on = tuple(each for each in edge.on if each not in there[edge.rendezvous]) if edge.rendezvous else edge.on
        if edge.needs is WaitCondition.ALL and idle:
            on = tuple(each for each in on if each not in idle)
        found.append((index, edge, on))
    return found


def _since(edge: WaitEdge) -> float:
    return float(np.fmax(edge.since, edge.progressed_at))


def find_permanently_blocked(graph: WaitGraph) -> tuple[BoolArray, BoolArray]:
    """Masks of the processes and nodes whose waits no process can end: `[processes]`, `[nodes]`.

    A process that does not wait is assumed to proceed, and so is a node without a known blocker. Whatever they can end,
    directly or indirectly, is not blocked permanently; the rest contains a cycle or a knot.
    """
    held_process = graph.waiting()
    blocks = np.flatnonzero(held_process[graph.block_process])
    waits = np.arange(len(graph.wait_process))
    any_of = np.flatnonzero(graph.any_of)
    while True:
        held_node = np.zeros(len(graph.seq), dtype=np.bool_)
        held_node[graph.block_node[blocks]] = True
        if len(any_of):
            free = np.zeros(len(graph.seq), dtype=np.bool_)
            free[graph.block_node[~held_process[graph.block_process]]] = True
            held_node[any_of] &= ~free[any_of]
        waits = waits[held_node[graph.wait_node[waits]]]
        now = np.zeros(graph.processes, dtype=np.bool_)
        now[graph.wait_process[waits]] = True
        if now.sum() == held_process.sum():
            return now, held_node
        held_process = now
        blocks = blocks[now[graph.block_process[blocks]]]


def node_dependencies(graph: WaitGraph, process: BoolArray, node: BoolArray) -> tuple[IntArray, IntArray]:
    """Pairs of the given nodes: X waits for Y because a blocker of X waits in Y. Each pair once."""
    blocks = node[graph.block_node] & process[graph.block_process]
    waits = node[graph.wait_node] & process[graph.wait_process]
    owner, where = graph.wait_process[waits], graph.wait_node[waits]
    order = np.argsort(owner, kind="stable")
    owner, where = owner[order], where[order]
    blocked, blocker = graph.block_node[blocks], graph.block_process[blocks]
    first, last = np.searchsorted(owner, blocker), np.searchsorted(owner, blocker, side="right")
    counts = last - first
    ends = np.cumsum(counts)
    steps = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    target = where[np.repeat(first, counts) + steps]
    source = np.repeat(blocked, counts)
    key = np.unique(source * np.int64(len(graph.seq)) + target)
    return key // len(graph.seq), key % len(graph.seq)


def find_cycles_and_knots(graph: WaitGraph) -> list[IntArray]:
    """The cycles and knots: sets of nodes that wait for each other and for no process that could end the wait."""
    held_process, held_node = find_permanently_blocked(graph)
    if not held_node.any():
        return []
    source, target = node_dependencies(graph, held_process, held_node)
    following: dict[int, list[int]] = {}
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        following.setdefault(a, []).append(b)
    found = []
    for part in strongly_connected_components(following):
        inside = set(part)
        if len(part) == 1 and part[0] not in following.get(part[0], ()):
            continue
        leaves = any(after not in inside for each in part if graph.any_of[each] for after in following[each])
        if not leaves:
            found.append(np.array(sorted(part), dtype=np.int64))
    return found


def strongly_connected_components(following: dict[int, list[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan 1972), without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in following:
        if root in index:
            continue
        work = [(root, iter(following.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for after in rest:
                if after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    on_stack.add(after)
                    work.append((after, iter(following.get(after, ()))))
                    break
                if after in on_stack:
                    low[node] = min(low[node], index[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    part = [stack.pop()]
                    while part[-1] != node:
                        part.append(stack.pop())
                    on_stack.difference_update(part)
                    found.append(part)
    return found


def reachable_from_stalled(graph: WaitGraph) -> BoolArray:
    """`[nodes]`: the stalled nodes and all that they wait for, directly or indirectly."""
    mask = graph.stalled.copy()
    process = np.zeros(graph.processes, dtype=np.bool_)
    while True:
        process[graph.block_process[mask[graph.block_node]]] = True
        new = mask.copy()
        new[graph.wait_node[process[graph.wait_process]]] = True
        if (new == mask).all():
            return mask
        mask = new
