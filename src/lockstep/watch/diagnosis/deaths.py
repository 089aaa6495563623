"""Finds the deaths that are causes, among deaths that only follow from the end of another process."""

from collections.abc import Sequence

import numpy as np

from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, measure_inactivity, proven_inactive
from lockstep.watch.diagnosis.evidence_types import NO_EXIT_CODE, Liveness
from lockstep.watch.diagnosis.failure_classes import (
    FailureClass,
    class_of_exit,
    is_collective_refused,
    is_collective_stalled,
)
from lockstep.watch.diagnosis.root_cause import describe_end, longest_wait_on
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import BoolArray

SELF_CAUSED = 0.85
"""With at least this confidence, the process itself caused its failure (a crash, a kill, an exception)."""
SIMULTANEOUS_S = 0.1
"""Deaths this close together have no reliable order, because clocks and the detection of exits are less precise."""
TEARDOWN_S = 10.0
"""A process may need this long to exit after an exception, while peers that notice its closed sockets exit at once."""
AFTERMATH_S = 5.0
"""A process killed more than this long after another process died was killed by a launcher because of that death."""


def find_deaths(context: DiagnosisContext, reached: BoolArray | None) -> list[Hypothesis]:
    """A hypothesis for each death that is a cause: the first one of each incident, and those that are no effects."""
    liveness = context.evidence.processes.liveness
    dead = [int(p) for p in np.flatnonzero(liveness == Liveness.DEAD) if not _was_intended(context, int(p))]
    dead = [p for p in dead if not _is_unobserved(context, p, reached)]
    if not dead:
        return []
    causes = {
        p: class_of_exit(Liveness.DEAD, int(context.evidence.processes.exit_code[p]), context.note(p)) for p in dead
    }
    groups: dict[int, list[int]] = {}
    label = context.connected_part if len(dead) > 1 else np.zeros(len(liveness), dtype=np.int64)
    for process in dead:
        groups.setdefault(int(label[process]), []).append(process)
    found = []
    for group in groups.values():
        culprits = _first_deaths(context, group, causes)
        if all(causes[p].culprit_confidence < SELF_CAUSED for p in culprits):
            behind = _late_members(context, culprits)
            found += behind
            if any(each.level is VerdictLevel.CONFIRMED for each in behind):
                continue
        for process in culprits:
            found.append(
                _death_hypothesis(context, process, causes[process], sorted(set(group) - set(culprits)), reached)
            )
    return found


def _was_intended(context: DiagnosisContext, process: int) -> bool:
    """Whether Lockstep ended the process, or the process ended with the verdict that released it from a collective."""
    note = context.note(process)
    return note.ours or is_collective_stalled(note.error)


def _is_unobserved(context: DiagnosisContext, process: int, reached: BoolArray | None) -> bool:
    """Whether nothing is known about how the process ended and no process has waited long for it. This is the normal
    end of a job that was observed too late."""
    note = context.note(process)
    if int(context.evidence.processes.exit_code[process]) != NO_EXIT_CODE or note.error or note.cause:
        return False
    if context.graph is None or reached is None:
        return True
    nodes = context.graph.block_node[context.graph.block_process == process]
    waited = context.graph.since[nodes[reached[nodes]]]
    return not (context.at - waited >= context.thresholds.notice_s).any()


def _first_deaths(context: DiagnosisContext, group: Sequence[int], causes: dict[int, FailureClass]) -> list[int]:
    """The processes that died on their own; if none did, the ones that died first."""
    ended_at = {p: float(np.nan_to_num(context.evidence.processes.ended_at[p], nan=np.inf)) for p in group}
    own = [p for p in group if causes[p].culprit_confidence >= SELF_CAUSED]
    if own:
        first = min(ended_at[p] for p in own)
        kept = [p for p in own if not (_is_kill(context, p) and ended_at[p] > first + AFTERMATH_S)]
        earlier = [p for p in group if p not in own and ended_at[p] < first - TEARDOWN_S]
        return sorted(kept + (_earliest(earlier, ended_at, causes) if earlier else []))
    return _earliest(group, ended_at, causes)


def _earliest(group: Sequence[int], ended_at: dict[int, float], causes: dict[int, FailureClass]) -> list[int]:
    real = [p for p in group if causes[p].culprit_confidence > 0.3] or list(group)
    first = min(ended_at[p] for p in real)
    together = [p for p in real if ended_at[p] <= first + SIMULTANEOUS_S or not np.isfinite(ended_at[p])]
    best = max(causes[p].culprit_confidence for p in together)
    return sorted(p for p in together if causes[p].culprit_confidence == best)


def _late_members(context: DiagnosisContext, dead: Sequence[int]) -> list[Hypothesis]:
    """Members that the dead processes waited for, if their deaths look like effects: members that had not entered the
    same collective, and that exited earlier or have been inactive since before those deaths."""
    members, processes = context.evidence.communicators, context.evidence.processes
    late: dict[int, tuple[int, int, float, float]] = {}
    for process in dead:
        for row in np.flatnonzero((members.process == process) & (members.entered > 0)).tolist():
            rows = context.members(int(context.pending.communicator[row]))
            behind = (members.entered[rows] >= 0) & (members.entered[rows] < members.entered[row])
            for other in members.process[rows][behind].tolist():
                place = int(context.pending.communicator[row]), int(members.entered[row])
                late.setdefault(other, (*place, float(members.entered_at[row]), float(processes.ended_at[process])))
    found = []
    for other, (communicator, seq, since, ended_at) in sorted(late.items()):
        left = context.liveness(other) is Liveness.EXITED and not processes.ended_at[other] > ended_at + 1.0
        still = (
            measure_inactivity(context, other).any_activity_s >= context.thresholds.notice_s
            and context.last_activity(other) <= ended_at
        )
        if context.note(other).ours or not (left or (still and context.liveness(other) is Liveness.RUNNING)):
            continue
        proven = left or (proven_inactive(context, other, since) and not context.progress_unknown[other])
        found.append(
            Hypothesis(
                VerdictKind.DEAD if left else VerdictKind.ABSENT,
                VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE,
                0.7 if proven else 0.5,
                f"has {'ended with exit code 0' if left else 'not entered {collective}, which others gave up on'}",
                (other,),
                collective=(communicator, seq),
                proven_by_structure=left,
                others=tuple(dead),
                since=float(processes.ended_at[other]) if left else since,
                alternatives=(Alternative("uneven_data", 0.5),) if left else (),
                facts=tuple(
                    Fact(f"{processes.info[p].name} {describe_end(context, p)}", "its parent") for p in dead[:4]
                ),
            )
        )
    return found


def _is_kill(context: DiagnosisContext, process: int) -> bool:
    return int(context.evidence.processes.exit_code[process]) in (-9, 137)


def _death_hypothesis(
    context: DiagnosisContext, process: int, cause: FailureClass, effects: list[int], reached: BoolArray | None
) -> Hypothesis:
    node, _ = longest_wait_on(context, process, reached)
    info = context.evidence.processes.info
    later = [f"{info[p].name} {describe_end(context, p)}" for p in effects[:4]]
    facts = [Fact(f"{info[process].name} {describe_end(context, process)}", "its parent")]
    facts += [Fact(f"{each}, later or as an effect", "its parent") for each in later]
    unknown = cause.name == "unknown"
    refused = is_collective_refused(context.note(process).error)
    return Hypothesis(
        VerdictKind.DEAD,
        VerdictLevel.NOTICE if refused else VerdictLevel.CONFIRMED,  # the calls show which rank was wrong
        cause.culprit_confidence,
        describe_end(context, process),
        (process,),
        node=node,
        since=float(context.evidence.processes.ended_at[process]),
        cause=cause.name,
        alternatives=cause.alternatives,
        facts=tuple(facts),
        collect=("the last lines of its log, and the kernel log of its host (dmesg)",) if unknown else (),
        proven_by_structure=True,
        others=tuple(effects),
    )
