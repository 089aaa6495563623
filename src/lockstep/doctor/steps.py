"""Who went on after what: the steps that each file and each rank in it shows after a line."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from lockstep.doctor.sightings import Reading, Tick

FEW = 2
"""So many steps after a failure may be those that were under way."""
MANY = 10
"""More than those who wait for a dead rank can make."""
_ANYBODY = -1


class Steps:
    """Of all files of an attempt."""

    def __init__(self, readings: Sequence[Reading], old: Collection[int]) -> None:
        self._after = {reading.source: _counted(reading.ticks) for reading in readings if reading.source not in old}

    def went_on(self, source: int, rank: int | None, line: int, *, lethal: bool = False) -> bool:
        """Whether steps were made after a line, by the same rank where that is known, else by anybody.

        Args:
            lethal: Nobody survives what the line says, so of others many steps are wanted.
        """
        counted = self._after.get(source)
        if counted is None:
            return False
        for each in (rank, _ANYBODY):
            lines, left = counted.get(each, ((), ()))
            at = bisect_right(lines, line)
            if at < len(lines):
                return left[at] > (MANY if lethal and each in (None, _ANYBODY) else FEW)
        return False


def _counted(ticks: Sequence[Tick]) -> dict[int | None, tuple[list[int], list[int]]]:
    """By rank, the lines with a counter, and how many different ones stand on each and after it."""
    of_rank: dict[int | None, list[Tick]] = defaultdict(list)
    for tick in ticks:
        of_rank[_ANYBODY].append(tick)
        of_rank[tick.who.rank].append(tick)
    found = {}
    for rank, own in of_rank.items():
        seen: set[tuple[int, int]] = set()
        left = []
        for tick in reversed(own):
            seen.add((tick.epoch, tick.step))
            left.append(len(seen))
        found[rank] = [tick.line for tick in own], left[::-1]
    return found


def steps_by_rank(ticks: Iterable[Tick]) -> Mapping[int, Tick]:
    """By rank the last counter that it showed."""
    found: dict[int, Tick] = {}
    for tick in ticks:
        if tick.who.rank is not None:
            found[tick.who.rank] = tick
    return found
