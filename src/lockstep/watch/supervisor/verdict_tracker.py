"""Verdicts over time: one is reported once, again when its content changes, and withdrawn when it no longer holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind, VerdictLevel

HOLD_S = 1.5
"""A verdict missing for less than this still holds: a single judgement may lack evidence."""
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
    """When the verdict was first published, on the clock of `at`."""
    at: float


@dataclass(slots=True)
class _TrackedVerdict:
    number: int
    verdict: Verdict
    since: float
    seen: float


def verdict_key(verdict: Verdict) -> VerdictKey:
    """Equal for verdicts about the same stall: the culprits, else the collective and the kind."""
    if verdict.culprits:
        return tuple(sorted({(each.role, str(each.rank), each.host, each.pid) for each in verdict.culprits}, key=str))
    collective = verdict.collective
    return (str(verdict.kind), collective.communicator if collective else "", collective.seq if collective else -1)


class VerdictTracker:
    """Keeps the standing verdicts. No clock, no side effects."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._cases: dict[VerdictKey, _TrackedVerdict] = {}
        self._buried: set[VerdictKey] = set()
        """Deaths that are not published again, even if others wait for the process later: a process dies once."""
        self._count = 0

    @property
    def standing(self) -> list[Verdict]:
        """The standing verdicts, the most severe first."""
        cases = sorted(self._cases.values(), key=lambda case: (-_LEVEL_ORDER.index(case.verdict.level), case.since))
        return [case.verdict for case in cases]

    def update(self, verdicts: Sequence[Verdict], at: float) -> list[VerdictUpdate]:
        """Takes the verdicts of a moment; returns the updates to publish."""
        changes = []
        for verdict in verdicts:
            key = verdict_key(verdict)
            case = self._cases.get(key)
            if case is None and verdict.kind is VerdictKind.DEAD and key in self._buried:
                continue
            stronger = None if case is not None else self._stronger(verdict)
            if stronger is not None:
                stronger.seen = at
                continue
            if case is None:
                self._count += 1
                case = self._cases[key] = _TrackedVerdict(self._count, verdict, at, at)
                changes.append(VerdictUpdate(case.number, VerdictChange.NEW, verdict, at, at))
                continue
            case.seen = at
            if _level_index(verdict) < _level_index(case.verdict):  # a proof is not weakened by a later judgement
                verdict = replace(verdict, level=case.verdict.level)
            news = _reportable_content(verdict) != _reportable_content(case.verdict)
            case.verdict = verdict
            if news:
                changes.append(VerdictUpdate(case.number, VerdictChange.UPDATED, verdict, case.since, at))
        for key, case in list(self._cases.items()):
            if at - case.seen > self._hold_s:
                del self._cases[key]
                if case.verdict.kind is VerdictKind.DEAD:
                    self._buried.add(key)
                changes.append(VerdictUpdate(case.number, VerdictChange.WITHDRAWN, case.verdict, case.since, at))
        return changes

    def _stronger(self, verdict: Verdict) -> _TrackedVerdict | None:
        """A standing verdict that says the same of fewer culprits with more confidence: evidence wears off, as when
        freed processes have ended."""
        for case in self._cases.values():
            known = case.verdict
            if known.kind is not verdict.kind or known.confidence <= verdict.confidence:
                continue
            # A deadlock is in several collectives at once, and one of them is published.
            same = (
                verdict.kind is VerdictKind.CYCLE or _collective_place(known) == _collective_place(verdict) is not None
            )
            if same and {*verdict_key(known)} < {*verdict_key(verdict)}:
                return case
        return None

    def acted(self, number: int) -> None:
        """Marks that something was done about a stall: sets its level to `act`."""
        for case in self._cases.values():
            if case.number == number:
                case.verdict = replace(case.verdict, level=VerdictLevel.ACT)


def _collective_place(verdict: Verdict) -> tuple[str, int] | None:
    collective = verdict.collective
    return None if collective is None else (collective.communicator, collective.seq)


def _level_index(verdict: Verdict) -> int:
    return _LEVEL_ORDER.index(verdict.level)


def _reportable_content(verdict: Verdict) -> tuple[object, ...]:
    """The content whose change is published: not the duration, nor the exact confidence."""
    return (verdict.level, verdict.kind, verdict.cause, tuple(each.where for each in verdict.culprits))
