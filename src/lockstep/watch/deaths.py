"""Deaths: which came by themselves, and which are what the others saw of them."""

from collections.abc import Sequence

import numpy as np

from lockstep.watch.classify import Cause, freed, of_end, refused
from lockstep.watch.facts import NO_CODE, Life
from lockstep.watch.finding import Case, Finding
from lockstep.watch.graph import Bools
from lockstep.watch.sinks import ended, what_it_holds_up
from lockstep.watch.stillness import proven_still, stillness
from lockstep.watch.verdict import Alternative, Fact, Kind, Level

OWN = 0.85
"""From here on an end speaks for itself (a crash, a kill, an exception of its own)."""
TOGETHER_S = 0.1
"""Deaths this near to each other have no order: clocks and reapers are no better."""
TEARDOWN_S = 10.0
"""A process that raised may need so long to end, while those that its sockets' end tells of it end at once."""
AFTERMATH_S = 5.0
"""Who is killed so long after another died was killed for it, by a launcher."""


def deaths(case: Case, reached: Bools | None) -> list[Finding]:
    """The deaths that are causes; of each incident the first, and those that do not look like effects."""
    life = case.evidence.processes.life
    dead = [int(p) for p in np.flatnonzero(life == Life.DEAD) if not _meant(case, int(p))]
    dead = [p for p in dead if not _unremarked(case, p, reached)]
    if not dead:
        return []
    causes = {p: of_end(Life.DEAD, int(case.evidence.processes.exit_code[p]), case.note(p)) for p in dead}
    groups: dict[int, list[int]] = {}
    label = case.incident_of if len(dead) > 1 else np.zeros(len(life), dtype=np.int64)
    for process in dead:
        groups.setdefault(int(label[process]), []).append(process)
    found = []
    for group in groups.values():
        culprits = _first(case, group, causes)
        if all(causes[p].own < OWN for p in culprits):
            behind = _behind(case, culprits)
            found += behind
            if any(each.level is Level.CONFIRMED for each in behind):
                continue
        for process in culprits:
            found.append(_finding(case, process, causes[process], sorted(set(group) - set(culprits)), reached))
    return found


def _meant(case: Case, process: int) -> bool:
    """Its end was asked for, or it ended by the verdict that freed it: that has been told."""
    note = case.note(process)
    return note.ours or freed(note.error)


def _unremarked(case: Case, process: int, reached: Bools | None) -> bool:
    """Nobody knows how it ended, and nobody has waited for it for long: so do those end whose job is over, whoever
    looked too late to see it."""
    note = case.note(process)
    if int(case.evidence.processes.exit_code[process]) != NO_CODE or note.error or note.cause:
        return False
    if case.graph is None or reached is None:
        return True
    nodes = case.graph.block_node[case.graph.block_process == process]
    waited = case.graph.since[nodes[reached[nodes]]]
    return not (case.at - waited >= case.patience.notice_s).any()


def _first(case: Case, group: Sequence[int], causes: dict[int, Cause]) -> list[int]:
    """Who died of itself. Where no end speaks for itself: who died first."""
    ended_at = {p: float(np.nan_to_num(case.evidence.processes.ended_at[p], nan=np.inf)) for p in group}
    own = [p for p in group if causes[p].own >= OWN]
    if own:
        first = min(ended_at[p] for p in own)
        kept = [p for p in own if not (_is_kill(case, p) and ended_at[p] > first + AFTERMATH_S)]
        earlier = [p for p in group if p not in own and ended_at[p] < first - TEARDOWN_S]
        return sorted(kept + (_earliest(earlier, ended_at, causes) if earlier else []))
    return _earliest(group, ended_at, causes)


def _earliest(group: Sequence[int], ended_at: dict[int, float], causes: dict[int, Cause]) -> list[int]:
    real = [p for p in group if causes[p].own > 0.3] or list(group)
    first = min(ended_at[p] for p in real)
    together = [p for p in real if ended_at[p] <= first + TOGETHER_S or not np.isfinite(ended_at[p])]
    best = max(causes[p].own for p in together)
    return sorted(p for p in together if causes[p].own == best)


def _behind(case: Case, dead: Sequence[int]) -> list[Finding]:
    """Whom those waited for that ended by what looks like an effect: members that had not entered what they were in,
    and that left before them, or stand still since before their end."""
    members, processes = case.evidence.communicators, case.evidence.processes
    late: dict[int, tuple[int, int, float, float]] = {}
    for process in dead:
        for row in np.flatnonzero((members.process == process) & (members.entered > 0)).tolist():
            rows = case.members(int(case.inside.communicator[row]))
            behind = (members.entered[rows] >= 0) & (members.entered[rows] < members.entered[row])
            for other in members.process[rows][behind].tolist():
                place = int(case.inside.communicator[row]), int(members.entered[row])
                late.setdefault(other, (*place, float(members.entered_at[row]), float(processes.ended_at[process])))
    found = []
    for other, (communicator, seq, since, ended_at) in sorted(late.items()):
        left = case.life(other) is Life.LEFT and not processes.ended_at[other] > ended_at + 1.0
        still = stillness(case, other).all_s >= case.patience.notice_s and case.moved(other) <= ended_at
        if case.note(other).ours or not (left or (still and case.life(other) is Life.RUNNING)):
            continue
        proven = left or (proven_still(case, other, since) and not case.unclear[other])
        found.append(
            Finding(
                Kind.DEAD if left else Kind.ABSENT, Level.CONFIRMED if proven else Level.NOTICE, 0.7 if proven else 0.5,
                f"has {'ended with exit code 0' if left else 'not entered {collective}, for which others gave up'}",
                (other,), collective=(communicator, seq), structural=left, others=tuple(dead),
                since=float(processes.ended_at[other]) if left else since,
                alternatives=(Alternative("uneven_data", 0.5),) if left else (),
                facts=tuple(Fact(f"{processes.who[p].name} {ended(case, p)}", "its parent") for p in dead[:4]),
            )
        )  # fmt: skip
    return found


def _is_kill(case: Case, process: int) -> bool:
    return int(case.evidence.processes.exit_code[process]) in (-9, 137)


def _finding(case: Case, process: int, cause: Cause, effects: list[int], reached: Bools | None) -> Finding:
    node, _ = what_it_holds_up(case, process, reached)
    who = case.evidence.processes.who
    later = [f"{who[p].name} {ended(case, p)}" for p in effects[:4]]
    facts = [Fact(f"{who[process].name} {ended(case, process)}", "its parent")]
    facts += [Fact(f"{each}, later or as an effect", "its parent") for each in later]
    unknown = cause.name == "unknown"
    return Finding(
        Kind.DEAD,
        Level.NOTICE if refused(case.note(process).error) else Level.CONFIRMED,  # the calls tell who was wrong
        cause.own,
        ended(case, process),
        (process,),
        node=node,
        since=float(case.evidence.processes.ended_at[process]),
        cause=cause.name,
        alternatives=cause.alternatives,
        facts=tuple(facts),
        collect=("the last lines of its log, and the kernel log of its host (dmesg)",) if unknown else (),
        structural=True,
        others=tuple(effects),
    )
