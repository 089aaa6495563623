"""Finds out which operations of a dump have ended: the collectives of a communicator, its sends and receives.

A batch of sends and receives shares one `collective_seq_id` and one `p2p_seq_id`. Its parts are recorded without
events, so their state never changes; that of the entry `coalesced` after them is the state of all. A batch without that
entry has ended and the entry was left out or overwritten, or it has not been started.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import compress, pairwise
from operator import itemgetter, not_
from typing import Any

from lockstep.watch.diagnosis.evidence_types import needs_all_members
from lockstep.watch.dumps.dump_parser import MAX_TEXT_CHARS
from lockstep.watch.dumps.traces import CommunicatorTrace, PendingEntry, RankTrace

Entries = Sequence[dict[str, Any]]
_BatchKey = tuple[int, int]
_COALESCED = "coalesced"
_MAX_TRANSFERS = 4096
"""The most open sends and receives kept per communicator."""
_STATE, _RETIRED = map(itemgetter, ("state", "retired"))


def operation_of(entry: Mapping[str, Any]) -> str:
    """`all_reduce` for an entry `nccl:all_reduce`."""
    return str(entry["profiling_name"].partition(":")[2])[:MAX_TEXT_CHARS]


def order_of(entry: Mapping[str, Any]) -> int:
    """The position of an entry among all of the process. Old versions have no `record_id`, but their times ascend."""
    number = entry.get("record_id")
    return number if type(number) is int else int(entry["time_created_ns"])


def has_ended(entries: Entries) -> list[bool]:
    """Which entries have ended. With gloo the `state` never changes, but `retired` entries have ended, successfully or
    not."""
    if _is_of_gloo(entries):
        return list(map(_RETIRED, entries))
    return [state == "completed" for state in map(_STATE, entries)]


def _is_of_gloo(entries: Entries) -> bool:
    return bool(entries[-1]["profiling_name"].startswith("gloo"))


def has_started(entry: Mapping[str, Any]) -> bool:
    """Whether the recorder has noted that the device has started the operation."""
    return entry.get("state") in ("started", "completed") or bool(entry.get("time_discovered_started_ns"))


def describe_recorder(trace: RankTrace, entries: Entries) -> None:
    """Fills in what the entries show about the recorder: whether it leaves out completed ones and notes starts,
    and the time-out of unfinished operations."""
    ended = has_ended(entries)
    open_entries = list(compress(entries, map(not_, ended)))
    trace.only_active = len(open_entries) == len(entries) and not _is_of_gloo(entries)
    trace.timed = any(entry.get("time_discovered_started_ns") for entry in entries)
    trace.untimed = not trace.timed and any(ended)
    trace.newest_ended = max(_newest_left_out(entries), max(map(order_of, compress(entries, ended)), default=-1))
    timeouts = [each for entry in open_entries if type(each := entry.get("timeout_ms")) is int and each > 0]
    trace.timeout_s = max(timeouts, default=float("nan")) / 1000


def _newest_left_out(entries: Entries) -> int:
    """The position of the newest operation between the entries that has none, because it has ended and the dump holds
    unfinished ones only; -1 if there is none."""
    numbers = [entry.get("record_id") for entry in entries]
    gaps = (
        after - 1 for before, after in pairwise(numbers) if type(before) is type(after) is int and after - before > 1
    )
    return max(gaps, default=-1)


def split_off_transfers(group: CommunicatorTrace, entries: Entries, complete: bool) -> list[dict[str, Any]]:
    """Records the sends and receives of a communicator and returns its collectives.

    A batch also takes a number of the collectives, on its own rank only. So the collectives are numbered anew: from the
    first one if the dump is `complete`, else from the oldest unfinished one, and then their counts are uncertain.
    """
    transfers = [entry for entry in entries if entry["is_p2p"]]
    others = [entry for entry in entries if not entry["is_p2p"]]
    group.issued = dict(Counter(map(operation_of, transfers)))
    group.first_transfer = min(_key(entry)[1] for entry in transfers)
    batches: dict[_BatchKey, list[dict[str, Any]]] = {}
    for entry in transfers:
        batches.setdefault(_key(entry), []).append(entry)
    of_collectives = {_key(entry) for entry in others if operation_of(entry) != _COALESCED}
    ends = {_key(e): e for e in entries if operation_of(e) == _COALESCED and _key(e) not in of_collectives}
    batched = _batched_keys(batches, ends, {number for number, _ in of_collectives})
    pending = [_pending(*each) for each in _operations(batches, ends, batched) if not has_ended([each[1]])[0]]
    group.transfers = sorted(pending, key=lambda each: each.order)[:_MAX_TRANSFERS]
    collectives = [entry for entry in others if _key(entry) in of_collectives]
    if not batched or not collectives:
        return collectives
    group.uncertain = not complete
    return _renumber(collectives, complete)


def _operations(
    batches: Mapping[_BatchKey, Entries], ends: Mapping[_BatchKey, dict[str, Any]], batched: Set[_BatchKey]
) -> Iterator[tuple[Entries, dict[str, Any]]]:
    """Batches and single sends and receives: their parts, and the entry that has their state. Batches without such an
    entry are omitted."""
    for key, end in ends.items():
        yield batches.get(key, ()), end
    for key, parts in batches.items():
        if key not in batched:
            yield from (([part], part) for part in parts)


def _pending(parts: Entries, entry: dict[str, Any]) -> PendingEntry:
    return PendingEntry(
        order_of(parts[0] if parts else entry), entry["time_created_ns"] / 1e9, has_started(entry),
        tuple(map(operation_of, parts)),
    )  # fmt: skip


def _renumber(collectives: Entries, complete: bool) -> list[dict[str, Any]]:
    """Numbers collectives from the first one, or, if older ones may be missing, the unfinished ones."""
    if not complete:
        collectives = [e for e, ended in zip(collectives, has_ended(collectives), strict=True) if not ended]
    numbers = {number: at for at, number in enumerate(dict.fromkeys(e["collective_seq_id"] for e in collectives), 1)}
    return [each | {"collective_seq_id": numbers[each["collective_seq_id"]]} for each in collectives]


def _key(entry: Mapping[str, Any]) -> _BatchKey:
    number = entry.get("p2p_seq_id")
    return entry["collective_seq_id"], number if type(number) is int else 0


def _batched_keys(
    batches: Mapping[_BatchKey, Entries], ends: Mapping[_BatchKey, Mapping[str, Any]], collectives: set[int]
) -> set[_BatchKey]:
    """The keys of batches. A batch is the first to use its number of collectives, a single send or receive is not: the
    number is that of an earlier call, or 0. One alone is ambiguous; it is a single one unless others are batches."""
    first_use: dict[int, int] = {}
    for collective, transfer in batches:
        first_use[collective] = min(transfer, first_use.get(collective, transfer))
    fresh = {key for key in batches if key[0] not in collectives | {0} and first_use[key[0]] == key[1]}
    clear = {key for key, parts in batches.items() if key in ends or len(parts) > 1}
    if clear or (len(fresh) > 1 and len(fresh) == len(batches)):
        return fresh | clear | ends.keys()
    return set(ends)


def record_progress(group: CommunicatorTrace, entries: Entries, sequences: Sequence[int]) -> None:
    """Records the rank's progress from its collectives."""
    newest, gloo, ended = entries[-1], group.backend == "gloo", has_ended(entries)
    group.needs_all = all(map(needs_all_members, set(map(operation_of, entries))))
    group.first, group.entered, group.entered_at = sequences[0], max(sequences), newest["time_created_ns"] / 1e9
    group.ended = max(compress(sequences, ended), default=-1)
    group.completed = group.ended if group.ended >= 0 else group.first - 1
    if gloo:
        group.completed = min(compress(sequences, map(not_, ended)), default=group.entered + 1) - 1
    certain = group.completed
    if gloo and group.completed == group.entered:  # the newest one may have failed: gloo retires it all the same
        certain -= 1
    for sequence, entry in zip(reversed(sequences), reversed(entries), strict=True):
        if sequence == group.completed and not gloo:
            at = entry.get("time_discovered_completed_ns")
            group.completed_at = at / 1e9 if type(at) is int and at else group.completed_at
        if sequence <= certain and needs_all_members(operation_of(entry)):
            group.certain = sequence
            break
    group.uncertain |= gloo and group.operations > sequences[-1]
    if group.completed < group.entered:
        oldest = [entry for entry, number in zip(entries, sequences, strict=True) if number == group.completed + 1]
        if oldest:
            started = any(map(has_started, oldest))
            group.pending = PendingEntry(order_of(oldest[0]), oldest[0]["time_created_ns"] / 1e9, started)
