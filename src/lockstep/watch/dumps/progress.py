"""Finds out which operations of a dump have ended: the collectives of a communicator, its sends and receives.

A batch of sends and receives shares one `collective_seq_id` and one `p2p_seq_id`. Its parts are recorded without
events, so their state never changes; that of the entry `coalesced` after them is the state of all. A batch without that
entry has ended and the entry was left out or overwritten, or it has not been started.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from operator import itemgetter, not_
from typing import Any

from lockstep.watch.diagnosis.evidence_types import needs_all_members
from lockstep.watch.dumps.dump_parser import MAX_TEXT_CHARS
from lockstep.watch.dumps.traces import CommunicatorTrace, PendingEntry, RankTrace

Entries = Sequence[Mapping[str, Any]]
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
    if entries[-1]["profiling_name"].startswith("gloo"):
        return list(map(_RETIRED, entries))
    return [state == "completed" for state in map(_STATE, entries)]


def has_started(entry: Mapping[str, Any]) -> bool:
    """Whether the recorder has noted that the device has started the operation."""
    return entry.get("state") in ("started", "completed") or bool(entry.get("time_discovered_started_ns"))


def describe_recorder(trace: RankTrace, entries: Entries) -> None:
    """Fills in what the entries show about the recorder: whether it has overwritten entries or leaves out completed
    ones, notes starts, and the time-out of unfinished operations."""
    open_entries = [entry for entry, ended in zip(entries, has_ended(entries), strict=True) if not ended]
    nccl = not entries[-1]["profiling_name"].startswith("gloo")
    trace.only_active = nccl and len(open_entries) == len(entries)
    trace.wrapped = entries[0].get("record_id", 0) != 0 and not trace.only_active
    trace.timed = any(entry.get("time_discovered_started_ns") for entry in entries)
    timeouts = [each for entry in open_entries if type(each := entry.get("timeout_ms")) is int and each > 0]
    trace.timeout_s = max(timeouts, default=float("nan")) / 1000


def split_off_transfers(group: CommunicatorTrace, entries: Entries, complete: bool) -> list[dict[str, Any]]:
    """Records the sends and receives of a communicator and returns its collectives.

    A batch also takes a number of the collectives, on its own rank only. So the collectives are numbered anew: from the
    first one if the dump is `complete`, else from the oldest unfinished one, and then their counts are uncertain.
    """
    batches: dict[_BatchKey, list[Mapping[str, Any]]] = {}
    ends: dict[_BatchKey, Mapping[str, Any]] = {}
    for entry in entries:
        if entry["is_p2p"]:
            batches.setdefault(_key(entry), []).append(entry)
            text = operation_of(entry)
            group.issued[text] = group.issued.get(text, 0) + 1
    parts_of_collectives = {_key(e) for e in entries if not e["is_p2p"] and operation_of(e) != _COALESCED}
    ends |= {_key(e): e for e in entries if operation_of(e) == _COALESCED and _key(e) not in parts_of_collectives}
    batched = _batched_keys(batches, ends, {number for number, _ in parts_of_collectives})
    for key in sorted({*batches, *ends}, key=lambda key: order_of((batches.get(key) or [ends[key]])[0])):
        if key in batched:
            end = ends.get(key)
            if end is not None and not has_ended([end])[0]:
                _append_pending(group, batches.get(key, []), end)
        else:
            for entry in batches[key]:
                if not has_ended([entry])[0]:
                    _append_pending(group, [entry], entry)
    collectives = [dict(e) for e in entries if not e["is_p2p"] and _key(e) not in ends]
    if batched and collectives:
        if not complete:
            collectives = [e for e, ended in zip(collectives, has_ended(collectives), strict=True) if not ended]
            group.uncertain = True
        numbers = {
            number: at for at, number in enumerate(dict.fromkeys(e["collective_seq_id"] for e in collectives), 1)
        }
        for entry in collectives:
            entry["collective_seq_id"] = numbers[entry["collective_seq_id"]]
    return collectives


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


def _append_pending(group: CommunicatorTrace, parts: Entries, entry: Mapping[str, Any]) -> None:
    if len(group.transfers) < _MAX_TRANSFERS:
        group.transfers.append(
            PendingEntry(order_of(parts[0] if parts else entry), entry["time_created_ns"] / 1e9, has_started(entry),
                         tuple(operation_of(each) for each in parts))
        )  # fmt: skip


def record_progress(group: CommunicatorTrace, entries: Entries, sequences: Sequence[int]) -> None:
    """Records the rank's progress from its collectives."""
    newest, gloo, ended = entries[-1], group.backend == "gloo", has_ended(entries)
    group.first, group.entered, group.entered_at = sequences[0], max(sequences), newest["time_created_ns"] / 1e9
    group.ended = max(compress(sequences, ended), default=-1)
    group.completed = group.ended if group.ended >= 0 else group.first - 1
    if gloo:
        group.completed = min(compress(sequences, map(not_, ended)), default=group.entered + 1) - 1
    group.timed_out = not gloo and not ended[-1] and bool(newest["retired"])
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
    oldest = [entry for entry, number in zip(entries, sequences, strict=True) if number == group.completed + 1]
    if oldest and group.completed < group.entered:
        started = any(map(has_started, oldest))
        group.pending = PendingEntry(order_of(oldest[0]), oldest[0]["time_created_ns"] / 1e9, started)
