"""Beacons as rows: who is there, what it does, how fast, and who waits for what. Pure functions of what was read."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.watch.beacon import BeaconState, Counter, WaitRecord, read_beacons
from lockstep.watch.procs import process_state
from lockstep.watch.records import CommunicatorRecord

_LIFE = {
    "R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "dead", "X": "dead",
    "I": "idle",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reading:
    """The beacons of a run at one moment, and how their processes were then."""

    at_ns: int
    """Monotonic clock of the host."""
    beacons: tuple[BeaconState, ...]
    states: Mapping[int, str | None]
    """By pid: the state letter of /proc, None when the process is gone."""


@dataclass(frozen=True, slots=True)
class CounterRow:
    """A counter; `rate` is per second between two readings, None without an earlier one of the same process."""

    name: str
    value: int
    total: int | None
    rate: float | None
    still_s: float
    """Since when it has not moved."""


@dataclass(frozen=True, slots=True)
class WaitRow:
    """A wait; `left_s` is the time to its bound as things stand, None without one."""

    kind: str
    whom: str
    why: str
    since_s: float
    stalled_s: float
    left_s: float | None
    thread: str


@dataclass(frozen=True, slots=True)
class CommunicatorRow:
    """How far a process is on a communicator; -1 where it is not known."""

    label: str
    entered: int
    completed: int
    operation: str
    """Of the call that it is in, empty when it is in none."""
    inside_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A process as `lockstep top` shows it."""

    name: str
    role: str
    rank: int
    pid: int
    alive: bool
    state: str
    """running, sleeping, in the kernel, stopped, traced, idle, dead, or gone."""
    stage: str
    stage_s: float
    beat_s: float | None
    """Age of the last sign of life of a background thread; None when it gives none."""
    counters: tuple[CounterRow, ...]
    waits: tuple[WaitRow, ...]
    """The longest first."""
    communicators: tuple[CommunicatorRow, ...] = ()


def take_reading(run: str) -> Reading:
    """Reads the beacons of a run and the states of their processes now."""
    beacons = tuple(read_beacons(run))
    states = {state.pid: process_state(state.pid, state.start_ticks) for state in beacons}
    return Reading(time.monotonic_ns(), beacons, states)


def rows(now: Reading, before: Reading | None = None) -> list[Row]:
    """A row per beacon, by role and rank. With an earlier reading, counters have rates."""
    earlier = {(state.pid, state.start_ticks): state for state in before.beacons} if before else {}
    found = [
        _row(now, state, before.at_ns if before else 0, earlier.get((state.pid, state.start_ticks)))
        for state in now.beacons
    ]
    return sorted(found, key=lambda row: (row.role, row.rank, row.name))


def _row(now: Reading, state: BeaconState, before_ns: int, before: BeaconState | None) -> Row:
    letter = now.states.get(state.pid)
    alive = letter not in (None, "Z", "X")
    return Row(
        name=state.name,
        role=state.role,
        rank=state.rank,
        pid=state.pid,
        alive=alive,
        state="gone" if letter is None else _LIFE.get(letter, letter),
        stage=state.stage,
        stage_s=_age(now, state.stage_since_ns) if state.stage else 0.0,
        beat_s=_age(now, state.beat_ns) if state.beat_ns else None,
        counters=tuple(
            _counter(now, name, counter, before_ns, before.counters.get(name) if before else None)
            for name, counter in state.counters.items()
        ),
        waits=tuple(_wait(now, wait) for wait in state.waits) if alive else (),
        communicators=tuple(_communicator(now, each) for each in state.communicators if not each.closed),
    )


def _counter(now: Reading, name: str, counter: Counter, before_ns: int, before: Counter | None) -> CounterRow:
    seconds = (now.at_ns - before_ns) / 1e9
    rate = (counter.value - before.value) / seconds if before is not None and seconds > 0 else None
    return CounterRow(name, counter.value, counter.total, rate, _age(now, counter.updated_ns))


def _wait(now: Reading, wait: WaitRecord) -> WaitRow:
    left = None if wait.deadline_ns is None else (wait.deadline_ns - now.at_ns) / 1e9
    return WaitRow(
        wait.kind, wait.whom, wait.why, _age(now, wait.since_ns), _age(now, wait.moved_ns), left, wait.thread_name
    )


def _communicator(now: Reading, record: CommunicatorRecord) -> CommunicatorRow:
    inside = record.inside
    return CommunicatorRow(
        record.label, record.entered, record.completed, inside.operation if inside is not None else "",
        _age(now, inside.entered_ns) if inside is not None else 0.0,
    )  # fmt: skip


def _age(now: Reading, at_ns: int) -> float:
    return max(0.0, (now.at_ns - at_ns) / 1e9)


def sentence(row: Row) -> str:
    """What a process does, in words: `waits 12 s for reward-0 (future): scores of step 7`, or its counters."""
    if not row.alive:
        return row.state
    if row.state in ("stopped", "traced"):
        return f"{row.state} in {row.stage or 'no stage'}"
    if row.waits:
        wait = row.waits[0]
        return f"waits {wait.since_s:.0f} s for {wait.whom} ({wait.kind}): {wait.why}"
    return ", ".join(progress(counter) for counter in row.counters) or row.stage or row.state


def progress(counter: CounterRow) -> str:
    """A counter in words: `tokens 512/4096, 230/s`."""
    total = "" if counter.total is None else f"/{counter.total}"
    rate = "" if counter.rate is None else f", {counter.rate:,.0f}/s"
    return f"{counter.name} {counter.value}{total}{rate}"


def waiting_for(rows_: Iterable[Row]) -> list[tuple[str, str, float]]:
    """Who waits for whom and since how many seconds, the longest first: the edges of a wait graph."""
    edges = [(row.name, wait.whom, wait.since_s) for row in rows_ for wait in row.waits]
    return sorted(edges, key=lambda edge: -edge[2])


def quiet(now: Sequence[Row], for_s: float) -> list[Row]:
    """Living processes none of whose counters moved for that long and which wait for nobody."""
    return [
        row
        for row in now
        if row.alive and not row.waits and row.counters and all(counter.still_s >= for_s for counter in row.counters)
    ]
