"""Digests of the calls on a communicator, by which the supervisor compares the calls of hosts without receiving them.

A window is `WINDOW` successive calls, numbered by the calls from Python (`CallRecord.issued`), which all members make
alike. A digest covers the calls from the beginning of a window up to one of them. Hosts report the digest of every
window that is complete, and while a communicator is idle also that of the calls since then: so any two hosts have
digests of the same calls, however far they are apart, and an active communicator costs one number per `WINDOW` calls.

A digest is 64 bits of BLAKE2b over both numbers and the signature of each call, in the order of the calls, whatever the
order in which those of a host's members become known.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.watch.beacon.call_follower import FollowedCall

WINDOW = 32
_CALL = struct.Struct("<qqQ")
KEPT_WINDOWS = 8
"""Windows that still wait for some of their calls, which may come from another member of the host."""


class CallDigest(NamedTuple):
    """The digest of the calls from the beginning of a window up to call `last`."""

    last: int
    value: int

    @property
    def first(self) -> int:
        """The first call of the window."""
        return self.last - (self.last - 1) % WINDOW


def digest_calls(calls: Sequence[FollowedCall]) -> CallDigest | None:
    """The digest of these calls of a window, in any order; None if some from its beginning to the last are missing."""
    in_order = sorted(calls, key=lambda call: call.issued)
    last = in_order[-1].issued
    if len(calls) != (last - 1) % WINDOW + 1:
        return None
    data = b"".join([_CALL.pack(call.issued, call.seq, call.signature) for call in in_order])
    return CallDigest(last, int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))


@dataclass(slots=True)
class CallWindows:
    """The windows of a communicator, from the calls that a host's members make."""

    _windows: dict[int, list[FollowedCall]] = field(default_factory=dict)
    """The calls of those that are incomplete, by position."""
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
        calls = self._windows.setdefault(position, [])
        calls.append(call)
        self._newest = max(self._newest, call.issued)
        if len(calls) == WINDOW:
            digest = digest_calls(self._windows.pop(position))
            self._complete += [] if digest is None else [digest]
        elif len(self._windows) > KEPT_WINDOWS:
            del self._windows[min(self._windows)]

    def take(self) -> Sequence[CallDigest]:
        """The digests since the last time: of windows that have been completed, and of the newest calls if there have
        been no further ones since then."""
        taken, self._complete = self._complete, []
        newest = self._windows.get((self._newest - 1) // WINDOW)
        idle, self._newest_before = self._newest == self._newest_before, self._newest
        if idle and self._newest > self._taken and newest and (digest := digest_calls(newest)) is not None:
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
