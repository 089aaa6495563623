"""Decodes one dump into columns of numbers: the calls of a rank on each of its communicators.

The decoder runs in a separate process (`reader_process`) with only the standard library, because dumps are untrusted:
a value may have any type, and may be far larger than the file.

The format has versions 1.0 to 2.10 (torch/csrc/distributed/c10d/FlightRecorder.hpp). Version 1.x counts in `seq_id` and
names no process group; versions up to 2.2 lack `is_p2p`, dtypes or `pg_status`. Dumps in JSON have strings in
`pg_status`, 0 for an unknown time and lists for tuples. The oldest form is a bare list of entries.
"""

import json
import marshal
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any

from lockstep.base.text import count_noun
from lockstep.watch.dumps.dump_parser import (
    DAMAGED_INPUT_ERRORS,
    MAX_TEXT_CHARS,
    DumpCallSites,
    NotADump,
    bounded_text,
    normalize_entry,
    parse_dump,
)
from lockstep.watch.dumps.group_status import apply_config, apply_status
from lockstep.watch.dumps.progress import describe_recorder, order_of, record_progress, split_off_transfers
from lockstep.watch.dumps.traces import CommunicatorTrace, RankTrace

BLOCK = 128
"""Older collectives are compared in blocks: those with equal `sequence // BLOCK` have one digest."""

_PROCESS_GROUP, _SEQUENCE, _CREATED = map(itemgetter, ("process_group", "collective_seq_id", "time_created_ns"))
_IS_P2P = itemgetter("is_p2p")
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
        apply_config(trace, content.get("pg_config"))
        apply_status(trace, content.get("pg_status"))
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
        trace.entries = len(entries)
        if entries:
            describe_recorder(trace, entries)
            ids = [entry.get("record_id", -1) for entry in (entries[0], entries[-1])]
            trace.complete = ids == [0, len(entries) - 1]
            trace.contiguous = ids[0] > 0 and ids[1] - ids[0] == len(entries) - 1
            trace.newest = _CREATED(entries[-1]) / 1e9
        sites = DumpCallSites()
        for (name, description), group_entries in of_group.items():
            group = CommunicatorTrace(str(name)[:MAX_TEXT_CHARS], str(description)[:MAX_TEXT_CHARS])
            self._decode_group(group, group_entries, sites, full, trace.complete)
            trace.groups.append(group)
        trace.sites = sites.names
        trace.complete &= all(group.first <= 1 for group in trace.groups)
        if entries:
            trace.began = _CREATED(entries[0]) / 1e9 if trace.complete else float("nan")
            overwritten = not trace.only_active and entries[0].get("record_id", 0) != 0
            trace.pending_lost = overwritten and order_of(entries[0]) in {each.order for each in trace.unfinished}
        return trace

    def _decode_group(
        self, group: CommunicatorTrace, entries: _Entries, sites: DumpCallSites, full: bool, complete: bool
    ) -> None:
        """Fills in a communicator from its entries, which are ordered from old to new. `complete` is true if the dump
        holds all entries since the process started."""
        newest = entries[-1]
        group.backend = newest["profiling_name"].partition(":")[0]
        number, operations = newest.get("pg_id"), newest.get("op_id")
        group.number = number if type(number) is int else -1
        group.operations = operations if type(operations) is int else -1
        if any(map(_IS_P2P, entries)):
            entries = split_off_transfers(group, entries, complete)
            if not entries:
                return
        sequences = list(map(_SEQUENCE, entries))
        record_progress(group, entries, sequences)
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


def _hash64(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


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
