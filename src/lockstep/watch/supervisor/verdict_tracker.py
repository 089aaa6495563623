"""Verdicts over time: one is reported once, again when its content changes, and withdrawn when it no longer holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind, VerdictLevel

HOLD_S = 1.5
"""A verdict that is gone for less than this is not over: a look may fall into a moment without evidence."""
_LEVEL_ORDER = (VerdictLevel.NOTICE, VerdictLevel.CONFIRMED, VerdictLevel.ACT)

VerdictKey = tuple[object, ...]


class VerdictChange(StrEnum):
    TOLD = "told"
    UPDATED = "updated"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class VerdictUpdate:
    """A verdict that is told now, and what it has to do with those before."""

    number: int
    """The same for all that is said of one stall."""
    change: VerdictChange
    verdict: Verdict
    since: float
    """When it was first told, on the clock of `at`."""
    at: float


@dataclass(slots=True)
class _TrackedVerdict:
    number: int
    verdict: Verdict
    since: float
    seen: float


def verdict_key(verdict: Verdict) -> VerdictKey:
    """What makes two verdicts speak of the same thing: those who are named, else the collective and the kind."""
    if verdict.culprits:
        return tuple(sorted({(each.role, str(each.rank), each.host, each.pid) for each in verdict.culprits}, key=str))
    collective = verdict.collective
    return (str(verdict.kind), collective.communicator if collective else "", collective.seq if collective else -1)


class VerdictTracker:
    """Pure but for its memory: no clock, no effect."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._cases: dict[VerdictKey, _TrackedVerdict] = {}
        self._buried: set[VerdictKey] = set()
        """Deaths that were told and are over: nobody dies twice, whoever waits for the dead once more."""
        self._count = 0

    @property
    def standing(self) -> list[Verdict]:
        """What holds now, the gravest first."""
        cases = sorted(self._cases.values(), key=lambda case: (-_LEVEL_ORDER.index(case.verdict.level), case.since))
        return [case.verdict for case in cases]

    def update(self, verdicts: Sequence[Verdict], at: float) -> list[VerdictUpdate]:
        """Takes what holds at a moment; returns what is to be told of it."""
        changes = []
        for verdict in verdicts:
            key = verdict_key(verdict)
            case = self._cases.get(key)
            if case is None and verdict.kind is VerdictKind.DEAD and key in self._buried:
                continue
            surer = None if case is not None else self._surer(verdict)
            if surer is not None:
                surer.seen = at
                continue
            if case is None:
                self._count += 1
                case = self._cases[key] = _TrackedVerdict(self._count, verdict, at, at)
                changes.append(VerdictUpdate(case.number, VerdictChange.TOLD, verdict, at, at))
                continue
            case.seen = at
            if _level_index(verdict) < _level_index(
                case.verdict
            ):  # what was proven once does not become doubtful by a new look
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

    def _surer(self, verdict: Verdict) -> _TrackedVerdict | None:
        """The case that says of fewer, and surer, what the verdict says of more: evidence wears off, as when those who
        were freed have ended and no longer vote."""
        for case in self._cases.values():
            known = case.verdict
            if known.kind is not verdict.kind or known.confidence <= verdict.confidence:
                continue
            # A deadlock is in several collectives at once, and one of them is told.
            same = (
                verdict.kind is VerdictKind.CYCLE or _collective_place(known) == _collective_place(verdict) is not None
            )
            if same and {*verdict_key(known)} < {*verdict_key(verdict)}:
                return case
        return None

    def acted(self, number: int) -> None:
        """Something was done about a case: its level says so from now on."""
        for case in self._cases.values():
            if case.number == number:
                case.verdict = replace(case.verdict, level=VerdictLevel.ACT)


def _collective_place(verdict: Verdict) -> tuple[str, int] | None:
    collective = verdict.collective
    return None if collective is None else (collective.communicator, collective.seq)


def _level_index(verdict: Verdict) -> int:
    return _LEVEL_ORDER.index(verdict.level)


def _reportable_content(verdict: Verdict) -> tuple[object, ...]:
    """What is worth telling again when it changes: not how long it lasts, nor how sure it is to a percent."""
    return (verdict.level, verdict.kind, verdict.cause, tuple(each.where for each in verdict.culprits))
