"""Proposes causes from differences between ranks or hosts: in collectives, reports, versions and stacks."""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.doctor.judge.collective_waits import class_of_activity, collective_of_frames
from lockstep.doctor.judge.hypotheses import Candidate
from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.logs.parsed_log import RuleMatch
from lockstep.doctor.logs.stack_traces import UNREADABLE, LoggedStack
from lockstep.watch.diagnosis.verdict import Culprit, Fact

_MAX_FACTS = 3
_MAX_PEERS = 4096


def difference_candidates(history: JobHistory) -> Iterator[Candidate]:
    """Yields candidates from collective fingerprints, versions, and ranks that never reported."""
    yield from _different_operations(history)
    yield from _different_versions(history)
    yield from _never_announced(history)


def _different_operations(history: JobHistory) -> Iterator[Candidate]:
    """Yields a candidate if ranks called different collectives at the same sequence number.

    The same operation with different shapes means uneven data, unless the ranks called it in different places; with
    equal shapes, another argument differs.
    """
    mismatches = [each for each in history.facts("mismatch") if not history.continued_after(each)]
    if not mismatches:
        return
    operations = {each.fields[key] for each in mismatches for key in ("op", "peer_op") if key in each.fields}
    first = [
        each for each in mismatches if each.fields.get("peer_seq", each.fields.get("seq")) == each.fields.get("seq")
    ]
    reports = [(int(each["rank"]), int(each["peer"]) if each.get("peer") else None,
                (each.get("op"), each.get("shape"), each.get("dtype")))
               for each in (match.fields for match in first or mismatches) if each.get("rank")]  # fmt: skip
    ranks = minority_ranks(reports) or tuple(sorted({rank for rank, _, _ in reports}))
    operation = mismatches[0].fields.get("op", "").lower()
    places = {history.exception_sites.get(rank) for rank in map(history.rank, mismatches) if rank is not None} - {None}
    types = {each.fields["dtype"] for each in mismatches if "dtype" in each.fields}
    if len(operations) <= 1 and len(places) < 2 and len(types) < 2:
        yield Candidate("uneven_data", 0.7, list(mismatches), ranks, operation)
    else:
        yield Candidate("rank_divergent_branch", 0.8, list(mismatches), ranks, operation)


def minority_ranks(reports: Iterable[tuple[int, int | None, Hashable]]) -> tuple[int, ...]:
    """Returns the minority among ranks, each of which reports the first peer that called something else.

    A rank compares its call with those of all others in rank order, so it agrees with the ranks before the reported
    peer (`ProcessGroupWrapper.cpp`). The result is empty if there is no majority.

    Args:
        reports: The reporting rank, the peer that it names, and the fingerprint of the reporting rank's call.
    """
    group: dict[int, int] = {}
    same: dict[Hashable, int] = {}

    def root(rank: int) -> int:
        while group.setdefault(rank, rank) != rank:
            rank = group[rank]
        return rank

    for rank, peer, called in reports:
        group[root(rank)] = root(same.setdefault(called, rank))
        if peer is not None:
            root(peer)
        for other in range(min(peer or 0, _MAX_PEERS)):
            group[root(other)] = root(rank)
    sides: dict[int, list[int]] = defaultdict(list)
    for rank in group:
        sides[root(rank)].append(rank)
    sizes = sorted(map(len, sides.values()), reverse=True)
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return ()
    return tuple(sorted(rank for side in sides.values() if len(side) < sizes[0] for rank in side))


def _different_versions(history: JobHistory) -> Iterator[Candidate]:
    """Yields a candidate for the libraries of which hosts have different versions; the culprits are the minority, or
    both of two hosts."""
    by_library: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    shown: dict[tuple[str, str], RuleMatch] = {}
    for each in history.facts("nccl_version") + history.facts("library_version"):
        if each.origin.host:
            library, version = each.fields.get("library", "NCCL"), each.fields["version"]
            by_library[library][each.origin.host].add(version)
            shown.setdefault((library, version), each)
    for library, by_host in by_library.items():
        common = Counter(version for versions in by_host.values() for version in versions)
        usual, many = common.most_common(1)[0]
        if len(common) < 2 or many == len(by_host):
            continue
        others = [host for host, versions in by_host.items() if usual not in versions]
        hosts = sorted(others if many > len(others) else by_host)
        worked = history.traits & {"progressed", "ended_well"}
        text = f"The hosts use different versions of {library}: {', '.join(sorted(common))}."
        facts = [Fact(each.text, file=each.file, line=each.line) for (name, _), each in shown.items()
                 if name == library]  # fmt: skip
        culprits = tuple(Culprit(None, host=host, name=host) for host in hosts)
        yield Candidate("version_mismatch", 0.3 if worked else 0.7, [], culprits, "", text, facts[:_MAX_FACTS])


def _never_announced(history: JobHistory) -> Iterator[Candidate]:
    """Yields a candidate if most ranks reported that they start, the others wrote nothing, and nothing else was."""
    placed = {int(each.fields["rank"]): each for each in history.facts("placed") if each.fields.get("size")}
    missing = tuple(sorted(history.ranks - set(placed)))
    if not 0 < len(missing) < len(placed) or history.traits & {"progressed", "exception", "ended_well"}:
        return
    if history.failures or any(rank in log.tail_lines for log in history.logs for rank in missing):
        return
    text = f"{len(placed)} of {len(history.ranks)} ranks report that they start; the others wrote nothing."
    facts = [Fact(each.text, file=each.file, line=each.line) for each in placed.values()]
    yield Candidate("rendezvous_incomplete", 0.5, [], missing, "", text, facts[:_MAX_FACTS])


_FILE_FUNCTIONS = re.compile(
    r"(?i)(?:^|_)(?:open|read|write|save|load|fsync|close|flush|_?serialize|dump|stat|listdir)"
)


_HELPER_FILE = re.compile(r"torch/distributed/(?:elastic|run|launch)|accelerate/commands|data/_utils/worker\.py")
"""Files in the stacks of launchers and of loader workers, which are no ranks."""


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """The stack of the main thread of a process, its collective ("" if none), and the function that called it."""

    stack: LoggedStack
    operation: str
    caller: str


def stack_snapshots(history: JobHistory) -> list[StackSnapshot]:
    """Returns the stacks of ranks that were taken in the last attempt."""
    found = []
    for log in history.logs:
        for stack in log.stacks if log.source not in history.old_sources else ():
            if stack.is_main_thread and not any(_HELPER_FILE.search(frame.file) for frame in stack.frames):
                own = [frame.function for frame in stack.frames if "torch/" not in frame.file]
                found.append(StackSnapshot(stack, collective_of_frames(stack.frames), own[-1] if own else ""))
    return found


def stack_candidates(history: JobHistory) -> Iterator[Candidate]:
    """Yields a candidate if some processes are outside the collective that most processes are in."""
    found = stack_snapshots(history)
    counted = Counter(each.operation for each in found if each.operation)
    if len(found) < 2 or not counted:
        return
    waited, many = counted.most_common(1)[0]
    elsewhere = [each for each in found if each.operation != waited]
    others = [each for each in elsewhere if not each.operation] or elsewhere
    if not others or many < len(others):
        return
    facts = [Fact(each.stack.text, file=each.stack.file, line=each.stack.number) for each in others[:3]]
    in_kernel = [each for each in others if each.stack.state == UNREADABLE]
    culprits = tuple(_culprit_of_stack(each.stack, history, len(others) == 1) for each in in_kernel or others)
    where = others[0].caller or "a place that could not be inspected"
    text = f"{many} processes wait in {waited}; {len(others)} {'is' if len(others) == 1 else 'are'} in {where}."
    cls, weight = _classify_outliers(in_kernel, others)
    yield Candidate(cls, weight, [], culprits, waited, text, facts)


def _classify_outliers(in_kernel: Sequence[StackSnapshot], others: Sequence[StackSnapshot]) -> tuple[str, float]:
    """Returns class and weight for the processes outside the collective.

    If they are in another collective, they took another branch; otherwise their functions decide.
    """
    frames = " ".join(frame.function for each in others for frame in each.stack.frames)
    if in_kernel:
        return "storage_fault", 0.55
    if all(each.operation for each in others):
        return "rank_divergent_branch", 0.65
    cls = class_of_activity(frames)
    if cls is not None:
        return cls, 0.65
    return ("storage_fault", 0.45) if _FILE_FUNCTIONS.search(frames) else ("rank_divergent_branch", 0.5)


def _culprit_of_stack(stack: LoggedStack, history: JobHistory, only: bool) -> Culprit:
    """Returns the process of a stack as a culprit: its rank, if it is known.

    Args:
        only: Whether it is the only process outside the collective, and so the only rank that raised no exception.
    """
    rank = stack.origin.rank
    if rank is None and stack.pid is not None:
        rank = history.rank_of_pid.get(stack.pid)
    host = stack.origin.host or (history.hosts.get(rank, "") if rank is not None else "")
    frame = next((each for each in reversed(stack.frames) if "torch/" not in each.file), None)
    where = f"{frame.function}() at {frame.file}:{frame.line}" if frame else ""
    silent = history.ranks - {each.rank for each, _, _, _ in history.tracebacks} if only and rank is None else ()
    rank = next(iter(silent)) if len(silent) == 1 else rank
    name = "" if rank is not None else host or str(stack.pid)
    return Culprit(rank, host=host, pid=stack.pid, where=where, name=name)
