"""Whether what a rule needs was seen, in the relation that it asks for."""

import re
from collections.abc import Iterable, Mapping, Sequence

from lockstep.doctor.schema import Condition
from lockstep.doctor.sightings import Sighting
from lockstep.doctor.story import Story, order


class Seen:
    """The sightings of the last attempt, to be asked."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self._by_id: dict[str, list[Sighting]] = {}
        self._by_class: dict[str, list[Sighting]] = {}
        for each in story.sightings:
            self._by_id.setdefault(each.rule.id, []).append(each)
            if each.rule.cls and each.rule.signature.role in ("cause", "sign"):
                self._by_class.setdefault(each.rule.cls, []).append(each)

    @property
    def by_id(self) -> Mapping[str, Sequence[Sighting]]:
        return self._by_id

    def allows(self, seen: Sighting) -> bool:
        """All that its rule needs is there, and nothing that it excludes."""
        signature = seen.rule.signature
        return all(self.holds(each, seen) for each in signature.needs) and not any(
            self.holds(each, seen) for each in signature.unless
        )

    def holds(self, condition: Condition | str, seen: Sighting) -> bool:
        """Whether a condition of the rule of `seen` is met."""
        if isinstance(condition, str):
            return any(each is not seen for each in self._by_id.get(condition, ()))
        if condition.any:
            return any(self.holds(each, seen) for each in condition.any)
        if condition.story is not None:
            return condition.story in self.story.traits
        return any(_related(condition, each, seen) for each in self._others(condition) if each is not seen)

    def _others(self, condition: Condition) -> Iterable[Sighting]:
        if condition.id is not None:
            return self._by_id.get(condition.id, ())
        if condition.cls is not None:
            return self._by_class.get(condition.cls, ())
        return self.story.facts(condition.fact or "")


def _related(condition: Condition, other: Sighting, seen: Sighting) -> bool:
    for name, pattern in condition.matches.items():
        if re.fullmatch(pattern, other.fields.get(name, "")) is None:
            return False
    if condition.who != "any":
        same = same_speaker(other, seen)
        if same is None or same != (condition.who == "same"):
            return False
    if condition.when == "before" and _precedes(seen, other):
        return False
    if condition.when == "after" and _precedes(other, seen):
        return False
    if condition.within_s is not None and (
        other.when is None or seen.when is None or abs(other.when - seen.when) > condition.within_s
    ):
        return False
    if condition.within_lines is not None:
        return other.source == seen.source and abs(other.line - seen.line) <= condition.within_lines
    return True


def _precedes(one: Sighting, other: Sighting) -> bool:
    """By time; where one of them has none by the line in one file, and of two files nothing is known."""
    if one.when is None or other.when is None:
        return one.source == other.source and one.line < other.line
    return order(one) < order(other)


def same_speaker(one: Sighting, other: Sighting) -> bool | None:
    """None where one of them is not known."""
    if one.who.rank is not None and other.who.rank is not None:
        return one.who.rank == other.who.rank
    if one.who.pid is not None and other.who.pid is not None:
        return one.who.pid == other.who.pid
    if one.who.host and other.who.host:
        return one.who.host == other.who.host
    return None
