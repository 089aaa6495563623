"""Which engines are far behind their peers, by their own counters. Pure.

An engine's speed is tokens per second and sequence, compared with what its peers made of about as many sequences: one
that decodes a single long completion is not slower at that than they were at their last ones, and one that has hundreds
left is not slow because they have few. So long completions are waited for, and only slow engines are not.
"""

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

from lockstep.config.rollout import ReissueConfig
from lockstep.rollout.engine_protocol import EngineProgress

SLOW_PENALTY = 20
"""Times `after_s`: who was slow gets work again after so long, to see whether it still is."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """That an engine is far behind."""

    why: str
    """After "it"."""
    silent: bool
    """Whether it makes nothing at all."""


@dataclass(slots=True)
class _EngineSpeed:
    """What is known of an engine."""

    moved_at: float
    """When its counter was last seen to move, or the wait for it began."""
    tokens: int = -1
    """At the last look; -1 before the first of a wait."""
    running: int = 0
    at: float = 0.0
    speed: float | None = None
    """Tokens per second and sequence, when it last made some."""
    rows: float = 0.0
    """Sequences that it had then."""
    speeds: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By the number of sequences, in powers of two: how many, and its speed, when it last had about so many."""
    slow_since: float | None = None
    until: float = 0.0
    """It gets less work than others until then."""


class StragglerDetector:
    """Speeds of engines, and who is behind.

    Times are seconds of any clock that does not go back.
    """

    def __init__(self, config: ReissueConfig) -> None:
        self.config = config
        self._seen: dict[int, _EngineSpeed] = {}

    def begin(self, now: float) -> None:
        """A wait begins: who owes something then was not looked at before. Speeds are remembered."""
        for seen in self._seen.values():
            seen.moved_at, seen.tokens, seen.slow_since = now, -1, None

    def owes(self, rank: int, now: float) -> None:
        """The engine owes something: silence counts from now on at the latest."""
        self._seen.setdefault(rank, _EngineSpeed(now))

    def rests(self, rank: int, now: float) -> None:
        """It owes nothing, so it may be silent."""
        if rank in self._seen:
            seen = self._seen[rank]
            seen.moved_at, seen.tokens, seen.slow_since = now, -1, None

    def forget(self, rank: int) -> None:
        """Another process is in its place."""
        self._seen.pop(rank, None)

    def observe(self, rank: int, now: float, progress: EngineProgress) -> None:
        """What an engine that owes something says of itself."""
        seen = self._seen.setdefault(rank, _EngineSpeed(now))
        if seen.tokens >= 0 and progress.tokens != seen.tokens:
            seen.moved_at = now
            rows = (seen.running + progress.running) / 2
            if rows > 0 and now > seen.at:
                seen.speed, seen.rows = (progress.tokens - seen.tokens) / (now - seen.at) / rows, rows
                seen.speeds[round(math.log2(rows))] = rows, seen.speed
                self._judge(rank, seen, now)
        seen.at, seen.tokens, seen.running = now, progress.tokens, progress.running

    def punish(self, rank: int, behind: Straggler, now: float) -> None:
        """It gets nothing for a while: who was silent until it answers, who is slow for longer, as it stays so."""
        if rank in self._seen and not behind.silent:
            self._seen[rank].until = now + SLOW_PENALTY * self.config.after_s

    def pardoned(self, rank: int, now: float) -> bool:
        """Whether that is over."""
        return rank not in self._seen or now >= self._seen[rank].until

    def behind(self, waited_for: Collection[int], now: float) -> dict[int, Straggler]:
        """How each of those that are waited for is far behind the others; empty while one of them is not."""
        found = {}
        for rank in waited_for:
            seen = self._seen.get(rank)
            behind = None if seen is None else self._behind(rank, seen, now)
            if behind is None:
                return {}
            found[rank] = behind
        return found

    def _behind(self, rank: int, seen: _EngineSpeed, now: float) -> Straggler | None:
        quiet = now - seen.moved_at
        if quiet >= self.config.after_s:
            return Straggler(f"made no token for {quiet:.0f} s", silent=True)
        if seen.slow_since is not None and now - seen.slow_since >= self.config.after_s:
            return Straggler(
                f"makes {seen.speed:.1f} tokens/s a sequence, the others {self._usual(rank, seen.rows):.1f}",
                silent=False,
            )
        return None

    def _judge(self, rank: int, seen: _EngineSpeed, now: float) -> None:
        usual = self._usual(rank, seen.rows)
        slow = usual is not None and seen.speed is not None and seen.speed < self.config.slower_than * usual
        if not slow:
            seen.slow_since = None
        elif seen.slow_since is None:
            seen.slow_since = now

    def _usual(self, rank: int, rows: float) -> float | None:
        """The median of what the others make of so many sequences, each, at least."""
        others = [_expected_speed(seen, rows) for other, seen in self._seen.items() if other != rank and seen.speeds]
        return statistics.median(others) if others else None


def _expected_speed(seen: _EngineSpeed, rows: float) -> float:
    """Tokens per second and sequence that an engine makes of so many sequences, at least, by when it had about as many.
    With fewer, none is slower than with more; with more, all together are no slower than they were with fewer."""
    had, speed = min(seen.speeds.values(), key=lambda each: (abs(math.log2(each[0] / rows)), -each[0]))
    return speed * min(1.0, had / rows)
