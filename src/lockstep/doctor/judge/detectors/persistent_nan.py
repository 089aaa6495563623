"""Candidates for a loss or gradient norm that became NaN and stayed so to the end."""

from collections import defaultdict
from collections.abc import Iterator

from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.judge.scoring import Candidate
from lockstep.doctor.logs.parsed_log import RuleMatch

_MIN_ROWS = 4
"""So many rows in which a loss is no number: one or two of them trainers skip."""


def candidates(history: JobHistory) -> Iterator[Candidate]:
    """A loss that is no number any more when the job ends, or now."""
    rows: dict[tuple[int, int | None], list[RuleMatch]] = defaultdict(list)
    for each in history.facts("no_number"):
        rows[each.source, each.origin.rank].append(each)
    lasting = [each for each in rows.values() if len(each) >= _MIN_ROWS and not history.survived(each[-1])]
    if lasting:
        first = min(lasting, key=lambda each: each[0].line)
        text = "The loss or the norm of the gradients became NaN and stayed so until the last row."
        yield Candidate("nan_or_inf", 0.5, [first[0], first[-1]], (), "", text, persists=True)
