"""Collectives that everybody has entered: some completed and others did not, or nobody did; and those of which too
little is known."""

from collections.abc import Collection
from operator import attrgetter

import numpy as np

from lockstep.watch.cycles import out_of_order
from lockstep.watch.facts import Life
from lockstep.watch.finding import Case, Finding
from lockstep.watch.graph import Bools, Graph
from lockstep.watch.naming import some
from lockstep.watch.stillness import all_proven_still
from lockstep.watch.verdict import Alternative, Fact, Kind, Level

PAIRS = 32
"""Collectives in flight that are compared with each other at most."""
_ASKED = 256
"""Members at most that are asked whether anything of them moves."""


def in_flight(case: Case, graph: Graph, reached: Bools, explained: Collection[int] = ()) -> list[Finding]:
    """Findings about stalled collectives that nobody is known to block, those of `explained` communicators excepted."""
    blocked = np.zeros(len(graph.seq), dtype=np.bool_)
    blocked[graph.block_node] = True
    doubtful = np.zeros(len(graph.seq), dtype=np.bool_)
    doubtful[graph.suspect_node] = True
    open_ = reached & graph.stalled & (graph.communicator >= 0) & ~blocked
    nodes = [node for node in np.flatnonzero(open_).tolist() if int(graph.communicator[node]) not in explained]
    complete = [node for node in nodes if not doubtful[node]]
    found = [_too_little(case, graph, node) for node in nodes if doubtful[node]]
    lagging = [each for node in complete if (each := _lag(case, graph, node)) is not None]
    if lagging:
        return found + lagging
    return found + _nobody_completes(case, graph, complete)


def _lag(case: Case, graph: Graph, node: int) -> Finding | None:
    """Most members have completed it, some have not."""
    waiters = graph.waiters(node) if graph.few_wait(node, _ASKED) else []
    members = case.evidence.communicators
    rows = case.members(int(graph.communicator[node]))
    done = int((members.completed[rows] >= graph.seq[node]).sum())
    if not waiters or len(waiters) >= done:
        return None
    proven = all_proven_still(case, waiters[:_ASKED], float(graph.since[node]))
    return Finding(
        Kind.DEVICE_LAG,
        Level.CONFIRMED if proven else Level.NOTICE,
        0.7 if proven else 0.5,
        f"has entered {{collective}} and not completed it, as {done} others have",
        tuple(waiters),
        node=node,
        since=float(graph.since[node]),
        alternatives=(Alternative("gpu_hardware_fault", 0.3), Alternative("network_blocked", 0.3)),
        collect=("the device's counters and the kernel log of its host", "its native stack (py-spy dump --native)"),
    )


def _nobody_completes(case: Case, graph: Graph, nodes: list[int]) -> list[Finding]:
    if not nodes:
        return []
    nodes = sorted(nodes, key=lambda each: (graph.since[each], each))
    collectives = [(int(graph.communicator[each]), int(graph.seq[each])) for each in nodes[:PAIRS]]
    odd = out_of_order(case, collectives) if len(nodes) > 1 else []
    waits = np.zeros(len(graph.seq), dtype=np.bool_)
    waits[nodes] = True
    waiters = graph.wait_process[waits[graph.wait_node]][:_ASKED].tolist()
    since = float(graph.since[nodes[0]])
    if _moves(case, waiters) and case.at - since < case.patience.busy_factor * case.patience.notice_s:
        return []  # bytes are under way
    proven = all_proven_still(case, waiters, since)
    if odd:
        return [
            Finding(
                Kind.CYCLE, Level.CONFIRMED if proven else Level.NOTICE, 0.65 if proven else 0.5,
                "entered its collectives in another order than the others", tuple(odd), node=nodes[0], since=since,
                alternatives=(Alternative("rank_divergent_branch", 0.5),), others=tuple(waiters),
            )
        ]  # fmt: skip
    culprits, hosts = _host_in_all(case, graph, nodes)
    several = len(hosts) > 1
    links = some(sorted(hosts), 4)
    return [
        Finding(
            Kind.IN_FLIGHT,
            Level.CONFIRMED if proven else Level.NOTICE,
            0.6 if proven else 0.45,
            "all members have entered {collective} and none completes it",
            tuple(culprits),
            node=nodes[0],
            since=since,
            alternatives=(Alternative("network_blocked", 0.5),) if several else (Alternative("p2p_path_broken", 0.3),),
            facts=(Fact(f"it spans the hosts {links}", "communicators"),) if several else (),
            collect=(
                "bytes and retransmits of the links between its hosts" if several else "GPU and link counters",
                "native stacks of two members (py-spy dump --native)",
            ),
        )
    ]


def _moves(case: Case, processes: list[int]) -> bool:
    """Whether any of them uses CPU, a network or a GPU."""
    rows = np.array(processes, dtype=np.int64)
    return bool((case.at - case.evidence.processes.active_at[rows] < case.patience.notice_s).any())


def _host_in_all(case: Case, graph: Graph, nodes: list[int]) -> tuple[list[int], set[str]]:
    """The processes of the one host that all collectives in flight have in common, if they have no other; all hosts."""
    who = case.evidence.processes.who
    spans: list[set[str]] = []
    for node in nodes[:PAIRS]:
        rows = case.members(int(graph.communicator[node]))
        processes = map(who.__getitem__, case.evidence.communicators.process[rows].tolist())
        spans.append(set(map(attrgetter("host"), processes)))
    hosts, common = set().union(*spans), set.intersection(*spans)
    if len(common) != 1 or all(span == hosts for span in spans):
        return [], hosts
    waiting = np.unique(graph.wait_process[np.isin(graph.wait_node, nodes)]).tolist()
    return [each for each in waiting if who[each].host in common], hosts


def _too_little(case: Case, graph: Graph, node: int) -> Finding:
    """Everybody of whom is known how far it is has entered; the one that has not is among the rest, or nobody."""
    suspects = graph.suspects(node)
    who = case.evidence.processes.who
    names = some(suspects, 4, lambda each: who[each].name)
    unseen = [each for each in suspects if case.life(each) is Life.UNSEEN]
    what = "a beacon, a dump or the log" if unseen else "the stack and the counts"
    return Finding(
        Kind.UNKNOWN,
        Level.NOTICE,
        0.4,
        "nobody is known to be late for {collective}",
        node=node,
        since=float(graph.since[node]),
        alternatives=(Alternative("absent", 0.5), Alternative("in_flight", 0.2)),
        collect=(f"{what} of {names}",),
        more=f"Nothing is known of {names}, which may be late or not.",
        others=tuple(suspects),
    )
