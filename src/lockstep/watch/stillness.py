"""Whether a process that is alive does anything. Progress, not patience: whoever moves is never proven to hang."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.watch.finding import Case
from lockstep.watch.verdict import Fact


@dataclass(frozen=True, slots=True)
class Stillness:
    """For how many seconds something of a process has not moved, until it was last seen; NaN if nobody looks at it."""

    all_s: float
    """Nothing at all moved."""
    counters_s: float
    activity_s: float
    """No CPU, disk, network or GPU was used."""
    stack_s: float
    """Every stack was the same."""

    def moves(self, within_s: float) -> bool:
        return self.all_s < within_s

    def counts(self, within_s: float) -> bool:
        """A counter moved: work is done, not only CPU used."""
        return self.counters_s < within_s

    def unproductive_s(self, waited_s: float) -> float:
        """Since when no counter moved; where nothing counts, since when somebody waits."""
        return waited_s if math.isnan(self.counters_s) else self.counters_s

    def burns(self, within_s: float) -> bool:
        """It uses CPU in one place, and no counter moves."""
        return self.moves(within_s) and self.stack_s >= within_s and not self.counters_s < self.stack_s


def stillness(case: Case, process: int) -> Stillness:
    processes, now = case.evidence.processes, case.now(process)
    return Stillness(
        now - case.moved(process),
        now - float(processes.moved_at[process]),
        now - float(processes.active_at[process]),
        now - float(processes.same_stack_since[process]),
    )


def proven_still(case: Case, process: int, since: float) -> bool:
    """Nothing of it moved for longer than its limit, all of it while somebody waits (`since`); or it burned CPU in one
    place for many times that."""
    found, limit, waited = stillness(case, process), case.limit(process), case.at - since
    if case.evidence.source == "dumps" and math.isnan(found.all_s):
        return waited >= limit  # nobody could look at it; that it wrote no entry for so long is what is left
    if found.all_s >= limit and waited >= limit and not found.stack_s < limit:
        return True
    limit *= case.patience.busy_factor
    return found.stack_s >= limit and waited >= limit and not found.counters_s < limit


def all_proven_still(case: Case, processes: Sequence[int], since: float) -> bool:
    """The same of several that are inside of a collective since then."""
    rows = np.array(processes, dtype=np.int64)
    seen = case.evidence.processes.seen_at
    now = case.at if seen is None else np.fmin(seen[rows], case.at)
    notes = case.evidence.processes.notes
    limit = np.full(len(rows), case.patience.still_s)
    if notes:
        limit[:] = [case.limit(each) for each in processes]
    still = now - case.last_moved[rows] >= limit
    same = ~(now - case.evidence.processes.same_stack_since[rows] < limit)
    return bool((still & same & (case.at - since >= limit)).all())


def in_words(case: Case, process: int) -> tuple[Fact, ...]:
    """What is known of its movement."""
    found, name = stillness(case, process), case.evidence.processes.who[process].name
    told = (
        ("no counter moved", found.counters_s),
        ("no CPU, disk, network or GPU used", found.activity_s),
        ("equal stacks", found.stack_s),
    )
    return tuple(
        Fact(f"{name}: {what} for {seconds:.0f} s", "agent")
        for what, seconds in told
        if seconds >= case.patience.notice_s
    )
