"""A run over time: how far it was when, and what went wrong meanwhile."""

from bisect import bisect_right
from collections.abc import Sequence

from lockstep.ledger import CommitRow, EventRow, Ledger
from lockstep.report.charts import Chart, Mark
from lockstep.report.incidents import Incident

PROGRESS = Chart("Steps done", ("steps",), "over the time the run was up", wide=True, clock=True)


class RunTime:
    """Seconds that a run has been up, without the time between its attempts."""

    def __init__(self, events: Sequence[EventRow], commits: Sequence[CommitRow]) -> None:
        spans: dict[int, tuple[float, float]] = {}
        seen = [(row.generation, row.at) for row in events] + [(row.generation, row.at) for row in commits]
        for generation, at in seen:
            first, last = spans.get(generation, (at, at))
            spans[generation] = min(first, at), max(last, at)
        self._spans = [spans[generation] for generation in sorted(spans)]

    def at(self, wall: float) -> float:
        """Of a moment in seconds since the epoch; between two attempts, the end of the first."""
        return sum(min(max(wall - first, 0.0), last - first) for first, last in self._spans)


class Timeline:
    """Places of incidents on charts over time, and on those over steps."""

    def __init__(self, ledger: Ledger, incidents: Sequence[Incident]) -> None:
        commits = sorted(ledger.commits(), key=lambda row: row.at)
        self._incidents = incidents
        self._clock = RunTime(ledger.events(), commits)
        self._committed = [row.at for row in commits]
        self._done = [row.step + 1 for row in commits]

    def curve(self) -> list[tuple[float, float]]:
        """(seconds up, steps done) at the begin and at every step's end."""
        return [(0.0, 0.0)] + [
            (self._clock.at(at), float(done)) for at, done in zip(self._committed, self._done, strict=True)
        ]

    def over_time(self) -> list[Mark]:
        return [
            Mark(self._clock.at(each.began), self._clock.at(each.ended or each.moments[-1].at), str(number), each.fine)
            for number, each in enumerate(self._incidents, 1)
        ]

    def over_steps(self) -> list[Mark]:
        places = [self.step(each.began) - 0.5 for each in self._incidents]
        return [
            Mark(place, place, str(number), each.fine)
            for number, (place, each) in enumerate(zip(places, self._incidents, strict=True), 1)
        ]

    def step(self, wall: float) -> int:
        """Under way at that time, counted from 1."""
        before = bisect_right(self._committed, wall)
        return self._done[before - 1] + 1 if before else 1
