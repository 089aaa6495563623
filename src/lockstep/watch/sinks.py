"""Who is at the end of the waits: processes that others wait for and that wait for nobody."""

from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.watch.classify import ending, of_end
from lockstep.watch.evidence import Edge
from lockstep.watch.facts import Life
from lockstep.watch.finding import STILL_AT_MOST, Case, Finding
from lockstep.watch.graph import Bools, Graph
from lockstep.watch.stillness import Stillness, in_words, proven_still, stillness
from lockstep.watch.verdict import Alternative, Fact, Kind, Level

_MANY = 64
"""So many running processes at most are looked at one by one: those that are still for the longest time."""


def sinks(case: Case, graph: Graph, reached: Bools) -> list[Finding]:
    """Findings about everybody at an end, the dead excepted (they are judged whether waited for or not)."""
    waiting = graph.waiting()
    rows = np.flatnonzero(reached[graph.block_node] & ~waiting[graph.block_process])
    blocked: dict[int, list[int]] = {}
    for process, node in zip(graph.block_process[rows].tolist(), graph.block_node[rows].tolist(), strict=True):
        if not _another_will_do(case, graph, waiting, node, process):
            blocked.setdefault(process, []).append(node)
    found = _left(case, graph, {p: nodes for p, nodes in blocked.items() if case.life(p) is Life.LEFT})
    running = {p: nodes for p, nodes in blocked.items() if case.life(p) is Life.RUNNING and not case.note(p).ours}
    for process in _stillest(case, running):
        found += _running(case, graph, process, running[process])
    for process, nodes in blocked.items():
        if case.life(process) is Life.UNSEEN:
            found += _never_came(case, graph, process, nodes)
    return found


def _another_will_do(case: Case, graph: Graph, waiting: Bools, node: int, process: int) -> bool:
    """One of several is enough, and there is another that can still come."""
    if not graph.any_of[node]:
        return False
    for other in graph.blockers(node):
        if other == process or case.life(other) is not Life.RUNNING or waiting[other]:
            continue
        if not stillness(case, other).all_s >= case.patience.notice_s:
            return True
    return False


def _stillest(case: Case, running: Iterable[int]) -> list[int]:
    everybody = list(running)
    if len(everybody) <= _MANY:
        return everybody
    processes = np.array(everybody, dtype=np.int64)
    last = np.nan_to_num(case.last_moved[processes], nan=np.inf)
    chosen = processes[np.argsort(last, kind="stable")[:_MANY]]
    late = case.at - case.last_moved[chosen] >= case.patience.notice_s
    return [int(each) for each in chosen[late]]


def stopped(case: Case, reached: Bools | None) -> list[Finding]:
    """Who is stopped by a signal or a debugger, waited for or not; not when all are: somebody suspended the job."""
    life = case.evidence.processes.life
    all_stopped = not ((life == Life.RUNNING) | (life == Life.DEAD)).any()
    found = []
    for process in np.flatnonzero(life == Life.STOPPED).tolist():
        if case.note(process).ours:
            continue
        node, since = what_it_holds_up(case, process, reached)
        began = float(case.evidence.processes.ended_at[process])
        if np.isnan(began):
            last = case.moved(process)
            began = since if np.isnan(last) else last
        if not case.now(process) - began >= case.patience.notice_s:
            continue  # a look at its stack stops a process for a moment; what was since the last look nobody knows
        sure = not all_stopped
        found.append(
            Finding(
                Kind.ABSENT,
                Level.CONFIRMED if sure else Level.NOTICE,
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


def what_it_holds_up(case: Case, process: int, reached: Bools | None) -> tuple[int | None, float]:
    """The node that it blocks in which somebody waits for the longest time, and since when."""
    graph = case.graph
    if graph is None or reached is None:
        return None, float("nan")
    nodes = graph.block_node[graph.block_process == process]
    if reached[nodes].any():
        nodes = nodes[reached[nodes]]
    return longest(graph, nodes.tolist())


def longest(graph: Graph, nodes: Sequence[int]) -> tuple[int | None, float]:
    """The node in which somebody waits for the longest time, and since when; collectives before other waits, which
    only tell that somebody waits for the one who waits."""
    if not nodes:
        return None, float("nan")
    node = min(nodes, key=lambda each: (bool(graph.edge[each] >= 0), graph.since[each], each))
    since = float(graph.since[node])
    return node, since if np.isfinite(since) else float("nan")


def lost(case: Case, graph: Graph | None, reached: Bools | None) -> list[Finding]:
    """Hosts that are not heard of, one finding for each whose processes are waited for."""
    if graph is None or reached is None:
        return []
    life = case.evidence.processes.life
    rows = reached[graph.block_node] & (life[graph.block_process] == Life.LOST)
    hosts: dict[str, list[int]] = {}
    for process in np.unique(graph.block_process[rows]).tolist():
        hosts.setdefault(case.evidence.processes.who[process].host, []).append(process)
    found = []
    seen_at = case.evidence.processes.seen_at
    for host, processes in hosts.items():
        nodes = graph.block_node[rows & np.isin(graph.block_process, processes)]
        node, since = longest(graph, nodes.tolist())
        seen = since if seen_at is None else float(np.max(seen_at[processes]))
        proven = case.at - seen >= case.patience.still_s
        found.append(
            Finding(
                Kind.ABSENT,
                Level.CONFIRMED if proven else Level.NOTICE,
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


def _left(case: Case, graph: Graph, blocked: dict[int, list[int]]) -> list[Finding]:
    found: list[Finding] = []
    extra: set[int] = set()
    for process, nodes in blocked.items():
        if case.note(process).ours:
            continue
        collectives = [node for node in nodes if graph.edge[node] < 0]
        minority = next((node for node in collectives if _few_entered(case, graph, node)), None)
        if minority is not None:
            if minority not in extra:
                extra.add(minority)
                found.append(_one_too_many(case, graph, minority))
            continue
        node, _ = longest(graph, nodes)
        cause = of_end(Life.LEFT, 0, case.note(process))
        sure = not collectives or any(_most_entered(case, graph, each) for each in collectives)
        starved = all(graph.any_of[each] for each in nodes)
        found.append(
            Finding(
                Kind.STARVED if starved else Kind.DEAD,
                Level.CONFIRMED,
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


def _entered(case: Case, graph: Graph, node: int) -> tuple[int, int, int]:
    """How many members have entered, how many have left without, and how many there are."""
    members = case.members(int(graph.communicator[node]))
    entered = case.evidence.communicators.entered[members] >= graph.seq[node]
    life = case.evidence.processes.life[case.evidence.communicators.process[members]]
    return int(entered.sum()), int(((life == Life.LEFT) & ~entered).sum()), len(entered)


def _few_entered(case: Case, graph: Graph, node: int) -> bool:
    """More members have left in peace than have entered: those who entered made one too many."""
    entered, gone, size = _entered(case, graph, node)
    return gone > entered and 2 * gone > size


def _most_entered(case: Case, graph: Graph, node: int) -> bool:
    entered, _, size = _entered(case, graph, node)
    return 2 * entered > size


def _one_too_many(case: Case, graph: Graph, node: int) -> Finding:
    return Finding(
        Kind.MISMATCH,
        Level.CONFIRMED,
        0.75,
        "has entered {collective}, which the others never did before they ended with exit code 0",
        tuple(graph.waiters(node)),
        node=node,
        since=float(graph.since[node]),
        cause="unknown",
        alternatives=(Alternative("uneven_data", 0.5), Alternative("rank_divergent_branch", 0.4)),
        structural=True,
    )


def _never_came(case: Case, graph: Graph, process: int, nodes: list[int]) -> list[Finding]:
    node, since = longest(graph, nodes)
    unplaced = _unplaced(case, case.role(process))
    looks = [stillness(case, each) for each in unplaced]
    if any(each.moves(case.patience.notice_s) and not each.burns(case.patience.notice_s) for each in looks):
        return []  # somebody is on the way
    proven = case.at - since >= case.patience.still_s and not unplaced
    meeting = _meeting(case, graph, node) if node is not None else ""
    perhaps = f"it may be {_one_of(case, unplaced)}" if unplaced else "no such process is known here"
    return [
        Finding(
            Kind.ABSENT,
            Level.CONFIRMED if proven else Level.NOTICE,
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


def _unplaced(case: Case, role: str) -> list[int]:
    """Living processes that are there and have no rank yet."""
    living = (Life.RUNNING, Life.STOPPED)
    who = case.evidence.processes.who
    return [p for p, each in enumerate(who) if each.role == role and each.rank < 0 and case.life(p) in living]


def _one_of(case: Case, processes: list[int]) -> str:
    """With the line that each is in."""
    named = [(case.evidence.processes.who[p].name, case.note(p).where) for p in processes[:3]]
    more = f" or one of {len(processes) - 3} more" if len(processes) > 3 else ""
    return " or ".join(f"{name} in {where}" if where else name for name, where in named) + more


def _running(case: Case, graph: Graph, process: int, nodes: list[int]) -> list[Finding]:
    """A running process that others wait for and that waits for nobody, as far as is known."""
    node, since = longest(graph, [each for each in nodes if graph.stalled[each]] or nodes)
    assert node is not None
    order = case.idle.get(process)
    if order is not None and any(case.life(each) is not Life.RUNNING for each in order.on):
        return []  # who gives it its orders cannot
    found, notice_s = stillness(case, process), case.patience.notice_s
    collective, moves, burns = bool(graph.edge[node] < 0), found.moves(notice_s), found.burns(notice_s)
    slow = moves and not burns and _far_behind(case, graph, process, node)
    if moves and not burns and not slow and found.unproductive_s(case.at - since) < case.unhurried(process):
        return []  # it works, and nobody works faster
    unclear = bool(case.unclear[process])
    proven = proven_still(case, process, since) and not unclear
    confidence = 0.45 if burns else 0.3 if moves else 0.5
    if proven:
        confidence = 0.7 if np.isnan(found.stack_s) else STILL_AT_MOST
    return [
        Finding(
            Kind.SLOW if slow else Kind.ABSENT,
            Level.CONFIRMED if proven else Level.NOTICE,
            confidence,
            "has not entered {collective}" if collective else _no_answer(case, graph, node),
            (process,),
            node=node,
            since=since,
            cause="rendezvous_incomplete" if _meeting(case, graph, node) else "unknown",
            alternatives=_suspicions(case, process, slow),
            facts=in_words(case, process),
            collect=_missing(case, process, found, unclear),
        )
    ]


def _meeting(case: Case, graph: Graph, node: int) -> str:
    """The meeting that a node is about, if it is."""
    return case.evidence.edges[int(graph.edge[node])].meeting if graph.edge[node] >= 0 else ""


def _no_answer(case: Case, graph: Graph, node: int) -> str:
    meeting = _meeting(case, graph, node)
    return f"has not joined {meeting}" if meeting else "does not answer"


def _missing(case: Case, process: int, found: Stillness, unclear: bool) -> tuple[str, ...]:
    """What would tell more of it."""
    collect = []
    if np.isnan(found.all_s):
        collect.append("whether it uses CPU, disk or network")
    if np.isnan(found.stack_s) and not case.note(process).where:
        collect.append("its stack (py-spy dump)")
    if unclear:
        collect.append("how far it is in its other communicators, and whether it is in a receive")
    return tuple(collect)


def _far_behind(case: Case, graph: Graph, process: int, node: int) -> bool:
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


def _suspicions(case: Case, process: int, slow: bool) -> tuple[Alternative, ...]:
    stage = case.evidence.processes.stage[process] if case.evidence.processes.stage else ""
    if "checkpoint" in stage:
        return (Alternative("checkpoint_timeout", 0.4),)
    if "reward" in stage or "score" in stage:
        return (Alternative("remote_service_timeout", 0.3),)
    return (Alternative("slow_rank_preprocess", 0.4),) if slow else ()


def edges_without_process(case: Case, graph: Graph, reached: Bools) -> list[Finding]:
    """Waits for somebody outside of the job, and waits that nobody can end."""
    found = []
    blocked = np.zeros(len(graph.seq), dtype=np.bool_)
    blocked[graph.block_node] = True
    for node in np.flatnonzero(reached & (graph.edge >= 0) & ~blocked).tolist():
        edge = case.evidence.edges[int(graph.edge[node])]
        since = float(graph.since[node])
        # Nobody can look at a service outside; how long it may think is what the waiter grants it.
        granted = bool(edge.outside) and edge.kind == "http" and case.at < edge.until
        proven = proven_still(case, edge.process, since) and not granted
        level, confidence = (Level.CONFIRMED, 0.7) if proven else (Level.NOTICE, 0.5)
        if edge.outside:
            cause = "remote_service_timeout" if proven and edge.kind in ("http", "async function") else "unknown"
            finding = Finding(
                Kind.ABSENT, level, confidence, "does not answer", outside=edge.outside, node=node, since=since,
                cause=cause, alternatives=(Alternative("network_blocked", 0.2),), others=(edge.process,),
            )  # fmt: skip
        elif edge.meeting:
            if stillness(case, edge.process).moves(case.patience.notice_s):
                continue
            finding = _missing_elsewhere(edge, since) if edge.elsewhere else _all_there(edge, since, level)
        else:
            finding = Finding(
                Kind.STARVED, level, min(confidence, 0.6), "waits and nobody is about to give", node=node, since=since,
                others=(edge.process, *edge.on), more="Whoever it waits for is idle.",
                collect=("what the idle ones were asked last",),
            )  # fmt: skip
        found.append(finding)
    return found


def _missing_elsewhere(edge: Edge, since: float) -> Finding:
    return Finding(
        Kind.UNKNOWN, Level.NOTICE, 0.4,
        f"all who are known here have come to {edge.meeting}; of {edge.elsewhere} of its ranks nothing is known, they "
        "are on no host that is watched",
        since=since, cause="rendezvous_incomplete", others=(edge.process,),
        collect=("what their launchers say on their hosts",),
    )  # fmt: skip


def _all_there(edge: Edge, since: float, level: Level) -> Finding:
    return Finding(
        Kind.UNKNOWN, level, 0.5, f"all have come to {edge.meeting}, and nobody goes on",
        since=since, others=(edge.process,),
        alternatives=(Alternative("rank_divergent_branch", 0.4), Alternative("network_blocked", 0.3)),
        collect=("the members that each rank makes the communicator with", "whether they reach each other's ports"),
    )  # fmt: skip


def ended(case: Case, process: int) -> str:
    """How a process ended, in words, with its exception."""
    processes, note = case.evidence.processes, case.note(process)
    said = ending(int(processes.life[process]), int(processes.exit_code[process]))
    return f"{said} ({note.error.strip().splitlines()[-1][:200]})" if note.error.strip() else said
