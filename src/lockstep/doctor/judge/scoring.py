"""Weighs the failure classes and separates the cause from its consequences.

A signature whose conditions are met gives its class a weight: the strength of the signature, reduced if the job
continued after the match. Matches that another match explains are dropped. The weights a and b of two signatures of a
class combine to `1 - (1 - a)(1 - b / 2)`: all but the strongest signature count half. The detectors add candidates from
the structure of the job.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.doctor.judge.job_history import JobHistory, match_order
from lockstep.doctor.judge.rule_conditions import MatchIndex
from lockstep.doctor.logs.parsed_log import RuleMatch
from lockstep.doctor.logs.stack_traces import is_primary
from lockstep.watch.diagnosis.verdict import Culprit, Fact

MAX_SIGN_WEIGHT = 0.6
"""Maximum weight of a class with signs only."""
MAX_VICTIM_WEIGHT = 0.5
"""Maximum weight of a class with wrappers and consequences only."""
SURVIVED_FACTOR = 0.25
"""Factor for matches after which the job continued."""
TROUBLED_FACTOR = 0.4
"""Factor for the class `benign` if the last lines of a file report an error."""
MAX_OUTSIDE_WEIGHT = 0.45
"""Maximum weight of a host's log line dated outside the job's time: clocks may differ, and a fault may persist."""
LATER_FACTOR = 0.75
"""Factor for a cause that follows another cause."""
FINAL_KILL_FACTOR = 0.6
"""Factor for an external kill long after a failure."""
STRONG_WEIGHT = 0.5
"""Only classes of at least this weight reduce the weight of others."""
_EXTERNAL_KILL = "external_kill"
_INCOMPLETE_RENDEZVOUS = "rendezvous_incomplete"
_CLOSE_S = 60.0
"""The order of two lines within this many seconds says little about which event came first."""
MIN_NAMED_WEIGHT = 0.35
"""Classes with less weight are not named."""
MAX_CONFIDENCE = 0.97


@dataclass
class Candidate:
    """A failure class and the reasons for it."""

    cls: str
    weight: float
    matches: list[RuleMatch] = field(default_factory=list)
    """The strongest match first."""
    culprits: tuple[str | int | Culprit, ...] | None = None
    """Culprits from the structure of the job; None: the culprits follow from the rules of the matches."""
    collective: str = ""
    explanation: str = ""
    facts: list[Fact] = field(default_factory=list)
    """Evidence in addition to the matches."""
    persists: bool = False
    """Whether the failure lasted until the end, so that a reported success does not disprove it."""

    @property
    def first(self) -> tuple[float, int, int]:
        """The sort key of the first match of the strongest rule."""
        strongest = [each for each in self.matches if each.rule.id == self.matches[0].rule.id]
        return min((match_order(each) for each in strongest), default=(float("inf"), 0, 0))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The best candidate, its confidence, and the runners-up."""

    best: Candidate
    confidence: float
    others: Sequence[tuple[Candidate, float]]


def rank_candidates(history: JobHistory, structural: Iterable[Candidate] = ()) -> Judgement:
    """Ranks the possible causes, and computes the confidence of the best.

    Args:
        structural: Candidates of the detectors.
    """
    index = MatchIndex(history)
    classified = [each for each in history.matches if each.rule.cls and each.rule.signature.role != "context"]
    allowed = [each for each in classified if index.allows(each)]
    causes = _drop_explained(history, [each for each in allowed if each.rule.signature.role in ("cause", "sign")])
    causes = _drop_explained_counts(history, causes)
    candidates = _by_class(history, causes)
    structural = list(structural)
    unclassified = next((each for each in structural if each.cls == "unknown"), Candidate("unknown", 0.0))
    for each in structural:
        if each is unclassified:
            continue
        known = candidates.get(each.cls)
        candidates[each.cls] = each if known is None else _combined(known, each)
    if all(each.weight < MIN_NAMED_WEIGHT for each in candidates.values()):
        _add_victims(history, [each for each in allowed if each.rule.signature.role == "victim"], candidates)
    _discount_generic_exception(candidates)
    _discount_later_causes(candidates)
    _discount_final_kill(history, candidates)
    _add_benign(history, [each for each in allowed if each.rule.signature.role == "healthy"], candidates)
    ranked = sorted(candidates.values(), key=lambda each: (-each.weight, each.first))
    if not ranked or ranked[0].weight < MIN_NAMED_WEIGHT:
        unknown = replace(unclassified, matches=ranked[0].matches if ranked else [])
        return Judgement(unknown, 0.5, [(each, each.weight) for each in ranked[:3]])
    best, second = ranked[0], ranked[1].weight if len(ranked) > 1 else 0.0
    confidence = min(MAX_CONFIDENCE, best.weight * (1 - 0.5 * (second / best.weight) ** 3))
    return Judgement(best, confidence, [(each, min(each.weight, confidence)) for each in ranked[1:4]])


def _drop_explained(history: JobHistory, causes: list[RuleMatch]) -> list[RuleMatch]:
    """Drops causes that another cause explains, in whatever order they occur.

    A match after which the job continued, or that is dated outside the job, explains nothing.
    """
    explaining = {
        each.rule.id: each for each in causes if not (history.continued_after(each) or history.outside_job(each))
    }
    kept = [each for each in causes if not any(_explains(one, each) for one in explaining.values())]
    return kept or causes


def _drop_explained_counts(history: JobHistory, causes: list[RuleMatch]) -> list[RuleMatch]:
    """Drops reports that ranks are missing, if exactly that many ranks had failed before: their errors explain it."""
    counts = [each for each in causes if {"joined", "size"} <= each.fields.keys()]
    failed = [
        (history.rank(each), each.when)
        for each in causes
        if each not in counts and each.rule.cls != _INCOMPLETE_RENDEZVOUS
    ]
    failed += [(origin.rank, when) for origin, when, traceback, _ in history.tracebacks if is_primary(traceback)]
    explained = []
    for each in counts:
        earlier = {rank for rank, when in failed if when is None or each.when is None or when <= each.when}
        missing = int(each.fields["size"]) - int(each.fields["joined"])
        explained += [each] if len(earlier - {None, history.rank(each)}) == missing else []
    return [each for each in causes if each not in explained]


def _explains(one: RuleMatch, other: RuleMatch) -> bool:
    """Whether one match explains another. An external kill explains nothing that happened long before."""
    names = one.rule.signature.explains
    if other.rule.id not in names and other.rule.cls not in names:
        return False
    return one.rule.cls != _EXTERNAL_KILL or other.rule.cls == _EXTERNAL_KILL or not _long_before(other, one)


def _long_before(one: RuleMatch, other: RuleMatch) -> bool:
    """Whether a match is too early to be a consequence of the other one that was merely printed first."""
    if one.when is not None and other.when is not None:
        return one.when < other.when - _CLOSE_S
    return one.source == other.source and one.line < other.line


def _by_class(history: JobHistory, causes: Sequence[RuleMatch]) -> dict[str, Candidate]:
    """Combines the matches of each class into a candidate."""
    weights: dict[str, dict[str, float]] = defaultdict(dict)
    members: dict[str, list[RuleMatch]] = defaultdict(list)
    for each in causes:
        assert each.rule.cls is not None
        signature = each.rule.signature
        weight = signature.strength
        if signature.role == "sign":
            weight = min(weight, MAX_SIGN_WEIGHT)
        if history.continued_after(each):
            weight *= SURVIVED_FACTOR
        if history.outside_job(each):
            weight = min(weight, MAX_OUTSIDE_WEIGHT)
        weights[each.rule.cls][each.rule.id] = max(weight, weights[each.rule.cls].get(each.rule.id, 0.0))
        members[each.rule.cls].append(each)
    found = {}
    for cls, of_rule in weights.items():
        ordered = sorted(of_rule.values(), reverse=True)
        doubt = 1.0
        for at, weight in enumerate(ordered):
            doubt *= 1 - (weight if at == 0 else weight / 2)
        strongest = sorted(members[cls], key=lambda each: (-of_rule[each.rule.id], match_order(each)))
        most = MAX_OUTSIDE_WEIGHT if all(history.outside_job(each) for each in strongest) else MAX_CONFIDENCE
        found[cls] = Candidate(cls, min(most, 1 - doubt), strongest)
    return found


def _add_victims(history: JobHistory, victims: Sequence[RuleMatch], candidates: dict[str, Candidate]) -> None:
    """Adds the classes of wrappers and consequences."""
    for cls, each in _by_class(history, victims).items():
        each.weight = min(each.weight, MAX_VICTIM_WEIGHT)
        candidates[cls] = each if cls not in candidates else _combined(candidates[cls], each)


def _combined(one: Candidate, other: Candidate) -> Candidate:
    weight = min(MAX_CONFIDENCE, 1 - (1 - one.weight) * (1 - other.weight))
    return Candidate(one.cls, weight, [*one.matches, *other.matches],
                     other.culprits if one.culprits is None else one.culprits,
                     one.collective or other.collective, one.explanation or other.explanation,
                     [*one.facts, *other.facts], one.persists or other.persists)  # fmt: skip


def _discount_generic_exception(candidates: Mapping[str, Candidate]) -> None:
    """Reduces the weight of `rank_exception_masked` if a specific class has the same exception."""
    general = candidates.get("rank_exception_masked")
    if general is None:
        return
    exception_sites = {(fact.file, fact.line) for fact in general.facts} | {(e.file, e.line) for e in general.matches}
    for each in candidates.values():
        if each is not general and any((match.file, match.line) in exception_sites for match in each.matches):
            general.weight *= LATER_FACTOR
            return


def _discount_later_causes(candidates: Mapping[str, Candidate]) -> None:
    """Reduces the weight of all strong causes but the first."""
    strong = [each for each in candidates.values() if each.matches and each.weight >= STRONG_WEIGHT]
    if len(strong) < 2:
        return
    first = min(strong, key=lambda each: each.first)
    for each in candidates.values():
        if each is not first and each.matches and each.first > first.first:
            each.weight *= LATER_FACTOR


def _discount_final_kill(history: JobHistory, candidates: Mapping[str, Candidate]) -> None:
    """Reduces the weight of an external kill long after a failure: the time limit or a person ended a job that hung."""
    end = candidates.get(_EXTERNAL_KILL)
    if end is None or not end.matches:
        return
    before = [match for each in candidates.values() if each is not end and each.weight >= STRONG_WEIGHT
              for match in each.matches]  # fmt: skip
    if any(_long_before(match, end.matches[0]) and not history.continued_after(match) for match in before):
        end.weight *= FINAL_KILL_FACTOR


def _ends_with_trouble(history: JobHistory, candidates: Mapping[str, Candidate]) -> bool:
    """Whether the logs end with an error, or some match was not followed by further steps."""
    return history.ends_with_trouble or any(
        not history.continued_after(match) for each in candidates.values() for match in each.matches
    )


def _add_benign(history: JobHistory, healthy: Sequence[RuleMatch], candidates: dict[str, Candidate]) -> None:
    """Adds the class `benign`, weighted by the signs of a healthy job."""
    traits = history.traits
    worst = max((each.weight for each in candidates.values()), default=0.0)
    weight = 0.0
    if "ended_well" in traits:
        weight = 0.9
    elif "running" in traits:
        weight = 0.75 if "progressed" in traits else 0.3
    if healthy and weight:
        weight = 1 - (1 - weight) * (1 - max(each.rule.signature.strength for each in healthy) / 2)
    if "ended_well" not in traits and _ends_with_trouble(history, candidates):
        weight *= TROUBLED_FACTOR
    if "ended_well" in traits:
        for each in candidates.values():
            each.weight *= 1.0 if each.persists else 0.3
        weight *= TROUBLED_FACTOR if any(each.persists for each in candidates.values()) else 1.0
    elif worst >= 0.6:
        weight *= 0.4
    if weight:
        done = history.facts("done")[-2:]
        known = candidates.get("benign")
        own = Candidate("benign", min(MAX_CONFIDENCE, weight), [*healthy, *done])
        candidates["benign"] = own if known is None else _combined(known, own)
