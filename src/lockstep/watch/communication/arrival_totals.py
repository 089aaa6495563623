"""Sums up who is late in collectives and who waits for it, from the calls that agents sample (`agent.call_timings`).

`communication.json` has the totals of all collectives of which the entries of all members are known:

    {"format": 1, "run", "written": seconds since the epoch, "communicators": [COMMUNICATOR, ...],
        "windows": [WINDOW, ...], "left_out": communicators whose totals gave way to those of newer ones}
    COMMUNICATOR: {"name", "backend", "processes": [name of each rank], "on_device": operations run after their calls,
        "unmatched": calls of which entries are missing, "operations": [OPERATION, ...], "ranks": [RANK, ...],
        "pairs": [[late rank, waiting rank, calls, ns, histogram], ...], "all_pairs": whether `pairs` is complete}
    OPERATION: {"operation", "size": upper bound of bytes (a power of two) or null, "calls", "sampled", "bytes",
        "waiting_ns", "moving_ns", "moving_calls", "bus_bytes", "bus_ns", "spread": histogram, "moving": histogram}
    RANK: [calls in which it was last, ns that others waited for it, ns that it waited, histogram of its lateness]
    WINDOW: {"began", "ended": seconds since the epoch, "waited_ns": {process: ns}, "caused_ns": {process: ns}}

Waiting is from a member's entry to the last member's. Moving is from then until the member left, and known of calls
that block. A sampled call of a shift s counts as 2**s calls. Communicators of more than `MOST_MEMBERS` members keep the
waits of each rank, and of pairs only those of the last rank with the one that had waited the longest, the `MOST_PAIRS`
pairs with the most time. All histograms are those of `time_histogram`, by number of bucket.
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.base.folders import write_atomically
from lockstep.base.json_text import read_json
from lockstep.watch.communication.call_sizes import bus_bytes
from lockstep.watch.communication.time_histogram import TimeHistogram

log = logging.getLogger(__name__)

FORMAT = 1
COMMUNICATION_FILE = "communication.json"
WRITE_S = 10.0
MOST_MEMBERS = 32
MOST_PAIRS = 256
MOST_PENDING = 1024
"""Calls of a communicator that wait for the entries of some members, if there are up to `MOST_MEMBERS`; of larger ones,
calls with about as many entries in total."""
MOST_LIVE = 4096
"""Communicators whose calls are being compared."""
MOST_TOTALS = 4096
"""Communicators with totals: a job may make new ones, with new names, in every step."""
MOST_DESCRIBED = 65_536
"""Signatures whose meaning is known: shapes of unequal batches are new ones in every step."""
WINDOW_S = 10.0
"""The length of windows at first; it doubles whenever there are `MOST_WINDOWS`."""
MOST_WINDOWS = 120


class Entry(NamedTuple):
    """When a member entered a collective, on its host's clock."""

    host: str
    entered_ns: int
    took_ns: int
    """-1 if unknown."""
    signature: int
    shift: int
    asynchronous: bool


@dataclass(slots=True)
class _Operation:
    calls: int = 0
    sampled: int = 0
    nbytes: int = 0
    waiting_ns: int = 0
    moving_ns: int = 0
    moving_calls: int = 0
    bus_bytes: float = 0.0
    bus_ns: int = 0
    spread: TimeHistogram = field(default_factory=TimeHistogram)
    moving: TimeHistogram = field(default_factory=TimeHistogram)


@dataclass(slots=True)
class _Rank:
    last: int = 0
    caused_ns: int = 0
    waited_ns: int = 0
    lateness: TimeHistogram = field(default_factory=TimeHistogram)


@dataclass(slots=True)
class _Pair:
    calls: int = 0
    ns: int = 0
    waits: TimeHistogram = field(default_factory=TimeHistogram)


@dataclass(slots=True)
class CommunicatorTotals:
    """The totals of a communicator."""

    name: str
    backend: str
    processes: tuple[str, ...]
    """By rank."""
    on_device: bool = False
    unmatched: int = 0
    operations: dict[tuple[str, int | None], _Operation] = field(default_factory=dict)
    ranks: list[_Rank] = field(default_factory=list)
    pairs: dict[tuple[int, int], _Pair] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = self.ranks or [_Rank() for _ in self.processes]

    @property
    def all_pairs(self) -> bool:
        return len(self.processes) <= MOST_MEMBERS

    def add(self, entries: Mapping[int, Entry], entered: Mapping[int, int], operation: str, nbytes: int | None) -> int:
        """Adds a collective of which all entries are known. Returns the rank that entered last.

        Args:
            entries: by rank.
            entered: when each rank entered, on one clock.
        """
        times = 1 << max(each.shift for each in entries.values())
        late = max(entered, key=lambda rank: (entered[rank], rank))
        last, first = entered[late], min(entered.values())
        size = None if nbytes is None else 1 << max(nbytes - 1, 0).bit_length()
        known = self.operations.setdefault((operation, size), _Operation())
        known.calls, known.sampled = known.calls + times, known.sampled + 1
        known.nbytes += times * (nbytes or 0)
        known.spread.add(last - first, times)
        for rank, at in entered.items():
            if rank != late:
                known.waiting_ns += times * (last - at)
                self.ranks[rank].waited_ns += times * (last - at)
                self.ranks[late].caused_ns += times * (last - at)
        self.ranks[late].last += times
        self.ranks[late].lateness.add(last - first, times)
        self._add_pairs(entered, late, times)
        moving = [max(0, entered[rank] + each.took_ns - last) for rank, each in entries.items() if each.took_ns >= 0]
        if len(moving) == len(entries):
            known.moving_calls += times
            known.moving_ns += times * sum(moving)
            known.moving.add(max(moving), times)
            moved = None if nbytes is None else bus_bytes(operation, nbytes, len(entries))
            if moved is not None:
                known.bus_bytes, known.bus_ns = known.bus_bytes + times * moved, known.bus_ns + times * max(moving)
        return late

    def _add_pairs(self, entered: Mapping[int, int], late: int, times: int) -> None:
        waiting = [rank for rank in entered if rank != late]
        if not self.all_pairs:
            waiting = [min(waiting, key=lambda rank: (entered[rank], rank))]
        for rank in waiting:
            pair = self.pairs.setdefault((late, rank), _Pair())
            wait = entered[late] - entered[rank]
            pair.calls, pair.ns = pair.calls + times, pair.ns + times * wait
            pair.waits.add(wait, times)
        if not self.all_pairs and len(self.pairs) > 2 * MOST_PAIRS:
            kept = sorted(self.pairs, key=lambda each: -self.pairs[each].ns)[:MOST_PAIRS]
            self.pairs = {each: self.pairs[each] for each in kept}

    def to_json(self) -> dict[str, Any]:
        pairs = sorted(self.pairs.items(), key=lambda each: -each[1].ns)
        return {
            "name": self.name, "backend": self.backend, "processes": list(self.processes), "on_device": self.on_device,
            "unmatched": self.unmatched, "all_pairs": self.all_pairs,
            "operations": [
                {
                    "operation": operation, "size": size, "calls": each.calls, "sampled": each.sampled,
                    "bytes": each.nbytes, "waiting_ns": each.waiting_ns, "moving_ns": each.moving_ns,
                    "moving_calls": each.moving_calls, "bus_bytes": round(each.bus_bytes), "bus_ns": each.bus_ns,
                    "spread": each.spread.to_json(), "moving": each.moving.to_json(),
                }
                for (operation, size), each in self.operations.items()
            ],
            "ranks": [[each.last, each.caused_ns, each.waited_ns, each.lateness.to_json()] for each in self.ranks],
            "pairs": [
                [late, rank, each.calls, each.ns, each.waits.to_json()]
                for (late, rank), each in (pairs if self.all_pairs else pairs[:MOST_PAIRS])
            ],
        }  # fmt: skip

    @staticmethod
    def parse(values: Mapping[str, Any]) -> "CommunicatorTotals":
        """Raises KeyError, TypeError or ValueError if it is none."""
        made = CommunicatorTotals(
            str(values["name"]), str(values["backend"]), tuple(map(str, values["processes"])),
            bool(values["on_device"]), int(values["unmatched"]),
        )  # fmt: skip
        for each in values["operations"]:
            size = None if each["size"] is None else int(each["size"])
            numbers = {of: int(each[name]) for name, of in _NUMBERS.items()}
            made.operations[str(each["operation"]), size] = _Operation(
                **numbers, spread=TimeHistogram(each["spread"]), moving=TimeHistogram(each["moving"])
            )
        ranks = [
            _Rank(int(last), int(caused), int(waited), TimeHistogram(late))
            for last, caused, waited, late in values["ranks"]
        ]
        if len(ranks) != len(made.processes):
            raise ValueError(f"{len(ranks)} ranks of {len(made.processes)} processes")
        made.ranks = ranks
        for late, rank, calls, ns, waits in values["pairs"]:
            made.pairs[int(late), int(rank)] = _Pair(int(calls), int(ns), TimeHistogram(waits))
        if not all(0 <= rank < len(ranks) for pair in made.pairs for rank in pair):
            raise ValueError(f"pairs have other ranks than {len(ranks)}")
        return made


_NUMBERS = {
    "calls": "calls", "sampled": "sampled", "bytes": "nbytes", "waiting_ns": "waiting_ns", "moving_ns": "moving_ns",
    "moving_calls": "moving_calls", "bus_bytes": "bus_bytes", "bus_ns": "bus_ns",
}  # fmt: skip
"""The numbers of an operation in the file, and in `_Operation`."""


@dataclass(slots=True)
class _Window:
    began: float
    ended: float
    waited_ns: dict[str, int] = field(default_factory=dict)
    caused_ns: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def parse(values: Mapping[str, Any]) -> "_Window":
        waited, caused = (
            {str(name): int(ns) for name, ns in dict(values[of]).items()} for of in ("waited_ns", "caused_ns")
        )
        return _Window(float(values["began"]), float(values["ended"]), waited, caused)

    def merge(self, other: "_Window") -> None:
        self.ended = other.ended
        for mine, theirs in ((self.waited_ns, other.waited_ns), (self.caused_ns, other.caused_ns)):
            for name, ns in theirs.items():
                mine[name] = mine.get(name, 0) + ns


@dataclass(slots=True)
class _Live:
    """A communicator whose calls are being compared."""

    pending: OrderedDict[tuple[int, int], dict[int, Entry]] = field(default_factory=OrderedDict)
    """By incarnation and number of the call: the entries of ranks."""
    processes: dict[int, str] = field(default_factory=dict)
    """By rank."""


def _are_all(ranks: Mapping[int, Any], size: int) -> bool:
    """Whether these are all ranks. Members that differ in who is one may have as many of others."""
    return len(ranks) == size and all(rank in ranks for rank in range(size))


class ArrivalTotals:
    """The totals of a job, and the file that holds them; None writes none. A file of the same run is continued."""

    def __init__(self, path: Path | None, run: str) -> None:
        self._path, self._run = path, run
        self._totals: OrderedDict[tuple[str, tuple[str, ...]], CommunicatorTotals] = OrderedDict()
        """By name and processes, the one that was used last at the end."""
        self._left_out = 0
        self._live: OrderedDict[str, _Live] = OrderedDict()
        """By key in rosters, the one with the newest call last."""
        self._described: OrderedDict[int, tuple[str, int | None]] = OrderedDict()
        """By signature, the one that was used last at the end."""
        self._offsets: dict[str, int] = {}
        self._windows: list[_Window] = []
        self._window_s = WINDOW_S
        self._changed, self._written_at = False, float("-inf")
        self._read()

    def describe(self, signatures: Mapping[int, tuple[str, int | None]]) -> None:
        """Notes operation and bytes of signatures."""
        for signature, meaning in signatures.items():
            self._described[signature] = meaning
            self._described.move_to_end(signature)
        while len(self._described) > MOST_DESCRIBED:
            self._described.popitem(last=False)

    def set_offset(self, host: str, ns: int) -> None:
        """Sets how far the clock of a host is ahead of the supervisor's."""
        self._offsets[host] = ns

    def add(
        self, key: str, name: str, backend: str, size: int, call: tuple[int, int], rank: int, process: str,
        entry: Entry, on_device: bool = False,
    ) -> None:  # fmt: skip
        """Adds the entry of a member.

        Args:
            key: of the communicator in rosters.
            call: incarnation of the communicator and number of the call.
        """
        live = self._live.setdefault(key, _Live())
        self._live.move_to_end(key)
        if len(self._live) > MOST_LIVE:
            self._live.popitem(last=False)
        live.processes[rank] = process
        entries = live.pending.setdefault(call, {})
        entries[rank] = entry
        if size > 1 and _are_all(entries, size):
            del live.pending[call]
            self._join(live, name, backend, size, entries, on_device)
        elif len(live.pending) > max(1, MOST_PENDING * MOST_MEMBERS // max(size, MOST_MEMBERS)):
            live.pending.popitem(last=False)
            if _are_all(live.processes, size):
                self._of(live, name, backend, size, on_device).unmatched += 1

    def write(self, now: float, last: bool = False) -> None:
        """Writes the file if it is time, or at the end. A failure is logged, and affects nothing else."""
        if self._path is None or not self._changed or (now - self._written_at < WRITE_S and not last):
            return
        self._written_at, self._changed = now, False
        try:
            write_atomically(self._path, json.dumps(self.to_json(), separators=(",", ":")).encode())
        except OSError as error:
            log.warning("the totals of collectives could not be written: %s", error)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT, "run": self._run, "written": time.time(),
            "communicators": [each.to_json() for each in self._totals.values()],
            "windows": [
                {"began": each.began, "ended": each.ended, "waited_ns": each.waited_ns, "caused_ns": each.caused_ns}
                for each in self._windows
            ],
            "left_out": self._left_out,
        }  # fmt: skip

    def _of(self, live: _Live, name: str, backend: str, size: int, on_device: bool) -> CommunicatorTotals:
        processes = tuple(live.processes[rank] for rank in range(size))
        found = self._totals.get((name, processes))
        if found is None:
            found = self._totals[name, processes] = CommunicatorTotals(name, backend, processes, on_device)
            if len(self._totals) > MOST_TOTALS:
                self._totals.popitem(last=False)
                self._left_out += 1
        self._totals.move_to_end((name, processes))
        return found

    def _join(
        self, live: _Live, name: str, backend: str, size: int, entries: dict[int, Entry], on_device: bool
    ) -> None:
        if len({each.signature for each in entries.values()}) > 1:
            return  # a mismatch, which others report
        of_one_host = len({each.host for each in entries.values()}) == 1
        entered = {
            rank: each.entered_ns - (0 if of_one_host else self._offsets.get(each.host, 0))
            for rank, each in entries.items()
        }
        totals = self._of(live, name, backend, size, on_device)
        signature = next(iter(entries.values())).signature
        operation, nbytes = self._described.get(signature, ("", None))
        if operation:
            self._described.move_to_end(signature)
        before = [each.waited_ns for each in totals.ranks]
        late = totals.add(entries, entered, operation or "unknown operation", nbytes)
        waited = [each.waited_ns - earlier for each, earlier in zip(totals.ranks, before, strict=True)]
        self._add_to_window(totals.processes, late, waited)
        self._changed = True

    def _add_to_window(self, processes: tuple[str, ...], late: int, waited: list[int]) -> None:
        now = time.time()
        if not self._windows or now - self._windows[-1].began >= self._window_s:
            self._windows.append(_Window(now, now))
            if len(self._windows) > MOST_WINDOWS:
                self._window_s *= 2
                merged = self._windows[::2]
                for one, other in zip(merged, self._windows[1::2], strict=False):
                    one.merge(other)
                self._windows = merged
        window = self._windows[-1]
        window.ended = now
        for name, ns in zip(processes, waited, strict=True):
            if ns:
                window.waited_ns[name] = window.waited_ns.get(name, 0) + ns
        name = processes[late]
        window.caused_ns[name] = window.caused_ns.get(name, 0) + sum(waited)

    def _read(self) -> None:
        """Continues the file of an earlier attempt of the same run."""
        if self._path is None or not self._path.is_file():  # a pipe would block
            return
        try:
            values = read_json(self._path)
            if (values["format"], values["run"]) != (FORMAT, self._run):
                return
            for each in values["communicators"]:
                made = CommunicatorTotals.parse(each)
                self._totals[made.name, made.processes] = made
            self._windows = [_Window.parse(each) for each in values["windows"]]
            self._left_out = int(values.get("left_out", 0))
        except (OSError, KeyError, TypeError, ValueError) as error:
            log.warning("%s cannot be continued, and is written anew: %r", self._path, error)
            self._totals, self._windows = OrderedDict(), []
            return
        covered_s = self._windows[-1].ended - self._windows[0].began if self._windows else 0.0
        while self._window_s * MOST_WINDOWS < covered_s:
            self._window_s *= 2
