"""Proposes what may have happened to a job: one hypothesis per failure class, from its signatures and the detectors.

A signature proposes its class if the conditions of its rule are met; the detectors propose classes from the structure
of the job. A hypothesis knows the lines that it rests on, and those that would follow from it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lockstep.doctor.judge.job_history import JobHistory, match_order
from lockstep.doctor.judge.rule_conditions import MatchIndex
from lockstep.doctor.logs.parsed_log import RuleMatch
from lockstep.doctor.logs.stack_traces import Traceback, is_primary
from lockstep.watch.diagnosis.verdict import Culprit, Fact

NO_FAULT = ("unknown", "benign")
MIN_LINES = 3
"""Shorter logs do not show that nothing is wrong, unless they show progress."""
MAX_SIGN_STRENGTH = 0.6
"""A sign is at most this strong."""
CLOSE_S = 60.0
"""The order of two lines within this many seconds says little about which event came first."""
_NEVER = (float("inf"), 0, 0)
_PYTHON_WARNING = re.compile(r"\b[A-Z]\w*Warning: ")
_WARNING_STRENGTH = 0.45
"""What Python prints as a warning did not end the program."""

Site = tuple[str, int]
"""File and line."""


@dataclass
class Candidate:
    """A failure class that a detector proposes."""

    cls: str
    weight: float
    """How strongly the structure suggests the class, 0 to 1; `factors` turns it into tiers."""
    matches: list[RuleMatch] = field(default_factory=list)
    culprits: tuple[str | int | Culprit, ...] | None = None
    """Culprits from the structure of the job; None: the culprits follow from the rules of the matches."""
    collective: str = ""
    explanation: str = ""
    facts: list[Fact] = field(default_factory=list)
    """Evidence in addition to the matches."""

    @property
    def sites(self) -> set[Site]:
        """The lines that it rests on."""
        of_facts = {(each.file, each.line) for each in self.facts if each.line is not None}
        return {(each.file, each.line) for each in self.matches} | of_facts


@dataclass
class FailureHypothesis:
    """A failure class and what it rests on.

    Attributes:
        signed: The matches of its signatures that no other match explains, or all if others explain all of them; the
            strongest rule first, the matches of a rule in time order.
        proposed: What detectors propose, the strongest first.
        explained: The matches of its signatures that others explain.
        victim: Whether only wrappers and consequences suggest it.
    """

    cls: str
    signed: list[RuleMatch] = field(default_factory=list)
    proposed: list[Candidate] = field(default_factory=list)
    explained: list[RuleMatch] = field(default_factory=list)
    victim: bool = False

    @property
    def matches(self) -> list[RuleMatch]:
        return [*self.signed, *(match for each in self.proposed for match in each.matches)]

    @property
    def culprits(self) -> tuple[str | int | Culprit, ...] | None:
        """The culprits that the structure shows; None: those of the matches."""
        return next((each.culprits for each in self.proposed if each.culprits is not None), None)

    @property
    def collective(self) -> str:
        return next((each.collective for each in self.proposed if each.collective), "")

    @property
    def explanation(self) -> str:
        return next((each.explanation for each in self.proposed if each.explanation), "")

    @property
    def facts(self) -> list[Fact]:
        return [fact for each in self.proposed for fact in each.facts]

    @cached_property
    def sites(self) -> frozenset[Site]:
        """The lines that it rests on."""
        signed = {(each.file, each.line) for each in self.signed}
        return frozenset(signed.union(*(each.sites for each in self.proposed)))

    @cached_property
    def since(self) -> tuple[float, int, int]:
        """The sort key of the first match of its strongest rule."""
        return min(
            (match_order(each) for each in self.matches if each.rule.id == self.matches[0].rule.id), default=_NEVER
        )


@dataclass
class JobEvidence:
    """The history of a job, the hypotheses about it, and what they rest on.

    Attributes:
        causes: The matches of causes and signs whose conditions are met.
        healthy: The matches that say that nothing is wrong.
        unclassified: What a detector found without a class.
    """

    history: JobHistory
    causes: list[RuleMatch]
    healthy: list[RuleMatch]
    hypotheses: list[FailureHypothesis] = field(default_factory=list)
    unclassified: FailureHypothesis = field(default_factory=lambda: FailureHypothesis("unknown"))

    def stopped(self, match: RuleMatch) -> bool:
        """Whether a match is of this job's time, and training did not continue after it."""
        return not (self.history.continued_after(match) or self.history.outside_job(match))

    @cached_property
    def raised(self) -> Mapping[Site, float | None]:
        """The exceptions that are failures themselves, with their times."""
        return {(log.name, each.number): when for _, when, each, log in self.history.tracebacks if is_primary(each)}

    @cached_property
    def _first_of_chain(self) -> Mapping[Site, int]:
        """The line of the first exception of its chain, for each exception that another one led to."""
        found: dict[Site, int] = {}
        last: dict[tuple[str, object], Traceback] = {}
        for origin, _, each, log in self.history.tracebacks:
            before = last.get((log.name, origin))
            if before is not None and before.chained:
                found[log.name, each.number] = found.get((log.name, before.number), before.number)
            last[log.name, origin] = each
        return found

    def first_of_chain(self, site: Site) -> Site:
        """Returns the line of the exception that led to the one on a line; without such a one, the line itself."""
        return site[0], self._first_of_chain.get(site, site[1])

    def since(self, one: FailureHypothesis) -> tuple[float, int, int]:
        """Returns the sort key of the first line of a hypothesis, where the links of a chain have one line."""
        when, source, line = one.since
        log = self.history.by_source.get(source)
        return when, source, line if log is None else self.first_of_chain((log.name, line))[1]

    def explains(self, one: RuleMatch, other: RuleMatch) -> bool:
        """Whether a match would follow from another one. Nothing follows from what the job survived, or from what came
        long after it."""
        names = one.rule.signature.explains
        if (other.rule.id not in names and other.rule.cls not in names) or not self.stopped(one):
            return False
        undated = one.when is None or other.when is None
        return other.rule.cls == one.rule.cls or undated or not long_before(other, one)

    def explained_by(self, one: FailureHypothesis) -> set[Site]:
        """Returns the lines that would follow from those of a hypothesis."""
        causes = list({each.rule.id: each for each in one.signed if each.rule.signature.explains}.values())
        return {(each.file, each.line) for each in self.causes if any(self.explains(cause, each) for cause in causes)}

    @cached_property
    def unnamed(self) -> frozenset[Site]:
        """The exceptions that are failures themselves and that no signature names."""
        return frozenset(self.raised.keys() - {(each.file, each.line) for each in self.causes})

    def misses_failed(self, match: RuleMatch) -> bool:
        """Whether a match counts ranks that did not join, and exactly as many had failed before; or a process of
        another host had, of which no rank is known."""
        if not {"joined", "size"} <= match.fields.keys():
            return False
        failed = [(self.history.rank(each), "", each.when) for each in self.causes if each.rule.cls != match.rule.cls]
        failed += [(origin.rank, origin.host, when)
                   for origin, when, each, _ in self.history.tracebacks if is_primary(each)]  # fmt: skip
        failed = [each for each in failed if each[2] is None or match.when is None or each[2] <= match.when]
        missing = int(match.fields["size"]) - int(match.fields["joined"])
        return len({rank for rank, _, _ in failed} - {None, self.history.rank(match)}) == missing or any(
            rank is None and host not in ("", match.origin.host) for rank, host, _ in failed
        )


def propose(history: JobHistory, structural: Iterable[Candidate]) -> JobEvidence:
    """Returns the hypotheses about a job.

    Args:
        structural: What the detectors propose.
    """
    index = MatchIndex(history)
    allowed = [
        each
        for each in history.matches
        if each.rule.cls and each.rule.signature.role != "context" and index.allows(each)
    ]
    roles: dict[str, list[RuleMatch]] = {"cause": [], "victim": [], "healthy": []}
    for each in allowed:
        roles[each.rule.signature.role if each.rule.signature.role != "sign" else "cause"].append(each)
    job = JobEvidence(history, roles["cause"], roles["healthy"])
    by_class: dict[str, FailureHypothesis] = {}
    for role in ("cause", "victim"):
        for each in roles[role]:
            known = by_class.setdefault(
                str(each.rule.cls), FailureHypothesis(str(each.rule.cls), victim=role == "victim")
            )
            known.signed += [each] if known.victim == (role == "victim") else []
    for candidate in sorted(structural, key=lambda each: -each.weight):
        unclassified = candidate.cls == "unknown"
        known = (
            job.unclassified if unclassified else by_class.setdefault(candidate.cls, FailureHypothesis(candidate.cls))
        )
        known.proposed.append(candidate)
    job.hypotheses += by_class.values()
    _separate_explained(job)
    shows_health = "progressed" in history.traits or any(each.lines >= MIN_LINES for each in history.logs)
    if history.traits & {"ended_well", "running"} and shows_health:
        job.hypotheses.append(FailureHypothesis("benign", [*job.healthy, *history.facts("done")[-2:]]))
    return job


def _separate_explained(job: JobEvidence) -> None:
    """Separates the matches of each hypothesis from those that follow from other matches, and sorts them."""
    explaining = {
        each.rule.id: each for each in job.causes if each.rule.signature.explains and job.stopped(each)
    }.values()
    for hypothesis in job.hypotheses:
        follow = [each for each in hypothesis.signed
                  if any(job.explains(one, each) for one in explaining) or job.misses_failed(each)]  # fmt: skip
        own = [each for each in hypothesis.signed if each not in follow] or hypothesis.signed
        strength: dict[str, float] = {}
        for each in own:
            counted = strength_of(each) if job.stopped(each) else strength_of(each) / 4
            strength[each.rule.id] = max(strength.get(each.rule.id, 0.0), counted)
        hypothesis.explained = follow
        hypothesis.signed = sorted(own, key=match_order)
        hypothesis.signed.sort(key=lambda each: -strength[each.rule.id])


def strength_of(match: RuleMatch) -> float:
    """Returns the strength of a match's signature."""
    signature = match.rule.signature
    limit = MAX_SIGN_STRENGTH if signature.role == "sign" else 1.0
    limit = _WARNING_STRENGTH if match.traceback is None and _PYTHON_WARNING.search(match.text) else limit
    return min(signature.strength, limit)


def long_before(one: RuleMatch, other: RuleMatch) -> bool:
    """Whether a match is too early to be a consequence of the other one that was merely printed first."""
    if one.when is not None and other.when is not None:
        return one.when < other.when - CLOSE_S
    return one.source == other.source and one.line < other.line
