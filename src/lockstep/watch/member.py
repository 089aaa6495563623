"""A process as a member of one communicator: what it has issued there, and whether that fits the others."""

from time import monotonic_ns
from typing import Any

from lockstep.watch import beacon
from lockstep.watch.counts import Offsets
from lockstep.watch.errors import CollectiveRefused
from lockstep.watch.records import CallRecord
from lockstep.watch.schedule import Board
from lockstep.watch.tape import (
    CALL_BYTES,
    CALLS,
    FRESH,
    LEFT,
    MASK,
    NO_PEER,
    P2P,
    PRIME,
    REFUSED,
    Line,
    Tape,
    pack_call,
)

UNSAID = -2
What = tuple[int, int, int, int, int]
"""Of a call: signature, numbers of the texts of it and of its site, the site's digest, and the smaller number."""


class Context:
    """The stage a call is issued in, by number of its text; changes rarely."""

    def __init__(self, own: beacon.Beacon, tape: Tape) -> None:
        self.own, self.tape = own, tape
        self.stage = ""
        self.number = 0

    def renew(self) -> int:
        """The number of the present stage."""
        self.stage = self.own.stage_name
        self.number = self.tape.text(self.stage) if self.stage else 0
        return self.number


class Member:
    """One communicator of this process. Calls on it are issued by one thread at a time."""

    __slots__ = (
        "board", "context", "counted", "entered", "group", "hardened", "issued", "label", "line", "name", "offsets",
        "rank", "ranks", "raw", "rolling", "run", "sequence",
    )  # fmt: skip

    def __init__(
        self, group: Any, line: Line, name: str, label: str, ranks: list[int], rank: int, context: Context
    ) -> None:  # fmt: skip
        self.group, self.line, self.name, self.label = group, line, name, label
        self.ranks, self.rank, self.context = ranks, rank, context
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

    def enter(self, what: What) -> int:
        """Notes that a collective begins; returns what `Line.leave` needs.

        Raises:
            CollectiveRefused: another member on this host has entered something else at this place.
        """
        # Written out, without the calls that it stands for (Line.enter, roll): they would double its cost.
        signature, label, site, where, _ = what
        context, line = self.context, self.line
        number = context.number
        if context.own.stage_name is not context.stage or number <= context.tape.newest_text - FRESH:
            number = context.renew()
        self.issued = issued = self.issued + 1
        before = self.rolling
        self.rolling = rolling = ((before ^ signature) * PRIME) & MASK
        calls = line.calls
        at = line.ring_at + (calls % CALLS) * CALL_BYTES
        line.calls = calls = calls + 1
        pack_call(
            line.memory, at, calls, self.sequence() + 1 - self.offsets.total, issued, signature, rolling,
            monotonic_ns(), 0, label, site, 0, number, NO_PEER, calls,
        )  # fmt: skip
        line.words[line.calls_word] = calls
        left = (at + LEFT) >> 3
        if self.board is not None:
            self._hold_against(self.board, signature ^ where, left, before)
        return left

    def _hold_against(self, board: Board, signature: int, left: int, rolling: int) -> None:
        other = board.enter(self.issued, signature)
        if other is not None:
            self.line.leave(left, REFUSED)
            refusal = self._refusal(self.issued, other)
            self.issued, self.rolling = self.issued - 1, rolling
            raise refusal

    def pass_message(self, what: What, peer: int | None) -> int:
        """Notes that a point-to-point call begins."""
        self.line.blind()
        signature, label, site, _, _ = what
        return self.line.enter(
            self.sequence() - self.offsets.total, self.issued, signature, self.rolling, label, site,
            self.context.renew(), P2P, NO_PEER if peer is None else peer,
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
        now, old = monotonic_ns(), self.entered
        entered = self.offsets.collective(raw[0]) if raw[0] >= 0 else 0
        completed = self.offsets.collective(raw[1]) if raw[1] >= 0 else (-1 if raw[1] == UNSAID else 0)
        self.raw = raw
        self.entered = (
            entered, completed, now if entered != old[0] else old[2], now if completed != old[1] else old[3],
        )  # fmt: skip
        self.line.counts(*self.entered)

    def close(self) -> None:
        """The communicator was destroyed; it is let go of, so that its threads and sockets can end."""
        self.line.close()
        self.group, self.sequence = None, lambda: self.issued
        if self.board is not None:
            board, self.board = self.board, None
            board.close()


def _words(call: CallRecord | None) -> str:
    if call is None:
        return "another call"
    root = "" if call.root is None else f" root {call.root}"
    what = " ".join(word for word in (call.operation, call.shapes, call.dtype) if word)
    return f"{what}{root} at {call.where}" if call.where else f"{what}{root}"
