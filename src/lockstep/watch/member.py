"""A process as a member of one communicator: what it has issued there, and whether that fits the others."""

import time
from types import FrameType
from typing import Any

from lockstep.watch import beacon
from lockstep.watch.counts import Offsets
from lockstep.watch.errors import CollectiveRefused
from lockstep.watch.records import CallRecord
from lockstep.watch.schedule import Board
from lockstep.watch.sites import Sites
from lockstep.watch.tape import P2P, REFUSED, Line, roll

UNSAID = -2


class Context:
    """The stage a call is issued in, by number of its text; changes rarely."""

    def __init__(self, own: beacon.Beacon) -> None:
        self._own, self._stage, self._number = own, "", 0

    def number(self) -> int:
        stage = self._own.stage_name
        if stage is not self._stage or not (self._number == 0 or self._tape_fresh()):
            tape = self._own.tape()
            self._number = tape.text(stage) if tape is not None and stage else 0
            self._stage = stage
        return self._number

    def _tape_fresh(self) -> bool:
        tape = self._own.tape()
        return tape is None or tape.fresh(self._number)


class Member:
    """One communicator of this process. Calls on it are issued by one thread at a time."""

    __slots__ = (
        "board", "context", "counted", "entered", "group", "hardened", "issued", "label", "line", "name", "offsets",
        "rank", "ranks", "raw", "rolling", "run", "sequence", "sites",
    )  # fmt: skip

    def __init__(
        self, group: Any, line: Line, name: str, label: str, ranks: list[int], rank: int, sites: Sites,
        context: Context,
    ) -> None:  # fmt: skip
        self.group, self.line, self.name, self.label = group, line, name, label
        self.ranks, self.rank, self.sites, self.context = ranks, rank, sites, context
        self.board: Board | None = None
        self.run = ""
        self.issued = self.rolling = 0
        self.offsets = Offsets()
        self.raw = (-1, -1)
        """What the poll saw last."""
        self.entered = (-1, -1, 0, 0)
        self.counted = False
        self.hardened = 0
        self.sequence = group._get_sequence_number_for_group
        try:
            self.sequence()
        except (RuntimeError, NotImplementedError):
            self.sequence = lambda: self.issued

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank] if self.rank < len(self.ranks) else self.rank

    def enter(self, signature: int, label: int, frame: FrameType) -> int:
        """Notes that a collective begins; returns where, for `Line.leave`.

        Raises:
            CollectiveRefused: another member on this host has entered something else at this place.
        """
        site, where = self.sites.find(frame)
        issued, rolling = self.issued + 1, self.rolling
        seq = self.sequence() + 1 - self.offsets.total
        self.issued, self.rolling = issued, roll(rolling, signature)
        at = self.line.enter(seq, issued, signature, self.rolling, label, site, self.context.number())
        board = self.board
        if board is not None:
            other = board.enter(issued, signature ^ where, self._same)
            if other is not None:
                self.line.fail(at, REFUSED)
                self.issued, self.rolling = issued - 1, rolling
                raise self._refusal(issued, other)
        return at

    def pass_message(self, signature: int, label: int, frame: FrameType, peer: int | None) -> int:
        """Notes that a point-to-point call begins."""
        self.line.blind()
        return self.line.enter(
            self.sequence() - self.offsets.total, self.issued, signature, self.rolling, label,
            self.sites.find(frame)[0], self.context.number(), P2P, -1 if peer is None else peer,
        )  # fmt: skip

    # --- the schedule: rare, so it may read the others' beacons

    def _call_of(self, column: int, number: int) -> CallRecord | None:
        assert self.board is not None
        _, name, slot = self.board.member(column)
        calls = beacon.read_calls(beacon.run_dir(self.run) / f"{name}.beacon", slot)
        return next(
            (call for call in reversed(calls) if call.issued == number and not (call.p2p or call.refused)), None
        )

    def _mine(self, number: int) -> CallRecord | None:
        calls = beacon.read_calls(beacon.current().path, self.line.slot)
        return next((call for call in reversed(calls) if call.issued == number and not call.p2p), None)

    def _same(self, column: int) -> bool | None:
        theirs, mine = self._call_of(column, self.issued), self._mine(self.issued)
        if theirs is None or mine is None:
            return None
        return theirs.signature == mine.signature and theirs.where == mine.where

    def _refusal(self, number: int, column: int) -> CollectiveRefused:
        assert self.board is not None
        rank, _, _ = self.board.member(column)
        mine, theirs = self._mine(number), self._call_of(column, number)
        peer = self.ranks[rank] if rank < len(self.ranks) else rank
        return CollectiveRefused(self.label, number, _words(mine), _words(theirs), self.global_rank, peer)

    # --- c10d's counts, from the recorder's thread

    def count(self, raw: tuple[int, int]) -> None:
        """Notes c10d's own numbers where they changed: -1 for none yet, `UNSAID` where nobody says."""
        if not self.counted:
            self.counted = True
            self.line.counted()
        if raw == self.raw:
            return
        now, old = time.monotonic_ns(), self.entered
        entered = self.offsets.collective(raw[0]) if raw[0] >= 0 else 0
        completed = self.offsets.collective(raw[1]) if raw[1] >= 0 else (-1 if raw[1] == UNSAID else 0)
        self.raw = raw
        self.entered = (
            entered, completed, now if entered != old[0] else old[2], now if completed != old[1] else old[3],
        )  # fmt: skip
        self.line.counts(*self.entered)

    def close(self) -> None:
        """The communicator was destroyed."""
        self.line.close()
        if self.board is not None:
            board, self.board = self.board, None
            board.close()


def _words(call: CallRecord | None) -> str:
    if call is None:
        return "another call"
    root = "" if call.root is None else f" root {call.root}"
    what = " ".join(word for word in (call.operation, call.shapes, call.dtype) if word)
    return f"{what}{root} at {call.where}" if call.where else f"{what}{root}"
