"""Candidates from stacks of live processes: the ones at another place than the rest."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.doctor.judge.collective_waits import any_sharded_generation, class_of_activity, collective_of_frames
from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.judge.scoring import Candidate
from lockstep.doctor.logs.stack_traces import UNREADABLE, LoggedStack
from lockstep.watch.diagnosis.verdict import Culprit, Fact

_FILE_FUNCTIONS = re.compile(
    r"(?i)(?:^|_)(?:open|read|write|save|load|fsync|close|flush|_?serialize|dump|stat|listdir)"
)


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """The main thread of a process: its collective ("" if none), and the function that called it."""

    stack: LoggedStack
    operation: str
    caller: str


def stack_snapshots(history: JobHistory) -> list[StackSnapshot]:
    """The stacks taken in the last attempt."""
    found = []
    for log in history.logs:
        for stack in log.stacks if log.source not in history.old_sources else ():
            if stack.is_main_thread:
                own = [frame.function for frame in stack.frames if "torch/" not in frame.file]
                found.append(StackSnapshot(stack, collective_of_frames(stack.frames), own[-1] if own else ""))
    return found


def stack_candidates(history: JobHistory) -> Iterator[Candidate]:
    """Candidates from processes outside the collective that most are in; none without several stacks."""
    found = stack_snapshots(history)
    counted = Counter(each.operation for each in found if each.operation)
    if len(found) < 2 or not counted:
        return
    waited, many = counted.most_common(1)[0]
    others = [each for each in found if each.operation != waited]
    if not others or many < len(others):
        return
    facts = [Fact(each.stack.text, file=each.stack.file, line=each.stack.number) for each in others[:3]]
    stuck = [each for each in others if each.stack.state == UNREADABLE or _in_kernel(history, each.stack)]
    culprits = tuple(_culprit(each.stack, history) for each in stuck or others)
    where = others[0].caller or "a place that could not be inspected"
    text = f"{many} processes wait in {waited}; {len(others)} {'is' if len(others) == 1 else 'are'} in {where}."
    cls, weight = _classify_outliers(found, stuck, others)
    yield Candidate(cls, weight, [], culprits, waited, text, facts)


def _classify_outliers(
    all_of: Sequence[StackSnapshot], stuck: Sequence[StackSnapshot], others: Sequence[StackSnapshot]
) -> tuple[str, float]:
    """The class of the outliers: those in another collective took another branch; otherwise their functions decide."""
    frames = " ".join(frame.function for each in others for frame in each.stack.frames)
    if stuck:
        return "storage_fault", 0.55
    if all(each.operation for each in others):
        return (
            "zero3_generate_desync"
            if any_sharded_generation(each.stack for each in all_of)
            else "rank_divergent_branch"
        ), 0.65
    cls = class_of_activity(frames)
    if cls is not None:
        return cls, 0.65
    return ("storage_fault", 0.45) if _FILE_FUNCTIONS.search(frames) else ("rank_divergent_branch", 0.5)


def _in_kernel(history: JobHistory, stack: LoggedStack) -> bool:
    """Whether a process list shows it in uninterruptible sleep."""
    pid = str(stack.pid)
    return any(each.fields.get("pid") == pid for each in history.facts("uninterruptible"))


def _culprit(stack: LoggedStack, history: JobHistory) -> Culprit:
    rank = stack.origin.rank
    if rank is None and stack.pid is not None:
        rank = history.rank_of_pid.get(stack.pid)
    host = stack.origin.host or (history.hosts.get(rank, "") if rank is not None else "")
    frame = next((each for each in reversed(stack.frames) if "torch/" not in each.file), None)
    where = f"{frame.function}() at {frame.file}:{frame.line}" if frame else ""
    name = "" if rank is not None else host or str(stack.pid)
    return Culprit(rank, host=host, pid=stack.pid, where=where, name=name)
