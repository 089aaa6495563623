"""Proposes causes from values over time: durations of stages and collectives, and a loss that stays NaN."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lockstep.doctor.judge.collective_waits import CollectiveWait, class_of_activity, normalize_collective
from lockstep.doctor.judge.detectors.timeout_structure import find_waiting_ranks
from lockstep.doctor.judge.hypotheses import Candidate
from lockstep.doctor.judge.job_history import JobHistory, match_order
from lockstep.doctor.logs.parsed_log import RuleMatch
from lockstep.watch.diagnosis.verdict import Fact

_MIN_TIMEOUTS, _MAX_TIMEOUTS = 0.8, 2.0
"""Range for the duration of the late rank's stage, in multiples of the timeout."""
_NEAR_TIMEOUT = 0.9
"""Fraction of the timeout that the previous collective must have taken at least."""
_MIN_COLLECTIVES = 3
_MIN_ROWS = 4
"""Required number of rows without a number. Fewer prove nothing: trainers skip one or two such steps."""
_STAGE_CLASSES = ("checkpoint_timeout", "slow_rank_preprocess")


def trend_candidates(history: JobHistory) -> Iterator[Candidate]:
    """Yields candidates from values over time; those from durations need a timeout of known length."""
    yield from _persistent_nan(history)
    timeouts = [each for each in history.timeouts if each.timeout_ms]
    if not timeouts:
        return
    first = min((each.match for each in timeouts), key=match_order)
    limit = min(each.timeout_ms for each in timeouts if each.timeout_ms) / 1000
    lengths = [each for each in history.facts("length") if each.fields.get("seconds")]
    yield from _late_stage(history, lengths, first, limit)
    yield from _slower_collective(history, lengths, first, limit)


def _late_stage(
    history: JobHistory, lengths: Sequence[RuleMatch], first: RuleMatch, limit: float
) -> Iterator[Candidate]:
    """Yields a candidate if a rank that did not time out finished a long stage after the others had timed out."""
    waited = {each.origin.rank for each in history.timeouts}
    after = [
        each
        for each in lengths
        if match_order(each) > match_order(first)
        and history.rank(each) not in {*waited, None}
        and _MIN_TIMEOUTS * limit <= _seconds(each) <= _MAX_TIMEOUTS * limit
    ]
    if not after:
        return
    cls = class_of_activity(after[0].text)
    ranks = tuple(sorted({rank for each in after if (rank := history.rank(each)) is not None}))
    text = f"Rank {ranks[0]} finished after {_seconds(after[0]):.0f} s; the others had timed out after {limit:.0f} s."
    yield Candidate(
        cls if cls in _STAGE_CLASSES else "slow_collective_timeout",
        0.65,
        [],
        ranks,
        history.timeouts[0].operation,
        text,
        [_match_fact(each) for each in (after[0], first)],
    )


def _slower_collective(
    history: JobHistory, lengths: Sequence[RuleMatch], first: RuleMatch, limit: float
) -> Iterator[Candidate]:
    """Yields a candidate if all ranks timed out in a collective that had taken longer each time and nearly reached its
    timeout before."""
    waiting = find_waiting_ranks(history)
    waits: list[CollectiveWait] = waiting.timed_out
    if waiting.absent or len(waits) < len(history.ranks) or len({(each.operation, each.seq) for each in waits}) > 1:
        return
    operation = waits[0].operation
    before = [each for each in lengths if match_order(each) < match_order(first)]
    same = [each for each in before if normalize_collective(each.fields.get("op", "")) == operation]
    took = [_seconds(each) for each in same]
    rises = sum(later >= earlier for earlier, later in pairwise(took))
    if (
        len(took) < _MIN_COLLECTIVES
        or not _NEAR_TIMEOUT * limit <= took[-1] <= limit
        or rises < _NEAR_TIMEOUT * (len(took) - 1)
    ):
        return
    text = f"The {operation} took {took[0]:.0f} s at first and {took[-1]:.0f} s at last; its timeout is {limit:.0f} s."
    yield Candidate("slow_collective_timeout", 0.7, [], (), operation, text,
                    [_match_fact(each) for each in (same[0], same[-1], first)])  # fmt: skip


def _seconds(match: RuleMatch) -> float:
    return float(match.fields["seconds"])


def _match_fact(match: RuleMatch) -> Fact:
    return Fact(match.text, file=match.file, line=match.line)


def _persistent_nan(history: JobHistory) -> Iterator[Candidate]:
    """Yields a candidate if the loss is NaN in the last rows of a rank."""
    rows: dict[tuple[int, int | None], list[RuleMatch]] = defaultdict(list)
    for each in history.facts("no_number"):
        rows[each.source, each.origin.rank].append(each)
    persistent = [each for each in rows.values() if len(each) >= _MIN_ROWS and not history.continued_after(each[-1])]
    if persistent:
        first = min(persistent, key=lambda each: each[0].line)
        text = "The loss or the gradient norm became NaN and stayed NaN until the last row."
        yield Candidate("nan_or_inf", 0.5, [first[0], first[-1]], (), "", text, persists=True)
