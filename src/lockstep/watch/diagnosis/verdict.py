"""A verdict (what is wrong, which processes are the culprits, with what confidence and evidence) and its JSON form."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

MIN_ACTION_CONFIDENCE = 0.75
"""The lowest confidence of a confirmed verdict for which a process is killed or a collective aborted. Structural proof
gives more, and so does inactivity with equal stacks."""


class VerdictKind(StrEnum):
    """What kind of failure stalls the job."""

    DEAD = "dead"
    """The process ended while others needed it: by a signal, with an error, or with exit code 0 too early."""
    MISMATCH = "mismatch"
    """Members of a communicator made different calls at one sequence number (operation, shape, dtype, root, an extra or
    a missing call), or created it with different member lists."""
    ABSENT = "absent"
    """A process that others wait for has not entered their collective, or does not answer. Stopped processes, ranks
    that never joined, and services outside the job count as absent too."""
    DEVICE_LAG = "device_lag"
    """A process has entered a collective and not completed it, although its peers have completed it."""
    DEVICE = "device"
    """The device of a process has failed: it is lost, or reports an error of its hardware or of a kernel."""
    IN_FLIGHT = "in_flight"
    """All members have entered a collective and none completes it, so the link or the kernel is at fault."""
    CYCLE = "cycle"
    """Processes wait for each other."""
    STARVED = "starved"
    """A process waits on an empty queue, and all processes that could fill it are idle or have exited."""
    SLOW = "slow"
    """A process progresses, but far behind its peers. Such a verdict is never more than a notice."""
    UNKNOWN = "unknown"
    """The evidence does not suffice; `collect` names what is missing."""


class VerdictLevel(StrEnum):
    """How certain a verdict is."""

    NOTICE = "notice"
    """The verdict says which process waits for which; no action follows."""
    CONFIRMED = "confirmed"
    """Structure or long inactivity proves the verdict."""
    ACT = "act"
    """The verdict is confirmed and was acted upon."""


def level_of(proven: bool) -> VerdictLevel:
    """Confirmed if the verdict is proven, else a notice."""
    return VerdictLevel.CONFIRMED if proven else VerdictLevel.NOTICE


@dataclass(frozen=True, slots=True)
class Culprit:
    rank: int | None
    role: str = ""
    host: str = ""
    pid: int | None = None
    where: str = ""
    """The current line of the process: `score() at reward.py:31`."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class StalledCollective:
    """The collective that the others wait in."""

    communicator: str
    seq: int
    operation: str = ""
    call_site: str = ""


@dataclass(frozen=True, slots=True)
class WaitLink:
    """A link of the wait chain: process `who` waits for `on` in `what`."""

    who: str
    on: str
    what: str
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A piece of evidence: a line of a file, or a statement of a source."""

    text: str
    source: str = ""
    file: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    what: str
    """A verdict kind or failure class."""
    confidence: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `diagnose` and `explain`."""

    kind: VerdictKind
    level: VerdictLevel
    culprits: tuple[Culprit, ...] = ()
    cause: str = "unknown"
    """A failure class (FAILURES.md)."""
    collective: StalledCollective | None = None
    waiting: tuple[WaitLink, ...] = ()
    """The wait chain that ends at the culprit; the link to the culprit comes last."""
    confidence: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    evidence: tuple[Fact, ...] = ()
    explanation: str = ""
    fix: str = ""
    collect: tuple[str, ...] = ()
    """Further evidence worth collecting."""
    not_excluded: tuple[int, ...] = ()
    """Ranks of which the evidence cannot tell whether they are at fault."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """The verdict as JSON: the form of `--json` and `verdict.json`."""
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
            "waiting": [asdict(each) for each in self.waiting],
            "level": str(self.level),
            "confidence": round(self.confidence, 3),
            "alternatives": [{"class": each.what, "confidence": each.confidence} for each in self.alternatives],
            "evidence": [_fact_json(each) for each in self.evidence],
            "explanation": self.explanation,
            "fix": self.fix,
            "collect": list(self.collect),
        } | ({"not_excluded": list(self.not_excluded)} if self.not_excluded else {})


def parse_verdict(data: Mapping[str, Any]) -> Verdict:
    """Parses the JSON form of a verdict; missing fields become empty.

    Raises:
        ValueError: `data` is not the JSON form of a verdict.
    """
    try:
        collective = data.get("collective")
        return Verdict(
            kind=VerdictKind(data["kind"]),
            level=VerdictLevel(data["level"]),
            culprits=tuple(Culprit(**each) for each in data.get("culprits", ())),
            cause=data.get("class", "unknown"),
            collective=None if collective is None else _parse_collective(collective),
            waiting=tuple(WaitLink(**each) for each in data.get("waiting", ())),
            confidence=float(data.get("confidence", 0.0)),
            alternatives=tuple(Alternative(each["class"], each["confidence"]) for each in data.get("alternatives", ())),
            evidence=tuple(Fact(**each) for each in data.get("evidence", ())),
            explanation=data.get("explanation", ""),
            fix=data.get("fix", ""),
            collect=tuple(data.get("collect", ())),
            not_excluded=tuple(data.get("not_excluded", ())),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a verdict: {error}") from error


@dataclass(frozen=True, slots=True)
class StallThresholds:
    """How long waits and inactivity may last before they become verdicts, in seconds."""

    notice_s: float = 3.0
    """A wait without progress for this long becomes a notice."""
    still_s: float = 40.0
    """`--confirm-after`: a living process that others wait for is confirmed as the culprit after this long with equal
    stacks and without CPU, I/O, counter or GPU activity."""
    history_factor: float = 3.0
    """A stage that took d seconds before may be inactive for this factor times d, if that is more than `still_s`."""
    busy_factor: float = 10.0
    """A process that uses CPU with equal stacks and without counter progress is confirmed after this factor times
    `still_s`, because a long computation looks the same. A working process without counter progress becomes a notice
    after this factor times `notice_s`."""
    slow_factor: float = 3.0
    """A rank that needs at least this factor times as long as its peers is slow."""
    host_s: float = 5.0
    """A host without reports for this long is lost."""


def _parse_collective(data: Mapping[str, Any]) -> StalledCollective:
    return StalledCollective(**{name: value for name, value in data.items() if name != "op"})


def _fact_json(fact: Fact) -> dict[str, Any]:
    if fact.file:
        return {"file": fact.file, "line": fact.line, "text": fact.text}
    return {"source": fact.source, "text": fact.text}
