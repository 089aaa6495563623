"""Finds the deaths that caused a failure, among deaths that only followed from the end of another process, and finds
stopped processes."""

from collections.abc import Sequence

import numpy as np

from lockstep.watch.diagnosis.device_faults import class_of_failed_device
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, measure_inactivity, proven_inactive
from lockstep.watch.diagnosis.evidence_types import NO_EXIT_CODE, Liveness
from lockstep.watch.diagnosis.failure_classes import (
    FailureClass,
    class_of_exit,
    describe_exit,
    is_collective_refused,
    is_collective_stalled,
)
from lockstep.watch.diagnosis.root_cause import longest_wait_on
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import BoolArray

SELF_CAUSED = 0.85
"""With at least this confidence, the process itself caused its failure (a crash, a kill, an exception)."""
SIMULTANEOUS_S = 0.1
"""Deaths at most this far apart have no reliable order, because clocks and the detection of exits are imprecise."""
TEARDOWN_S = 10.0
"""A process may need this long to exit after an exception, while peers whose connections to it break exit at once."""
AFTERMATH_S = 5.0
"""A process killed more than this long after another process died was killed by its launcher because of that death."""


def find_deaths(context: DiagnosisContext, relevant: BoolArray | None) -> list[Hypothesis]:
    """A hypothesis for each death that is a cause: the first of each incident, and those that the process itself
    caused."""
    liveness = context.evidence.processes.liveness
    dead = [int(p) for p in np.flatnonzero(liveness == Liveness.DEAD) if not _was_intended(context, int(p))]
    dead = [p for p in dead if not _is_unobserved(context, p, relevant) and not _ended_with_whole(context, p)]
    if not dead:
        return []
    causes = {p: _class_of_death(context, p) for p in dead}
    groups: dict[int, list[int]] = {}
    incident = context.connected_part if len(dead) > 1 else np.zeros(len(liveness), dtype=np.int64)
    for process in dead:
        groups.setdefault(int(incident[process]), []).append(process)
    found = []
    for group in groups.values():
        culprits = _first_deaths(context, group, causes)
        if all(causes[p].culprit_confidence < SELF_CAUSED for p in culprits):
            late_members = _late_members(context, culprits)
            found += late_members
            if any(each.level is VerdictLevel.CONFIRMED for each in late_members):
                continue
        for process in culprits:
            found.append(
                _death_hypothesis(context, process, causes[process], sorted(set(group) - set(culprits)), relevant)
            )
    return found


def _class_of_death(context: DiagnosisContext, process: int) -> FailureClass:
    """The class that the exit proves; if it proves none or an error of a kernel, that of an error of its device."""
    found = class_of_exit(Liveness.DEAD, int(context.evidence.processes.exit_code[process]), context.note(process))
    unproven = found.name in ("unknown", "rank_exception_masked", "cuda_kernel_error", "external_kill")
    device = class_of_failed_device(context, process) if unproven else ""
    return FailureClass(device, culprit_confidence=0.95) if device else found


def _was_intended(context: DiagnosisContext, process: int) -> bool:
    """Whether Lockstep ended the process, or the process ended with the exception that Lockstep raised on it."""
    note = context.note(process)
    return note.ours or is_collective_stalled(note.error)


def _ended_with_whole(context: DiagnosisContext, process: int) -> bool:
    """Whether the process was a part of one that has ended as well, which its own end says nothing more about."""
    whole = context.whole(process)
    return whole != process and context.liveness(whole) not in (Liveness.RUNNING, Liveness.STOPPED)


def _is_unobserved(context: DiagnosisContext, process: int, relevant: BoolArray | None) -> bool:
    """Whether it is unknown how the process ended and no process has waited long for it, as at the normal end of a job
    that was observed too late."""
    note = context.note(process)
    if int(context.evidence.processes.exit_code[process]) != NO_EXIT_CODE or note.error or note.cause:
        return False
    if context.graph is None or relevant is None:
        return True
    nodes = context.graph.block_node[context.graph.block_process == process]
    waited = context.graph.since[nodes[relevant[nodes]]]
    return not (context.at - waited >= context.thresholds.notice_s).any()


def _first_deaths(context: DiagnosisContext, group: Sequence[int], causes: dict[int, FailureClass]) -> list[int]:
    """The processes that caused their own deaths; if there are none, those that died first."""
    ended_at = {p: float(np.nan_to_num(context.evidence.processes.ended_at[p], nan=np.inf)) for p in group}
    self_caused = [p for p in group if causes[p].culprit_confidence >= SELF_CAUSED]
    if self_caused:
        first = min(ended_at[p] for p in self_caused)
        first_and_independent = [
            p for p in self_caused if not (_is_kill(context, p) and ended_at[p] > first + AFTERMATH_S)
        ]
        earlier = [p for p in group if p not in self_caused and ended_at[p] < first - TEARDOWN_S]
        return sorted(first_and_independent + (_earliest(earlier, ended_at, causes) if earlier else []))
    return _earliest(group, ended_at, causes)


def _earliest(group: Sequence[int], ended_at: dict[int, float], causes: dict[int, FailureClass]) -> list[int]:
    """The processes that died first; of those that died together, the ones most likely to be the cause."""
    likely = [p for p in group if causes[p].culprit_confidence > 0.3] or list(group)
    first = min(ended_at[p] for p in likely)
    simultaneous = [p for p in likely if ended_at[p] <= first + SIMULTANEOUS_S or not np.isfinite(ended_at[p])]
    best = max(causes[p].culprit_confidence for p in simultaneous)
    return sorted(p for p in simultaneous if causes[p].culprit_confidence == best)


def _late_members(context: DiagnosisContext, dead: Sequence[int]) -> list[Hypothesis]:
    """Hypotheses about members for which the dead processes waited when they died, if their deaths look like effects.
    Such a member had not entered the collective of the dead processes, and exited earlier or has been inactive since
    before their deaths."""
    members, processes = context.evidence.communicators, context.evidence.processes
    late: dict[int, tuple[int, int, float, float]] = {}
    for process in dead:
        for row in np.flatnonzero((members.process == process) & (members.entered > 0)).tolist():
            rows = context.members(int(context.pending.communicator[row]))
            not_entered = (members.entered[rows] >= 0) & (members.entered[rows] < members.entered[row])
            for other in members.process[rows][not_entered].tolist():
                collective = int(context.pending.communicator[row]), int(members.entered[row])
                late.setdefault(
                    other, (*collective, float(members.entered_at[row]), float(processes.ended_at[process]))
                )
    found = []
    for other, (communicator, seq, since, ended_at) in sorted(late.items()):
        has_exited = context.liveness(other) is Liveness.EXITED and not processes.ended_at[other] > ended_at + 1.0
        is_inactive = (
            measure_inactivity(context, other).any_activity_s >= context.thresholds.notice_s
            and context.last_activity(other) <= ended_at
        )
        if context.note(other).ours or not (
            has_exited or (is_inactive and context.liveness(other) is Liveness.RUNNING)
        ):
            continue
        proven = has_exited or (proven_inactive(context, other, since) and not context.progress_unknown[other])
        found.append(
            Hypothesis(
                VerdictKind.DEAD if has_exited else VerdictKind.ABSENT,
                VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE,
                0.7 if proven else 0.5,
                "has ended with exit code 0" if has_exited else "has not entered {collective}, which others gave up on",
                (other,),
                collective=(communicator, seq),
                proven_by_structure=has_exited,
                others=tuple(dead),
                since=float(processes.ended_at[other]) if has_exited else since,
                alternatives=(Alternative("uneven_data", 0.5),) if has_exited else (),
                facts=tuple(
                    Fact(f"{processes.info[p].name} {_describe_end(context, p)}", "its parent") for p in dead[:4]
                ),
            )
        )
    return found


def _is_kill(context: DiagnosisContext, process: int) -> bool:
    return int(context.evidence.processes.exit_code[process]) in (-9, 137)


def _death_hypothesis(
    context: DiagnosisContext, process: int, cause: FailureClass, effects: list[int], relevant: BoolArray | None
) -> Hypothesis:
    node, _ = longest_wait_on(context, process, relevant)
    info = context.evidence.processes.info
    later = [f"{info[p].name} {_describe_end(context, p)}" for p in effects[:4]]
    facts = [Fact(f"{info[process].name} {_describe_end(context, process)}", "its parent")]
    facts += [Fact(f"{each}, later or as an effect", "its parent") for each in later]
    unknown = cause.name == "unknown"
    refused = is_collective_refused(context.note(process).error)
    return Hypothesis(
        VerdictKind.DEAD,
        VerdictLevel.NOTICE if refused else VerdictLevel.CONFIRMED,  # the recorded calls show which rank was wrong
        cause.culprit_confidence,
        _describe_end(context, process),
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


def _describe_end(context: DiagnosisContext, process: int) -> str:
    """How a process ended, as a verb phrase with its exception."""
    processes, note = context.evidence.processes, context.note(process)
    text = describe_exit(int(processes.liveness[process]), int(processes.exit_code[process]))
    return f"{text} ({note.error.strip().splitlines()[-1][:200]})" if note.error.strip() else text


def find_stopped(context: DiagnosisContext, relevant: BoolArray | None) -> list[Hypothesis]:
    """A hypothesis for each process stopped by a signal or a debugger, whether others wait for it or not. If all are
    stopped, the job was suspended, and nothing is confirmed."""
    liveness = context.evidence.processes.liveness
    others_run = bool(((liveness == Liveness.RUNNING) | (liveness == Liveness.DEAD)).any())
    found = []
    for process in np.flatnonzero(liveness == Liveness.STOPPED).tolist():
        whole = context.whole(process)
        if context.note(process).ours or (whole != process and context.liveness(whole) is Liveness.STOPPED):
            continue
        node, since = longest_wait_on(context, process, relevant)
        stopped_at = float(context.evidence.processes.ended_at[process])
        if np.isnan(stopped_at):
            last = context.last_activity(process)
            stopped_at = since if np.isnan(last) else last
        is_long = context.observed_at(process) - stopped_at >= context.thresholds.notice_s
        if not is_long:  # py-spy stops processes for a moment. Also if the time is unknown (NaN).
            continue
        found.append(
            Hypothesis(
                VerdictKind.ABSENT,
                VerdictLevel.CONFIRMED if others_run else VerdictLevel.NOTICE,
                0.95 if others_run else 0.5,
                "is stopped by a signal or a debugger",
                (process,),
                node=node,
                since=stopped_at,
                facts=(Fact(f"{context.evidence.processes.info[process].name}: state T (stopped)", "/proc"),),
                proven_by_structure=True,
            )
        )
    return found
