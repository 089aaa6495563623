"""Converts the beacons of a run to table rows: what each process does, how fast, and what it waits for."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.base.wait_state import SLEEP, WaitRecord
from lockstep.watch.beacon.beacon_records import BeaconState, CommunicatorRecord, ProgressCounter
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.procfs.processes import process_state

_STATE_NAMES = {
    "R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "dead", "X": "dead",
    "I": "idle",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BeaconSnapshot:
    """The beacons of a run at one time, and the states of their processes at that time."""

    at_ns: int
    """Time on the host's monotonic clock."""
    beacons: tuple[BeaconState, ...]
    states: Mapping[int, str | None]
    """The state letter in /proc, by pid; None if the process has ended."""


@dataclass(frozen=True, slots=True)
class CounterRow:
    """A counter. `rate` is its growth per second since an earlier snapshot, never negative; None without a snapshot of
    the same process."""

    name: str
    value: int
    total: int | None
    rate: float | None
    still_s: float
    """How long the counter has not changed."""


@dataclass(frozen=True, slots=True)
class WaitRow:
    """A wait. `left_s` is the time until its bound if there is no progress; None without a bound."""

    kind: str
    waits_for: str
    why: str
    since_s: float
    stalled_s: float
    left_s: float | None
    thread: str


@dataclass(frozen=True, slots=True)
class CommunicatorRow:
    """How many collectives a process has entered and completed on a communicator; -1 if unknown."""

    label: str
    entered: int
    completed: int
    operation: str
    """The operation of the current call; empty if there is none."""
    inside_s: float


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A process as `lockstep top` shows it."""

    name: str
    role: str
    rank: int
    pid: int
    alive: bool
    state: str
    """One of: running, sleeping, in the kernel, stopped, traced, idle, dead, or gone."""
    stage: str
    stage_s: float
    beat_s: float | None
    """Age of the last heartbeat of a background thread; None if the process writes none."""
    counters: tuple[CounterRow, ...]
    waits: tuple[WaitRow, ...]
    """The one to show first (`WaitRecord.display_order`)."""
    communicators: tuple[CommunicatorRow, ...] = ()
    parts: tuple["ProcessRow", ...] = ()
    """The processes that are parts of this one, such as an engine's workers in a rank."""


def take_snapshot(run: str) -> BeaconSnapshot:
    """Reads the beacons of a run and the states of their processes now."""
    beacons = tuple(read_beacons(run))
    states = {state.pid: process_state(state.pid, state.start_ticks) for state in beacons}
    return BeaconSnapshot(time.monotonic_ns(), beacons, states)


def process_rows(now: BeaconSnapshot, before: BeaconSnapshot | None = None) -> list[ProcessRow]:
    """One row per process, ordered by role and rank, with those of its parts inside. With an earlier snapshot, counters
    have rates."""
    earlier = {(state.pid, state.start_ticks): state for state in before.beacons} if before else {}
    found, parts = list[ProcessRow](), dict[str, list[ProcessRow]]()
    names = {state.name for state in now.beacons}
    for state in now.beacons:
        row = _process_row(now, state, before.at_ns if before else 0, earlier.get((state.pid, state.start_ticks)))
        (parts.setdefault(state.parent, []) if state.parent in names else found).append(row)
    found = [replace(row, parts=tuple(parts.get(row.name, ()))) for row in found]
    return sorted(found, key=lambda row: (row.role, row.rank, row.name))


def _process_row(now: BeaconSnapshot, state: BeaconState, before_ns: int, before: BeaconState | None) -> ProcessRow:
    letter = now.states.get(state.pid)
    alive = letter not in (None, "Z", "X")
    return ProcessRow(
        name=state.name,
        role=state.role,
        rank=state.rank,
        pid=state.pid,
        alive=alive,
        state="gone" if letter is None else _STATE_NAMES.get(letter, letter),
        stage=state.stage,
        stage_s=_age_s(now, state.stage_since_ns) if state.stage else 0.0,
        beat_s=_age_s(now, state.beat_ns) if state.beat_ns else None,
        counters=tuple(
            _counter_row(now, name, counter, before_ns, before.counters.get(name) if before else None)
            for name, counter in state.counters.items()
        ),
        waits=tuple(_wait_row(now, wait) for wait in state.waits) if alive else (),
        communicators=tuple(_communicator_row(now, each) for each in state.communicators if not each.closed),
    )


def _counter_row(
    now: BeaconSnapshot, name: str, counter: ProgressCounter, before_ns: int, before: ProgressCounter | None
) -> CounterRow:
    seconds = (now.at_ns - before_ns) / 1e9
    rate = None
    if before is not None and seconds > 0:
        # A counter that is lower than before has begun again, as those of a step do.
        rate = (counter.value - before.value if counter.value >= before.value else max(0, counter.value)) / seconds
    return CounterRow(name, counter.value, counter.total, rate, _age_s(now, counter.updated_ns))


def _wait_row(now: BeaconSnapshot, wait: WaitRecord) -> WaitRow:
    left = None if wait.deadline_ns is None else (wait.deadline_ns - now.at_ns) / 1e9
    return WaitRow(
        wait.kind,
        wait.waits_for,
        wait.why,
        _age_s(now, wait.since_ns),
        _age_s(now, wait.moved_ns),
        left,
        wait.thread_name,
    )


def _communicator_row(now: BeaconSnapshot, record: CommunicatorRecord) -> CommunicatorRow:
    inside = record.inside
    return CommunicatorRow(
        record.label, record.entered, record.completed, inside.operation if inside is not None else "",
        _age_s(now, inside.entered_ns) if inside is not None else 0.0,
    )  # fmt: skip


def _age_s(now: BeaconSnapshot, at_ns: int) -> float:
    return max(0.0, (now.at_ns - at_ns) / 1e9)


def describe_process(row: ProcessRow) -> str:
    """Describes what a process does: `waits 12 s for reward-0 (future): scores of step 7`, or its counters."""
    if not row.alive:
        return row.state
    if row.state in ("stopped", "traced"):
        return f"{row.state} in {row.stage or 'no stage'}"
    if row.waits:
        wait = row.waits[0]
        return f"waits {wait.since_s:.0f} s for {wait.waits_for} ({wait.kind}): {wait.why}"
    return ", ".join(describe_counter(counter) for counter in row.counters) or row.stage or row.state


def describe_counter(counter: CounterRow) -> str:
    """Describes a counter: `tokens 512/4096, 230/s`."""
    total = "" if counter.total is None else f"/{counter.total}"
    rate = "" if counter.rate is None else f", {counter.rate:,.0f}/s"
    return f"{counter.name} {counter.value}{total}{rate}"


def wait_edges(rows: Iterable[ProcessRow]) -> list[tuple[str, str, float]]:
    """The edges of a wait graph: waiting process, target and seconds, the longest wait first. A sleep is none."""
    edges = [(row.name, wait.waits_for, wait.since_s) for row in rows for wait in row.waits if wait.kind != SLEEP]
    return sorted(edges, key=lambda edge: -edge[2])


def idle_processes(now: Sequence[ProcessRow], for_s: float) -> list[ProcessRow]:
    """Living processes without a wait whose counters have not changed for `for_s` seconds."""
    return [
        row
        for row in now
        if row.alive and not row.waits and row.counters and all(counter.still_s >= for_s for counter in row.counters)
    ]
