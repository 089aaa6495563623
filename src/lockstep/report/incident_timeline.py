"""Where incidents lie on the charts of a report, over the time that a run was up and over its steps."""

from bisect import bisect_right
from collections.abc import Sequence

from lockstep.ledger import EventRow, Ledger
from lockstep.ledger.run_incidents import Incident
from lockstep.report.charts import ChartMark
from lockstep.report.run_summary import MAX_ROWS


class RunUptime:
    """Converts times to the seconds that a run has been up, excluding the time between its attempts."""

    def __init__(self, events: Sequence[EventRow], commits: Sequence[tuple[int, float, int]]) -> None:
        """`commits`: step, time and generation of each."""
        spans: dict[int, tuple[float, float]] = {}
        times = [(row.generation, row.at) for row in events] + [(generation, at) for _, at, generation in commits]
        for generation, at in times:
            first, last = spans.get(generation, (at, at))
            spans[generation] = min(first, at), max(last, at)
        self._spans = [spans[generation] for generation in sorted(spans)]

    def at(self, wall: float) -> float:
        """Returns the uptime at a time in seconds since the epoch. It does not grow between two attempts."""
        return sum(min(max(wall - first, 0.0), last - first) for first, last in self._spans)


class IncidentTimeline:
    """Computes the positions of incidents on charts over time and over steps."""

    def __init__(self, ledger: Ledger, incidents: Sequence[Incident]) -> None:
        commits = sorted(ledger.commit_times(), key=lambda commit: commit[1])
        self._incidents = incidents
        self._clock = RunUptime(ledger.events(), commits)
        self._committed = [at for _, at, _ in commits]
        self._done = [step + 1 for step, _, _ in commits]

    def curve(self) -> list[tuple[float, float]]:
        """Returns (seconds up, steps done) at the start and at each step's end, or of many steps at some."""
        stride = -(-len(self._done) // MAX_ROWS) or 1
        ends = list(zip(self._committed, self._done, strict=True))
        return [(0.0, 0.0)] + [(self._clock.at(at), float(done)) for at, done in [*ends[:-1:stride], *ends[-1:]]]

    def over_time(self) -> list[ChartMark]:
        return [
            ChartMark(
                self._clock.at(each.began),
                self._clock.at(each.ended or each.moments[-1].at),
                str(number),
                each.harmless,
            )
            for number, each in enumerate(self._incidents, 1)
        ]

    def over_steps(self) -> list[ChartMark]:
        places = [self.step(each.began) - 0.5 for each in self._incidents]
        return [
            ChartMark(place, place, str(number), each.harmless)
            for number, (place, each) in enumerate(zip(places, self._incidents, strict=True), 1)
        ]

    def step(self, wall: float) -> int:
        """Returns the step that was in progress at that time, counted from 1."""
        before = bisect_right(self._committed, wall)
        return self._done[before - 1] + 1 if before else 1
