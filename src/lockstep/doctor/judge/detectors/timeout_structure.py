"""Proposes causes of a timeout in a collective from where the ranks waited.

If all ranks waited in the same call, the transport failed. If they waited in different calls, they took different
branches or had different amounts of data. If a rank did not wait, its activity in the meantime decides.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.doctor.judge.collective_waits import (
    CollectiveWait,
    class_of_activity,
    main_stack_by_rank,
    waits_by_rank,
)
from lockstep.doctor.judge.culprits import ended_by_signal, likely_first_failures, was_terminated
from lockstep.doctor.judge.hypotheses import Candidate
from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.logs.parsed_log import TailLine
from lockstep.doctor.logs.stack_traces import is_primary, names_trouble
from lockstep.doctor.logs.step_progress import last_step_by_rank
from lockstep.watch.diagnosis.verdict import Fact

_FINAL_PHASE = re.compile(
    r"(?i)barrier|eval|valid|save|checkpoint|finish|close|report|final|test|metric|summary|end_of"
)


_PAIR = 2
_LEFT_EARLY = ("broadcast", "reduce", "gather", "scatter")
"""Operations that a rank may complete before all have entered them."""
_TIMEOUT = re.compile(r"Timed out waiting (\d+)ms")
_MOST_OF_WAIT = 0.7
_LAST_LINES = 12
_REPORTS_PER_SILENT_RANK = 4
"""Ranks that wrote nothing are absent only if this many times as many ranks report that they waited."""
_RUNTIME_LINE = re.compile(r"\.cpp:\d+\]|NCCL (?:INFO|WARN)|^\s*frame #|^\s*$")
"""Lines of background threads, which print even while the rank is stuck."""


_ENDED = re.compile(
    r"(?i)\b(?:saved|wrote|written|stored|loaded|exported|evaluated|consumed|finished|completed|done)\b|\btook \d"
)
"""A line that reports the end of an activity, after which the rank did something else."""


@dataclass(frozen=True, slots=True)
class WaitingRanks:
    """The ranks that waited in a collective at the end, and those that did not."""

    history: JobHistory
    waits: Mapping[int, CollectiveWait]
    absent: tuple[int, ...]
    """Known ranks that did not wait in a collective, or entered it too late."""
    late: frozenset[int] = frozenset()
    """Ranks that entered it after others had given up."""

    @property
    def timed_out(self) -> list[CollectiveWait]:
        return [each for each in self.waits.values() if each.timed_out]


def find_waiting_ranks(history: JobHistory) -> WaitingRanks:
    """Finds the waiting ranks, and the known ranks that do not wait."""
    found = waits_by_rank(history)
    writing = set()
    for log in history.logs:
        if log.source not in history.old_sources:
            writing |= {rank for rank in log.tail_lines if rank is not None}
            writing |= {counter.origin.rank for counter in log.counters if counter.origin.rank is not None}
    writing |= {0} if 0 in history.ranks and 0 not in found and _main_lines(history) else set()
    late = _late_ranks(history, found)
    found = {rank: each for rank, each in found.items() if rank not in late}
    raised = {history.rank(each) for each in history.exceptions}
    named = {int(rank) for each in history.facts("absent") for rank in re.findall(r"\d+", each.fields.get("peer", ""))}
    silent = history.ranks - set(found) - raised
    silent = silent if _REPORTS_PER_SILENT_RANK * len(silent) <= len(found) else frozenset()
    return WaitingRanks(history, found, tuple(sorted(named or late or writing - set(found) - raised or silent)), late)


def _late_ranks(history: JobHistory, waits: Mapping[int, CollectiveWait]) -> frozenset[int]:
    """Returns the ranks that lost a peer in the operation in which others timed out, and worked while those waited:
    their last line was written after a wait had ended, or when most of it was over."""
    late: set[int] = set()
    for rank, each in waits.items():
        last = _last_lines(history, rank)
        for other in waits.values() if each.peer_lost and last else ():
            if not other.timed_out or other.operation != each.operation or other.rank is None:
                continue
            before = _last_lines(history, other.rank)
            limit = _TIMEOUT.search(other.text)
            if before and limit and None not in (last[-1].when, before[-1].when):
                waited = (last[-1].when or 0.0) - (before[-1].when or 0.0)
                late |= {rank} if waited > int(limit[1]) / 1000 * _MOST_OF_WAIT else set()
            elif each.file == other.file and last[-1].line > other.line:
                late.add(rank)
    return frozenset(late)


def structure_candidates(history: JobHistory) -> Iterator[Candidate]:
    """Yields candidates from where the ranks waited."""
    waiting = find_waiting_ranks(history)
    if not waiting.timed_out:
        yield from _left_early(waiting)
        return
    entered = _without_ahead(waiting)
    behind = _ranks_behind(entered) or _ranks_behind(waiting)
    waiting = entered if behind or waiting.absent else waiting
    groups = _waits_by_place(waiting)
    if behind:
        yield from _never_entered(waiting, behind)
    elif len(groups) > 1:
        yield from _different_places(waiting, groups)
    elif waiting.absent:
        yield from _absent_ranks(waiting)
    elif len(waiting.waits) > 1:
        yield from _all_in_one_place(waiting)


def _without_ahead(waiting: WaitingRanks) -> WaitingRanks:
    """Leaves out the ranks that wait one operation after a broadcast or the like in which others wait: its root, for
    example, does not wait for all, so that a rank that has not entered it also stops those that have left it."""
    numbered = {rank: each.seq for rank, each in waiting.waits.items() if each.timed_out and each.seq is not None}
    first = min(numbered.values(), default=0)
    if any(waiting.waits[rank].operation not in _LEFT_EARLY for rank, seq in numbered.items() if seq == first):
        return waiting
    kept = {rank: each for rank, each in waiting.waits.items() if numbered.get(rank) != first + 1}
    return replace(waiting, waits=kept)


def _left_early(waiting: WaitingRanks) -> Iterator[Candidate]:
    """Yields a candidate if no rank timed out but some lost a peer: a known rank without a report has left."""
    lost = [each for each in waiting.waits.values() if each.peer_lost]
    if not lost or any(is_primary(traceback) for _, _, traceback, _ in waiting.history.tracebacks):
        return
    ended = {
        each.rank: each
        for each in likely_first_failures(waiting.history)
        if each.rank is not None and each.rank not in waiting.waits
    }
    operation, facts = lost[0].operation, _wait_facts(waiting, ())
    if ended:
        signalled = ended_by_signal(waiting.history)
        terminated = all(was_terminated(rank, waiting.history) for rank in ended)
        cls = "unknown" if signalled else "external_kill" if terminated else "rank_exception_masked"
        how = "ended by a signal" if signalled else "ended first, without a message"
        text = f"{_rank_list(tuple(ended))} {how}; the others lost the connection."
        yield Candidate(cls, 0.5, [], tuple(ended.values()), operation, text, facts)
    elif waiting.absent and len(waiting.absent) <= len(lost) and not _crashed(waiting):
        killed = all(_stopped_midway(waiting, rank) for rank in waiting.absent)
        cls, how = ("external_kill", "broke off between two steps") if killed else ("uneven_data", "left")
        text = f"{_rank_list(waiting.absent)} {how} while the others were still in {operation or 'a collective'}."
        yield Candidate(cls, 0.45, [], waiting.absent, operation, text, [*_last_line_facts(waiting), *facts])


def _stopped_midway(waiting: WaitingRanks, rank: int) -> bool:
    """Whether the last line of a rank is a counter that had not reached its total. One that leaves by itself mostly
    says so."""
    last, lines = last_step_by_rank(waiting.history.counters).get(rank), _last_lines(waiting.history, rank)
    return last is not None and bool(lines) and last.step + 1 < last.of and last.line == lines[-1].line


def _crashed(waiting: WaitingRanks) -> bool:
    """Whether a rank that did not wait reports a crash or a cause of it."""
    reports = [each for each in waiting.history.matches
               if each.rule.signature.fact == "crash" or each.rule.signature.role == "cause"]  # fmt: skip
    return any(waiting.history.rank(each) in waiting.absent for each in reports)


def _ranks_behind(waiting: WaitingRanks) -> tuple[int, ...]:
    """Returns the ranks whose last enqueued work precedes the timed-out collective in the same process group."""
    timed_out_seq = max((each.seq for each in waiting.timed_out if each.seq is not None), default=None)
    if timed_out_seq is None:
        return ()
    last: dict[int, int] = {}
    states = waiting.history.facts("work_state")
    groups = {each.fields.get("pg") for each in states if each.fields.get("seq")}
    for each in states:
        rank = waiting.history.reporting_rank(each)
        if rank is not None and (not groups or each.fields.get("pg") in groups):
            last[rank] = max(last.get(rank, -1), int(each.fields["enqueued"]))
    late = tuple(sorted(rank for rank, number in last.items() if 0 <= number < timed_out_seq))
    return late if len(late) < len(last) else ()


def _never_entered(waiting: WaitingRanks, behind: Sequence[int]) -> Iterator[Candidate]:
    """Yields candidates for ranks that did not reach the timed-out collective."""
    first = waiting.timed_out[0]
    facts = _wait_facts(waiting, behind)
    text = f"{_rank_list(behind)} never entered the {first.operation} in which the others timed out."
    activity = _activity_of_absent(waiting, behind)
    if activity is not None:
        yield _wait_candidate(*activity, behind, first, text, facts)
    yield _wait_candidate("rank_divergent_branch", 0.5 if activity else 0.6, behind, first, text, facts)


def _wait_candidate(
    cls: str, weight: float, ranks: Sequence[int], wait: CollectiveWait, text: str, facts: list[Fact]
) -> Candidate:
    return Candidate(cls, weight, [], tuple(ranks), wait.operation, text, facts)


def _waits_by_place(waiting: WaitingRanks) -> list[list[CollectiveWait]]:
    """Groups the waits by the call that waits; the largest group comes first."""
    groups: dict[object, list[CollectiveWait]] = defaultdict(list)
    has_stacks = any(each.path for each in waiting.waits.values())
    for each in waiting.waits.values():
        if has_stacks:
            if each.path:
                groups[each.operation, each.innermost_frame].append(each)
        elif each.timed_out and each.operation:
            groups[each.operation, each.numel, each.seq].append(each)
    return sorted(groups.values(), key=len, reverse=True)


def _different_places(waiting: WaitingRanks, groups: Sequence[Sequence[CollectiveWait]]) -> Iterator[Candidate]:
    """Yields candidates if ranks waited in different calls: the smaller group is suspect."""
    most, others = groups[0], [each for group in groups[1:] for each in group]
    suspects = sorted(each.rank for each in others if each.rank is not None)
    if most[0].operation == "barrier" and all(each.in_backward for each in others) and len(most) == len(others):
        most, others = others, list(most)
    ended = others[0].operation == "barrier" and all(each.in_backward for each in most)
    if len(most) == len(others) and not ended:
        everyone = sorted(each.rank for each in [*most, *others] if each.rank is not None)
        suspects = everyone if len(others) > 1 else suspects
    uneven = ended or (not others[0].path and any(_FINAL_PHASE.search(each.where) for each in others))
    facts = _wait_facts(waiting, [*suspects[:2], *(each.rank for each in most[:2] if each.rank is not None)])
    where = others[0].where or f"{others[0].operation} of {others[0].numel} elements"
    text = (
        f"{_rank_list(suspects)} waited in {others[0].operation or 'a collective'} ({where}), "
        f"the others in {most[0].operation or 'a collective'} ({most[0].where or f'{most[0].numel} elements'})."
    )
    operation = most[0].operation
    cls, other = ("uneven_data", "rank_divergent_branch") if uneven else ("rank_divergent_branch", "uneven_data")
    yield Candidate(cls, 0.7, culprits=tuple(suspects), collective=operation, explanation=text, facts=facts)
    yield Candidate(other, 0.4, culprits=tuple(suspects), collective=operation, explanation=text, facts=facts)


def _absent_ranks(waiting: WaitingRanks) -> Iterator[Candidate]:
    """Yields a candidate for the known ranks that did not wait: their activity in the meantime explains the delay."""
    absent = waiting.absent
    first = waiting.timed_out[0]
    text = f"{_rank_list(absent)} did not enter the {first.operation or 'collective'} in which the others timed out."
    facts = [*_wait_facts(waiting, absent), *_last_line_facts(waiting)]
    stack_text = " ".join(f"{frame.function} {frame.source}" for each in waiting.timed_out for frame in each.path)
    activity = _activity_of_absent(waiting, absent)
    cls, weight = activity if activity is not None else (class_of_activity(stack_text) or "unknown", 0.45)
    yield _wait_candidate(cls, weight, absent, first, text, facts)


def _activity_of_absent(waiting: WaitingRanks, ranks: Sequence[int]) -> tuple[str, float] | None:
    """Returns the class that the activity of absent ranks suggests, and its weight; None if nothing is known.

    The activity is taken from their stacks, from what they logged while the others waited, or, with less weight, from
    what they logged last.
    """
    stacks = main_stack_by_rank(waiting.history)
    for rank in ranks:
        cls = class_of_activity(" ".join(frame.function for frame in stacks[rank].frames)) if rank in stacks else None
        if cls is not None:
            return cls, 0.75
    began = min((each.started for each in waiting.timed_out if each.started is not None), default=None)
    logged_meanwhile = False
    for rank in ranks:
        for each in reversed(_last_lines(waiting.history, rank)):
            if _RUNTIME_LINE.search(each.text) or names_trouble(each.text):
                continue
            during = began is not None and each.when is not None and each.when > began + 1.0
            during = during or rank in waiting.late
            logged_meanwhile = logged_meanwhile or during
            cls = class_of_activity(each.text)
            if cls != "uneven_data" and not during and _ENDED.search(each.text):
                return None
            if cls is not None:
                return cls, 0.7 if during else 0.55
    return ("slow_collective_timeout", 0.5) if logged_meanwhile else None


def _all_in_one_place(waiting: WaitingRanks) -> Iterator[Candidate]:
    """Yields a candidate if all ranks waited in the same call: the transport failed, or all wait for each other's
    message."""
    first = waiting.timed_out[0]
    facts = _wait_facts(waiting, [each.rank for each in waiting.timed_out[:3] if each.rank is not None])
    traits = waiting.history.traits
    where = f" ({first.where})" if first.where else ""
    text = f"All ranks waited in the same {first.operation or 'collective'}{where}, and it completed on none."
    if first.operation in ("recv", "send"):
        text = f"All ranks waited in {first.operation} for each other{where}."
        yield _wait_candidate("rank_divergent_branch", 0.6, (), first, text, facts)
    elif len(waiting.waits) >= len(waiting.history.ranks):
        if "first_collective" in traits and "many_hosts" not in traits:
            yield _wait_candidate("p2p_path_broken", 0.6, (), first, text, facts)
        elif "many_hosts" in traits:
            hosts = sorted(set(waiting.history.hosts.values()))
            cls = "ib_rdma_fault" if waiting.history.facts("rdma_used") else "network_blocked"
            yield Candidate(cls, 0.5, [], tuple(hosts) if len(hosts) == _PAIR else (), first.operation,
                            text, facts)  # fmt: skip


def _last_lines(history: JobHistory, rank: int) -> list[TailLine]:
    """Returns the last lines of a rank before its exception, from the file to which it wrote last."""
    found = []
    for log in history.logs:
        if rank in log.tail_lines and log.source not in history.old_sources:
            first = min((each.first for origin, _, each, at in history.tracebacks
                         if origin.rank == rank and at.source == log.source), default=None)  # fmt: skip
            lines = [each for each in log.tail_lines[rank] if first is None or each.line < first][-_LAST_LINES:]
            found += [lines] if lines else []
    if rank == 0 and not found:
        return _main_lines(history)
    return max(found, key=lambda each: each[-1].when or 0.0, default=[])


def _main_lines(history: JobHistory) -> list[TailLine]:
    """Returns what matched without a rank before the first timeout, if rank 0 writes no lines: mostly only the main
    process logs, and names no rank."""
    if any(0 in log.tail_lines for log in history.logs):
        return []
    first = {each.match.source: each.match.line for each in reversed(history.timeouts)}
    return [TailLine(each.line, each.when, each.text) for each in history.matches
            if each.origin.rank is None and each.line < first.get(each.source, 0)][-_LAST_LINES:]  # fmt: skip


def _last_line_facts(waiting: WaitingRanks) -> list[Fact]:
    """Returns the last line of each of the first absent ranks."""
    last = {rank: lines[-1] for rank in waiting.absent[:3] if (lines := _last_lines(waiting.history, rank))}
    history = waiting.history
    files = {id(each): log.name for log in history.logs for lines in log.tail_lines.values() for each in lines}
    waited = history.timeouts[0].match.file if history.timeouts else ""
    return [Fact(each.text, file=files.get(id(each), waited), line=each.line) for each in last.values()]


def _wait_facts(waiting: WaitingRanks, ranks: Sequence[int]) -> list[Fact]:
    shown = [waiting.waits[rank] for rank in ranks if rank in waiting.waits] or waiting.timed_out[:2]
    shown = shown or list(waiting.waits.values())[:2]
    return [Fact(each.text, file=each.file, line=each.line) for each in shown[:4]]


def _rank_list(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''}"
