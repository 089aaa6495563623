"""How a version is cut for the way from device to device: pure functions, the same on all sides."""

import hashlib
from dataclasses import dataclass

from lockstep.weights.plan import Entry, Plan


@dataclass(frozen=True, slots=True)
class Lot:
    """Neighbouring tensors of the plan, gathered, sent, checked and loaded together. They lie in one piece of memory as
    in the plan's buffer, from the first one's place on."""

    number: int
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        last = self.entries[-1]
        return last.offset + last.nbytes - self.entries[0].offset

    def place(self, entry: Entry) -> tuple[int, int]:
        """First and last (exclusive) byte of one of its tensors."""
        start = entry.offset - self.entries[0].offset
        return start, start + entry.nbytes


def cut(plan: Plan, limit: int) -> tuple[Lot, ...]:
    """All tensors in the order of the plan, in lots of `limit` bytes at most. Tensors are not cut, as an engine loads
    whole ones: one of more bytes is a lot by itself."""
    groups: list[list[Entry]] = []
    for entry in plan.entries:
        if groups and entry.offset + entry.nbytes - groups[-1][0].offset <= limit:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return tuple(Lot(number, tuple(group)) for number, group in enumerate(groups))


def agreement(plan: Plan, limit: int, check: str) -> str:
    """sha256, hexadecimal, of what two sides must have in common: tensors and their order, buckets, checksums."""
    return hashlib.sha256(f"{plan.digest} {limit} {check}".encode()).hexdigest()
