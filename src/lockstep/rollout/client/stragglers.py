"""Finds engines that are far slower than their peers, by their own counters.

An engine's speed is tokens per second and sequence, compared with the speed of its peers at about the same number of
sequences: an engine that decodes one long completion is not slower than its peers were at their last ones, and an
engine with hundreds of sequences left is not slow because the others have few. So long completions are waited for, and
slow engines are not.
"""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import PendingResult
from lockstep.cluster.rpc.futures import CallError, call_duration_s, gather_outcomes
from lockstep.config.rollout import ReissueConfig
from lockstep.rollout.engine_protocol import EngineProgress

T = TypeVar("T")

SLOW_PENALTY = 20
"""Times `after_s`: after this time a slow engine gets requests again, to see whether it is still slow."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """An engine that is far behind."""

    why: str
    """Why the engine counts as a straggler; completes a sentence that begins with the engine's name."""
    silent: bool
    """Whether the engine makes no tokens at all."""


@dataclass(slots=True)
class _EngineSpeed:
    moved_at: float
    """When its counter was last seen to move, or the wait for it began."""
    tokens: int = -1
    """At the last observation; -1 before the first one of a wait."""
    running: int = 0
    at: float = 0.0
    speed: float | None = None
    """Tokens per second and sequence when it last made tokens."""
    rows: float = 0.0
    """The number of sequences at that time."""
    speeds: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By the number of sequences, in powers of two: the number, and the speed when it last had about as many."""
    slow_since: float | None = None
    penalty_until: float = 0.0


class StragglerDetector:
    """Speeds of engines, and which of them are far behind. Pure.

    Times are seconds of any monotonic clock.
    """

    def __init__(self, config: ReissueConfig) -> None:
        self.config = config
        self._engines: dict[int, _EngineSpeed] = {}

    def begin_wait(self, now: float) -> None:
        """Begins a wait: forgets earlier observations of the engines, and keeps their speeds."""
        for engine in self._engines.values():
            engine.moved_at, engine.tokens, engine.slow_since = now, -1, None

    def mark_busy(self, rank: int, now: float) -> None:
        """Notes that the engine has requests: its silence counts from now on at the latest."""
        self._engines.setdefault(rank, _EngineSpeed(now))

    def mark_idle(self, rank: int, now: float) -> None:
        """Notes that the engine has no requests, so it may be silent."""
        if rank in self._engines:
            engine = self._engines[rank]
            engine.moved_at, engine.tokens, engine.slow_since = now, -1, None

    def forget(self, rank: int) -> None:
        """Notes that the engine is replaced by another process."""
        self._engines.pop(rank, None)

    def observe(self, rank: int, now: float, progress: EngineProgress) -> None:
        """Takes the counters of an engine."""
        engine = self._engines.setdefault(rank, _EngineSpeed(now))
        if engine.tokens >= 0 and progress.tokens != engine.tokens:
            engine.moved_at = now
            rows = (engine.running + progress.running) / 2
            if rows > 0 and now > engine.at:
                engine.speed, engine.rows = (progress.tokens - engine.tokens) / (now - engine.at) / rows, rows
                engine.speeds[round(math.log2(rows))] = rows, engine.speed
                self._update_slow_since(rank, engine, now)
        engine.at, engine.tokens, engine.running = now, progress.tokens, progress.running

    def penalize(self, rank: int, straggler: Straggler, now: float) -> None:
        """Withholds requests from the engine for a while: a silent one until it answers, a slow one for longer."""
        if rank in self._engines and not straggler.silent:
            self._engines[rank].penalty_until = now + SLOW_PENALTY * self.config.after_s

    def penalty_over(self, rank: int, now: float) -> bool:
        return rank not in self._engines or now >= self._engines[rank].penalty_until

    def find(self, blocking: Collection[int], now: float) -> dict[int, Straggler]:
        """The engines of `blocking` as stragglers; empty unless all of them are."""
        found = {}
        for rank in blocking:
            engine = self._engines.get(rank)
            straggler = None if engine is None else self._straggler(rank, engine, now)
            if straggler is None:
                return {}
            found[rank] = straggler
        return found

    def _straggler(self, rank: int, engine: _EngineSpeed, now: float) -> Straggler | None:
        quiet = now - engine.moved_at
        if quiet >= self.config.after_s:
            return Straggler(f"made no token for {quiet:.0f} s", silent=True)
        if engine.slow_since is not None and now - engine.slow_since >= self.config.after_s:
            return Straggler(
                f"makes {engine.speed:.1f} tokens/s a sequence, the others {self._peer_speed(rank, engine.rows):.1f}",
                silent=False,
            )
        return None

    def _update_slow_since(self, rank: int, engine: _EngineSpeed, now: float) -> None:
        usual = self._peer_speed(rank, engine.rows)
        slow = usual is not None and engine.speed is not None and engine.speed < self.config.slower_than * usual
        if not slow:
            engine.slow_since = None
        elif engine.slow_since is None:
            engine.slow_since = now

    def _peer_speed(self, rank: int, rows: float) -> float | None:
        """The median over the other engines of their least speed at this number of sequences."""
        others = [
            _expected_speed(engine, rows) for other, engine in self._engines.items() if other != rank and engine.speeds
        ]
        return statistics.median(others) if others else None


def _expected_speed(engine: _EngineSpeed, rows: float) -> float:
    """The least speed of an engine at this number of sequences, from its speed at the most similar number. A sequence
    is not slower among fewer ones, and all together are not slower among more."""
    had, speed = min(engine.speeds.values(), key=lambda each: (abs(math.log2(each[0] / rows)), -each[0]))
    return speed * min(1.0, had / rows)


def gather_patiently(
    pendings: Sequence[PendingResult[T]], why: str, config: ReissueConfig, live_engines: Callable[[], int]
) -> tuple[list[T | CallError], bool]:
    """The outcomes of calls to live engines, and whether some are `Stalled` because these engines are silent and others
    are not.

    An engine is silent if it makes no progress for `after_s`, and for as long as the slowest engine takes that is not
    far behind. Calls that take all engines long take as long as they take.
    """
    if not config.enable or live_engines() <= 1:
        return gather_outcomes(pendings, why, None), False
    outcomes = gather_outcomes(pendings, why, config.after_s)
    stalled = sum(isinstance(each, Stalled) for each in outcomes)
    if stalled == live_engines():
        return gather_outcomes(pendings, why), False
    if not stalled:
        return outcomes, False
    took = [call_duration_s(pending) for pending in pendings if pending.done()]
    usual_s = statistics.median(took) if took else 0.0
    if usual_s > config.slower_than * config.after_s:
        outcomes = gather_outcomes(pendings, why, usual_s / config.slower_than)
    return outcomes, True
