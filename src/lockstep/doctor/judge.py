"""From sightings and story to classes with a confidence: the first cause against its victims.

Each signature whose conditions hold gives its class a weight: its strength, less where the job went on after it, or
where something earlier explains it. Weights of different signatures of a class add up as independent reasons do,
`1 - (1 - a)(1 - b)`, further ones counting half. The structure of the job (`structure.py`) gives candidates as well.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.doctor.conditions import Seen
from lockstep.doctor.sightings import Sighting
from lockstep.doctor.story import Story, order
from lockstep.doctor.tracebacks import own
from lockstep.watch.verdict import Culprit, Fact

SIGN_AT_MOST = 0.6
"""What a class is worth of which only signs were seen."""
VICTIM_AT_MOST = 0.5
"""What a class is worth of which only wrappers and consequences were seen."""
SURVIVED = 0.25
"""The weight of what the job survived."""
TROUBLED = 0.4
"""How much of being healthy is left where the last words of a file are those of trouble."""
STRAYED = 0.45
"""What a record is worth that is dated outside of the job, by so little that the clocks may differ, or of a fault that
lasts."""
LATER = 0.75
"""The weight of a cause that comes after another one's, on another rank or in the same."""
AT_THE_END = 0.6
"""The weight of an end from outside that comes long after a failure."""
STRONG = 0.5
"""A class from this on may take weight from others."""
_END = "external_kill"
_NOT_ALL = "rendezvous_incomplete"
_CLOSE = 60.0
"""Seconds within which the order of lines says little of what came first."""
DECIDED = 0.35
"""A class below this is not named."""
AT_MOST = 0.97


@dataclass
class Candidate:
    """A class with the reasons for it."""

    cls: str
    weight: float
    sightings: list[Sighting] = field(default_factory=list)
    """The strongest first."""
    culprits: tuple[str | int | Culprit, ...] | None = None
    """From the structure; None: as the sightings' rules say."""
    collective: str = ""
    explanation: str = ""
    facts: list[Fact] = field(default_factory=list)
    """Evidence beside the sightings."""
    lasts: bool = False
    """It was still so at the end: a job that ends well all the same is not healed of it."""

    @property
    def first(self) -> tuple[float, int, int]:
        """When its strongest reason was seen first."""
        strongest = [each for each in self.sightings if each.rule.id == self.sightings[0].rule.id]
        return min((order(each) for each in strongest), default=(float("inf"), 0, 0))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The candidates, the best first, and what is left for `unknown`."""

    best: Candidate
    confidence: float
    others: Sequence[tuple[Candidate, float]]


def judge(story: Story, structural: Iterable[Candidate] = ()) -> Judgement:
    """What it was, the other things that it may have been, and how sure that is."""
    seen = Seen(story)
    telling = [each for each in story.sightings if each.rule.cls and each.rule.signature.role != "context"]
    held = [each for each in telling if seen.allows(each)]
    causes = _unexplained(story, [each for each in held if each.rule.signature.role in ("cause", "sign")])
    causes = _not_kept_away(story, causes)
    candidates = _by_class(story, causes)
    structural = list(structural)
    silent = next((each for each in structural if each.cls == "unknown"), Candidate("unknown", 0.0))
    for each in structural:
        if each is silent:
            continue
        known = candidates.get(each.cls)
        candidates[each.cls] = each if known is None else _joined(known, each)
    if all(each.weight < DECIDED for each in candidates.values()):
        _last_resort(story, [each for each in held if each.rule.signature.role == "victim"], candidates)
    _specific(candidates)
    _first_counts(candidates)
    _end_is_no_cause(story, candidates)
    _healthy(story, [each for each in held if each.rule.signature.role == "healthy"], candidates)
    ranked = sorted(candidates.values(), key=lambda each: (-each.weight, each.first))
    if not ranked or ranked[0].weight < DECIDED:
        unknown = replace(silent, sightings=ranked[0].sightings if ranked else [])
        return Judgement(unknown, 0.5, [(each, each.weight) for each in ranked[:3]])
    best, second = ranked[0], ranked[1].weight if len(ranked) > 1 else 0.0
    confidence = min(AT_MOST, best.weight * (1 - 0.5 * (second / best.weight) ** 3))
    return Judgement(best, confidence, [(each, min(each.weight, confidence)) for each in ranked[1:4]])


def _unexplained(story: Story, causes: list[Sighting]) -> list[Sighting]:
    """Without those that another one explains: by its rule, whatever the order. What the job went on after, or what is
    dated outside of it, explains nothing."""
    present = {each.rule.id: each for each in causes if not (story.survived(each) or story.strayed(each))}
    kept = [each for each in causes if not any(_explains(one, each) for one in present.values())]
    return kept or causes


def _not_kept_away(story: Story, causes: list[Sighting]) -> list[Sighting]:
    """Without the counts of who came, where as many ranks as were missed had errors of their own before that: those
    kept them away."""
    short = [each for each in causes if {"joined", "size"} <= each.fields.keys()]
    fell = [(story.rank(each), each.when) for each in causes if each not in short and each.rule.cls != _NOT_ALL]
    fell += [(who.rank, when) for who, when, traceback, _ in story.tracebacks if own(traceback)]
    away = []
    for each in short:
        earlier = {rank for rank, when in fell if when is None or each.when is None or when <= each.when}
        missed = int(each.fields["size"]) - int(each.fields["joined"])
        away += [each] if len(earlier - {None, story.rank(each)}) == missed else []
    return [each for each in causes if each not in away]


def _explains(one: Sighting, other: Sighting) -> bool:
    """An end from outside explains nothing that was before it."""
    names = one.rule.signature.explains
    if other.rule.id not in names and other.rule.cls not in names:
        return False
    return one.rule.cls != _END or other.rule.cls == _END or not _long_before(other, one)


def _long_before(one: Sighting, other: Sighting) -> bool:
    """By so much that it cannot be a consequence which was only printed earlier."""
    if one.when is not None and other.when is not None:
        return one.when < other.when - _CLOSE
    return one.source == other.source and one.line < other.line


def _by_class(story: Story, causes: Sequence[Sighting]) -> dict[str, Candidate]:
    weights: dict[str, dict[str, float]] = defaultdict(dict)
    members: dict[str, list[Sighting]] = defaultdict(list)
    for each in causes:
        assert each.rule.cls is not None
        signature = each.rule.signature
        weight = signature.strength
        if signature.role == "sign":
            weight = min(weight, SIGN_AT_MOST)
        if story.survived(each):
            weight *= SURVIVED
        if story.strayed(each):
            weight = min(weight, STRAYED)
        weights[each.rule.cls][each.rule.id] = max(weight, weights[each.rule.cls].get(each.rule.id, 0.0))
        members[each.rule.cls].append(each)
    found = {}
    for cls, of_rule in weights.items():
        ordered = sorted(of_rule.values(), reverse=True)
        left = 1.0
        for at, weight in enumerate(ordered):
            left *= 1 - (weight if at == 0 else weight / 2)
        strongest = sorted(members[cls], key=lambda each: (-of_rule[each.rule.id], order(each)))
        most = STRAYED if all(story.strayed(each) for each in strongest) else AT_MOST
        found[cls] = Candidate(cls, min(most, 1 - left), strongest)
    return found


def _last_resort(story: Story, victims: Sequence[Sighting], candidates: dict[str, Candidate]) -> None:
    """What wraps other failures counts where nothing else is there."""
    for cls, each in _by_class(story, victims).items():
        each.weight = min(each.weight, VICTIM_AT_MOST)
        candidates[cls] = each if cls not in candidates else _joined(candidates[cls], each)


def _joined(one: Candidate, other: Candidate) -> Candidate:
    weight = min(AT_MOST, 1 - (1 - one.weight) * (1 - other.weight))
    return Candidate(one.cls, weight, [*one.sightings, *other.sightings],
                     other.culprits if one.culprits is None else one.culprits,
                     one.collective or other.collective, one.explanation or other.explanation,
                     [*one.facts, *other.facts], one.lasts or other.lasts)  # fmt: skip


def _specific(candidates: Mapping[str, Candidate]) -> None:
    """That a rank raised something says less than what it raised."""
    general = candidates.get("rank_exception_masked")
    if general is None:
        return
    places = {(fact.file, fact.line) for fact in general.facts} | {(e.file, e.line) for e in general.sightings}
    for each in candidates.values():
        if each is not general and any((seen.file, seen.line) in places for seen in each.sightings):
            general.weight *= LATER
            return


def _first_counts(candidates: Mapping[str, Candidate]) -> None:
    """Of causes that are about as strong, those after the first lose."""
    strong = [each for each in candidates.values() if each.sightings and each.weight >= STRONG]
    if len(strong) < 2:
        return
    first = min(strong, key=lambda each: each.first)
    for each in candidates.values():
        if each is not first and each.sightings and each.first > first.first:
            each.weight *= LATER


def _end_is_no_cause(story: Story, candidates: Mapping[str, Candidate]) -> None:
    """A job that hangs after a failure, or goes on for a while, is ended by its time limit or by somebody."""
    end = candidates.get(_END)
    if end is None or not end.sightings:
        return
    before = [seen for each in candidates.values() if each is not end and each.weight >= STRONG
              for seen in each.sightings]  # fmt: skip
    if any(_long_before(seen, end.sightings[0]) and not story.survived(seen) for seen in before):
        end.weight *= AT_THE_END


def _ends_with_trouble(story: Story, candidates: Mapping[str, Candidate]) -> bool:
    """The last thing that a file says of the job is a reason to worry: no step was made after it."""
    return story.ends_badly or any(not story.survived(seen) for each in candidates.values() for seen in each.sightings)


def _healthy(story: Story, healthy: Sequence[Sighting], candidates: dict[str, Candidate]) -> None:
    """How much speaks for nothing being wrong."""
    traits = story.traits
    worst = max((each.weight for each in candidates.values()), default=0.0)
    weight = 0.0
    if "ended_well" in traits:
        weight = 0.9
    elif "running" in traits:
        weight = 0.75 if "progressed" in traits else 0.3
    if healthy and weight:
        weight = 1 - (1 - weight) * (1 - max(each.rule.signature.strength for each in healthy) / 2)
    if "ended_well" not in traits and _ends_with_trouble(story, candidates):
        weight *= TROUBLED
    if "ended_well" in traits:
        for each in candidates.values():
            each.weight *= 1.0 if each.lasts else 0.3
        weight *= TROUBLED if any(each.lasts for each in candidates.values()) else 1.0
    elif worst >= 0.6:
        weight *= 0.4
    if weight:
        done = story.facts("done")[-2:]
        known = candidates.get("benign")
        own = Candidate("benign", min(AT_MOST, weight), [*healthy, *done])
        candidates["benign"] = own if known is None else _joined(known, own)
