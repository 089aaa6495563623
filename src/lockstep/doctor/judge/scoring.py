"""Weighs failure classes, separating the first cause from its victims.

Each signature whose conditions hold gives its class a weight: its strength, reduced if the job continued after it
or if something earlier explains it. Weights of different signatures of a class combine as independent reasons do,
`1 - (1 - a)(1 - b)`, the second and later ones counting half. The detectors add candidates from the structure of
the job.
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
"""What a class is worth of which only signs were seen."""
MAX_VICTIM_WEIGHT = 0.5
"""What a class is worth of which only wrappers and consequences were seen."""
SURVIVED_FACTOR = 0.25
"""The weight of what the job survived."""
TROUBLED_FACTOR = 0.4
"""How much of being healthy is left where the last words of a file are those of trouble."""
MAX_OUTSIDE_WEIGHT = 0.45
"""What a record is worth that is dated outside of the job, by so little that the clocks may differ, or of a fault that
lasts."""
LATER_FACTOR = 0.75
"""The weight of a cause that comes after another one's, on another rank or in the same."""
FINAL_KILL_FACTOR = 0.6
"""The weight of an end from outside that comes long after a failure."""
STRONG_WEIGHT = 0.5
"""A class from this on may take weight from others."""
_EXTERNAL_KILL = "external_kill"
_INCOMPLETE_RENDEZVOUS = "rendezvous_incomplete"
_CLOSE_S = 60.0
"""Seconds within which the order of lines says little of what came first."""
MIN_NAMED_WEIGHT = 0.35
"""A class below this is not named."""
MAX_CONFIDENCE = 0.97


@dataclass
class Candidate:
    """A class with the reasons for it."""

    cls: str
    weight: float
    matches: list[RuleMatch] = field(default_factory=list)
    """The strongest first."""
    culprits: tuple[str | int | Culprit, ...] | None = None
    """From the structure; None: as the sightings' rules say."""
    collective: str = ""
    explanation: str = ""
    facts: list[Fact] = field(default_factory=list)
    """Evidence beside the sightings."""
    persists: bool = False
    """It was still so at the end: a job that ends well all the same is not healed of it."""

    @property
    def first(self) -> tuple[float, int, int]:
        """When its strongest reason was seen first."""
        strongest = [each for each in self.matches if each.rule.id == self.matches[0].rule.id]
        return min((match_order(each) for each in strongest), default=(float("inf"), 0, 0))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The candidates, the best first, and what is left for `unknown`."""

    best: Candidate
    confidence: float
    others: Sequence[tuple[Candidate, float]]


def rank_candidates(history: JobHistory, structural: Iterable[Candidate] = ()) -> Judgement:
    """What it was, the other things that it may have been, and how sure that is."""
    seen = MatchIndex(history)
    telling = [each for each in history.matches if each.rule.cls and each.rule.signature.role != "context"]
    held = [each for each in telling if seen.allows(each)]
    causes = _drop_explained(history, [each for each in held if each.rule.signature.role in ("cause", "sign")])
    causes = _drop_short_counts(history, causes)
    candidates = _by_class(history, causes)
    structural = list(structural)
    silent = next((each for each in structural if each.cls == "unknown"), Candidate("unknown", 0.0))
    for each in structural:
        if each is silent:
            continue
        known = candidates.get(each.cls)
        candidates[each.cls] = each if known is None else _combined(known, each)
    if all(each.weight < MIN_NAMED_WEIGHT for each in candidates.values()):
        _add_victims(history, [each for each in held if each.rule.signature.role == "victim"], candidates)
    _discount_generic_exception(candidates)
    _discount_later_causes(candidates)
    _discount_final_kill(history, candidates)
    _add_benign(history, [each for each in held if each.rule.signature.role == "healthy"], candidates)
    ranked = sorted(candidates.values(), key=lambda each: (-each.weight, each.first))
    if not ranked or ranked[0].weight < MIN_NAMED_WEIGHT:
        unknown = replace(silent, matches=ranked[0].matches if ranked else [])
        return Judgement(unknown, 0.5, [(each, each.weight) for each in ranked[:3]])
    best, second = ranked[0], ranked[1].weight if len(ranked) > 1 else 0.0
    confidence = min(MAX_CONFIDENCE, best.weight * (1 - 0.5 * (second / best.weight) ** 3))
    return Judgement(best, confidence, [(each, min(each.weight, confidence)) for each in ranked[1:4]])


def _drop_explained(history: JobHistory, causes: list[RuleMatch]) -> list[RuleMatch]:
    """Without those that another one explains: by its rule, whatever the order. What the job went on after, or what is
    dated outside of it, explains nothing."""
    present = {each.rule.id: each for each in causes if not (history.survived(each) or history.outside_job(each))}
    kept = [each for each in causes if not any(_explains(one, each) for one in present.values())]
    return kept or causes


def _drop_short_counts(history: JobHistory, causes: list[RuleMatch]) -> list[RuleMatch]:
    """Without the counts of who came, where as many ranks as were missed had errors of their own before that: those
    kept them away."""
    short = [each for each in causes if {"joined", "size"} <= each.fields.keys()]
    fell = [
        (history.rank(each), each.when)
        for each in causes
        if each not in short and each.rule.cls != _INCOMPLETE_RENDEZVOUS
    ]
    fell += [(origin.rank, when) for origin, when, traceback, _ in history.tracebacks if is_primary(traceback)]
    away = []
    for each in short:
        earlier = {rank for rank, when in fell if when is None or each.when is None or when <= each.when}
        missed = int(each.fields["size"]) - int(each.fields["joined"])
        away += [each] if len(earlier - {None, history.rank(each)}) == missed else []
    return [each for each in causes if each not in away]


def _explains(one: RuleMatch, other: RuleMatch) -> bool:
    """An end from outside explains nothing that was before it."""
    names = one.rule.signature.explains
    if other.rule.id not in names and other.rule.cls not in names:
        return False
    return one.rule.cls != _EXTERNAL_KILL or other.rule.cls == _EXTERNAL_KILL or not _long_before(other, one)


def _long_before(one: RuleMatch, other: RuleMatch) -> bool:
    """By so much that it cannot be a consequence which was only printed earlier."""
    if one.when is not None and other.when is not None:
        return one.when < other.when - _CLOSE_S
    return one.source == other.source and one.line < other.line


def _by_class(history: JobHistory, causes: Sequence[RuleMatch]) -> dict[str, Candidate]:
    weights: dict[str, dict[str, float]] = defaultdict(dict)
    members: dict[str, list[RuleMatch]] = defaultdict(list)
    for each in causes:
        assert each.rule.cls is not None
        signature = each.rule.signature
        weight = signature.strength
        if signature.role == "sign":
            weight = min(weight, MAX_SIGN_WEIGHT)
        if history.survived(each):
            weight *= SURVIVED_FACTOR
        if history.outside_job(each):
            weight = min(weight, MAX_OUTSIDE_WEIGHT)
        weights[each.rule.cls][each.rule.id] = max(weight, weights[each.rule.cls].get(each.rule.id, 0.0))
        members[each.rule.cls].append(each)
    found = {}
    for cls, of_rule in weights.items():
        ordered = sorted(of_rule.values(), reverse=True)
        left = 1.0
        for at, weight in enumerate(ordered):
            left *= 1 - (weight if at == 0 else weight / 2)
        strongest = sorted(members[cls], key=lambda each: (-of_rule[each.rule.id], match_order(each)))
        most = MAX_OUTSIDE_WEIGHT if all(history.outside_job(each) for each in strongest) else MAX_CONFIDENCE
        found[cls] = Candidate(cls, min(most, 1 - left), strongest)
    return found


def _add_victims(history: JobHistory, victims: Sequence[RuleMatch], candidates: dict[str, Candidate]) -> None:
    """What wraps other failures counts where nothing else is there."""
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
    """That a rank raised something says less than what it raised."""
    general = candidates.get("rank_exception_masked")
    if general is None:
        return
    exception_sites = {(fact.file, fact.line) for fact in general.facts} | {(e.file, e.line) for e in general.matches}
    for each in candidates.values():
        if each is not general and any((seen.file, seen.line) in exception_sites for seen in each.matches):
            general.weight *= LATER_FACTOR
            return


def _discount_later_causes(candidates: Mapping[str, Candidate]) -> None:
    """Of causes that are about as strong, those after the first lose."""
    strong = [each for each in candidates.values() if each.matches and each.weight >= STRONG_WEIGHT]
    if len(strong) < 2:
        return
    first = min(strong, key=lambda each: each.first)
    for each in candidates.values():
        if each is not first and each.matches and each.first > first.first:
            each.weight *= LATER_FACTOR


def _discount_final_kill(history: JobHistory, candidates: Mapping[str, Candidate]) -> None:
    """A job that hangs after a failure, or goes on for a while, is ended by its time limit or by somebody."""
    end = candidates.get(_EXTERNAL_KILL)
    if end is None or not end.matches:
        return
    before = [seen for each in candidates.values() if each is not end and each.weight >= STRONG_WEIGHT
              for seen in each.matches]  # fmt: skip
    if any(_long_before(seen, end.matches[0]) and not history.survived(seen) for seen in before):
        end.weight *= FINAL_KILL_FACTOR


def _ends_with_trouble(history: JobHistory, candidates: Mapping[str, Candidate]) -> bool:
    """The last thing that a file says of the job is a reason to worry: no step was made after it."""
    return history.ends_with_trouble or any(
        not history.survived(seen) for each in candidates.values() for seen in each.matches
    )


def _add_benign(history: JobHistory, healthy: Sequence[RuleMatch], candidates: dict[str, Candidate]) -> None:
    """How much speaks for nothing being wrong."""
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
