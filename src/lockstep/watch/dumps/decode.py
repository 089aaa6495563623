"""One dump, made small: what a rank said of each of its communicators, as columns of numbers.

Imports the standard library only and runs in a process of its own (`worker`), because dumps are untrusted: a value may
have any type, and be far larger than the file.

The format has had versions 1.0 to 2.10 (torch/csrc/distributed/c10d/FlightRecorder.hpp). What differs here: 1.x counts
in `seq_id` and names no process group; 2.2 and older lack `is_p2p`, dtypes or `pg_status`; JSON has strings in
`pg_status`, 0 for a time that is not known and lists for tuples; a list of entries alone was the first form.
"""

import json
import marshal
import re
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import compress
from operator import itemgetter, not_
from typing import Any

from lockstep.watch.dumps.callers import Sites, text_of
from lockstep.watch.dumps.trace import BLOCK, MOST_RANKS, Group, NotADump, Trace
from lockstep.watch.dumps.unpickle import DAMAGE, loads

_GROUP, _SEQUENCE, _CREATED = map(itemgetter, ("process_group", "collective_seq_id", "time_created_ns"))
_STATE, _RETIRED, _IS_P2P = map(itemgetter, ("state", "retired", "is_p2p"))
_CALL = itemgetter("profiling_name", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
_NEWEST = 64
"""So many calls of a communicator at least are kept one by one."""
_Entries = list[dict[str, Any]]

_OUTPUT_SAYS_ALL = ("all_gather", "_all_gather", "allgather", "scatter", "_broadcast_oop")
"""Every rank's output is alike; inputs may differ, or be there on the root only."""
_INPUT_SAYS_ALL = ("reduce_scatter", "_reduce_scatter", "gather")
_NOTHING_ALIKE = ("all_to_all", "alltoall")
_FOR_ALL = ("all_", "_all_", "allreduce", "allgather", "reduce_scatter", "_reduce_scatter", "barrier")
"""Operations that nobody can finish before everybody entered."""
_P2P = ("send", "recv")
_MOST_TEXT = 300
_MOST_WAITS = 8
_MOST_MEMBERS = 8 * MOST_RANKS
"""Characters of a list of members."""
_MOST_GROUPS = 10_000
_HEAD = 4096


class Decoder:
    """Decodes one dump after the other; remembers what calls looked like."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, str, str]] = {}
        """By signature: operation, shapes, dtype."""
        self._signatures: dict[bytes, int] = {}

    def read(self, data: bytes, full: bool = False) -> Trace:
        """Decode a file's bytes. What is older than the newest calls is kept call by call if `full`, else as digests of
        blocks, which is enough where ranks called the same.

        Raises:
            NotADump: Empty, truncated, damaged, or something else.
        """
        content = parse(data)
        if isinstance(content, list):
            content = {"entries": content, "version": "1.0"}
        if not isinstance(content, dict) or not {"entries", "pg_status", "pg_config", "version"} & content.keys():
            raise NotADump("holds something else than a flight-recorder dump")
        library = content.get("comm_lib_version", content.get("nccl_version"))
        trace = Trace(text_of(content.get("version")), text_of(library))
        entries = content.get("entries")
        if not isinstance(entries, list):
            entries = []
        try:
            trace = self._groups(trace, entries, full)
        except DAMAGE:
            entries = [entry for entry in map(normal, entries) if entry is not None]
            bad = len(content.get("entries") or ()) - len(entries)
            if bad and not entries and len(content) <= 2:
                raise NotADump("holds something else than a flight-recorder dump") from None
            if bad:
                trace.notes.append(f"{bad} entries are unreadable")
            trace.groups = []
            try:
                trace = self._groups(trace, entries, full)
            except DAMAGE as error:
                raise NotADump(f"is damaged: {str(error)[:_MOST_TEXT] or type(error).__name__}") from error
        _configured(trace, content.get("pg_config"))
        _status(trace, content.get("pg_status"))
        return trace

    def _groups(self, trace: Trace, entries: _Entries, full: bool) -> Trace:
        """Fill in what the entries say.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: An entry is not of the present form.
        """
        names = list(map(_GROUP, entries))
        different = dict.fromkeys(names)
        if len(different) > _MOST_GROUPS:
            raise NotADump("speaks of more communicators than any job has")
        of_group: dict[tuple[str, str], _Entries] = dict.fromkeys(different, entries)
        if len(different) > 1:
            of_group = {name: [] for name in different}
            for name, entry in zip(names, entries, strict=True):
                of_group[name].append(entry)
        sites = Sites()
        for (name, description), mine in of_group.items():
            group = Group(str(name)[:_MOST_TEXT], str(description)[:_MOST_TEXT])
            self._group(group, mine, sites, full)
            trace.groups.append(group)
        trace.sites = sites.names
        trace.entries = len(entries)
        if entries:
            ids = [entry.get("record_id", -1) for entry in (entries[0], entries[-1])]
            trace.whole = ids == [0, len(entries) - 1] and all(group.first <= 1 for group in trace.groups)
            trace.began = _CREATED(entries[0]) / 1e9 if trace.whole else float("nan")
            trace.newest = _CREATED(entries[-1]) / 1e9
        return trace

    def _group(self, group: Group, entries: _Entries, sites: Sites, full: bool) -> None:
        """Fill in a communicator from its entries, the oldest first."""
        newest = entries[-1]
        group.backend = newest["profiling_name"].partition(":")[0]
        number, operations = newest.get("pg_id"), newest.get("op_id")
        group.number = number if type(number) is int else -1
        group.operations = operations if type(operations) is int else -1
        if any(map(_IS_P2P, entries)):
            _waits(group, entries)
            entries = [entry for entry in entries if not entry["is_p2p"]]
            if not entries:
                return
        sequences = list(map(_SEQUENCE, entries))
        _progress(group, entries, sequences)
        start = 0 if full else _digest(group, entries, sequences)
        self._calls(group, entries[start:], sequences[start:], sites)

    def _calls(self, group: Group, entries: _Entries, sequences: Sequence[int], sites: Sites) -> None:
        """Call by call: number, signature, time and line."""
        known, calls = self._signatures, list(map(_CALL, entries))
        keys = [marshal.dumps(call, 2) for call in calls]
        for new in set(keys) - known.keys():
            known[new] = self._sign(*calls[keys.index(new)])
        created: Sequence[int] = list(map(_CREATED, entries))
        signatures: Sequence[int] = [known[key] for key in keys]
        places: Sequence[int] = sites.of(entries)
        if len(set(sequences)) < len(sequences):
            sequences, signatures, created, places = self._coalesced(sequences, signatures, created, places)
        group.sequence, group.signature = array("q", sequences), array("Q", signatures)
        group.created, group.site = array("q", created), array("i", places)

    def _coalesced(
        self, sequences: Sequence[int], signatures: Sequence[int], created: Sequence[int], places: Sequence[int]
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """The parts of a coalesced block have one sequence number: one call of them."""
        blocks: dict[int, tuple[int, int, int]] = {}
        for sequence, signature, when, place in zip(sequences, signatures, created, places, strict=True):
            before = blocks.get(sequence)
            blocks[sequence] = (self._both(before[0], signature), before[1], place) if before else (
                signature, when, place)  # fmt: skip
        merged = list(blocks.values())
        return list(blocks), [each[0] for each in merged], [each[1] for each in merged], [each[2] for each in merged]

    def _sign(self, name: str, ins: Any, outs: Any, in_types: Any, out_types: Any) -> int:
        """The signature of a call that was not seen before: of what must be alike on all ranks."""
        operation = str(name).partition(":")[2] or str(name)
        operation = operation[:_MOST_TEXT]
        shapes, types = f"{_short(ins)} -> {_short(outs)}", f"{_types(in_types)} -> {_types(out_types)}"
        compared: tuple[Any, ...] = (ins, outs, in_types, out_types)
        if operation.startswith(_NOTHING_ALIKE):
            compared = ()
        elif operation.startswith(_INPUT_SAYS_ALL):
            compared = (ins, in_types)
        elif operation.startswith(_OUTPUT_SAYS_ALL):
            compared = (outs, out_types)
        signature = _hash(json.dumps((operation, *compared)).encode())
        self.calls[signature] = (operation, shapes if ins != outs else _short(ins), _type(types))
        return signature

    def _both(self, first: int, second: int) -> int:
        """The signature of a coalesced block: of its parts in their order."""
        signature = _hash(f"{first} {second}".encode())
        if signature not in self.calls:
            parts = [self.calls[each] for each in (first, second)]
            operation = parts[1][0] if "coalesced" in parts[1][0] else f"{parts[0][0]}+{parts[1][0]}"[:_MOST_TEXT]
            self.calls[signature] = (operation, parts[0][1], parts[0][2])
        return signature


def parse(data: bytes) -> Any:
    """The content of a dump, pickled or JSON.

    Raises:
        NotADump: Empty, truncated or damaged.
    """
    start = data[:_HEAD].lstrip()
    if not start.strip(b"\0"):
        raise NotADump("is empty")
    try:
        return json.loads(data) if start[:1] in b"{[" else loads(data)
    except DAMAGE as error:
        what = str(error) or type(error).__name__
        raise NotADump(f"is truncated or damaged: {what[:_MOST_TEXT]}") from error


def normal(entry: Any) -> dict[str, Any] | None:
    """An entry of any version with the fields of the present one; None if it says too little."""
    if not isinstance(entry, dict):
        return None
    group = entry.get("process_group", entry.get("pg_name"))
    pair = (group, "") if isinstance(group, str) else tuple(group) if isinstance(group, list | tuple) else ()
    if not pair:
        pair = (str(entry.get("pg_id", "")), "")
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    name, created = entry.get("profiling_name"), entry.get("time_created_ns", 0)
    texts = len(pair) == 2 and all(type(part) is str for part in (*pair, name))
    if not texts or type(sequence) is not int or type(created) is not int or not 0 <= sequence < 2**62:
        return None
    if not -(2**62) < created < 2**62:
        return None
    operation = str(name).partition(":")[2]
    lists: dict[str, Any] = {key: entry.get(key) if isinstance(entry.get(key), list | tuple) else [] for key in
             ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")}  # fmt: skip
    try:
        marshal.dumps(list(lists.values()), 2)
    except ValueError:
        return None
    return entry | lists | {
        "process_group": pair, "collective_seq_id": sequence, "time_created_ns": created,
        "state": entry.get("state"), "retired": bool(entry.get("retired")),
        "is_p2p": bool(entry.get("is_p2p", operation.startswith(_P2P))),
    }  # fmt: skip


def _ended(entries: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which are over. Gloo's state never changes; that an entry is retired says that it has ended, well or not."""
    if entries[-1]["profiling_name"].startswith("gloo"):
        return list(map(_RETIRED, entries))
    return [state == "completed" for state in map(_STATE, entries)]


def _waits(group: Group, entries: Sequence[Mapping[str, Any]]) -> None:
    """The sends and receives that have not ended, the oldest first."""
    for entry, ended in zip(entries, _ended(entries), strict=True):
        if entry["is_p2p"] and not ended and len(group.waits) < _MOST_WAITS:
            group.waits.append((entry["profiling_name"].partition(":")[2][:_MOST_TEXT], _CREATED(entry) / 1e9))


def _digest(group: Group, entries: _Entries, sequences: Sequence[int]) -> int:
    """Digest the whole blocks that are older than the newest calls; where the rest begins."""
    first = group.first
    begin, end = -(-first // BLOCK), (group.entered - _NEWEST) // BLOCK
    if end <= begin or sequences != list(range(first, first + len(sequences))):
        return 0
    group.digested = begin
    for block in range(begin, end):
        at = block * BLOCK - first
        group.digests.append(_hash(marshal.dumps(list(map(_CALL, entries[at : at + BLOCK])), 2)))
    return end * BLOCK - first


def _progress(group: Group, entries: Sequence[Mapping[str, Any]], sequences: Sequence[int]) -> None:
    """How far the rank came, from its collectives."""
    newest, gloo, ended = entries[-1], group.backend == "gloo", _ended(entries)
    group.first, group.entered, group.entered_at = sequences[0], max(sequences), _CREATED(newest) / 1e9
    group.ended = max(compress(sequences, ended), default=-1)
    group.completed = group.ended if group.ended >= 0 else group.first - 1
    if gloo:
        group.completed = min(compress(sequences, map(not_, ended)), default=group.entered + 1) - 1
    group.gave_up = not gloo and not ended[-1] and bool(newest["retired"])
    sure = group.completed - (gloo and group.completed == group.entered)
    for sequence, entry in zip(reversed(sequences), reversed(entries), strict=True):
        if sequence == group.completed and not gloo:
            at = entry.get("time_discovered_completed_ns")
            group.completed_at = at / 1e9 if type(at) is int and at else group.completed_at
        if sequence <= sure and entry["profiling_name"].partition(":")[2].lower().startswith(_FOR_ALL):
            group.certain = sequence
            break
    group.blind = gloo and group.operations > sequences[-1]


def _members(ranks: Any) -> str:
    """A list of ranks, or torch's text of one, as text; empty for anything else."""
    if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
        ranks = str(ranks)
    if not isinstance(ranks, str) or len(ranks) > _MOST_MEMBERS:
        return ""
    return ranks if re.fullmatch(r"\[\s*\d{1,7}(\s*,\s*\d{1,7})*\s*\]", ranks) else ""


def _configured(trace: Trace, config: Any) -> None:
    """Who is in which communicator, as the dump says."""
    if not isinstance(config, dict):
        return
    for name, about in config.items():
        if not isinstance(about, dict) or not isinstance(name, str):
            continue
        members = _members(about.get("ranks"))
        if not members:
            continue
        largest = max(map(int, re.findall(r"\d+", members)))
        if largest >= MOST_RANKS:
            continue
        trace.world = max(trace.world, 1 + largest)
        if not name:
            continue  # gloo's: of which communicator it is, nobody knows
        name = name[:_MOST_TEXT]
        same = [group for group in trace.groups if group.name == name]
        if not same:
            trace.groups.append(Group(name, text_of(about.get("desc")), entered=0 if trace.whole else -1))
            same = trace.groups[-1:]
            same[0].completed = same[0].entered
        for group in same:
            group.members = members


def _status(trace: Trace, status: Any) -> None:
    """The counters: for communicators whose entries are not in the dump (completed ones are left out when only active
    ones are wanted), and to see that something moved which is not recorded."""
    if not isinstance(status, dict):
        return
    of_number = {str(group.number): group for group in trace.groups if group.number >= 0}
    silent = [group for group in trace.groups if not group.sequence and not group.waits]
    spare = [number for number in status if number not in of_number]
    for number, counters in status.items():
        if not isinstance(counters, dict):
            continue
        entered, completed = (_number(counters.get(f"last_{what}_collective")) for what in ("enqueued", "completed"))
        if number in of_number:
            group = of_number[number]
            group.blind |= group.backend == "gloo" and entered > group.operations >= 0
            continue
        default = [group for group in silent if number == "0" and "default_pg" in (group.name, group.description)]
        mine = default or (silent if len(silent) == len(spare) == 1 else [])
        for group in mine[:1]:
            group.entered, group.completed = max(entered, 0), max(completed, 0)


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def _number(value: Any) -> int:
    try:
        return int(value) if isinstance(value, int | str) else -1
    except ValueError:
        return -1


def _short(value: Any, most: int = _MOST_TEXT) -> str:
    """Text of lists of numbers, bounded."""
    text = json.dumps(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _types(value: Any) -> str:
    names = list(dict.fromkeys(str(each)[:40] for each in value[:1000])) if isinstance(value, list | tuple) else []
    return ",".join(names)[:_MOST_TEXT]


def _type(pair: str) -> str:
    first, _, second = pair.partition(" -> ")
    return first if first == second else pair
