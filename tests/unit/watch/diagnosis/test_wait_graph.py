"""Compares the wait graph with a brute-force search and with networkx."""

from itertools import pairwise

import networkx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.watch.diagnosis.evidence import CallTable, Evidence, MembershipTable, ProcessTable, WaitEdge
from lockstep.watch.diagnosis.evidence_types import CommunicatorInfo, Liveness, ProcessInfo, WaitCondition
from lockstep.watch.diagnosis.pending import find_pending
from lockstep.watch.diagnosis.wait_graph import (
    WaitGraph,
    build_wait_graph,
    find_cycles_and_knots,
    find_permanently_blocked,
    reachable_from_stalled,
    strongly_connected_components,
)

AT = 100.0


def blank_processes(count: int) -> ProcessTable:
    return ProcessTable(
        info=[ProcessInfo(f"p{i}", "policy", i) for i in range(count)],
        liveness=np.zeros(count, dtype=np.int8),
        exit_code=np.zeros(count, dtype=np.int32),
        ended_at=np.full(count, np.nan),
        progressed_at=np.full(count, np.nan),
        active_at=np.full(count, np.nan),
        same_stack_since=np.full(count, np.nan),
    )


def no_calls() -> CallTable:
    none = np.zeros(0, dtype=np.int64)
    return CallTable(none, none, none.astype(np.uint64), {})


def with_groups(count: int, groups: list[list[int]], entered: list[int], completed: list[int]) -> Evidence:
    starts = np.cumsum([0, *(len(each) for each in groups)])
    since = np.full(len(entered), AT - 10)
    communicators = MembershipTable(
        [CommunicatorInfo(f"c{i}") for i in range(len(groups))], starts, np.array([p for each in groups for p in each]),
        np.array(entered), np.array(completed), since, since,
    )  # fmt: skip
    return Evidence(AT, blank_processes(count), communicators, no_calls())


def with_edges(count: int, edges: list[WaitEdge]) -> Evidence:
    none = np.zeros(0, dtype=np.int64)
    communicators = MembershipTable([], np.array([0]), none, none, none, none * 1.0, none * 1.0)
    return Evidence(AT, blank_processes(count), communicators, no_calls(), edges)


def graph_of(evidence: Evidence) -> WaitGraph:
    return build_wait_graph(evidence, find_pending(evidence), 3.0)


def edges_of(count: int) -> st.SearchStrategy[list[WaitEdge]]:
    """At most two waits of each process, each for up to three other processes."""

    def edge(process: int) -> st.SearchStrategy[WaitEdge]:
        others = st.lists(st.integers(0, count - 1).filter(lambda each: each != process), min_size=1, max_size=3)
        return st.builds(
            lambda on, needs: WaitEdge(process, tuple(sorted(set(on))), needs=needs, since=AT - 10), others,
            st.sampled_from(WaitCondition),
        )  # fmt: skip

    return st.tuples(*(st.lists(edge(p), max_size=2) for p in range(count))).map(
        lambda each: [one for some in each for one in some]
    )


def able_to_proceed(edges: list[WaitEdge], count: int) -> set[int]:
    """The processes that can proceed, by brute force: those that do not wait, and repeatedly those whose waits end."""
    free: set[int] = set()
    while True:
        now = {
            process
            for process in range(count)
            if all(
                (any if edge.needs is WaitCondition.ANY else all)(each in free for each in edge.on)
                for edge in edges
                if edge.process == process
            )
        }
        if now == free:
            return free
        free = now


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 7).flatmap(lambda count: st.tuples(st.just(count), edges_of(count))))
def test_permanently_blocked_processes(drawn: tuple[int, list[WaitEdge]]) -> None:
    count, edges = drawn
    if edges:
        process, _ = find_permanently_blocked(graph_of(with_edges(count, edges)))
        assert set(np.flatnonzero(process).tolist()) == set(range(count)) - able_to_proceed(edges, count)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 7).flatmap(lambda count: st.tuples(st.just(count), edges_of(count))))
def test_a_cycle_or_knot_alone_is_a_deadlock(drawn: tuple[int, list[WaitEdge]]) -> None:
    count, edges = drawn
    if not edges:
        return
    graph = graph_of(with_edges(count, edges))
    process, _ = find_permanently_blocked(graph)
    found = find_cycles_and_knots(graph)
    assert bool(found) == bool(process.any())
    for core in found:
        inside = {p for node in core.tolist() for p in graph.waiters(node)} & {
            p for node in core.tolist() for p in graph.blockers(node)
        }
        kept = [edges[int(graph.edge[node])] for node in core.tolist()]
        alone = [
            WaitEdge(e.process, tuple(p for p in e.on if p in inside or e.needs is WaitCondition.ANY), needs=e.needs)
            for e in kept
            if e.process in inside
        ]
        assert inside <= set(range(count)) - able_to_proceed([e for e in alone if e.on], count)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 12), max_size=4), max_size=13))
def test_components_equal_those_of_networkx(following: dict[int, list[int]]) -> None:
    graph = networkx.DiGraph([(a, b) for a, after in following.items() for b in after])
    graph.add_nodes_from(following)
    expected = {frozenset(each) for each in networkx.strongly_connected_components(graph)}
    assert {frozenset(each) for each in strongly_connected_components(following)} == expected


@st.composite
def collectives(draw: st.DrawFn) -> Evidence:
    """Members of random communicators, each inside a collective or not."""
    count = draw(st.integers(2, 8))
    groups, entered, completed = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        group = sorted(draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=count)))
        groups.append(group)
        for _ in group:
            done = draw(st.sampled_from([0, 1, 3, 20, 5000, 10**9]))
            completed.append(done)
            entered.append(done + draw(st.sampled_from([0, 0, 1, 2])))
    return with_groups(count, groups, entered, completed)


@settings(max_examples=300, deadline=None)
@given(collectives())
def test_waits_in_collectives_equal_those_found_by_brute_force(evidence: Evidence) -> None:
    members = evidence.communicators
    expected = networkx.DiGraph()
    waits: dict[int, set[int]] = {}
    for begin, end in pairwise(members.starts.tolist()):
        for a in range(begin, end):
            if members.entered[a] > members.completed[a]:
                late = {
                    int(members.process[b]) for b in range(begin, end) if members.entered[b] <= members.completed[a]
                }
                waits.setdefault(int(members.process[a]), set()).update(late)
    for process, others in waits.items():
        expected.add_node(process)
        expected.add_edges_from((process, each) for each in others)
    if not waits:
        assert not len(graph_of(evidence).seq)
        return
    graph = graph_of(evidence)
    assert {p for node in range(len(graph.seq)) for p in graph.waiters(node)} == set(waits)
    for process, others in waits.items():
        nodes = graph.wait_node[graph.wait_process == process]
        assert {p for node in nodes.tolist() for p in graph.blockers(node)} == others
    cyclic = {p for part in networkx.strongly_connected_components(expected) if len(part) > 1 for p in part}
    inside = {
        p
        for core in find_cycles_and_knots(graph)
        for node in core.tolist()
        for p in set(graph.waiters(node)) & set(graph.block_process[np.isin(graph.block_node, core)].tolist())
    }
    assert inside == cyclic


def test_many_sequence_numbers_that_are_far_apart() -> None:
    """Fifty members wait at different sequence numbers, one of them far behind; the others wait at least for it."""
    entered = [1, *range(1000, 1049)]
    evidence = with_groups(50, [list(range(50))], entered, [0, *(each - 1 for each in entered[1:])])
    graph = graph_of(evidence)
    assert all(0 in graph.blockers(node) for node in range(1, len(graph.seq)))
    assert reachable_from_stalled(graph).all()


def test_a_dead_or_stopped_member_blocks_and_does_not_wait() -> None:
    evidence = with_groups(3, [[0, 1, 2]], [5, 5, 5], [4, 4, 4])
    evidence.processes.liveness[:2] = [Liveness.STOPPED, Liveness.DEAD]
    graph = graph_of(evidence)
    assert graph.waiters(0) == [2]
    assert graph.blockers(0) == [0, 1]


def test_an_idle_process_that_has_answered_is_not_waited_for() -> None:
    edges = [
        WaitEdge(0, (1, 2), since=AT - 10),
        WaitEdge(1, (0,), since=AT - 10, idle=True),
        WaitEdge(3, (1,), since=AT - 10),
    ]
    graph = graph_of(with_edges(4, edges))
    assert graph.blockers(0) == [2]
    assert graph.blockers(1) == []
    assert find_cycles_and_knots(graph) == []


def test_a_process_in_the_rendezvous_is_not_waited_for() -> None:
    edges = [WaitEdge(p, tuple(q for q in range(4) if q != p), since=AT - 10, rendezvous="join") for p in range(3)]
    graph = graph_of(with_edges(4, edges))
    assert [graph.blockers(node) for node in range(3)] == [[3], [3], [3]]
    assert find_cycles_and_knots(graph) == []


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), max_size=6), st.sets(st.integers(0, 7))
)
def test_peers_are_all_processes_that_communicators_connect(groups: list[list[int]], some: set[int]) -> None:
    zeros = [0] * sum(map(len, groups))
    drawn = networkx.Graph()
    drawn.add_nodes_from(range(8))
    for group in groups:
        networkx.add_path(drawn, group)
    expected = {each for process in some for each in networkx.node_connected_component(drawn, process)} - some
    assert with_groups(8, groups, zeros, zeros).communicators.peers_of(some) == expected
