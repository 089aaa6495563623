"""Digests of the calls on a communicator, by which the supervisor compares the calls of hosts without receiving them.

A window is `WINDOW` successive calls, numbered by the calls from Python (`CallRecord.issued`), which all members make
alike. A digest covers the calls from the beginning of a window up to one of them. Hosts report the digest of every
window that is complete, and while a communicator is idle also that of the calls since then: so any two hosts have
digests of the same calls, however far they are apart, and an active communicator costs one number per `WINDOW` calls.

The digest is the sum modulo 2^64 of a number for each call, so that it does not depend on the order in which the calls
of a host's members become known. The number is that of MurmurHash3's 64-bit finalizer
(https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp), a bijection of the signature: a single different
call always changes the digest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.watch.beacon.call_follower import FollowedCall

WINDOW = 32
KEPT_WINDOWS = 8
"""Windows that still wait for some of their calls, which may come from another member of the host."""
_MASK = 2**64 - 1


class CallDigest(NamedTuple):
    """The digest of the calls from the beginning of a window up to call `last`."""

    last: int
    value: int

    @property
    def first(self) -> int:
        """The first call of the window."""
        return self.last - (self.last - 1) % WINDOW


@dataclass(slots=True)
class _Window:
    known: int = 0
    last: int = 0
    value: int = 0

    def add(self, call: FollowedCall) -> None:
        self.known += 1
        self.last = max(self.last, call.issued)
        self.value = (self.value + _call_number(call)) & _MASK


@dataclass(slots=True)
class CallWindows:
    """The windows of a communicator, from the calls that a host's members make."""

    _windows: dict[int, _Window] = field(default_factory=dict)
    """Those that are incomplete, by position."""
    _complete: list[CallDigest] = field(default_factory=list)
    _newest: int = 0
    """The newest call."""
    _newest_before: int = 0
    """The newest call when digests were taken last."""
    _taken: int = 0
    """The newest call that is covered by a digest which was taken."""

    def add(self, call: FollowedCall) -> None:
        """Adds a call that has not been added before, in any order."""
        position = (call.issued - 1) // WINDOW
        window = self._windows.setdefault(position, _Window())
        window.add(call)
        self._newest = max(self._newest, call.issued)
        if window.known == WINDOW:
            self._complete.append(CallDigest(window.last, window.value))
            del self._windows[position]
        elif len(self._windows) > KEPT_WINDOWS:
            del self._windows[min(self._windows)]

    def take(self) -> Sequence[CallDigest]:
        """The digests since the last time: of windows that have been completed, and of the newest calls if there have
        been no further ones since then."""
        taken, self._complete = self._complete, []
        newest = self._windows.get((self._newest - 1) // WINDOW)
        idle, self._newest_before = self._newest == self._newest_before, self._newest
        if idle and self._newest > self._taken and newest is not None:
            digest = CallDigest(newest.last, newest.value)
            if newest.known == digest.last - digest.first + 1:
                taken.append(digest)
        self._taken = max([self._taken, *(each.last for each in taken)])
        return taken


def first_difference(ours: Sequence[FollowedCall], theirs: Sequence[FollowedCall]) -> int | None:
    """The sequence number of the first call that differs between two hosts; None if none does. Calls that are numbered
    differently, by c10d or from Python, prove nothing."""
    other = {each.issued: each for each in theirs}
    differing = (
        each.seq
        for each in ours
        if each.issued in other
        and other[each.issued].seq == each.seq
        and other[each.issued].signature != each.signature
    )
    return min(differing, default=None)


def _call_number(call: FollowedCall) -> int:
    value = (call.signature ^ call.seq * 0x9E3779B97F4A7C15 ^ call.issued * 0xC2B2AE3D27D4EB4F) & _MASK
    value = ((value ^ value >> 33) * 0xFF51AFD7ED558CCD) & _MASK
    value = ((value ^ value >> 33) * 0xC4CEB9FE1A85EC53) & _MASK
    return value ^ value >> 33
