"""Who went on after what: the steps that each file and each rank in it shows after a line."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.doctor.sightings import Reading, Tick

FEW = 2
"""So many steps after a failure may be those that were under way."""
MANY = 10
"""More than those who wait for a dead rank can make."""
_ANYBODY = -1


@dataclass(frozen=True, slots=True)
class _Counted:
    """The counters of a speaker, in the order of lines.

    Attributes:
        lines: On which they stand.
        left: How many different ones stand on each and after it.
        most: The highest of these.
        reached: The highest of all.
    """

    lines: list[int]
    left: list[int]
    most: list[tuple[int, int]]
    reached: tuple[int, int]


class Steps:
    """Of all files of an attempt."""

    def __init__(self, readings: Sequence[Reading], old: Collection[int]) -> None:
        self._after = {reading.source: _counted(reading.ticks) for reading in readings if reading.source not in old}

    def went_on(self, source: int, rank: int | None, line: int, *, lethal: bool = False) -> bool:
        """Whether steps were made after a line, by the same rank where that is known, else by anybody.

        Where a rank that counted counts no more the others have to get further than it, and by many: in a file that was
        put together from those of several ranks theirs follow on its last words.

        Args:
            lethal: Nobody survives what the line says, so of others many steps are wanted.
        """
        counted = self._after.get(source, {})
        own, all_of_them = counted.get(rank), counted.get(_ANYBODY)
        if own is not None:
            at = bisect_right(own.lines, line)
            if at < len(own.lines):
                return own.left[at] > (MANY if lethal and rank is None else FEW)
        if all_of_them is None:
            return False
        at = bisect_right(all_of_them.lines, line)
        if at == len(all_of_them.lines):
            return False
        if own is not None and rank is not None:
            epoch, step = own.reached
            return all_of_them.left[at] > MANY and all_of_them.most[at] > (epoch, step + 1)
        return all_of_them.left[at] > (MANY if lethal else FEW)


def _counted(ticks: Sequence[Tick]) -> dict[int | None, _Counted]:
    """By rank."""
    of_rank: dict[int | None, list[Tick]] = defaultdict(list)
    for tick in ticks:
        of_rank[_ANYBODY].append(tick)
        of_rank[tick.who.rank].append(tick)
    found = {}
    for rank, own in of_rank.items():
        seen: set[tuple[int, int]] = set()
        left, most = [], []
        highest = (0, 0)
        for tick in reversed(own):
            seen.add((tick.epoch, tick.step))
            highest = max(highest, (tick.epoch, tick.step))
            left.append(len(seen))
            most.append(highest)
        found[rank] = _Counted([tick.line for tick in own], left[::-1], most[::-1], highest)
    return found


def steps_by_rank(ticks: Iterable[Tick]) -> Mapping[int, Tick]:
    """By rank the last counter that it showed."""
    found: dict[int, Tick] = {}
    for tick in ticks:
        if tick.who.rank is not None:
            found[tick.who.rank] = tick
    return found
