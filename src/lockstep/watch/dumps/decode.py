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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import itemgetter
from typing import Any

from lockstep.watch.dumps.unpickle import DAMAGE, loads

_ROW = itemgetter(
    "process_group", "collective_seq_id", "profiling_name", "input_sizes", "output_sizes", "input_dtypes",
    "output_dtypes", "time_created_ns", "state", "retired", "is_p2p",
)  # fmt: skip
_FRAMES = itemgetter("frames")
_Row = tuple[Any, ...]
_SEQUENCE_AT, _CREATED_AT, _STATE_AT, _RETIRED_AT, _P2P_AT = 1, 7, 8, 9, 10

_OUTPUT_SAYS_ALL = ("all_gather", "_all_gather", "allgather", "scatter", "_broadcast_oop")
"""Every rank's output is alike; inputs may differ, or be there on the root only."""
_INPUT_SAYS_ALL = ("reduce_scatter", "_reduce_scatter", "gather")
_NOTHING_ALIKE = ("all_to_all", "alltoall")
_FOR_ALL = ("all_", "_all_", "allreduce", "allgather", "reduce_scatter", "_reduce_scatter", "barrier")
"""Operations that nobody can finish before everybody entered."""
_P2P = ("send", "recv")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen|/torch/(?:distributed|nn|_)|^\?\?$")
_FRAME_LINE = re.compile(r"#\d+ (?P<name>.+) from (?P<filename>.+):(?P<line>\d+)")
_MOST_TEXT = 300
_MOST_WAITS = 8
_HEAD = 4096


class NotADump(ValueError):
    """The file holds something else, or is damaged; the text says what."""


@dataclass(slots=True)
class Group:
    """What one rank said of one communicator. Times are Unix seconds, sequence numbers -1 where not known."""

    name: str
    description: str = ""
    backend: str = ""
    members: str = ""
    """Its ranks as the dump lists them, `[0, 1]`; empty if it does not say."""
    entered: int = -1
    completed: int = -1
    entered_at: float = float("nan")
    completed_at: float = float("nan")
    ended: int = -1
    """The last collective that has ended on this rank, while earlier ones may go on."""
    certain: int = -1
    """The last collective that this rank finished for certain and that nobody can finish without everybody."""
    first: int = -1
    """The oldest collective that is still in the ring."""
    waits: list[tuple[str, float]] = field(default_factory=list)
    """Sends and receives that have not ended: (`recv 1<-0`, since)."""
    blind: bool = False
    """The counters moved without an entry: point-to-point with gloo."""
    number: int = -1
    """Under which `pg_status` has it."""
    operations: int = -1
    """How many operations it has begun, point-to-point ones included."""
    gave_up: bool = False
    """The watchdog gave the newest one up."""
    sequence: "array[int]" = field(default_factory=lambda: array("q"))
    signature: "array[int]" = field(default_factory=lambda: array("Q"))
    created: "array[int]" = field(default_factory=lambda: array("q"))
    """Nanoseconds."""
    site: "array[int]" = field(default_factory=lambda: array("i"))
    """An index into `Trace.sites`."""


@dataclass(slots=True)
class Trace:
    """What one rank's dump says."""

    version: str = ""
    library: str = ""
    groups: list[Group] = field(default_factory=list)
    entries: int = 0
    whole: bool = False
    """Every collective since the process began is in it."""
    began: float = float("nan")
    """When the first one was entered, if that is still in the ring."""
    newest: float = float("nan")
    world: int = 0
    """The job has at least so many ranks."""
    sites: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Decoder:
    """Decodes one dump after the other; remembers what calls looked like."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, str, str]] = {}
        """By signature: operation, shapes, dtype."""
        self._signatures: dict[bytes, int] = {}

    def read(self, data: bytes) -> Trace:
        """Decode a file's bytes.

        Raises:
            NotADump: Empty, truncated, damaged, or something else.
        """
        content = parse(data)
        if isinstance(content, list):
            content = {"entries": content, "version": "1.0"}
        if not isinstance(content, dict) or not {"entries", "pg_status", "pg_config", "version"} & content.keys():
            raise NotADump("holds something else than a flight-recorder dump")
        library = content.get("comm_lib_version", content.get("nccl_version"))
        trace = Trace(_text(content.get("version")), _text(library))
        entries = content.get("entries")
        if not isinstance(entries, list):
            entries = []
        try:
            rows = list(map(_ROW, entries))
            trace = self._groups(trace, rows, entries)
        except DAMAGE:
            entries = [entry for entry in map(normal, entries) if entry is not None]
            bad = len(content.get("entries") or ()) - len(entries)
            if bad and not entries and len(content) <= 2:
                raise NotADump("holds something else than a flight-recorder dump") from None
            if bad:
                trace.notes.append(f"{bad} entries are unreadable")
            trace.groups = []
            try:
                trace = self._groups(trace, list(map(_ROW, entries)), entries)
            except DAMAGE as error:
                raise NotADump(f"is damaged: {str(error)[:_MOST_TEXT] or type(error).__name__}") from error
        _configured(trace, content.get("pg_config"))
        _status(trace, content.get("pg_status"))
        return trace

    def _groups(self, trace: Trace, rows: list[_Row], entries: list[dict[str, Any]]) -> Trace:
        """Fill in what the entries say.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: An entry is not of the present form.
        """
        by: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            by[row[0]].append(index)
        sites = _Sites()
        for (name, description), indices in by.items():
            group = Group(str(name), str(description))
            if len(by) == 1:
                self._group(group, rows, entries, sites)
            else:
                self._group(group, [rows[index] for index in indices], [entries[index] for index in indices], sites)
            trace.groups.append(group)
        trace.sites = sites.names
        trace.entries = len(rows)
        if rows:
            ids = [entry.get("record_id", -1) for entry in (entries[0], entries[-1])]
            trace.whole = ids == [0, len(rows) - 1] and all(group.first <= 1 for group in trace.groups)
            trace.began = rows[0][_CREATED_AT] / 1e9 if trace.whole else float("nan")
            trace.newest = max(row[_CREATED_AT] for row in rows) / 1e9
        return trace

    def _group(self, group: Group, rows: list[_Row], entries: list[dict[str, Any]], sites: "_Sites") -> None:
        """Fill in a communicator from its entries, the oldest first."""
        group.backend = rows[-1][2].partition(":")[0]
        number, operations = entries[-1].get("pg_id"), entries[-1].get("op_id")
        group.number = number if type(number) is int else -1
        group.operations = operations if type(operations) is int else -1
        if any(map(itemgetter(_P2P_AT), rows)):
            _waits(group, rows)
            kept = [at for at, row in enumerate(rows) if not row[_P2P_AT]]
            rows, entries = [rows[at] for at in kept], [entries[at] for at in kept]
            if not rows:
                return
        names, ins, outs, in_types, out_types = (map(itemgetter(at), rows) for at in (2, 3, 4, 5, 6))
        sequences: Sequence[int] = list(map(itemgetter(_SEQUENCE_AT), rows))
        created: Sequence[int] = list(map(itemgetter(_CREATED_AT), rows))
        known, dumps = self._signatures, marshal.dumps
        keys = [dumps(call, 2) for call in zip(names, ins, outs, in_types, out_types, strict=True)]
        for new in set(keys) - known.keys():
            known[new] = self._sign(rows[keys.index(new)])
        signatures = [known[key] for key in keys]
        places = sites.of(entries)
        if len(set(sequences)) < len(sequences):
            sequences, signatures, created, places = self._coalesced(sequences, signatures, created, places)
        group.sequence, group.signature = array("q", sequences), array("Q", signatures)
        group.created, group.site = array("q", created), array("i", places)
        _progress(group, rows, entries)

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

    def _sign(self, row: _Row) -> int:
        """The signature of a call that was not seen before: of what must be alike on all ranks."""
        _, _, name, ins, outs, in_types, out_types, *_ = row
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


def _ended(row: _Row) -> bool:
    """Gloo's state never changes; that an entry is retired says that it has ended, well or not."""
    return bool(row[_RETIRED_AT] if row[2].startswith("gloo") else row[_STATE_AT] == "completed")


def _waits(group: Group, rows: Sequence[_Row]) -> None:
    """The sends and receives that have not ended, the oldest first."""
    for row in rows:
        if row[_P2P_AT] and not _ended(row) and len(group.waits) < _MOST_WAITS:
            group.waits.append((row[2].partition(":")[2][:_MOST_TEXT], row[_CREATED_AT] / 1e9))


def _progress(group: Group, rows: Sequence[_Row], entries: Sequence[Mapping[str, Any]]) -> None:
    """How far the rank came, from its collectives."""
    newest, gloo = rows[-1], group.backend == "gloo"
    group.first, group.entered, group.entered_at = group.sequence[0], max(group.sequence), newest[_CREATED_AT] / 1e9
    if gloo:
        waiting = [row[_SEQUENCE_AT] for row in rows if not row[_RETIRED_AT]]
        group.completed = min(waiting) - 1 if waiting else group.entered
        group.ended = max((row[_SEQUENCE_AT] for row in rows if row[_RETIRED_AT]), default=-1)
    else:
        group.completed = max((row[_SEQUENCE_AT] for row in rows if row[_STATE_AT] == "completed"), default=-1)
        if group.completed < 0:
            group.completed = group.first - 1
        group.gave_up = bool(newest[_RETIRED_AT]) and newest[_STATE_AT] != "completed"
    sure = group.completed - (gloo and group.completed == group.entered)
    for row, entry in zip(reversed(rows), reversed(entries), strict=True):
        if row[_SEQUENCE_AT] == group.completed and not gloo:
            at = entry.get("time_discovered_completed_ns")
            group.completed_at = at / 1e9 if type(at) is int and at else group.completed_at
        if row[_SEQUENCE_AT] <= sure and row[2].partition(":")[2].lower().startswith(_FOR_ALL):
            group.certain = row[_SEQUENCE_AT]
            break
    group.blind = gloo and group.operations > newest[_SEQUENCE_AT]


def _configured(trace: Trace, config: Any) -> None:
    """Who is in which communicator, as the dump says."""
    if not isinstance(config, dict):
        return
    for name, about in config.items():
        if not isinstance(about, dict) or not isinstance(name, str):
            continue
        ranks = about.get("ranks")
        members = str(ranks) if isinstance(ranks, str) else _short(ranks, 2**20) if isinstance(ranks, list) else ""
        if not re.fullmatch(r"\[\s*\d{1,7}(\s*,\s*\d{1,7})*\s*\]", members):
            continue
        trace.world = max(trace.world, 1 + max(map(int, re.findall(r"\d+", members))))
        if not name:
            continue  # gloo's: of which communicator it is, nobody knows
        same = [group for group in trace.groups if group.name == name]
        if not same:
            trace.groups.append(Group(name, _text(about.get("desc")), entered=0 if trace.whole else -1))
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


class _Sites:
    """Call sites, each once. Frames of a dump are shared, so who was asked before is known by identity."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._by_identity: dict[tuple[int, ...], int] = {}

    def of(self, entries: Sequence[Mapping[str, Any]]) -> list[int]:
        """The number of the call site of each entry, 0 where the dump has no stacks."""
        try:
            stacks = list(map(_FRAMES, entries))
        except KeyError:
            stacks = [entry.get("frames") for entry in entries]
        known, places = self._by_identity, []
        for stack in stacks:
            key = tuple(map(id, stack)) if type(stack) is list else (id(stack),)
            place = known.get(key)
            if place is None:
                place = known[key] = self._number(site(_frames(stack)))
            places.append(place)
        return places

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


def _frames(frames: Any) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first, of dicts or of the text that torch makes of them."""
    if isinstance(frames, str):
        return [(m["filename"], int(m["line"]), m["name"]) for m in _FRAME_LINE.finditer(frames[: 2**16])]
    found = []
    for frame in frames[:200] if isinstance(frames, list | tuple) else ():
        if isinstance(frame, str):
            found += _frames(frame)
        elif isinstance(frame, dict):
            line = frame.get("line", 0)
            found.append((_text(frame.get("filename")), line if type(line) is int else 0, _text(frame.get("name"))))
    return found


def site(frames: Sequence[tuple[str, int, str]]) -> str:
    """`train.py:31 in step`: the innermost frame that is in no library, else the innermost outside of torch."""
    ours = [frame for frame in frames if frame[0] and not _LIBRARY.search(frame[0])]
    beyond = [frame for frame in frames if frame[0] and "/torch/" not in frame[0]]
    for file, line, function in (ours or beyond or frames)[:1]:
        return f"{file.rpartition('/')[2]}:{line} in {function}"[:_MOST_TEXT]
    return ""


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def _text(value: Any) -> str:
    return value[:_MOST_TEXT] if isinstance(value, str) else ""


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
