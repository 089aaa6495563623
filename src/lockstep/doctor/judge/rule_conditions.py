"""Evaluates the conditions of rules (`needs` and `unless`)."""

from collections.abc import Iterable

from lockstep.doctor.judge.job_history import JobHistory, match_order
from lockstep.doctor.knowledge.knowledge_schema import RuleCondition
from lockstep.doctor.logs.parsed_log import RuleMatch


class MatchIndex:
    """The matches of the last attempt, indexed for conditions."""

    def __init__(self, history: JobHistory) -> None:
        self.history = history
        self._by_id: dict[str, list[RuleMatch]] = {}
        self._by_class: dict[str, list[RuleMatch]] = {}
        for each in history.matches:
            self._by_id.setdefault(each.rule.id, []).append(each)
            if each.rule.cls and each.rule.signature.role in ("cause", "sign"):
                self._by_class.setdefault(each.rule.cls, []).append(each)

    def allows(self, match: RuleMatch) -> bool:
        """Whether all conditions that the rule of a match needs are met, and none that excludes it."""
        signature = match.rule.signature
        return all(self.holds(each, match) for each in signature.needs) and not any(
            self.holds(each, match) for each in signature.unless
        )

    def holds(self, condition: RuleCondition | str, match: RuleMatch) -> bool:
        """Whether a condition of the rule of a match is met."""
        if isinstance(condition, str):
            return any(each is not match for each in self._by_id.get(condition, ()))
        if condition.any:
            return any(self.holds(each, match) for each in condition.any)
        if condition.story is not None:
            return condition.story in self.history.traits
        return any(_relation_holds(condition, each, match) for each in self._matches_of(condition) if each is not match)

    def _matches_of(self, condition: RuleCondition) -> Iterable[RuleMatch]:
        """Returns the matches of the rule, class or fact that a condition names."""
        if condition.id is not None:
            return self._by_id.get(condition.id, ())
        if condition.cls is not None:
            return self._by_class.get(condition.cls, ())
        return self.history.facts(condition.fact or "")


def _relation_holds(condition: RuleCondition, other: RuleMatch, match: RuleMatch) -> bool:
    """Whether another match has the required origin and distance."""
    if condition.who != "any":
        same = same_origin(other, match)
        if same is None or same != (condition.who == "same"):
            return False
    if condition.when == "before" and _precedes(match, other):
        return False
    if condition.when == "after" and _precedes(other, match):
        return False
    return condition.within_s is None or (
        other.when is not None and match.when is not None and abs(other.when - match.when) <= condition.within_s
    )


def _precedes(one: RuleMatch, other: RuleMatch) -> bool:
    """Whether one match precedes another: by time, or by line within a file. False if the order is unknown."""
    if one.when is None or other.when is None:
        return one.source == other.source and one.line < other.line
    return match_order(one) < match_order(other)


def same_origin(one: RuleMatch, other: RuleMatch) -> bool | None:
    """Whether two matches are from the same rank, process or host; None if an origin is unknown in one file."""
    if one.origin.rank is not None and other.origin.rank is not None:
        return one.origin.rank == other.origin.rank
    if one.origin.pid is not None and other.origin.pid is not None:
        return one.origin.pid == other.origin.pid
    if one.origin.host and other.origin.host:
        return one.origin.host == other.origin.host
    return None if one.source == other.source else False
