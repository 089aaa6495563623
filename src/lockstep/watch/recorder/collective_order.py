"""Checks the order of collectives across the ranks of one host, to refuse a wrong call before the backend sees it.

gloo pairs any two calls, silently if their sizes match; otherwise it aborts the receiving rank, which may be the
correct one. The members of a communicator on one host share a file with a row per collective and a column per
member. A rank that is about to enter a collective writes its call to the row, reads the row, and commits the call. If
another member has committed a different call in that row, the call is refused.

If two ranks write at the same time, each sees the call of the other. Then the rank in the lower column waits until the
other has committed or withdrawn its call; after `DECISION_S`, because the other is stopped, its call counts as
committed.
"""

import mmap
import os
import struct
import time

from lockstep.base.folders import file_lock, make_run_shm_dir, open_file
from lockstep.watch.procfs.processes import is_alive, start_ticks

ROWS = 512
MAX_MEMBERS = 32
"""Members of one communicator on one host; further members are not checked."""
DECISION_S = 0.05

_ENTRY = 20
"""Words of a member's entry: rank + 1, pid, start time, slot in the beacon, and name of the beacon."""
_NAME = 96
_TABLE = 8
_ROWS_AT = _TABLE + MAX_MEMBERS * _ENTRY
_NUMBERS = ROWS * MAX_MEMBERS
"""Offset from a member's tag in a row to the number of its collective."""
_SIZE = 8 * (_ROWS_AT + 2 * ROWS * MAX_MEMBERS)
_TAG_BITS = (1 << 64) - 2
_NUMBER = struct.Struct("<Q")


class OrderCheck:
    """Reads and writes the shared file for one member. Only one thread may use it at a time."""

    def __init__(self, run: str, identity: int, rank: int, beacon: str, slot: int) -> None:
        self.path = make_run_shm_dir(run) / f"{identity:016x}.board"
        descriptor = open_file(self.path, os.O_RDWR)
        try:
            with file_lock(descriptor):  # released explicitly: the mapping keeps the file open, and with it the lock
                if os.fstat(descriptor).st_size < _SIZE:
                    os.ftruncate(descriptor, _SIZE)
                self._memory = mmap.mmap(descriptor, _SIZE)
                self._words = memoryview(self._memory).cast("B").cast("Q")
                self.column = self._register(rank, beacon, slot)
        finally:
            os.close(descriptor)
        self.rank = rank
        self._own_tags = [0] * ROWS
        self._row = _NUMBER
        """The tags of a row; as many as there are members."""

    def _register(self, rank: int, beacon: str, slot: int) -> int:
        words, count = self._words, self._words[0]
        free = next((n for n in range(count) if self._has_ended(n) or words[_TABLE + n * _ENTRY] == rank + 1), count)
        if free >= MAX_MEMBERS:
            raise OverflowError(f"more than {MAX_MEMBERS} members of a communicator on one host")
        at = _TABLE + free * _ENTRY
        pid = os.getpid()
        words[at : at + 4] = memoryview(_packed(rank + 1, pid, start_ticks(pid) or 0, slot)).cast("B").cast("Q")
        self._memory[8 * (at + 4) : 8 * (at + 4) + _NAME] = beacon.encode()[:_NAME].ljust(_NAME, b"\0")
        for row in range(ROWS):
            words[_ROWS_AT + row * MAX_MEMBERS + free + _NUMBERS] = words[_ROWS_AT + row * MAX_MEMBERS + free] = 0
        words[0] = max(count, free + 1)
        return free

    def _has_ended(self, column: int) -> bool:
        _, pid, start, _ = self._words[_TABLE + column * _ENTRY : _TABLE + column * _ENTRY + 4].tolist()
        return not is_alive(pid, start)

    def member(self, column: int) -> tuple[int, str, int]:
        """The rank of a member, the name of the member's beacon, and the slot of the communicator in the beacon."""
        at = _TABLE + column * _ENTRY
        name = bytes(self._memory[8 * (at + 4) : 8 * (at + 4) + _NAME]).rstrip(b"\0").decode()
        return self._words[at] - 1, name, self._words[at + 3]

    def enter(self, number: int, signature: int) -> int | None:
        """Enters a collective. Returns the column of a member that has entered a different call, else None."""
        words, row = self._words, number % ROWS
        at = _ROWS_AT + row * MAX_MEMBERS
        own = at + self.column
        tag = (signature ^ number << 32) & _TAG_BITS or 2  # another one when the row is used again
        committed, before = tag | 1, self._own_tags[row]
        # The tag is written first, so that a reader of the number sees this tag or a later one.
        words[own] = tag
        words[own + _NUMBERS] = number
        members = words[0]
        if self._row.size != 8 * members:
            self._row = struct.Struct(f"<{members}Q")
        tags = self._row.unpack_from(self._memory, at << 3)
        # Usually all others have entered this call, or entered what this rank did when the row was last used.
        if tags.count(committed) + tags.count(before) + 1 != members:
            other = self._find_conflict(at, number, tag)
            if other is not None:
                words[own + _NUMBERS] = 0
                words[own] = before
                return other
        words[own] = self._own_tags[row] = committed
        return None

    def _find_conflict(self, at: int, number: int, tag: int) -> int | None:
        """The column of a member that has committed a different call; None if there is none. An entry with an older
        number is of a member that has not arrived yet; one with a later number, of a member that has reused the row."""
        words = self._words
        for column in range(words[0]):
            until = time.monotonic() + DECISION_S
            while column != self.column and words[at + column + _NUMBERS] == number:
                theirs = words[at + column]
                if theirs & ~1 == tag or self._has_ended(column):
                    break
                time.sleep(5e-5)  # a tag being written belongs to a later number
                if (words[at + column], words[at + column + _NUMBERS]) != (theirs, number):
                    continue
                if theirs & 1 or column < self.column or time.monotonic() >= until:
                    return column
        return None

    def close(self) -> None:
        self._words.release()
        self._memory.close()


def _packed(*words: int) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in words)
