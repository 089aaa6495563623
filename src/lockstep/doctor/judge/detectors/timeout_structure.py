"""Candidates from where ranks waited: at different places, behind the others, or absent.

The structure decides about a timeout in a collective. If all ranks are at the same place, the transport failed; if
they are at different places, they took different branches or had different amounts of data; for an absent rank, its
activity in the meantime decides.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.doctor.judge.collective_waits import (
    GENERATION,
    SHARDED_WEIGHTS,
    CollectiveWait,
    any_sharded_generation,
    class_of_activity,
    collective_of_frames,
    main_stack_by_rank,
    waits_by_rank,
)
from lockstep.doctor.judge.culprits import ended_by_signal, first_failed
from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.judge.scoring import Candidate
from lockstep.doctor.logs.parsed_log import TailLine
from lockstep.doctor.logs.stack_traces import is_primary
from lockstep.doctor.logs.step_progress import last_step_by_rank
from lockstep.watch.diagnosis.verdict import Fact

_VLLM = re.compile(r"(?i)vllm|worker_?tp|enginecore|apiserver")
_FINAL_PHASE = re.compile(
    r"(?i)barrier|eval|valid|save|checkpoint|finish|close|report|final|test|metric|summary|end_of"
)


_BEGUN_FACTS = (
    ("checkpoint", "checkpoint_timeout"), ("preparing", "slow_rank_preprocess"),
    ("generating", "slow_collective_timeout"), ("checkpoint_done", ""),
)  # fmt: skip
"""Facts that begin an activity, with the class that each suggests; "" for an activity that is over."""
_PAIR = 2
_REPORTS_PER_SILENT_RANK = 4
"""Silent ranks are inferred only if this many times as many ranks report a timeout."""
_ON_RANK = re.compile(r"\b(?:on|by|from) rank (\d+)\b")
_RUNTIME_LINE = re.compile(r"\.cpp:\d+\]|NCCL (?:INFO|WARN)|^\s*frame #|^\s*$")
"""Lines of background threads, which print while the rank itself is stuck."""


@dataclass(frozen=True, slots=True)
class WaitingRanks:
    """The ranks and where each waited at the end."""

    history: JobHistory
    waits: Mapping[int, CollectiveWait]
    absent: tuple[int, ...]
    """Ranks that wrote lines and were in no ended collective."""

    @property
    def timed_out(self) -> list[CollectiveWait]:
        return [each for each in self.waits.values() if each.timed_out]


def find_waiting_ranks(history: JobHistory) -> WaitingRanks:
    """The waiting ranks, and the known ranks that do not wait."""
    found = waits_by_rank(history)
    writing = set()
    for log in history.logs:
        if log.source not in history.old_sources:
            writing |= {rank for rank in log.tail_lines if rank is not None}
            writing |= {counter.origin.rank for counter in log.counters if counter.origin.rank is not None}
    raised = {history.rank(each) for each in history.exceptions}
    named = {int(rank) for each in history.facts("absent") for rank in re.findall(r"\d+", each.fields.get("peer", ""))}
    return WaitingRanks(
        history,
        found,
        tuple(sorted(named or writing - set(found) - raised or _silent_ranks(history, {*found, *raised}))),
    )


def _silent_ranks(history: JobHistory, reporting: set[int | None]) -> set[int]:
    """Missing rank numbers, if many others reported how they ended: those ranks exist and are silent."""
    numbers = {rank for rank in reporting if rank is not None} | history.ranks
    missing = set(range(max(numbers, default=0) + 1)) - reporting
    return (
        {rank for rank in missing if rank is not None}
        if _REPORTS_PER_SILENT_RANK * len(missing) <= len(reporting)
        else set()
    )


def structure_candidates(history: JobHistory) -> Iterator[Candidate]:
    """Candidates from where the ranks waited."""
    yield from _first_exception(history)
    waiting = find_waiting_ranks(history)
    if not waiting.timed_out:
        yield from _left_early(waiting)
        return
    behind = _ranks_behind(waiting)
    groups = _waits_by_place(waiting)
    if behind:
        yield from _never_entered(waiting, behind)
    elif len(groups) > 1:
        yield from _different_places(waiting, groups)
    elif waiting.absent:
        yield from _absent_ranks(waiting)
    elif len(waiting.waits) > 1:
        yield from _all_in_one_place(waiting)
    yield from _last_begun(waiting)


def _first_exception(history: JobHistory) -> Iterator[Candidate]:
    """The first exception that neither ended a wait nor wraps another exception."""
    found = [(when if when is not None else float("inf"), log.source, traceback.number, origin, traceback, log)
             for origin, when, traceback, log in history.tracebacks if is_primary(traceback)]  # fmt: skip
    if not found:
        return
    _, _, _, raiser, traceback, log = min(found, key=lambda each: each[:3])
    fact = Fact(traceback.text, file=log.name, line=traceback.number)
    text = f"{f'Rank {raiser.rank}' if raiser.rank is not None else 'A process'} raised {traceback.type}"
    text += f" in {traceback.where}." if traceback.where else "."
    culprits = None if raiser.rank is None else (raiser.rank,)
    if _VLLM.search(raiser.role) or (traceback.frames and "/vllm/" in traceback.frames[-1].file):
        yield Candidate("vllm_engine_failure", 0.5, [], culprits, "", text, [fact])
        return
    victims = bool(history.facts("peer_lost") or history.timeouts) and raiser.rank is not None
    yield Candidate("rank_exception_masked", 0.6 if victims else 0.45, [], culprits, "", text, [fact])


def _left_early(waiting: WaitingRanks) -> Iterator[Candidate]:
    """No rank timed out and some lost a peer: a known rank without any report has left."""
    lost = [each for each in waiting.waits.values() if each.peer_lost]
    if not lost or any(is_primary(traceback) for _, _, traceback, _ in waiting.history.tracebacks):
        return
    gone = [each for each in first_failed(waiting.history) if each.rank is not None and each.rank not in waiting.waits]
    ranks = tuple(each.rank for each in gone if each.rank is not None)
    if ranks and not ended_by_signal(waiting.history):
        text = f"{_rank_list(ranks)} ended first, without a message; the others lost the connection."
        yield Candidate(
            "rank_exception_masked", 0.5, [], tuple(gone), lost[0].operation, text, _wait_facts(waiting, ())
        )
    elif not ranks and waiting.absent and len(waiting.absent) <= len(lost):
        facts = [_last_line_fact(waiting, rank) for rank in waiting.absent[:3] if _last_lines(waiting.history, rank)]
        text = (
            f"{_rank_list(waiting.absent)} left while the others were still in {lost[0].operation or 'a collective'}."
        )
        yield Candidate(
            "uneven_data", 0.45, [], waiting.absent, lost[0].operation, text, facts + _wait_facts(waiting, ())
        )


def _ranks_behind(waiting: WaitingRanks) -> tuple[int, ...]:
    """Ranks whose last enqueued work precedes the timed-out collective, in the same group."""
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
    first = waiting.timed_out[0]
    facts = _wait_facts(waiting, behind)
    text = f"{_rank_list(behind)} never entered the {first.operation} in which the others timed out."
    does = _activity_of_absent(waiting, behind)
    if does is not None:
        yield _wait_candidate(does[0], does[1], behind, first, text, facts)
    yield _wait_candidate("rank_divergent_branch", 0.5 if does else 0.6, behind, first, text, facts)


def _wait_candidate(
    cls: str, weight: float, ranks: Sequence[int], wait: CollectiveWait, text: str, facts: list[Fact]
) -> Candidate:
    return Candidate(cls, weight, [], tuple(ranks), wait.operation, text, facts)


def _waits_by_place(waiting: WaitingRanks) -> list[list[CollectiveWait]]:
    """The waits by place, the largest group first."""
    groups: dict[object, list[CollectiveWait]] = defaultdict(list)
    framed = any(each.path for each in waiting.waits.values())
    for each in waiting.waits.values():
        if framed:
            if each.path:
                groups[each.operation, each.innermost_frame].append(each)
        elif each.timed_out and each.operation:
            groups[each.operation, each.numel, each.seq].append(each)
    return sorted(groups.values(), key=len, reverse=True)


def _different_places(waiting: WaitingRanks, groups: Sequence[Sequence[CollectiveWait]]) -> Iterator[Candidate]:
    """Ranks at different places: the smaller group, or the one that is further, is suspect."""
    most, others = groups[0], [each for group in groups[1:] for each in group]
    ahead = [each for each in others if _is_further(each, most[0])]
    fewer = sorted(each.rank for each in (ahead or others) if each.rank is not None)
    if len(most) == len(others) and not ahead:
        fewer = sorted(each.rank for each in [*most, *others] if each.rank is not None) if len(others) > 1 else fewer
    steps = last_step_by_rank(waiting.history.counters)
    counts = {rank: (counter.epoch, counter.step) for rank, counter in steps.items() if rank in waiting.waits}
    later = any(_FINAL_PHASE.search(each.where) for each in others)
    left = any(len(each.path) < len(most[0].path) for each in ahead)
    uneven = _at_another_step(counts, fewer) or bool(ahead and (left or later)) or (later and not others[0].path)
    facts = _wait_facts(waiting, [*fewer[:2], *(each.rank for each in most[:2] if each.rank is not None)])
    where = others[0].where or f"{others[0].operation} of {others[0].numel} elements"
    text = (
        f"{_rank_list(fewer)} waited in {others[0].operation or 'a collective'} ({where}), "
        f"the others in {most[0].operation or 'a collective'} ({most[0].where or f'{most[0].numel} elements'})."
    )
    operation = most[0].operation
    if _is_sharded_generation(waiting):
        yield Candidate("zero3_generate_desync", 0.7, culprits=(), collective=operation, explanation=text, facts=facts)
        return
    cls, other = ("uneven_data", "rank_divergent_branch") if uneven else ("rank_divergent_branch", "uneven_data")
    yield Candidate(cls, 0.7, culprits=tuple(fewer), collective=operation, explanation=text, facts=facts)
    yield Candidate(other, 0.4, culprits=tuple(fewer), collective=operation, explanation=text, facts=facts)


def _is_further(one: CollectiveWait, other: CollectiveWait) -> bool:
    """Whether a wait is on a later line of the last function that both have in common."""
    for mine, its in zip(one.path, other.path, strict=False):
        if mine.file != its.file or mine.function != its.function:
            return False
        if mine.line != its.line:
            return mine.line > its.line
    return False


def _at_another_step(counts: Mapping[int, tuple[int, int]], ranks: Sequence[int]) -> bool:
    mine = {counts[rank] for rank in ranks if rank in counts}
    rest = {count for rank, count in counts.items() if rank not in ranks}
    return bool(mine and rest) and not mine & rest


def _is_sharded_generation(waiting: WaitingRanks) -> bool:
    stacks = [" ".join(map(str, each.path)) for each in waiting.waits.values()]
    generates = any(GENERATION.search(each) for each in stacks)
    sharded = any(SHARDED_WEIGHTS.search(each.text) for each in waiting.history.matches) or any(
        SHARDED_WEIGHTS.search(frame.file + frame.function)
        for log in waiting.history.logs for _, _, traceback in log.tracebacks for frame in traceback.frames
    )  # fmt: skip
    return generates and sharded


def _absent_ranks(waiting: WaitingRanks) -> Iterator[Candidate]:
    """Known ranks that reported nothing: their activity in the meantime explains the delay."""
    absent = waiting.absent
    first = waiting.timed_out[0]
    text = f"{_rank_list(absent)} did not enter the {first.operation or 'collective'} in which the others timed out."
    facts = _wait_facts(waiting, absent) + [
        _last_line_fact(waiting, rank) for rank in absent[:3] if _last_lines(waiting.history, rank)
    ]
    stack_text = " ".join(f"{frame.function} {frame.source}" for each in waiting.timed_out for frame in each.path)
    does = _activity_of_absent(waiting, absent)
    cls, weight = does if does is not None else (class_of_activity(stack_text) or "unknown", 0.45)
    if len(absent) > max(1, len(waiting.waits)):
        weight = min(weight, 0.45)
    yield _wait_candidate(cls, weight, absent, first, text, facts)


def _activity_of_absent(waiting: WaitingRanks, ranks: Sequence[int]) -> tuple[str, float] | None:
    """What absent ranks did while the others waited, and how certain that is.

    Judged by their stack, by what they logged while the others waited, or, less certain, by what they logged last.
    """
    stacks = main_stack_by_rank(waiting.history)
    for rank in ranks:
        if rank in stacks and _in_another_call(waiting, collective_of_frames(stacks[rank].frames)):
            return (
                "zero3_generate_desync" if any_sharded_generation(stacks.values()) else "rank_divergent_branch"
            ), 0.7
        cls = class_of_activity(" ".join(frame.function for frame in stacks[rank].frames)) if rank in stacks else None
        if cls is not None:
            return cls, 0.75
    began = min((each.started for each in waiting.timed_out if each.started is not None), default=None)
    moved = False
    for rank in ranks:
        for each in reversed(_last_lines(waiting.history, rank)):
            if _RUNTIME_LINE.search(each.text):
                continue
            during = began is not None and each.when is not None and each.when > began + 1.0
            moved = moved or during
            cls = class_of_activity(each.text)
            if cls == "uneven_data" and _all_out_of_data(waiting):
                continue
            if cls is not None:
                return cls, 0.7 if during else 0.55
    return ("slow_collective_timeout", 0.5) if moved else None


def _in_another_call(waiting: WaitingRanks, call: str) -> bool:
    """Whether `call` is a collective other than those that timed out: a rank that waits in another one is not slow."""
    return bool(call) and call not in {each.operation for each in waiting.timed_out}


def _all_out_of_data(waiting: WaitingRanks) -> bool:
    """Whether the waiting ranks report that they have no data left either."""
    texts = (each.text for rank in waiting.waits for each in _last_lines(waiting.history, rank))
    return any(class_of_activity(text) == "uneven_data" for text in texts)


def _all_in_one_place(waiting: WaitingRanks) -> Iterator[Candidate]:
    """All ranks arrived and nothing went through: the transport failed, or all wait for each other's message."""
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
            yield Candidate("network_blocked", 0.5, [], tuple(hosts) if len(hosts) == _PAIR else (), first.operation,
                            text, facts)  # fmt: skip


def _last_begun(waiting: WaitingRanks) -> Iterator[Candidate]:
    """The last activity begun before the timeout and after the last step may be what took so long."""
    history, first = (
        waiting.history,
        min((each for each in waiting.timed_out), key=lambda each: (each.ended or 0.0, each.line)),
    )
    source = next((log.source for log in history.logs if log.name == first.file), -1)
    counters = [counter.line for counter in history.counters_of(source) if counter.line < first.line]
    last = max(counters, default=0)
    found = [
        (each.line, cls, each)
        for name, cls in _BEGUN_FACTS for each in history.facts(name)
        if each.source == source and last <= each.line < first.line
    ]  # fmt: skip
    if not found:
        return
    _, cls, each = max(found, key=lambda one: one[0])
    text = "The last activity begun before the timeout: " + each.text[:120]
    if cls:
        alone = _sole_actor(waiting, [one.text for _, of, one in found if of == cls])
        yield _wait_candidate(cls, 0.4, alone, first, text, [Fact(each.text, file=each.file, line=each.line)])


def _sole_actor(waiting: WaitingRanks, begun: Sequence[str]) -> tuple[int, ...]:
    """Returns the rank that began the activity and did not wait with the majority: its lines name the rank, or only
    this rank waited elsewhere."""
    groups = _waits_by_place(waiting)
    most = {each.rank for each in groups[0]} if groups and len(groups[0]) > 1 else set(waiting.waits)
    named = {int(rank) for text in begun for rank in _ON_RANK.findall(text)} - most
    if named:
        return tuple(sorted(named))
    others = [each.rank for group in groups[1:] for each in group if each.rank is not None]
    return tuple(others) if len(others) == 1 and most - set(others) else ()


def _last_lines(history: JobHistory, rank: int) -> list[TailLine]:
    """A rank's last lines, in the file where it wrote last."""
    found = [list(log.tail_lines[rank]) for log in history.logs
             if rank in log.tail_lines and log.source not in history.old_sources]  # fmt: skip
    return max(found, key=lambda each: each[-1].when or 0.0, default=[])


def _last_line_fact(waiting: WaitingRanks, rank: int) -> Fact:
    last = _last_lines(waiting.history, rank)[-1]
    file = next(log.name for log in waiting.history.logs
                if rank in log.tail_lines and log.tail_lines[rank][-1] == last)  # fmt: skip
    return Fact(last.text, file=file, line=last.line)


def _wait_facts(waiting: WaitingRanks, ranks: Sequence[int]) -> list[Fact]:
    shown = [waiting.waits[rank] for rank in ranks if rank in waiting.waits] or waiting.timed_out[:2]
    shown = shown or list(waiting.waits.values())[:2]
    return [Fact(each.text, file=each.file, line=each.line) for each in shown[:4]]


def _rank_list(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''}"
