"""Finds engines that are far slower than the others, from their counters.

The speed of an engine, in tokens per second and sequence, is compared with that of the other engines when they had
about as many sequences. So an engine with one long completion is not slow, and neither is one that still has hundreds
of sequences when the others have few.
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
"""Times `after_s`: how long a slow engine gets no requests before it is tried again."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """An engine that is far behind."""

    why: str
    """Why the engine is a straggler; completes a sentence that begins with the engine's name."""
    silent: bool
    """Whether the engine generates no tokens at all."""


@dataclass(slots=True)
class _EngineSpeed:
    """What was observed of an engine."""

    progress_at: float
    """When the engine's token counter last changed, or the wait began."""
    tokens: int = -1
    """The token counter at the last observation; -1 before the first observation of a wait."""
    running: int = 0
    observed_at: float = 0.0
    speed: float | None = None
    """Tokens per second and sequence when the engine last generated tokens."""
    rows: float = 0.0
    """The number of sequences at that time."""
    speeds: dict[int, tuple[float, float]] = field(default_factory=dict)
    """(number of sequences, speed) when the engine last had about 2^key sequences, by key."""
    slow_since: float | None = None
    penalty_until: float = 0.0


class StragglerDetector:
    """Finds stragglers from the engines' counters. Times are seconds of any monotonic clock."""

    def __init__(self, config: ReissueConfig) -> None:
        self.config = config
        self._engines: dict[int, _EngineSpeed] = {}

    def begin_wait(self, now: float) -> None:
        """Begins a wait: drops the last observations of the engines, and keeps their speeds."""
        for engine in self._engines.values():
            engine.progress_at, engine.tokens, engine.slow_since = now, -1, None

    def mark_busy(self, rank: int, now: float) -> None:
        """Records that the engine has requests, and measures its silence from now on if it is new."""
        self._engines.setdefault(rank, _EngineSpeed(now))

    def mark_idle(self, rank: int, now: float) -> None:
        """Records that the engine has no requests, so it may be silent."""
        if rank in self._engines:
            engine = self._engines[rank]
            engine.progress_at, engine.tokens, engine.slow_since = now, -1, None

    def forget(self, rank: int) -> None:
        """Drops the observations of an engine that is replaced."""
        self._engines.pop(rank, None)

    def observe(self, rank: int, now: float, progress: EngineProgress) -> None:
        """Records the counters of an engine."""
        engine = self._engines.setdefault(rank, _EngineSpeed(now))
        if engine.tokens >= 0 and progress.tokens != engine.tokens:
            engine.progress_at = now
            rows = (engine.running + progress.running) / 2
            if rows > 0 and now > engine.observed_at:
                engine.speed, engine.rows = (progress.tokens - engine.tokens) / (now - engine.observed_at) / rows, rows
                engine.speeds[round(math.log2(rows))] = rows, engine.speed
                self._update_slow_since(rank, engine, now)
        engine.observed_at, engine.tokens, engine.running = now, progress.tokens, progress.running

    def penalize(self, rank: int, straggler: Straggler, now: float) -> None:
        """Begins the penalty of a slow engine. A silent engine has none: it gets requests again when it answers."""
        if rank in self._engines and not straggler.silent:
            self._engines[rank].penalty_until = now + SLOW_PENALTY * self.config.after_s

    def penalty_over(self, rank: int, now: float) -> bool:
        return rank not in self._engines or now >= self._engines[rank].penalty_until

    def find(self, blocking: Collection[int], now: float) -> dict[int, Straggler]:
        """Returns the stragglers among the engines that block a step; none unless all these engines are stragglers."""
        stragglers = {}
        for rank in blocking:
            engine = self._engines.get(rank)
            straggler = None if engine is None else self._straggler(rank, engine, now)
            if straggler is None:
                return {}
            stragglers[rank] = straggler
        return stragglers

    def _straggler(self, rank: int, engine: _EngineSpeed, now: float) -> Straggler | None:
        silent_s = now - engine.progress_at
        if silent_s >= self.config.after_s:
            return Straggler(f"has generated no token for {silent_s:.0f} s", silent=True)
        if engine.slow_since is not None and now - engine.slow_since >= self.config.after_s:
            peer_speed = self._peer_speed(rank, engine.rows)
            why = f"generates {engine.speed:.1f} tokens/s per sequence, the others {peer_speed:.1f}"
            return Straggler(why, silent=False)
        return None

    def _update_slow_since(self, rank: int, engine: _EngineSpeed, now: float) -> None:
        usual = self._peer_speed(rank, engine.rows)
        slow = usual is not None and engine.speed is not None and engine.speed < self.config.slower_than * usual
        if not slow:
            engine.slow_since = None
        elif engine.slow_since is None:
            engine.slow_since = now

    def _peer_speed(self, rank: int, rows: float) -> float | None:
        """The median of the speeds to expect of the other engines at this number of sequences."""
        others = [
            _expected_speed(engine, rows) for other, engine in self._engines.items() if other != rank and engine.speeds
        ]
        return statistics.median(others) if others else None


def _expected_speed(engine: _EngineSpeed, rows: float) -> float:
    """A lower bound of an engine's speed at this number of sequences, from its speed at the most similar number. With
    fewer sequences a sequence is not slower; with more, the engine as a whole is not slower."""
    observed_rows, speed = min(engine.speeds.values(), key=lambda each: (abs(math.log2(each[0] / rows)), -each[0]))
    return speed * min(1.0, observed_rows / rows)


def gather_patiently(
    pendings: Sequence[PendingResult[T]], why: str, config: ReissueConfig, live_engines: Callable[[], int]
) -> tuple[list[T | CallError], bool]:
    """Waits for the outcomes of calls to live engines. Returns them, and whether some are `Stalled` because these
    engines are silent while others answered.

    A call is stalled if its engine makes no progress for `after_s`, and for much longer than other engines took. If no
    engine answers within that time, the calls may take as long as they need.
    """
    if not config.enable or live_engines() <= 1:
        return gather_outcomes(pendings, why, None), False
    outcomes = gather_outcomes(pendings, why, config.after_s)
    stalled = sum(isinstance(each, Stalled) for each in outcomes)
    if stalled == live_engines():
        return gather_outcomes(pendings, why), False
    if not stalled:
        return outcomes, False
    durations = [call_duration_s(pending) for pending in pendings if pending.done()]
    usual_s = statistics.median(durations) if durations else 0.0
    if usual_s > config.slower_than * config.after_s:
        outcomes = gather_outcomes(pendings, why, usual_s / config.slower_than)
    return outcomes, True
