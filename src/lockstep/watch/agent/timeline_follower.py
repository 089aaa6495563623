"""Follows the beacons of a host for a timeline: each read returns what has ended since the read before, and what goes
on now, as JSON.

    {"now_ns", "texts": [text, ...], "processes": [PROCESS, ...]}

    PROCESS: {"name", "role", "rank", "pid", "parent", "stage": [name, since_ns], "waits": [[text, thread, since_ns]],
        "counters": {name: [value, total]}, "spans": [[kind, name, began_ns, ended_ns, amount, thread]],
        "communicators": [{"id", "name", "backend", "size", "rank", "members", "on_device", "calls": [CALL, ...]}],
        "lost": n}
    CALL: [number, issued, operation, shapes, dtype, site, stage, module, entered_ns, left_ns, flags, peer]

Texts of a call are positions in `texts`. A call that has not returned has `left_ns` 0 and is repeated when it has. All
times are on the host's monotonic clock. `lost` counts what was overwritten before it was read.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.watch.beacon.beacon_records import CALLS_PER_RING, MAX_SPANS, CallRecord, CommunicatorRecord
from lockstep.watch.beacon.reader import OpenedBeacon, opened_beacon

P2P, ASYNCHRONOUS, FAILED, REFUSED = 1, 2, 4, 8
"""The flags of a call."""
MAX_CALLS = 4096
"""Of one process, in one read: a frame stays below a megabyte per process."""


class _Texts:
    """The texts of one read, each stored once."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))


@dataclass(slots=True)
class _FollowedProcess:
    """What has been read of one process."""

    identity: tuple[int, int]
    """Pid and start time."""
    spans: int = 0
    calls: dict[tuple[int, int], int] = field(default_factory=dict)
    """The newest call that was read, by slot and identity of its communicator."""
    unreturned: dict[tuple[int, int], set[int]] = field(default_factory=dict)


class TimelineFollower:
    """Reads beacons again and again for one timeline.

    Args:
        newest: how many calls of a communicator, and spans of a process, the first read returns at most.
    """

    def __init__(self, newest: int = MAX_SPANS) -> None:
        self._newest = newest
        self._processes: dict[Path, _FollowedProcess] = {}

    def read(self, beacons: Iterable[Path]) -> dict[str, Any]:
        """What the processes with these beacons have done since the last read; see above."""
        texts, found = _Texts(), []
        for path in beacons:
            with opened_beacon(path) as beacon:
                if beacon is not None:
                    found.append(self._process(beacon, texts))
        return {"now_ns": time.monotonic_ns(), "texts": list(texts.known), "processes": found}

    def _process(self, beacon: OpenedBeacon, texts: _Texts) -> dict[str, Any]:
        state = beacon.state
        known, identity = self._processes.get(state.path), (state.pid, state.start_ticks)
        if known is None or known.identity != identity:  # the first read of a process
            known = self._processes[state.path] = _FollowedProcess(identity)
            known.spans = max(0, beacon.spans_written - self._newest)
        spans = beacon.spans(known.spans)
        lost = beacon.spans_written - known.spans - len(spans)
        known.spans = beacon.spans_written
        communicators, left = [], MAX_CALLS
        for each in state.communicators:
            if each.pair is None:
                calls, missed = self._calls(beacon, each, known, left)
                left, lost = left - len(calls), lost + missed
                communicators.append(_communicator_json(each, calls, texts))
        return {
            "name": state.name, "role": state.role, "rank": state.rank, "pid": state.pid, "parent": state.parent,
            "stage": [state.stage, state.stage_since_ns],
            "waits": [[f"{w.waits_for} ({w.kind}): {w.why}", w.thread_name, w.since_ns] for w in state.waits],
            "counters": {name: [counter.value, counter.total] for name, counter in state.counters.items()},
            "spans": [[s.kind, s.name, s.began_ns, s.ended_ns, s.amount, s.thread] for s in spans],
            "communicators": communicators, "lost": max(0, lost),
        }  # fmt: skip

    def _calls(
        self, beacon: OpenedBeacon, communicator: CommunicatorRecord, known: _FollowedProcess, most: int
    ) -> tuple[list[CallRecord], int]:
        """The calls to return, and how many were missed."""
        key = communicator.slot, communicator.identity
        written = beacon.calls_written(communicator.slot)
        before, unreturned = known.calls.get(key, max(0, written - self._newest)), known.unreturned.get(key, set())
        newest = written - min([before, *(number - 1 for number in unreturned)])
        ring = beacon.calls(communicator.slot, newest) if newest > 0 else ()
        found = [call for call in ring if call.number > before or (call.number in unreturned and not call.inside)]
        chosen = found[-most:] if most > 0 else []
        missed = max(0, written - before - CALLS_PER_RING) if key in known.calls else 0
        known.calls[key], known.unreturned[key] = written, {call.number for call in ring if call.inside}
        return chosen, missed + len(found) - len(chosen)


def _communicator_json(communicator: CommunicatorRecord, calls: list[CallRecord], texts: _Texts) -> dict[str, Any]:
    return {
        "id": f"{communicator.identity:016x}", "name": communicator.label, "backend": communicator.backend,
        "size": communicator.size, "rank": communicator.rank, "members": f"{communicator.members:016x}",
        "on_device": communicator.on_device,
        "calls": [_call_json(call, texts) for call in calls],
    }  # fmt: skip


def _call_json(call: CallRecord, texts: _Texts) -> list[Any]:
    flags = P2P * call.p2p | ASYNCHRONOUS * call.asynchronous | FAILED * call.failed | REFUSED * call.refused
    number = texts.number
    return [
        call.number, call.issued, number(call.operation), number(call.shapes), number(call.dtype), number(call.site),
        number(call.stage), number(call.module), call.entered_ns, call.left_ns, flags, call.peer,
    ]  # fmt: skip
