"""Verdicts over time: the same one is told once, again when it says something new, and taken back when it is over."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lockstep.watch.verdict import Kind, Level, Verdict

HOLD_S = 1.5
"""A verdict that is gone for less than this is not over: a look may fall into a moment without evidence."""
_LEVELS = (Level.NOTICE, Level.CONFIRMED, Level.ACT)

Key = tuple[object, ...]


class Change(StrEnum):
    TOLD = "told"
    UPDATED = "updated"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Told:
    """A verdict that is told now, and what it has to do with those before."""

    number: int
    """The same for all that is said of one stall."""
    change: Change
    verdict: Verdict
    since: float
    """When it was first told, on the clock of `at`."""
    at: float


@dataclass(slots=True)
class _Case:
    number: int
    verdict: Verdict
    since: float
    seen: float


def key_of(verdict: Verdict) -> Key:
    """What makes two verdicts speak of the same thing: those who are named, else the collective and the kind."""
    if verdict.culprits:
        return tuple(sorted({(each.role, str(each.rank), each.host, each.pid) for each in verdict.culprits}, key=str))
    collective = verdict.collective
    return (str(verdict.kind), collective.communicator if collective else "", collective.seq if collective else -1)


class Tracker:
    """Pure but for its memory: no clock, no effect."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._cases: dict[Key, _Case] = {}
        self._buried: set[Key] = set()
        """Deaths that were told and are over: nobody dies twice, whoever waits for the dead once more."""
        self._count = 0

    @property
    def standing(self) -> list[Verdict]:
        """What holds now, the gravest first."""
        cases = sorted(self._cases.values(), key=lambda case: (-_LEVELS.index(case.verdict.level), case.since))
        return [case.verdict for case in cases]

    def update(self, verdicts: Sequence[Verdict], at: float) -> list[Told]:
        """Takes what holds at a moment; returns what is to be told of it."""
        changes = []
        for verdict in verdicts:
            key = key_of(verdict)
            case = self._cases.get(key)
            if case is None and verdict.kind is Kind.DEAD and key in self._buried:
                continue
            surer = None if case is not None else self._surer(verdict)
            if surer is not None:
                surer.seen = at
                continue
            if case is None:
                self._count += 1
                case = self._cases[key] = _Case(self._count, verdict, at, at)
                changes.append(Told(case.number, Change.TOLD, verdict, at, at))
                continue
            case.seen = at
            if _level(verdict) < _level(case.verdict):  # what was proven once does not become doubtful by a new look
                verdict = replace(verdict, level=case.verdict.level)
            news = _says(verdict) != _says(case.verdict)
            case.verdict = verdict
            if news:
                changes.append(Told(case.number, Change.UPDATED, verdict, case.since, at))
        for key, case in list(self._cases.items()):
            if at - case.seen > self._hold_s:
                del self._cases[key]
                if case.verdict.kind is Kind.DEAD:
                    self._buried.add(key)
                changes.append(Told(case.number, Change.WITHDRAWN, case.verdict, case.since, at))
        return changes

    def _surer(self, verdict: Verdict) -> _Case | None:
        """The case that says of fewer, and surer, what the verdict says of more: evidence wears off, as when those who
        were freed have ended and no longer vote."""
        for case in self._cases.values():
            known = case.verdict
            if known.kind is not verdict.kind or known.confidence <= verdict.confidence:
                continue
            # A deadlock is in several collectives at once, and one of them is told.
            same = verdict.kind is Kind.CYCLE or _place(known) == _place(verdict) is not None
            if same and {*key_of(known)} < {*key_of(verdict)}:
                return case
        return None

    def acted(self, number: int) -> None:
        """Something was done about a case: its level says so from now on."""
        for case in self._cases.values():
            if case.number == number:
                case.verdict = replace(case.verdict, level=Level.ACT)


def _place(verdict: Verdict) -> tuple[str, int] | None:
    collective = verdict.collective
    return None if collective is None else (collective.communicator, collective.seq)


def _level(verdict: Verdict) -> int:
    return _LEVELS.index(verdict.level)


def _says(verdict: Verdict) -> tuple[object, ...]:
    """What is worth telling again when it changes: not how long it lasts, nor how sure it is to a percent."""
    return (verdict.level, verdict.kind, verdict.cause, tuple(each.where for each in verdict.culprits))
