"""Decodes one dump into columns of numbers: the calls of a rank on each of its communicators.

The decoder runs in a separate process (`reader_process`) with only the standard library, because dumps are untrusted:
a value may have any type, and may be far larger than the file.

The format has versions 1.0 to 2.10 (torch/csrc/distributed/c10d/FlightRecorder.hpp). Version 1.x counts in `seq_id` and
names no process group; versions up to 2.2 lack `is_p2p`, dtypes or `pg_status`. Dumps in JSON have strings in
`pg_status`, 0 for an unknown time and lists for tuples. The oldest form is a bare list of entries.
"""

import json
import marshal
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress
from operator import itemgetter, not_
from typing import Any

from lockstep.base.text import count_noun
from lockstep.watch.dumps.dump_parser import (
    DAMAGED_INPUT_ERRORS,
    MAX_RANKS,
    MAX_TEXT_CHARS,
    DumpCallSites,
    NotADump,
    bounded_text,
    normalize_entry,
    parse_dump,
)

BLOCK = 128
"""Older collectives are compared in blocks: those with equal `sequence // BLOCK` have one digest."""


@dataclass(slots=True)
class CommunicatorTrace:
    """One rank's record of one communicator. Times are Unix seconds; unknown sequence numbers are -1."""

    name: str
    description: str = ""
    backend: str = ""
    members: str = ""
    """The ranks of the communicator as the dump lists them, `[0, 1]`; empty if the dump does not list them."""
    entered: int = -1
    """The last collective that this rank has entered."""
    completed: int = -1
    """This rank has completed this collective and, with gloo, all earlier ones."""
    entered_at: float = float("nan")
    completed_at: float = float("nan")
    ended: int = -1
    """The last collective that has ended on this rank, successfully or not; earlier ones may still run."""
    certain: int = -1
    """The last collective that this rank has certainly completed and that no rank can complete before all have entered
    it."""
    first: int = -1
    """The oldest collective in the dump."""
    waits: list[tuple[str, float]] = field(default_factory=list)
    """Sends and receives that have not ended: (`recv 1<-0`, start time)."""
    uncertain: bool = False
    """True if the counters include calls without an entry (point-to-point with gloo)."""
    number: int = -1
    """The key of the communicator in `pg_status`."""
    operations: int = -1
    """The number of operations started, including sends and receives."""
    timed_out: bool = False
    """True if the watchdog gave up waiting for the newest collective."""
    digested: int = -1
    """The number of the first block in `digests`; -1 if there is none."""
    digests: "array[int]" = field(default_factory=lambda: array("Q"))
    """Digests of the blocks of calls that are older than those in the columns below."""
    sequence: "array[int]" = field(default_factory=lambda: array("q"))
    signature: "array[int]" = field(default_factory=lambda: array("Q"))
    """Digests of calls; matching calls have equal signatures."""
    created: "array[int]" = field(default_factory=lambda: array("q"))
    """When the calls were made, in Unix nanoseconds."""
    site: "array[int]" = field(default_factory=lambda: array("i"))
    """Indices of the call sites in `RankTrace.sites`."""


@dataclass(slots=True)
class RankTrace:
    """The content of one rank's dump."""

    version: str = ""
    library: str = ""
    groups: list[CommunicatorTrace] = field(default_factory=list)
    entries: int = 0
    complete: bool = False
    """True if the dump holds every collective since the process started."""
    began: float = float("nan")
    """When the first collective was entered; NaN if its entry has been overwritten."""
    newest: float = float("nan")
    """When the newest entry was created."""
    world: int = 0
    """A lower bound of the number of ranks of the job."""
    sites: list[str] = field(default_factory=list)
    """Call sites: `train.py:31 in step`."""
    notes: list[str] = field(default_factory=list)
    """Problems with the dump, as text."""


_PROCESS_GROUP, _SEQUENCE, _CREATED = map(itemgetter, ("process_group", "collective_seq_id", "time_created_ns"))
_STATE, _RETIRED, _IS_P2P = map(itemgetter, ("state", "retired", "is_p2p"))
_CALL = itemgetter("profiling_name", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
_MIN_KEPT_CALLS = 64
"""At least this many calls of a communicator are kept individually."""
_Entries = list[dict[str, Any]]
CallTexts = dict[int, tuple[str, str, str]]
"""Operation, shapes and dtype by signature."""

_EQUAL_OUTPUTS = ("all_gather", "_all_gather", "allgather", "scatter", "_broadcast_oop")
"""Operations whose output shapes and dtypes are equal on all ranks; inputs may differ, or exist on the root only."""
_EQUAL_INPUTS = ("reduce_scatter", "_reduce_scatter", "gather")
"""Operations whose input shapes and dtypes are equal on all ranks."""
_NOTHING_EQUAL = ("all_to_all", "alltoall")
_SYNCHRONIZING = ("all_", "_all_", "allreduce", "allgather", "reduce_scatter", "_reduce_scatter", "barrier")
"""Operations that no rank can complete before all have entered."""
_MAX_WAITS = 8
"""The most open sends and receives kept per communicator."""
_MAX_MEMBERS_CHARS = 8 * MAX_RANKS
"""The longest member list, in characters."""
_MAX_GROUPS = 10_000


class DumpDecoder:
    """Decodes dumps one by one; caches the signatures of calls."""

    def __init__(self) -> None:
        self.calls: CallTexts = {}
        self._signatures: dict[bytes, int] = {}

    def read(self, data: bytes, full: bool = False) -> RankTrace:
        """Decodes the bytes of a dump. With `full`, all calls are kept individually; else older calls become digests of
        blocks, which suffice if all ranks made the same calls.

        Raises:
            NotADump: the file is empty, truncated, damaged, or not a dump.
        """
        content = parse_dump(data)
        if isinstance(content, list):
            content = {"entries": content, "version": "1.0"}
        if not isinstance(content, dict) or not {"entries", "pg_status", "pg_config", "version"} & content.keys():
            raise NotADump("is not a flight-recorder dump")
        library = content.get("comm_lib_version", content.get("nccl_version"))
        trace = RankTrace(bounded_text(content.get("version")), bounded_text(library))
        entries = content.get("entries")
        if not isinstance(entries, list):
            entries = []
        try:
            trace = self._decode_groups(trace, entries, full)
        except DAMAGED_INPUT_ERRORS:
            entries = [entry for entry in map(normalize_entry, entries) if entry is not None]
            bad = len(content.get("entries") or ()) - len(entries)
            if bad and not entries and len(content) <= 2:
                raise NotADump("is not a flight-recorder dump") from None
            if bad:
                trace.notes.append(f"{count_noun(bad, 'entry')} cannot be read")
            trace.groups = []
            try:
                trace = self._decode_groups(trace, entries, full)
            except DAMAGED_INPUT_ERRORS as error:
                raise NotADump(f"is damaged: {str(error)[:MAX_TEXT_CHARS] or type(error).__name__}") from error
        _apply_config(trace, content.get("pg_config"))
        _apply_status(trace, content.get("pg_status"))
        return trace

    def _decode_groups(self, trace: RankTrace, entries: _Entries, full: bool) -> RankTrace:
        """Fills in the trace from the entries.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: an entry does not have the current format.
        """
        names = list(map(_PROCESS_GROUP, entries))
        group_names = dict.fromkeys(names)
        if len(group_names) > _MAX_GROUPS:
            raise NotADump("has more communicators than any job")
        of_group: dict[tuple[str, str], _Entries] = dict.fromkeys(group_names, entries)
        if len(group_names) > 1:
            of_group = {name: [] for name in group_names}
            for name, entry in zip(names, entries, strict=True):
                of_group[name].append(entry)
        sites = DumpCallSites()
        for (name, description), group_entries in of_group.items():
            group = CommunicatorTrace(str(name)[:MAX_TEXT_CHARS], str(description)[:MAX_TEXT_CHARS])
            self._decode_group(group, group_entries, sites, full)
            trace.groups.append(group)
        trace.sites = sites.names
        trace.entries = len(entries)
        if entries:
            ids = [entry.get("record_id", -1) for entry in (entries[0], entries[-1])]
            trace.complete = ids == [0, len(entries) - 1] and all(group.first <= 1 for group in trace.groups)
            trace.began = _CREATED(entries[0]) / 1e9 if trace.complete else float("nan")
            trace.newest = _CREATED(entries[-1]) / 1e9
        return trace

    def _decode_group(self, group: CommunicatorTrace, entries: _Entries, sites: DumpCallSites, full: bool) -> None:
        """Fills in a communicator from its entries, which are ordered from old to new."""
        newest = entries[-1]
        group.backend = newest["profiling_name"].partition(":")[0]
        number, operations = newest.get("pg_id"), newest.get("op_id")
        group.number = number if type(number) is int else -1
        group.operations = operations if type(operations) is int else -1
        if any(map(_IS_P2P, entries)):
            _record_open_p2p(group, entries)
            entries = [entry for entry in entries if not entry["is_p2p"]]
            if not entries:
                return
        sequences = list(map(_SEQUENCE, entries))
        _record_progress(group, entries, sequences)
        start = 0 if full else _digest_old_blocks(group, entries, sequences)
        self._decode_calls(group, entries[start:], sequences[start:], sites)

    def _decode_calls(
        self, group: CommunicatorTrace, entries: _Entries, sequences: Sequence[int], sites: DumpCallSites
    ) -> None:
        """Fills in the columns: number, signature, time and call site of each call."""
        known, calls = self._signatures, list(map(_CALL, entries))
        keys = [marshal.dumps(call, 2) for call in calls]
        for new in set(keys) - known.keys():
            known[new] = self._signature(*calls[keys.index(new)])
        created: Sequence[int] = list(map(_CREATED, entries))
        signatures: Sequence[int] = [known[key] for key in keys]
        places: Sequence[int] = sites.of(entries)
        if len(set(sequences)) < len(sequences):
            sequences, signatures, created, places = self._merge_coalesced(sequences, signatures, created, places)
        group.sequence, group.signature = array("q", sequences), array("Q", signatures)
        group.created, group.site = array("q", created), array("i", places)

    def _merge_coalesced(
        self, sequences: Sequence[int], signatures: Sequence[int], created: Sequence[int], places: Sequence[int]
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Merges the parts of a coalesced operation, which share a sequence number, into one call."""
        blocks: dict[int, tuple[int, int, int]] = {}
        for sequence, signature, when, place in zip(sequences, signatures, created, places, strict=True):
            before = blocks.get(sequence)
            blocks[sequence] = (self._combined_signature(before[0], signature), before[1], place) if before else (
                signature, when, place)  # fmt: skip
        merged = list(blocks.values())
        return list(blocks), [each[0] for each in merged], [each[1] for each in merged], [each[2] for each in merged]

    def _signature(self, name: str, ins: Any, outs: Any, in_types: Any, out_types: Any) -> int:
        """The signature of a new call: a digest of everything that must be equal on all ranks."""
        operation = str(name).partition(":")[2] or str(name)
        operation = operation[:MAX_TEXT_CHARS]
        shapes = f"{_bounded_json(ins)} -> {_bounded_json(outs)}"
        types = f"{_dtype_names(in_types)} -> {_dtype_names(out_types)}"
        compared: tuple[Any, ...] = (ins, outs, in_types, out_types)
        if operation.startswith(_NOTHING_EQUAL):
            compared = ()
        elif operation.startswith(_EQUAL_INPUTS):
            compared = (ins, in_types)
        elif operation.startswith(_EQUAL_OUTPUTS):
            compared = (outs, out_types)
        signature = _hash64(json.dumps((operation, *compared)).encode())
        self.calls[signature] = (operation, shapes if ins != outs else _bounded_json(ins), _dtype_text(types))
        return signature

    def _combined_signature(self, first: int, second: int) -> int:
        """The signature of a coalesced operation whose parts have these signatures."""
        signature = _hash64(f"{first} {second}".encode())
        if signature not in self.calls:
            parts = [self.calls[each] for each in (first, second)]
            operation = parts[1][0] if "coalesced" in parts[1][0] else f"{parts[0][0]}+{parts[1][0]}"[:MAX_TEXT_CHARS]
            self.calls[signature] = (operation, parts[0][1], parts[0][2])
        return signature


def _has_ended(entries: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which entries have ended. With gloo the `state` never changes, but `retired` entries have ended, successfully or
    not."""
    if entries[-1]["profiling_name"].startswith("gloo"):
        return list(map(_RETIRED, entries))
    return [state == "completed" for state in map(_STATE, entries)]


def _record_open_p2p(group: CommunicatorTrace, entries: Sequence[Mapping[str, Any]]) -> None:
    """Records the sends and receives that have not ended, oldest first."""
    for entry, ended in zip(entries, _has_ended(entries), strict=True):
        if entry["is_p2p"] and not ended and len(group.waits) < _MAX_WAITS:
            group.waits.append((entry["profiling_name"].partition(":")[2][:MAX_TEXT_CHARS], _CREATED(entry) / 1e9))


def _digest_old_blocks(group: CommunicatorTrace, entries: _Entries, sequences: Sequence[int]) -> int:
    """Digests the blocks of older calls; returns the index of the first entry that is to be kept individually."""
    first = group.first
    begin, end = -(-first // BLOCK), (group.entered - _MIN_KEPT_CALLS) // BLOCK
    if end <= begin or sequences != list(range(first, first + len(sequences))):
        return 0
    group.digested = begin
    for block in range(begin, end):
        at = block * BLOCK - first
        group.digests.append(_hash64(marshal.dumps(list(map(_CALL, entries[at : at + BLOCK])), 2)))
    return end * BLOCK - first


def _record_progress(group: CommunicatorTrace, entries: Sequence[Mapping[str, Any]], sequences: Sequence[int]) -> None:
    """Records the rank's progress from its collectives."""
    newest, gloo, ended = entries[-1], group.backend == "gloo", _has_ended(entries)
    group.first, group.entered, group.entered_at = sequences[0], max(sequences), _CREATED(newest) / 1e9
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
        if sequence <= certain and entry["profiling_name"].partition(":")[2].lower().startswith(_SYNCHRONIZING):
            group.certain = sequence
            break
    group.uncertain = gloo and group.operations > sequences[-1]


def _member_list(ranks: Any) -> str:
    """A list of ranks, or torch's text of such a list, as text; empty for any other value."""
    if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
        ranks = str(ranks)
    if not isinstance(ranks, str) or len(ranks) > _MAX_MEMBERS_CHARS:
        return ""
    return ranks if re.fullmatch(r"\[\s*\d{1,7}(\s*,\s*\d{1,7})*\s*\]", ranks) else ""


def _apply_config(trace: RankTrace, config: Any) -> None:
    """Fills in the members of communicators from the dump's configuration."""
    if not isinstance(config, dict):
        return
    for name, settings in config.items():
        if not isinstance(settings, dict) or not isinstance(name, str):
            continue
        members = _member_list(settings.get("ranks"))
        if not members:
            continue
        largest = max(map(int, re.findall(r"\d+", members)))
        if largest >= MAX_RANKS:
            continue
        trace.world = max(trace.world, 1 + largest)
        if not name:
            continue  # gloo's entry has no name, so its communicator is unknown
        name = name[:MAX_TEXT_CHARS]
        groups = [group for group in trace.groups if group.name == name]
        if not groups:
            trace.groups.append(
                CommunicatorTrace(name, bounded_text(settings.get("desc")), entered=0 if trace.complete else -1)
            )
            groups = trace.groups[-1:]
            groups[0].completed = groups[0].entered
        for group in groups:
            group.members = members


def _apply_status(trace: RankTrace, status: Any) -> None:
    """Fills in the counters of communicators without entries (a dump of active entries omits completed ones), and
    detects communicators with unrecorded calls."""
    if not isinstance(status, dict):
        return
    of_number = {str(group.number): group for group in trace.groups if group.number >= 0}
    without_calls = [group for group in trace.groups if not group.sequence and not group.waits]
    unmatched = [number for number in status if number not in of_number]
    for number, counters in status.items():
        if not isinstance(counters, dict):
            continue
        entered, completed = (_parse_int(counters.get(f"last_{what}_collective")) for what in ("enqueued", "completed"))
        if number in of_number:
            group = of_number[number]
            group.uncertain |= group.backend == "gloo" and entered > group.operations >= 0
            continue
        default = [
            group for group in without_calls if number == "0" and "default_pg" in (group.name, group.description)
        ]
        matches = default or (without_calls if len(without_calls) == len(unmatched) == 1 else [])
        for group in matches[:1]:
            group.entered, group.completed = max(entered, 0), max(completed, 0)


def _hash64(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def _parse_int(value: Any) -> int:
    try:
        return int(value) if isinstance(value, int | str) else -1
    except ValueError:
        return -1


def _bounded_json(value: Any, most: int = MAX_TEXT_CHARS) -> str:
    """A value as JSON, cut to `most` characters."""
    text = json.dumps(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _dtype_names(value: Any) -> str:
    """The distinct dtypes of a call as text."""
    names = list(dict.fromkeys(str(each)[:40] for each in value[:1000])) if isinstance(value, list | tuple) else []
    return ",".join(names)[:MAX_TEXT_CHARS]


def _dtype_text(pair: str) -> str:
    """The dtypes of inputs and outputs (`A -> B`) as text, `A` if both are equal."""
    first, _, second = pair.partition(" -> ")
    return first if first == second else pair
