"""Follows the beacons of a host for a timeline: each read returns what has ended since the read before, and what goes
on now, as JSON.

    {"now_ns", "processes": [PROCESS, ...], "calls": [base64, ...]}

    PROCESS: {"name", "role", "rank", "pid", "parent", "stage": [name, since_ns], "waits": [[text, thread, since_ns]],
        "counters": {name: [value, total]}, "spans": [[kind, name, began_ns, ended_ns, amount, thread]],
        "texts": {number: text}, "lost": n,
        "communicators": [{"id", "name", "backend", "size", "rank", "members", "on_device", "calls": n}]}

Calls are not decoded here, because the ranks need this host's processors: those of a communicator are the n-th item of
`calls`, as `call_copies.unpack_calls` takes them with the `texts` of the process. Communicators without new calls are
left out. A call that has not returned is repeated when it has. All times are on the host's monotonic clock. `lost`
counts what was overwritten before it was read.
"""

import time
from binascii import b2a_base64
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.watch.beacon.beacon_records import CALLS_PER_RING, MAX_SPANS, CommunicatorRecord
from lockstep.watch.beacon.call_copies import CALL_BYTES, text_numbers, unreturned_calls
from lockstep.watch.beacon.reader import OpenedBeacon, opened_beacon

MAX_CALLS = 4096
"""Of one process, in one read: a frame stays below a megabyte per process."""
_KEPT_TEXTS = 4096


@dataclass(slots=True)
class _FollowedProcess:
    """What has been read of one process."""

    identity: tuple[int, int]
    """Pid and start time."""
    spans: int = 0
    calls: dict[tuple[int, int], int] = field(default_factory=dict)
    """The newest call that was read, by slot and identity of its communicator."""
    unreturned: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    """Texts of its calls by number; a number means the same text as long as the process lives."""


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
        calls, found = list[str](), []
        for path in beacons:
            with opened_beacon(path) as beacon:
                if beacon is not None:
                    found.append(self._process(beacon, calls))
        return {"now_ns": time.monotonic_ns(), "processes": found, "calls": calls}

    def _process(self, beacon: OpenedBeacon, copies: list[str]) -> dict[str, Any]:
        state = beacon.state
        known, identity = self._processes.get(state.path), (state.pid, state.start_ticks)
        is_new = known is None or known.identity != identity
        if known is None or is_new:
            known = self._processes[state.path] = _FollowedProcess(identity)
            known.spans = max(0, beacon.spans_written - self._newest)
        spans = beacon.spans(known.spans)
        lost = beacon.spans_written - known.spans - len(spans)
        known.spans = beacon.spans_written
        communicators, texts, left = list[dict[str, Any]](), dict[int, str](), MAX_CALLS
        for each in state.communicators:
            data, missed = self._calls(beacon, each, known, left, is_new)
            left, lost = left - len(data) // CALL_BYTES, lost + missed
            if data:
                texts |= {number: _text(beacon, known, number) for number in text_numbers(data)}
                communicators.append(_communicator_json(each, len(copies)))
                copies.append(b2a_base64(data, newline=False).decode())
        return {
            "name": state.name, "role": state.role, "rank": state.rank, "pid": state.pid, "parent": state.parent,
            "stage": [state.stage, state.stage_since_ns],
            "waits": [[f"{w.waits_for} ({w.kind}): {w.why}", w.thread_name, w.since_ns] for w in state.waits],
            "counters": {name: [counter.value, counter.total] for name, counter in state.counters.items()},
            "spans": [[s.kind, s.name, s.began_ns, s.ended_ns, s.amount, s.thread] for s in spans],
            "texts": texts, "communicators": communicators, "lost": max(0, lost),
        }  # fmt: skip

    def _calls(
        self, beacon: OpenedBeacon, communicator: CommunicatorRecord, known: _FollowedProcess, most: int, is_new: bool
    ) -> tuple[bytes, int]:
        """Copies of the calls to return, and how many were missed. Of what was called before the first read of the
        process, only the newest calls are returned."""
        key = communicator.slot, communicator.identity
        written = beacon.calls_written(communicator.slot)
        before = known.calls.get(key, max(0, written - self._newest) if is_new else 0)
        unreturned = known.unreturned.get(key, set())
        if written == before and not unreturned:
            return b"", 0
        newest = written - min([before, *(number - 1 for number in unreturned)])
        data = beacon.copy_calls(communicator.slot, newest)
        inside = unreturned_calls(data)
        # So many were read before; those of them that have returned since are returned again.
        old = max(0, len(data) // CALL_BYTES - (written - before))
        first = written - len(data) // CALL_BYTES
        again = [at for at in range(old) if first + at + 1 in unreturned - inside]
        data = b"".join(data[at * CALL_BYTES : (at + 1) * CALL_BYTES] for at in again) + data[old * CALL_BYTES :]
        excess = max(0, len(data) // CALL_BYTES - most)
        missed = 0 if is_new else max(0, written - before - CALLS_PER_RING)
        known.calls[key], known.unreturned[key] = written, inside
        return data[excess * CALL_BYTES :], missed + excess


def _text(beacon: OpenedBeacon, known: _FollowedProcess, number: int) -> str:
    text = known.texts.get(number)
    if text is None:
        if len(known.texts) >= _KEPT_TEXTS:
            known.texts.clear()
        text = beacon.texts[number]
        if text:
            known.texts[number] = text
    return text


def _communicator_json(communicator: CommunicatorRecord, calls: int) -> dict[str, Any]:
    return {
        "id": f"{communicator.identity:016x}", "name": communicator.label, "backend": communicator.backend,
        "size": communicator.size, "rank": communicator.rank, "members": f"{communicator.members:016x}",
        "on_device": communicator.on_device, "calls": calls,
    }  # fmt: skip
