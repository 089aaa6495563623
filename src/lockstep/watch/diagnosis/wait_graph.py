"""The wait graph: which process waits for which, its cycles and knots, and the nodes that a stalled wait depends on.

A node is something in which processes wait: a collective (communicator, sequence number), or a wait edge of the
evidence. Processes block nodes: the members that have not entered a collective or cannot complete it block the
collective, and the targets of an edge block the edge. A device runs what its process issues in order, so a process
waits only in its oldest unfinished collective over all communicators on devices, and blocks those that it has issued
after that, or that its device has not started while another's has.

A process is blocked if one of its nodes is blocked. A collective and an ALL edge are blocked if one of their blockers
is blocked, an ANY edge if all are.

The graph consists of arrays, because in a stalled job of 16,000 ranks every rank waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.diagnosis.evidence import Evidence, FloatArray, IntArray, MembershipTable, WaitEdge
from lockstep.watch.diagnosis.evidence_types import Liveness, WaitCondition
from lockstep.watch.diagnosis.pending import PendingCollectives

BoolArray = NDArray[np.bool_]

LEVELS = 8
"""The most nodes of one communicator: waits at higher sequence numbers than the eighth count as waits at the eighth."""
_MAX_TABLE_CELLS = 1 << 22
"""The largest table of (communicator, sequence number); beyond that, sequence numbers are sorted."""


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The nodes of collectives, ordered by communicator and sequence number, followed by the nodes of edges."""

    processes: int
    communicator: IntArray
    """`[nodes]`; -1 for an edge."""
    seq: IntArray
    """`[nodes]`; -1 for an edge."""
    edge: IntArray
    """`[nodes]`: the index in the evidence's edges; -1 for a collective."""
    any_of: BoolArray
    """`[nodes]`: true if any one of the blockers can end the wait."""
    since: FloatArray
    """`[nodes]`: the start of the longest wait in the node."""
    stalled: BoolArray
    """`[nodes]`: true if a wait in the node has lasted longer than `notice_s`."""
    wait_process: IntArray
    """`[waits]`: the process that waits in `wait_node`."""
    wait_node: IntArray
    block_process: IntArray
    """`[blocks]`: the process that blocks `block_node`."""
    block_node: IntArray
    suspect_process: IntArray
    """`[suspects]`: a process of unknown progress that may block `suspect_node`."""
    suspect_node: IntArray

    def is_collective(self, node: int) -> bool:
        return bool(self.edge[node] < 0)

    def collective(self, node: int) -> tuple[int, int]:
        """Communicator and sequence number of a node that is a collective."""
        return int(self.communicator[node]), int(self.seq[node])

    def waiting(self) -> BoolArray:
        """`[processes]`: true for processes that wait in some node."""
        return mask_of(self.processes, self.wait_process)

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


def mask_of(size: int, at: IntArray | Sequence[int]) -> BoolArray:
    """`[size]`: true at the given indices."""
    mask = np.zeros(size, dtype=np.bool_)
    mask[at] = True
    return mask


def build_wait_graph(
    evidence: Evidence, pending: PendingCollectives, notice_s: float, always: bool = False
) -> WaitGraph:
    """Builds the graph. It is empty if no wait is longer than `notice_s`, unless `always`."""
    rows = np.flatnonzero(pending.waits)
    since = pending.since[rows]
    is_late = ~(_observed_at(evidence, evidence.communicators.process[rows]) - since < notice_s)
    edges = _blocking_edges(evidence)
    late_edges = [
        not float(_observed_at(evidence, edge.process)) - _edge_since(edge) < notice_s for _, edge, _ in edges
    ]
    if not (always or is_late.any() or any(late_edges)):
        rows, since, is_late, edges, late_edges = rows[:0], since[:0], is_late[:0], [], []
    communicator, seq, node_of = _collective_nodes(pending, rows)
    collectives = len(communicator)
    node_since = np.full(collectives + len(edges), np.inf)
    np.minimum.at(node_since, node_of, np.where(np.isnan(since), -np.inf, since))
    stalled = np.append(mask_of(collectives, node_of[is_late]), np.array(late_edges, dtype=np.bool_))
    blocks = _blockers(evidence, pending, communicator, seq, node_since)
    block_process, block_node, suspect_process, suspect_node = blocks
    node_since[collectives:] = [_edge_since(edge) for _, edge, _ in edges]
    edge_blocks = [(process, number) for number, (_, _, on) in enumerate(edges, collectives) for process in on]
    edge_block_rows = np.array(edge_blocks, dtype=np.int64).reshape(-1, 2)
    no_collective = np.full(len(edges), -1, dtype=np.int64)
    return WaitGraph(
        processes=len(evidence.processes.info),
        communicator=np.concatenate([communicator, no_collective]),
        seq=np.concatenate([seq, no_collective]),
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
        block_process=np.concatenate([block_process, edge_block_rows[:, 0]]),
        block_node=np.concatenate([block_node, edge_block_rows[:, 1]]),
        suspect_process=suspect_process,
        suspect_node=suspect_node,
    )


def _observed_at(evidence: Evidence, process: IntArray | int) -> FloatArray | float:
    """When processes were last observed, and so the last time at which their waits are known to last."""
    seen = evidence.processes.seen_at
    return evidence.at if seen is None else np.asarray(np.fmin(seen[process], evidence.at))


def _collective_nodes(pending: PendingCollectives, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Communicator and sequence number of each node, and the node of each row. Avoids sorting unless sequence
    numbers are far apart."""
    if not len(rows):
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    communicator, seq = pending.communicator[rows], pending.seq[rows]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(communicator)) + 1])
    lowest = np.zeros(int(communicator[-1]) + 1, dtype=np.int64)
    lowest[communicator[starts]] = np.minimum.reduceat(seq, starts)
    offset = seq - lowest[communicator]
    width = int(offset.max()) + 1
    if width * len(lowest) > _MAX_TABLE_CELLS:  # a member is far ahead: number the distinct offsets
        keys, dense = np.unique(np.stack([communicator, offset]), axis=1, return_inverse=True)
        first = np.searchsorted(keys[0], keys[0])
        place = first + np.minimum(np.arange(keys.shape[1]) - first, LEVELS - 1)
        used, node_of = np.unique(place[dense.reshape(-1)], return_inverse=True)
        return keys[0][used], keys[1][used] + lowest[keys[0][used]], node_of.reshape(-1)
    flags = np.zeros((len(lowest), width), dtype=np.bool_)
    flags[communicator, offset] = True
    if width > LEVELS:
        level = np.cumsum(flags, axis=1)
        last = np.argmax(level >= LEVELS, axis=1)
        exceeds = level[:, -1] > LEVELS
        offset = np.where(exceeds[communicator], np.minimum(offset, last[communicator]), offset)
        flags[:] = False
        flags[communicator, offset] = True
    node_number = np.cumsum(flags.reshape(-1)) - 1
    node_communicator, node_offset = np.nonzero(flags)
    return node_communicator, lowest[node_communicator] + node_offset, node_number[communicator * width + offset]


def _blockers(
    evidence: Evidence, pending: PendingCollectives, communicator: IntArray, seq: IntArray, since: FloatArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """The columns `block_process`, `block_node`, `suspect_process` and `suspect_node` of the collective nodes."""
    if not len(communicator):
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty, empty
    members, liveness = evidence.communicators, evidence.processes.liveness[evidence.communicators.process]
    has_left = (liveness != Liveness.RUNNING) & (liveness != Liveness.UNSEEN)
    is_known = (members.entered >= 0) & (liveness != Liveness.UNSEEN)
    if members.uncertain is not None:
        is_known &= ~members.uncertain
    seen = evidence.processes.seen_at
    seen = None if seen is None else seen[members.process]
    found: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    first = np.searchsorted(communicator, communicator)
    depth_of_node = np.arange(len(communicator)) - first
    all_rows = np.arange(len(members.process))
    for depth in range(int(depth_of_node.max()) + 1):
        nodes = np.flatnonzero(depth_of_node == depth)
        node_of = np.full(len(members.info), -1, dtype=np.int64)
        node_of[communicator[nodes]] = nodes
        rows = all_rows if len(nodes) == len(members.info) else _membership_rows(members, communicator[nodes])
        node = node_of[pending.communicator[rows]]
        not_reached = pending.reached[rows] < seq[node]
        will_not_complete = has_left[rows] & (members.completed[rows] < seq[node])
        is_certain = is_known[rows]
        if seen is not None:  # a report from before the wait proves nothing
            is_certain = is_certain & (seen[rows] >= since[node])
        blocks, may_block = will_not_complete | (not_reached & is_certain), not_reached & ~is_certain & ~has_left[rows]
        found.append((members.process[rows[blocks]], node[blocks], members.process[rows[may_block]], node[may_block]))
    one, two, three, four = (np.concatenate(column) for column in zip(*found, strict=True))
    return one, two, three, four


def _membership_rows(members: MembershipTable, communicators: IntArray) -> IntArray:
    """The rows of the memberships of the given communicators."""
    return join_ranges(members.starts[communicators], members.starts[communicators + 1])


def join_ranges(first: IntArray, last: IntArray) -> IntArray:
    """The numbers of the ranges from `first` to before `last`, one range after the other."""
    sizes = last - first
    ends = np.cumsum(sizes)
    numbers: IntArray = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - (ends - sizes), sizes)
    return numbers


def _blocking_edges(evidence: Evidence) -> list[tuple[int, WaitEdge, tuple[int, ...]]]:
    """The edges that block a process, each with its index and its blockers: in a rendezvous the processes that have not
    joined, else the targets, without idle processes if the edge waits for all of its targets."""
    liveness = evidence.processes.liveness
    idle = {edge.process for edge in evidence.edges if edge.idle and edge.main}
    joined: dict[str, set[int]] = {}
    for edge in evidence.edges:
        if edge.rendezvous:
            joined.setdefault(edge.rendezvous, set()).add(edge.process)
    found = []
    for index, edge in enumerate(evidence.edges):
        if not edge.main or edge.idle or liveness[edge.process] != Liveness.RUNNING:
            continue
        on = tuple(each for each in edge.on if each not in joined[edge.rendezvous]) if edge.rendezvous else edge.on
        if edge.needs is WaitCondition.ALL and idle:
            on = tuple(each for each in on if each not in idle)
        found.append((index, edge, on))
    return found


def _edge_since(edge: WaitEdge) -> float:
    return float(np.fmax(edge.since, edge.progressed_at))


def find_permanently_blocked(graph: WaitGraph) -> tuple[BoolArray, BoolArray]:
    """Masks of the processes and nodes whose waits no process can end: `[processes]`, `[nodes]`.

    A process that does not wait is assumed to proceed, and so is a node without a known blocker. A wait that they can
    end, directly or indirectly, is not permanent; the remaining waits contain a cycle or a knot.
    """
    blocked_process = graph.waiting()
    blocks = np.flatnonzero(blocked_process[graph.block_process])
    waits = np.arange(len(graph.wait_process))
    any_of = np.flatnonzero(graph.any_of)
    while True:
        blocked_node = mask_of(len(graph.seq), graph.block_node[blocks])
        if len(any_of):
            can_proceed = mask_of(len(graph.seq), graph.block_node[~blocked_process[graph.block_process]])
            blocked_node[any_of] &= ~can_proceed[any_of]
        waits = waits[blocked_node[graph.wait_node[waits]]]
        still_blocked = mask_of(graph.processes, graph.wait_process[waits])
        if still_blocked.sum() == blocked_process.sum():
            return still_blocked, blocked_node
        blocked_process = still_blocked
        blocks = blocks[still_blocked[graph.block_process[blocks]]]


def node_dependencies(graph: WaitGraph, process: BoolArray, node: BoolArray) -> tuple[IntArray, IntArray]:
    """The pairs (X, Y) of the given nodes for which a blocker of X waits in Y. Each pair occurs once."""
    blocks = node[graph.block_node] & process[graph.block_process]
    waits = node[graph.wait_node] & process[graph.wait_process]
    owner, where = graph.wait_process[waits], graph.wait_node[waits]
    order = np.argsort(owner, kind="stable")
    owner, where = owner[order], where[order]
    blocked, blocker = graph.block_node[blocks], graph.block_process[blocks]
    first, last = np.searchsorted(owner, blocker), np.searchsorted(owner, blocker, side="right")
    target = where[join_ranges(first, last)]
    source = np.repeat(blocked, last - first)
    key = np.unique(source * np.int64(len(graph.seq)) + target)
    return key // len(graph.seq), key % len(graph.seq)


def find_cycles_and_knots(graph: WaitGraph) -> list[IntArray]:
    """The cycles and knots, as sets of nodes whose waits depend on each other and on no process that could end them."""
    blocked_process, blocked_node = find_permanently_blocked(graph)
    if not blocked_node.any():
        return []
    source, target = node_dependencies(graph, blocked_process, blocked_node)
    following: dict[int, list[int]] = {}
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        following.setdefault(a, []).append(b)
    found = []
    for part in strongly_connected_components(following):
        inside = set(part)
        if len(part) == 1 and part[0] not in following.get(part[0], ()):
            continue
        can_end = any(after not in inside for each in part if graph.any_of[each] for after in following[each])
        if not can_end:
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
