"""Tracks verdicts over time: publishes a verdict once, again when its content changes, and withdraws it when it no
longer holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind, VerdictLevel

HOLD_S = 1.5
"""A verdict that is missing for less than this still holds, because a single diagnosis may lack evidence."""
_LEVEL_ORDER = (VerdictLevel.NOTICE, VerdictLevel.CONFIRMED, VerdictLevel.ACT)

VerdictKey = tuple[object, ...]


class VerdictChange(StrEnum):
    NEW = "told"
    UPDATED = "updated"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class VerdictUpdate:
    """A verdict to publish now, and how it relates to earlier ones."""

    number: int
    """The number of the stall: all events of one stall share it."""
    change: VerdictChange
    verdict: Verdict
    since: float
    """When the verdict was first published, on the same clock as `at`."""
    at: float


@dataclass(slots=True)
class _TrackedVerdict:
    number: int
    verdict: Verdict
    since: float
    seen_at: float


def verdict_key(verdict: Verdict) -> VerdictKey:
    """A key that is equal for verdicts on the same stall: the culprits, or the collective and kind without culprits."""
    if verdict.culprits:
        return tuple(sorted({(each.role, str(each.rank), each.host, each.pid) for each in verdict.culprits}, key=str))
    collective = verdict.collective
    return (str(verdict.kind), collective.communicator if collective else "", collective.seq if collective else -1)


class VerdictTracker:
    """Keeps the verdicts that hold at present."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._tracked: dict[VerdictKey, _TrackedVerdict] = {}
        self._past_deaths: set[VerdictKey] = set()
        """Deaths that were withdrawn and are never published again, even if others wait for the process later."""
        self._count = 0

    @property
    def standing(self) -> list[Verdict]:
        """The verdicts that hold, the most certain level first."""
        by_severity = sorted(
            self._tracked.values(), key=lambda tracked: (-_LEVEL_ORDER.index(tracked.verdict.level), tracked.since)
        )
        return [tracked.verdict for tracked in by_severity]

    def update(self, verdicts: Sequence[Verdict], at: float) -> list[VerdictUpdate]:
        """Takes the verdicts of a diagnosis; returns the updates to publish."""
        changes = []
        for verdict in verdicts:
            key = verdict_key(verdict)
            tracked = self._tracked.get(key)
            if tracked is None and verdict.kind is VerdictKind.DEAD and key in self._past_deaths:
                continue
            stronger = None if tracked is not None else self._stronger(verdict)
            if stronger is not None:
                stronger.seen_at = at
                continue
            if tracked is None:
                self._count += 1
                tracked = self._tracked[key] = _TrackedVerdict(self._count, verdict, at, at)
                changes.append(VerdictUpdate(tracked.number, VerdictChange.NEW, verdict, at, at))
                continue
            tracked.seen_at = at
            if _level_index(verdict) < _level_index(tracked.verdict):
                if verdict.level is VerdictLevel.NOTICE:
                    continue  # a proof stands: collecting evidence of a process may make it active for a moment
                verdict = replace(verdict, level=tracked.verdict.level)
            changed = _reportable_content(verdict) != _reportable_content(tracked.verdict)
            tracked.verdict = verdict
            if changed:
                changes.append(VerdictUpdate(tracked.number, VerdictChange.UPDATED, verdict, tracked.since, at))
        for key, tracked in list(self._tracked.items()):
            if at - tracked.seen_at > self._hold_s:
                del self._tracked[key]
                if tracked.verdict.kind is VerdictKind.DEAD:
                    self._past_deaths.add(key)
                changes.append(
                    VerdictUpdate(tracked.number, VerdictChange.WITHDRAWN, tracked.verdict, tracked.since, at)
                )
        return changes

    def _stronger(self, verdict: Verdict) -> _TrackedVerdict | None:
        """A verdict that holds and is the same with fewer culprits and more confidence, or None. Later diagnoses may
        have less evidence, for example after released processes have ended."""
        for tracked in self._tracked.values():
            known = tracked.verdict
            if known.kind is not verdict.kind or known.confidence <= verdict.confidence:
                continue
            # A deadlock involves several collectives, and a verdict names only one of them.
            same = (
                verdict.kind is VerdictKind.CYCLE or _collective_place(known) == _collective_place(verdict) is not None
            )
            if same and {*verdict_key(known)} < {*verdict_key(verdict)}:
                return tracked
        return None

    def acted(self, number: int) -> None:
        """Records that Lockstep acted on a stall: sets the level of its verdict to `act`."""
        for tracked in self._tracked.values():
            if tracked.number == number:
                tracked.verdict = replace(tracked.verdict, level=VerdictLevel.ACT)


def _collective_place(verdict: Verdict) -> tuple[str, int] | None:
    collective = verdict.collective
    return None if collective is None else (collective.communicator, collective.seq)


def _level_index(verdict: Verdict) -> int:
    return _LEVEL_ORDER.index(verdict.level)


def _reportable_content(verdict: Verdict) -> tuple[object, ...]:
    """The content of which a change is published; durations and the exact confidence are left out."""
    return (verdict.level, verdict.kind, verdict.cause, tuple(each.where for each in verdict.culprits))
