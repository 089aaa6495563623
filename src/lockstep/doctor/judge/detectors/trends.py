"""Candidates from how durations develop.

A stage that finished after the others had timed out was slow; a collective that takes longer and longer times out
at last.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from lockstep.doctor.judge.collective_waits import CollectiveWait, class_of_activity, normalize_collective
from lockstep.doctor.judge.detectors.timeout_structure import find_waiting_ranks
from lockstep.doctor.judge.job_history import JobHistory, match_order
from lockstep.doctor.judge.scoring import Candidate
from lockstep.doctor.logs.parsed_log import RuleMatch
from lockstep.watch.diagnosis.verdict import Fact

_MIN_TIMEOUTS, _MAX_TIMEOUTS = 0.8, 2.0
"""How long the late rank's stage was, in time-outs."""
_NEAR_TIMEOUT = 0.9
"""How near to the time-out, as a part of it, the last collective before it came."""
_MIN_COLLECTIVES = 3
_STAGE_CLASSES = ("checkpoint_timeout", "slow_rank_preprocess")


def candidates(history: JobHistory) -> Iterator[Candidate]:
    """Nothing without a time-out whose length is known."""
    said = [each for each in history.timeouts if each.timeout_ms]
    if not said:
        return
    first = min((each.match for each in said), key=match_order)
    limit = min(each.timeout_ms for each in said if each.timeout_ms) / 1000
    lengths = [each for each in history.facts("length") if each.fields.get("seconds")]
    yield from _late_stage(history, lengths, first, limit)
    yield from _climbing_collective(history, lengths, first, limit)


def _late_stage(
    history: JobHistory, lengths: Sequence[RuleMatch], first: RuleMatch, limit: float
) -> Iterator[Candidate]:
    """One who is not among those that timed out came to the end of a long stage after they had given up."""
    waited = {each.origin.rank for each in history.timeouts}
    after = [each for each in lengths if match_order(each) > match_order(first) and history.rank(each) not in {*waited, None}
             and _MIN_TIMEOUTS * limit <= _seconds(each) <= _MAX_TIMEOUTS * limit]  # fmt: skip
    if not after:
        return
    cls = class_of_activity(after[0].text)
    ranks = tuple(sorted({rank for each in after if (rank := history.rank(each)) is not None}))
    text = f"Rank {ranks[0]} was done after {_seconds(after[0]):.0f} s, the others had given up after {limit:.0f} s."
    yield Candidate(cls if cls in _STAGE_CLASSES else "slow_collective_timeout", 0.65, [], ranks, history.timeouts[0].operation,
                    text, [_match_fact(each) for each in (after[0], first)])  # fmt: skip


def _climbing_collective(
    history: JobHistory, lengths: Sequence[RuleMatch], first: RuleMatch, limit: float
) -> Iterator[Candidate]:
    """All ranks are in the collective which took nearly as long as its time-out before, and longer each time."""
    seen = find_waiting_ranks(history)
    waits: list[CollectiveWait] = seen.timed_out
    if seen.absent or len(waits) < len(history.ranks) or len({(each.operation, each.seq) for each in waits}) > 1:
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
    text = f"The {operation} took {took[0]:.0f} s at first and {took[-1]:.0f} s at last, of {limit:.0f} s that it may."
    yield Candidate("slow_collective_timeout", 0.7, [], (), operation, text,
                    [_match_fact(each) for each in (same[0], same[-1], first)])  # fmt: skip


def _seconds(seen: RuleMatch) -> float:
    return float(seen.fields["seconds"])


def _match_fact(seen: RuleMatch) -> Fact:
    return Fact(seen.text, file=seen.file, line=seen.line)
