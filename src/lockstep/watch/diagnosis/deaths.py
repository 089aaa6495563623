"""Finds the deaths that caused a failure, among deaths that only followed from the end of another process, and finds
stopped processes."""

from collections.abc import Sequence

import numpy as np

from lockstep.watch.diagnosis.device_faults import class_of_failed_device
from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, proven_inactive
from lockstep.watch.diagnosis.effects import AFTERMATH_S, KILLED, SIMULTANEOUS_S, choose_explanation
from lockstep.watch.diagnosis.evidence_types import NO_EXIT_CODE, Liveness
from lockstep.watch.diagnosis.failure_classes import (
    FailureClass,
    class_of_exit,
    describe_exit,
    is_collective_refused,
    is_collective_stalled,
)
from lockstep.watch.diagnosis.live_weights import live_weights
from lockstep.watch.diagnosis.root_cause import longest_wait_on
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel, level_of

MAX_ENDS = 64
"""The most different texts of ends that are judged individually."""


def find_deaths(context: DiagnosisContext) -> list[Hypothesis]:
    """A hypothesis for each end that processes of a role and incident had in common, about those that ended first or
    caused it themselves; and for what deaths that look like effects may follow from."""
    liveness = context.evidence.processes.liveness
    dead = [int(p) for p in np.flatnonzero(liveness == Liveness.DEAD) if not _was_intended(context, int(p))]
    dead = [p for p in dead if not _is_unobserved(context, p) and not _ended_with_whole(context, p)]
    incident = context.connected_part if len(dead) > 1 else np.zeros(len(liveness), dtype=np.int64)
    incidents: dict[int, list[int]] = {}
    for process in dead:
        incidents.setdefault(int(incident[process]), []).append(process)
    found = []
    for members in incidents.values():
        deaths = choose_explanation(context, _deaths_of_incident(context, members))
        if all(each.log_odds < live_weights().self_caused for each in deaths):
            found += _late_members(context, [p for each in deaths for p in each.culprits])
        found += deaths
    return found


def _deaths_of_incident(context: DiagnosisContext, dead: Sequence[int]) -> list[Hypothesis]:
    """The hypotheses about the deaths of one incident, the earliest first, at most `MAX_ENDS` of each kind of end."""
    ended_at = np.nan_to_num(context.evidence.processes.ended_at, nan=np.inf)
    alike: dict[str, dict[tuple[str, str, str], tuple[FailureClass, list[int]]]] = {}
    for process in sorted(dead, key=lambda p: float(ended_at[p])):
        cause = _class_of_death(context, process)
        key = context.role(process), cause.name, _describe_end(context, process)
        ends = alike.setdefault(cause.end, {})
        if key in ends or len(ends) < MAX_ENDS:
            ends.setdefault(key, (cause, []))[1].append(process)
    found = []
    for end, ends in alike.items():
        itself = live_weights().factors[end].yes >= live_weights().self_caused
        for cause, processes in ends.values():
            is_kill = int(context.evidence.processes.exit_code[processes[0]]) in KILLED
            window = SIMULTANEOUS_S if not itself else AFTERMATH_S if is_kill else np.inf
            last = ended_at[processes[0]] + window
            first = [p for p in processes if ended_at[p] <= last]
            found.append(_death_hypothesis(context, first, cause, dead))
    return found


def _class_of_death(context: DiagnosisContext, process: int) -> FailureClass:
    """The class that the exit proves; if it proves none or an error of a kernel, that of an error of its device."""
    found = class_of_exit(Liveness.DEAD, int(context.evidence.processes.exit_code[process]), context.note(process))
    unproven = found.name in ("unknown", "rank_exception_masked", "cuda_kernel_error", "external_kill")
    device = class_of_failed_device(context, process) if unproven else ""
    return FailureClass(device, end="named_failure") if device else found


def _was_intended(context: DiagnosisContext, process: int) -> bool:
    """Whether Lockstep ended the process, or the process ended with the exception that Lockstep raised on it."""
    note = context.note(process)
    return note.ours or is_collective_stalled(note.error)


def _ended_with_whole(context: DiagnosisContext, process: int) -> bool:
    """Whether the process was a part of one that has ended as well, which its own end says nothing more about."""
    whole = context.whole(process)
    return whole != process and context.liveness(whole) not in (Liveness.RUNNING, Liveness.STOPPED)


def _is_unobserved(context: DiagnosisContext, process: int) -> bool:
    """Whether it is unknown how the process ended and no process has waited long for it, as at the normal end of a job
    that was observed too late."""
    note = context.note(process)
    if int(context.evidence.processes.exit_code[process]) != NO_EXIT_CODE or note.error or note.cause:
        return False
    nodes = context.graph.block_node[context.graph.block_process == process]
    waited = context.graph.since[nodes[context.relevant[nodes]]]
    return not (context.at - waited >= context.thresholds.notice_s).any()


def _late_members(context: DiagnosisContext, dead: Sequence[int]) -> list[Hypothesis]:
    """Hypotheses about members for which the dead processes waited when they died, if their deaths look like effects.
    Such a member had not entered the collective of the dead processes, and exited earlier or has been inactive since
    before their deaths."""
    members, processes = context.evidence.communicators, context.evidence.processes
    late: dict[int, tuple[int, int]] = {}
    for process in dead:
        for row in np.flatnonzero((members.process == process) & (members.entered > 0)).tolist():
            rows = context.members(int(context.pending.communicator[row]))
            not_entered = (members.entered[rows] >= 0) & (members.entered[rows] < members.entered[row])
            for other in members.process[rows][not_entered].tolist():
                late.setdefault(other, (row, process))
    found = []
    for other, (row, process) in sorted(late.items()):
        since, ended_at = float(members.entered_at[row]), float(processes.ended_at[process])
        has_exited = context.liveness(other) is Liveness.EXITED and not processes.ended_at[other] > ended_at + 1.0
        is_inactive = context.last_activity(other) <= ended_at
        is_late = has_exited or (is_inactive and context.liveness(other) is Liveness.RUNNING)
        if context.note(other).ours or not is_late:
            continue
        proven = has_exited or (proven_inactive(context, other, since) and not context.progress_unknown[other])
        found.append(
            Hypothesis(
                VerdictKind.DEAD if has_exited else VerdictKind.ABSENT,
                level_of(proven),
                {"others_gave_up": proven},
                "has ended with exit code 0" if has_exited else "has not entered {collective}, which others gave up on",
                (other,),
                collective=(int(context.pending.communicator[row]), int(members.entered[row])),
                proven_by_structure=has_exited,
                others=tuple(dead),
                since=float(processes.ended_at[other]) if has_exited else since,
                alternatives=(Alternative("uneven_data", 0.5),) if has_exited else (),
                facts=tuple(Fact(f"{context.name(p)} {_describe_end(context, p)}", "its parent") for p in dead[:4]),
            )
        )
    return found


def _death_hypothesis(
    context: DiagnosisContext, first: list[int], cause: FailureClass, dead: Sequence[int]
) -> Hypothesis:
    """The hypothesis that processes that ended alike are the first of the dead of an incident."""
    node, _ = longest_wait_on(context, first[0])
    refused, unknown = is_collective_refused(context.note(first[0]).error), cause.name == "unknown"
    return Hypothesis(
        VerdictKind.DEAD,
        VerdictLevel.NOTICE if refused else VerdictLevel.CONFIRMED,  # the recorded calls show which rank was wrong
        {cause.end: True},
        _describe_end(context, first[0]),
        tuple(sorted(first, key=context.rank_key)),
        node=node,
        since=float(context.evidence.processes.ended_at[first[0]]),
        cause=cause.name,
        alternatives=cause.alternatives,
        facts=tuple(Fact(f"{context.name(p)} {_describe_end(context, p)}", "its parent") for p in first[:16]),
        collect=("the last lines of its log, and the kernel log of its host (dmesg)",) if unknown else (),
        proven_by_structure=True,
        others=tuple({*dead} - {*first}),
    )


def _describe_end(context: DiagnosisContext, process: int) -> str:
    """How a process ended, as a verb phrase with its exception."""
    processes, note = context.evidence.processes, context.note(process)
    text = describe_exit(int(processes.liveness[process]), int(processes.exit_code[process]))
    return f"{text} ({note.error.strip().splitlines()[-1][:200]})" if note.error.strip() else text


def find_stopped(context: DiagnosisContext) -> list[Hypothesis]:
    """A hypothesis for each process stopped by a signal or a debugger, whether others wait for it or not. If all are
    stopped, the job was suspended, and nothing is confirmed."""
    liveness = context.evidence.processes.liveness
    others_run = bool(((liveness == Liveness.RUNNING) | (liveness == Liveness.DEAD)).any())
    found = []
    for process in np.flatnonzero(liveness == Liveness.STOPPED).tolist():
        whole = context.whole(process)
        if context.note(process).ours or (whole != process and context.liveness(whole) is Liveness.STOPPED):
            continue
        node, since = longest_wait_on(context, process)
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
                level_of(others_run),
                {"stopped_alone": others_run},
                "is stopped by a signal or a debugger",
                (process,),
                node=node,
                since=stopped_at,
                facts=(Fact(f"{context.name(process)}: state T (stopped)", "/proc"),),
                proven_by_structure=True,
            )
        )
    return found
