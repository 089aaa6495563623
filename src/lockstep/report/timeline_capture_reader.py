"""Reads the captures of a timeline (`watch.supervisor.timeline_capture`) on one clock: what each process did, the
collectives that processes made together, and what the supervisor published.

A capture may end anywhere, because its writer was killed; lines that cannot be read are counted and left out.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lockstep.watch.beacon.beacon_records import CallRecord
from lockstep.watch.beacon.call_copies import CALL_BYTES, unpack_calls
from lockstep.watch.beacon.span_ring import SpanKind
from lockstep.watch.communication.call_sizes import call_bytes
from lockstep.watch.supervisor.incident import CAPTURE_FILE, USUAL_FOLDER, list_incidents
from lockstep.watch.supervisor.timeline_capture import CAPTURES_FOLDER, FORMAT

MAX_LINE_BYTES = 64 << 20


class _Communicator(msgspec.Struct):
    id: str
    name: str
    size: int
    rank: int
    on_device: bool
    calls: int
    """The position of its calls in those of the line."""


class _Process(msgspec.Struct):
    name: str
    role: str
    rank: int
    pid: int
    stage: tuple[str, int]
    waits: list[tuple[str, str, int]]
    counters: dict[str, tuple[int, int | None]]
    spans: list[tuple[int, str, int, int, int, str]]
    communicators: list[_Communicator]
    lost: int
    texts: dict[int, str] = {}


class _Line(msgspec.Struct):
    """Any line of a capture; which one it is shows in the fields that it has."""

    lockstep_timeline: int | None = None
    wall: float = 0.0
    at_ns: int = 0
    since_ns: int = 0
    host: str = ""
    offset_ns: int = 0
    now_ns: int = 0
    calls: list[bytes] = []
    """Copies of calls, which `unpack_calls` decodes."""
    processes: list[_Process] | None = None
    devices: dict[str, Any] = {}
    verdict: str | None = None
    level: str = ""
    change: str = ""
    end: str | None = None


@dataclass(slots=True)
class TimelineSlice:
    """Something that a process did. Times are nanoseconds since the epoch, on the clock of the supervisor's host."""

    track: str
    """The row in which it is shown: `stages`, `waits of MainThread`, `collectives of fsdp`."""
    name: str
    began_ns: int
    ended_ns: int
    details: dict[str, Any] = field(default_factory=dict)
    unfinished: bool = False
    """Whether it had not ended when the process was read last."""


@dataclass(slots=True)
class TimelineCall:
    """A call of a collective, or a message, by one process."""

    slice: TimelineSlice
    key: tuple[str, int, int]
    """Communicator, number of the call, and how many calls of that number the process had made on it before (after a
    communicator was created again): equal for the calls of all members."""
    operation: str
    size: int
    """Members of the communicator."""
    nbytes: int | None
    """Bytes of the tensors that the call was given; None if they are not recorded."""
    blocking: bool
    """Whether the call returned when its data was there; otherwise it returned when the operation was issued."""
    p2p: bool


@dataclass(slots=True)
class TimelineProcess:
    """What one process did."""

    host: str
    name: str
    role: str
    rank: int
    pid: int
    slices: list[TimelineSlice] = field(default_factory=list)
    calls: list[TimelineCall] = field(default_factory=list)
    counters: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Samples of each counter: time and value."""
    lost: int = 0
    """Spans and calls that were overwritten before they were read."""


@dataclass(slots=True)
class TimelineNote:
    """A verdict that the supervisor published."""

    at_ns: int
    level: str
    text: str


@dataclass(slots=True)
class Timeline:
    """The contents of one or several captures."""

    processes: list[TimelineProcess] = field(default_factory=list)
    notes: list[TimelineNote] = field(default_factory=list)
    devices: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    """Samples of GPUs, by host and name: time and value."""
    unreadable: int = 0
    """Lines that are no lines of a capture."""


def capture_files(folder: Path) -> list[Path]:
    """The captures in the folder of a run, in one of incidents, or in an incident; or the file itself, if it is one.
    Oldest first."""
    if folder.is_file():
        return [folder]
    if (folder / CAPTURE_FILE).is_file():
        return [folder / CAPTURE_FILE]
    incidents = list_incidents(folder / USUAL_FOLDER) or list_incidents(folder)
    found = [each / CAPTURE_FILE for each in incidents if (each / CAPTURE_FILE).is_file()]
    return [*found, *sorted((folder / CAPTURES_FOLDER).glob("*.jsonl"))]


def has_ended(file: Path) -> bool:
    """Whether a capture is complete."""
    try:
        with file.open("rb") as content:
            content.seek(max(0, file.stat().st_size - 4096))
            last = content.read().rstrip(b"\n").rpartition(b"\n")[2]
        return msgspec.json.decode(last, type=_Line).end is not None
    except (OSError, msgspec.MsgspecError, RecursionError):
        return False


def read_timeline(files: Iterable[Path]) -> Timeline:
    """Reads captures. What is in several of them is taken once.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no capture.
    """
    reader = _TimelineReader()
    for file in files:
        reader.read(file)
    return reader.finish()


@dataclass(slots=True)
class _OpenProcess:
    """What is known of a process while captures are read."""

    process: TimelineProcess
    spans: set[tuple[str, int, int]] = field(default_factory=set)
    calls: dict[tuple[str, int, int], TimelineCall] = field(default_factory=dict)
    """By communicator, number of the call, and when it began."""
    repeats: dict[tuple[str, int], int] = field(default_factory=dict)
    last: tuple[_Process, int, int] | None = None
    """The newest answer, when it was given, and how far its clock is behind."""


class _TimelineReader:
    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int], _OpenProcess] = {}
        self._found = Timeline()

    def read(self, file: Path) -> None:
        lines = _lines(file)
        header = next(lines, None)
        found = None if header is None else header.lockstep_timeline
        if header is None or found is None:
            raise ValueError(
                f"{file} is no capture of a timeline: give a run's folder, or a file of its folder timeline"
            )
        if found != FORMAT:
            raise ValueError(
                f"{file} has format {found} of timelines, and this version of Lockstep reads {FORMAT}: use the one "
                "that captured it, or move the file away"
            )
        to_wall = int(header.wall * 1e9) - header.at_ns
        answers = list[_Line]()
        for line in lines:
            if line is None:
                self._found.unreadable += 1
            elif line.processes is not None:
                answers.append(line)
            elif line.verdict is not None and line.change != "withdrawn":
                self._found.notes.append(TimelineNote(line.at_ns + to_wall, line.level, line.verdict))
        # The newest offset of a host is the most exact one, and one for all keeps the order of events.
        offsets = {line.host: line.offset_ns for line in answers}
        for line in answers:
            self._add(line, to_wall - offsets[line.host], header.since_ns + to_wall)

    def finish(self) -> Timeline:
        for each in self._open.values():
            _add_open_slices(each)
            each.process.slices += [call.slice for call in each.calls.values()]
            each.process.calls = list(each.calls.values())
            self._found.processes.append(each.process)
        return self._found

    def _add(self, line: _Line, shift: int, since_ns: int) -> None:
        now = line.now_ns + shift
        for name, value in _device_figures(line.devices):
            self._found.devices.setdefault(line.host, {}).setdefault(name, []).append((now, value))
        for read in line.processes or ():
            key = line.host, read.name, read.pid
            if key not in self._open:
                made = TimelineProcess(line.host, read.name, read.role, read.rank, read.pid)
                self._open[key] = _OpenProcess(made)
            known = self._open[key]
            known.process.lost += read.lost
            known.last = read, now, shift
            for name, (value, _) in read.counters.items():
                known.process.counters.setdefault(name, []).append((now, value))
            for span in read.spans:
                _add_span(known, span, shift, since_ns)
            for communicator in read.communicators:
                if 0 <= communicator.calls < len(line.calls):
                    calls = line.calls[communicator.calls]
                    whole = calls[: len(calls) // CALL_BYTES * CALL_BYTES]
                    found = unpack_calls(whole, defaultdict(str, read.texts))
                    _add_calls(known, communicator, found, shift, since_ns, now)


def _lines(file: Path) -> Iterator[_Line | None]:
    """The lines of a file; None for one that cannot be read. A last line that is not complete is left out."""
    with file.open("rb") as content:
        while raw := content.readline(MAX_LINE_BYTES):
            if raw.endswith(b"\n"):
                try:
                    yield msgspec.json.decode(raw, type=_Line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    yield None


def _add_span(known: _OpenProcess, span: tuple[int, str, int, int, int, str], shift: int, since_ns: int) -> None:
    kind, name, began, ended, amount, thread = span
    if (name, began, ended) in known.spans or ended + shift < since_ns:
        return
    known.spans.add((name, began, ended))
    details: dict[str, Any] = {}
    if amount:
        details["tokens" if kind == SpanKind.REQUEST else "bytes"] = amount
    known.process.slices.append(TimelineSlice(_track(kind, thread), name, began + shift, ended + shift, details))


def _track(kind: int, thread: str) -> str:
    match kind:
        case SpanKind.STAGE:
            return "stages"
        case SpanKind.WAIT:
            return f"waits of {thread}"
        case SpanKind.UNIT:
            return "micro-batches"
        case SpanKind.REQUEST:
            return "requests"
        case SpanKind.WEIGHTS:
            return "weight sync"
    return f"spans of kind {kind}"


def _add_open_slices(known: _OpenProcess) -> None:
    """Adds the stage and the waits in which the process was when it was read last."""
    if known.last is None:
        return
    read, now, shift = known.last
    name, since = read.stage
    found = [(name, _track(SpanKind.STAGE, ""), since)] if name else []
    found += [(text, _track(SpanKind.WAIT, thread), began) for text, thread, began in read.waits]
    for text, track, began in found:
        known.process.slices.append(TimelineSlice(track, text, began + shift, now, unfinished=True))


def _add_calls(
    known: _OpenProcess, communicator: _Communicator, calls: Iterable[CallRecord], shift: int, since_ns: int, now: int
) -> None:
    for call in calls:
        began, ended = call.entered_ns, call.left_ns
        if ended and ended + shift < since_ns:
            continue
        before = known.calls.get((communicator.id, call.number, began))
        if before is not None:
            if before.slice.unfinished:
                before.slice.unfinished, before.slice.ended_ns = not ended, (ended + shift) if ended else now
                before.blocking = _is_blocking(call)
                before.slice.details |= _outcome(call)
            continue
        operation, issued = call.operation or "unknown operation", call.issued
        details: dict[str, Any] = {"communicator": communicator.name, "call": call.number, "members": communicator.size}
        nbytes = call_bytes(call.operation, call.shapes, call.dtype, call.module)
        shown = {
            "bytes": nbytes, "shapes": call.shapes, "dtype": call.dtype, "call site": call.site, "stage": call.stage,
            "module": call.module, "peer": call.peer,
        }  # fmt: skip
        details |= {key: value for key, value in shown.items() if value not in (None, "")} | _outcome(call)
        track = f"collectives of {communicator.name}"
        made = TimelineSlice(track, operation, began + shift, ended + shift if ended else now, details, not ended)
        repeat = known.repeats.get((communicator.id, -1 if call.p2p else issued), 0)
        known.repeats[communicator.id, -1 if call.p2p else issued] = repeat + 1
        known.calls[communicator.id, call.number, began] = TimelineCall(
            made, (communicator.id, issued, repeat), call.operation, communicator.size, nbytes, _is_blocking(call),
            call.p2p,
        )  # fmt: skip


def _is_blocking(call: CallRecord) -> bool:
    return bool(call.left_ns) and not (call.asynchronous or call.failed or call.refused)


def _outcome(call: CallRecord) -> dict[str, bool]:
    """What is known of a call once it has returned."""
    found = {"asynchronous": call.asynchronous, "failed": call.failed, "refused": call.refused}
    return {name: value for name, value in found.items() if value}


def _device_figures(devices: dict[str, Any]) -> Iterator[tuple[str, float]]:
    found = devices.get("devices")
    for number, each in enumerate(found if isinstance(found, list) else []):
        sample = each.get("sample") if isinstance(each, dict) else None
        if isinstance(sample, dict):
            index = sample.get("index", number)
            for name, label in (("busy", "busy %"), ("memory_busy", "memory busy %"), ("power_w", "W")):
                if isinstance(value := sample.get(name), int | float):
                    yield f"GPU {index} {label}", float(value)
