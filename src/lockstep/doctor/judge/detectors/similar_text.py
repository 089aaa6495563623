"""Proposes the failure class whose texts in the knowledge base are most similar to the job's last errors.

The proposal counts only if no rule for the exact wording of a cause matched.
"""

from collections.abc import Iterator, Sequence

from lockstep.doctor.judge.hypotheses import Candidate
from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.judge.rule_conditions import MatchIndex
from lockstep.doctor.knowledge.knowledge_base import KnowledgeBase
from lockstep.doctor.logs import line_origin
from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.stack_traces import is_primary, is_secondary, names_trouble
from lockstep.doctor.logs.timestamps import TimestampParser
from lockstep.watch.diagnosis.verdict import Fact

MIN_SIMILARITY = 0.39
"""With less, texts share only common words."""
MIN_LEAD = 1.3
"""The most similar text must be this many times as similar as that of any other class."""
WEIGHT = 0.47
"""A little more than that of an exception without a known cause."""
_UNEXPLAINED = ("rank_exception_masked", "unknown")
_MAX_LINES = 12


def similar_candidates(history: JobHistory, rules: KnowledgeBase, known: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yields the class of which a text is most similar to a decisive line.

    Args:
        known: The candidates from the structure of the job, of which only an exception without a known cause leaves
            room for another explanation.
    """
    if history.ended_well or any(each.cls not in _UNEXPLAINED for each in known) or _has_exact_cause(history):
        return
    best: tuple[float, str, LineOrigin, Fact] | None = None
    for origin, text, fact in decisive_lines(history):
        found = rules.lexical_index.similar_classes(text)
        if not found or found[0].similarity < MIN_SIMILARITY:
            continue
        first = found[0]
        if len(found) > 1 and first.similarity < MIN_LEAD * found[1].similarity:
            continue
        if best is None or first.similarity > best[0]:
            best = first.similarity, first.cls, origin, fact
    if best is not None:
        _, cls, origin, fact = best
        yield Candidate(cls, WEIGHT, [], None if origin.rank is None else (origin.rank,), facts=[fact])


def _has_exact_cause(history: JobHistory) -> bool:
    """Whether a rule with the exact wording of a cause matched, and the job did not continue after it."""
    index = MatchIndex(history)
    return any(
        each.rule.cls and each.rule.tier == "exact" and each.rule.signature.role == "cause"
        and not history.continued_after(each) and index.allows(each)
        for each in history.matches
    )  # fmt: skip


def decisive_lines(history: JobHistory) -> Sequence[tuple[LineOrigin, str, Fact]]:
    """Returns the exceptions that are failures themselves; if there are none, the last lines that name trouble and
    are no known consequence. Each has its text after the prefixes."""
    found = [
        (origin, f"{each.type}: {each.message}".split("\n")[0], Fact(each.text, file=log.name, line=each.number))
        for origin, _, each, log in history.tracebacks if is_primary(each)
    ]  # fmt: skip
    consequences = {each.place for each in history.matches if each.rule.signature.role != "cause"}
    for log in history.logs if not found else ():
        after = max((counter.line for counter in log.counters), default=0)
        for each in (each for lines in log.tail_lines.values() for each in lines[-_MAX_LINES:]):
            if each.line > after and (log.source, each.line) not in consequences and names_trouble(each.text):
                prefix = line_origin.parse_prefixes(each.text, TimestampParser())
                if not is_secondary(each.text):
                    found.append(
                        (prefix.origin, each.text[prefix.at :], Fact(each.text, file=log.name, line=each.line))
                    )
    return found[:_MAX_LINES]
