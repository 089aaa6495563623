"""Writes a timeline as a trace in Chrome's JSON format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing
open: docs/timeline.md describes its tracks.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.folders import write_atomically
from lockstep.report.timeline_capture_reader import Timeline, TimelineCall, TimelineProcess, TimelineSlice
from lockstep.watch.communication.call_sizes import bus_bytes

MAX_SLICES = 1_000_000
"""The newest slices of a trace; Perfetto opens that many within seconds."""
MAX_ARROWS = 20_000
ARROWS_PER_CALL = 8
"""Arrows from the last rank that entered a collective, to the ones that waited the longest."""
_NAME_CHARS = 200
_RATES = ("tokens", "completions", "samples scored")
"""Counters that are shown per second."""
_FIRST_TRACKS = ("stages", "micro-batches", "requests", "weight sync")


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What is in a trace."""

    processes: int
    slices: int
    verdicts: int
    seconds: float
    lost: int
    """Spans and calls that had been overwritten before they were read."""
    dropped: int
    """Slices beyond `MAX_SLICES`."""


def write_trace(timeline: Timeline, path: Path) -> TraceSummary:
    """Writes the trace, compressed if the file's name ends in `.gz`.

    Raises:
        OSError: the file cannot be written.
    """
    trace, summary = build_trace(timeline)
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    write_atomically(path, gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text)
    return summary


def build_trace(timeline: Timeline) -> tuple[dict[str, Any], TraceSummary]:
    """The trace as an object of Chrome's format. Its times begin at the first slice or note; `otherData` has that time
    in seconds since the epoch."""
    _measure_collectives(timeline)
    ordered = sorted(timeline.processes, key=lambda each: (each.role, each.rank, each.name, each.host, each.pid))
    dropped = _drop_oldest(ordered)
    times = [each.began_ns for process in ordered for each in process.slices]
    times += [note.at_ns for note in timeline.notes]
    origin = min(times, default=0)
    end = max((each.ended_ns for process in ordered for each in process.slices), default=origin)
    places: dict[int, tuple[int, int]] = {}
    events: list[dict[str, Any]] = []
    # Perfetto takes a thread with the number of its process for the main thread, and shows it first.
    tids = itertools.count(len(ordered) + len(timeline.devices) + 1)
    for number, process in enumerate(ordered, start=1):
        events += _process_events(number, process, origin, tids, places)
    events += _arrow_events(timeline, origin, places)
    for number, (host, figures) in enumerate(sorted(timeline.devices.items()), start=len(ordered) + 1):
        events += _name_events(number, f"GPUs of {host or 'this host'}", number)
        for name, samples in figures.items():
            events += [_counter_event(number, name, at - origin, value) for at, value in samples if at >= origin]
    if timeline.notes:
        events += _name_events(0, "supervisor", -1)
        for note in timeline.notes:
            name = f"{note.level}: {note.text}"[:_NAME_CHARS]
            events.append({
                "ph": "i", "s": "g", "cat": "verdict", "name": name, "pid": 0, "tid": 0, "ts": _us(note.at_ns - origin),
                "args": {"verdict": note.text},
            })  # fmt: skip
    slices = sum(len(process.slices) for process in ordered)
    lost = sum(process.lost for process in ordered)
    summary = TraceSummary(len(ordered), slices, len(timeline.notes), (end - origin) / 1e9, lost, dropped)
    facts = {"began": origin / 1e9, "lost": lost, "dropped": dropped, "unreadable lines": timeline.unreadable}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**facts, "made by": "lockstep"}}, summary


def _us(ns: int) -> float:
    return ns / 1000


def _drop_oldest(processes: list[TimelineProcess]) -> int:
    """Drops the slices that began first, beyond the most that a trace has."""
    began = sorted(each.began_ns for process in processes for each in process.slices)
    dropped = len(began) - MAX_SLICES
    if dropped <= 0:
        return 0
    first = began[dropped]
    for process in processes:
        process.slices = [each for each in process.slices if each.began_ns >= first]
    return dropped


def _name_events(pid: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}},
    ]


def _process_events(
    pid: int, process: TimelineProcess, origin: int, tids: Iterator[int], places: dict[int, tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """The events of one process. Stores the process and track of each slice in `places`, by the slice's id."""
    host = f" on {process.host}" if process.host else ""
    yield from _name_events(pid, f"{process.name} (rank {process.rank}){host}, pid {process.pid}", pid)
    tracks: dict[str, list[TimelineSlice]] = defaultdict(list)
    for each in process.slices:
        tracks[each.track].append(each)
    for track in sorted(tracks, key=_track_order):
        for lane, slices in enumerate(_lanes(tracks[track]), start=1):
            tid = next(tids)
            name = track if lane == 1 else f"{track} ({lane})"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for each in slices:
                places[id(each)] = pid, tid
                yield _slice_event(each, pid, tid, origin)
    for name, samples in process.counters.items():
        shown = _rates(samples) if name in _RATES else [(at, float(value)) for at, value in samples]
        label = f"{name}/s" if name in _RATES else name
        yield from (_counter_event(pid, label, at - origin, value) for at, value in shown if at >= origin)


def _track_order(track: str) -> tuple[int, str]:
    if track in _FIRST_TRACKS:
        return _FIRST_TRACKS.index(track), ""
    return len(_FIRST_TRACKS) + track.startswith("waits"), track


def _slice_event(each: TimelineSlice, pid: int, tid: int, origin: int) -> dict[str, Any]:
    details = {**each.details, **({"unfinished": True} if each.unfinished else {})}
    return {
        "ph": "X", "cat": each.track.partition(" of ")[0], "name": each.name[:_NAME_CHARS], "pid": pid, "tid": tid,
        "ts": _us(each.began_ns - origin), "dur": _us(max(0, each.ended_ns - each.began_ns)), "args": details,
    }  # fmt: skip


def _counter_event(pid: int, name: str, at_ns: int, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(at_ns), "args": {"value": round(value, 3)}}


def _rates(samples: list[tuple[int, int]]) -> Iterator[tuple[int, float]]:
    """The growth per second between samples. A counter that is lower than before has begun again."""
    for (before_at, before), (at, value) in itertools.pairwise(samples):
        if at > before_at:
            yield before_at, max(0, value - before if value >= before else value) * 1e9 / (at - before_at)
    if samples:
        yield samples[-1][0], 0.0


def _lanes(slices: list[TimelineSlice]) -> list[list[TimelineSlice]]:
    """Divides slices into rows in which none overlaps another, because viewers show a thread's slices as a stack."""
    lanes: list[list[TimelineSlice]] = []
    free: list[tuple[int, int]] = []
    """When the last slice of each lane ends, and the lane."""
    for each in sorted(slices, key=lambda each: (each.began_ns, each.ended_ns)):
        if free and free[0][0] <= each.began_ns:
            _, lane = heapq.heappop(free)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(each)
        heapq.heappush(free, (max(each.ended_ns, each.began_ns), lane))
    return lanes


def _joined(timeline: Timeline) -> list[list[TimelineCall]]:
    """The calls of several processes that are one collective."""
    found: dict[tuple[str, int, int], list[TimelineCall]] = defaultdict(list)
    for process in timeline.processes:
        for call in process.calls:
            if not call.p2p:
                found[call.key].append(call)
    return [calls for calls in found.values() if len(calls) > 1]


def _measure_collectives(timeline: Timeline) -> None:
    """Adds to each call of a complete collective how long it waited for the last member, and the bus bandwidth since
    then. Only blocking calls: the others return when they are issued."""
    for calls in _joined(timeline):
        first = calls[0]
        if len(calls) < first.size or not all(call.blocking for call in calls):
            continue
        entered = max(call.slice.began_ns for call in calls)
        for call in calls:
            details, moving_ns = call.slice.details, call.slice.ended_ns - entered
            details["waited for the last member (us)"] = _us(entered - call.slice.began_ns)
            moved = None if call.nbytes is None else bus_bytes(call.operation, call.nbytes, call.size)
            if moved is not None and moving_ns > 0:
                details["bus bandwidth (GB/s)"] = float(f"{moved / moving_ns:.3g}")


def _arrow_events(timeline: Timeline, origin: int, places: dict[int, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Arrows from the last rank that entered a collective to those that waited for it.

    Perfetto turns an arrow round that ends in a slice which began before the one in which it starts, as a call that
    waited did. So it ends in a slice inside of that call, which begins when the last rank entered.
    """
    names = {id(call): process.name for process in timeline.processes for call in process.calls}
    number = 0
    for calls in _joined(timeline):
        last = max(calls, key=lambda call: call.slice.began_ns)
        at = last.slice.began_ns
        waiting = [
            call for call in calls if call.slice.began_ns < at < call.slice.ended_ns and id(call.slice) in places
        ]
        if id(last.slice) not in places:
            continue
        for call in sorted(waiting, key=lambda call: call.slice.began_ns)[:ARROWS_PER_CALL]:
            number += 1
            if number > MAX_ARROWS:
                return
            entry = TimelineSlice("arrival", f"{names[id(last)]} entered", at, call.slice.ended_ns)
            yield _slice_event(entry, *places[id(call.slice)], origin)
            for phase, end in (("s", last), ("f", call)):
                pid, tid = places[id(end.slice)]
                event = {"ph": phase, "cat": "collective", "name": last.operation, "id": number, "pid": pid, "tid": tid}
                yield event | {"ts": _us(at - origin)} | ({"bp": "e"} if phase == "f" else {})
