"""A verdict: what is wrong, the culprits, the confidence, the evidence; and its JSON form."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MIN_ACTION_CONFIDENCE = 0.75
"""Of confirmed verdicts: nobody is ended on less. Proof by structure has more, and stillness with equal stacks too."""


class VerdictKind(StrEnum):
    """What the wait graph says, structurally."""

    DEAD = "dead"
    """The process has ended while it was needed, by a signal, with an error, or with exit code 0 before its time."""
    MISMATCH = "mismatch"
    """Members of a communicator called different things under one number: operation, shape, dtype, root, one too many
    or too few; or made it with different lists of members."""
    ABSENT = "absent"
    """Others wait for it and it does not come: it has not entered their collective, or does not answer. A process that
    is stopped by a signal is absent, wherever it was stopped; so is one that never joined, and a service outside."""
    DEVICE_LAG = "device_lag"
    """It entered, peers completed, it did not."""
    IN_FLIGHT = "in_flight"
    """All entered, none completes: the link or the kernel."""
    CYCLE = "cycle"
    """They wait for each other."""
    STARVED = "starved"
    """Somebody waits and nobody is about to give: a queue is empty, all who could fill it are idle or have left."""
    SLOW = "slow"
    """It goes on, far behind its peers. Never more than a notice."""
    UNKNOWN = "unknown"
    """What is known does not decide; `collect` says what would."""


class VerdictLevel(StrEnum):
    """How much a verdict claims."""

    NOTICE = "notice"
    """Who waits for whom; accuses and does nothing."""
    CONFIRMED = "confirmed"
    """Proven by structure, or by stillness for long enough."""
    ACT = "act"
    """Confirmed, and something was done about it."""


@dataclass(frozen=True, slots=True)
class Culprit:
    rank: int | None
    role: str = ""
    host: str = ""
    pid: int | None = None
    where: str = ""
    """The line that it is in: `score() at reward.py:31`."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class StalledCollective:
    """The call that everybody waits in."""

    communicator: str
    seq: int
    operation: str = ""
    call_site: str = ""


@dataclass(frozen=True, slots=True)
class WaitLink:
    """One link of the wait chain in words, the longest wait first."""

    who: str
    on: str
    what: str
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A piece of evidence: a line of a file, or what a source said."""

    text: str
    source: str = ""
    file: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    what: str
    """A kind or class."""
    confidence: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `diagnose` and `explain` answer."""

    kind: VerdictKind
    level: VerdictLevel
    culprits: tuple[Culprit, ...] = ()
    cause: str = "unknown"
    """A class of FAILURES.md."""
    collective: StalledCollective | None = None
    waiting: tuple[WaitLink, ...] = ()
    confidence: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    evidence: tuple[Fact, ...] = ()
    explanation: str = ""
    fix: str = ""
    collect: tuple[str, ...] = ()
    """What would tell more."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """The form of `--json` and `verdict.json`, the same for live verdicts and for files."""
        collective = self.collective
        return {
            "kind": str(self.kind),
            "class": self.cause,
            "culprits": [
                {"rank": each.rank, "role": each.role, "host": each.host, "pid": each.pid, "where": each.where}
                | ({"name": each.name} if each.name else {})
                for each in self.culprits
            ],
            "collective": None
            if collective is None
            else {
                "communicator": collective.communicator,
                "seq": collective.seq,
                "operation": collective.operation,
                "op": collective.operation,
                "call_site": collective.call_site,
            },
            "waiting": [
                {"who": each.who, "on": each.on, "what": each.what, "since_s": each.since_s} for each in self.waiting
            ],
            "level": str(self.level),
            "confidence": round(self.confidence, 3),
            "alternatives": [{"class": each.what, "confidence": each.confidence} for each in self.alternatives],
            "evidence": [_fact_json(each) for each in self.evidence],
            "explanation": self.explanation,
            "fix": self.fix,
            "collect": list(self.collect),
        }


def parse_verdict(said: Mapping[str, Any]) -> Verdict:
    """The verdict of `Verdict.json`'s form, as stored in `verdict.json`; fields that are missing are empty.

    Raises:
        ValueError: It is not of that form.
    """
    try:
        collective = said.get("collective")
        return Verdict(
            kind=VerdictKind(said["kind"]),
            level=VerdictLevel(said["level"]),
            culprits=tuple(Culprit(**each) for each in said.get("culprits", ())),
            cause=said.get("class", "unknown"),
            collective=None if collective is None else _parse_collective(collective),
            waiting=tuple(WaitLink(**each) for each in said.get("waiting", ())),
            confidence=float(said.get("confidence", 0.0)),
            alternatives=tuple(Alternative(each["class"], each["confidence"]) for each in said.get("alternatives", ())),
            evidence=tuple(Fact(**each) for each in said.get("evidence", ())),
            explanation=said.get("explanation", ""),
            fix=said.get("fix", ""),
            collect=tuple(said.get("collect", ())),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a verdict: {error}") from error


@dataclass(frozen=True, slots=True)
class StallThresholds:
    """How long what may last before it counts. Seconds."""

    notice_s: float = 3.0
    """A wait in which nothing moved for so long is told."""
    still_s: float = 40.0
    """`--confirm-after`: without CPU, I/O, counter or GPU movement and with equal stacks for so long, an alive process
    that others wait for is confirmed; where there is history, `history_factor` times the longest so far if that is
    more."""
    history_factor: float = 3.0
    busy_factor: float = 10.0
    """One that burns CPU with equal stacks and without any counter moving is confirmed after so many times as long as
    one that does nothing: a long computation looks the same. One that works is told after so many times the notice
    without a counter moving."""
    slow_factor: float = 3.0
    """A rank that needs so many times what its peers need is slow."""
    host_s: float = 5.0
    """A host that is silent for so long is lost."""


def _parse_collective(said: Mapping[str, Any]) -> StalledCollective:
    return StalledCollective(**{name: value for name, value in said.items() if name != "op"})


def _fact_json(fact: Fact) -> dict[str, Any]:
    if fact.file:
        return {"file": fact.file, "line": fact.line, "text": fact.text}
    return {"source": fact.source, "text": fact.text}


def first_verdict(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The one that explains the others: `diagnose` puts it first."""
    return verdicts[0] if verdicts else None


def labeled_rows(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The name stands beside the first of the texts only."""
    for at, text in enumerate(texts):
        yield name if at == 0 else "", text


def advice_rows(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """What else it may have been, what helps, and what would tell more."""
    yield from labeled_rows("or else", [f"{each.what} ({each.confidence:.2f})" for each in verdict.alternatives])
    yield from labeled_rows("what helps", [verdict.fix] if verdict.fix else [])
    yield from labeled_rows("to know more", verdict.collect)
