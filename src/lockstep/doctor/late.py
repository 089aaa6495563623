"""Candidates from how long stages took: one that was done soon after the others' time-out was slow, and a collective
that takes longer and longer meets its time-out at last."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from lockstep.doctor.judge import Candidate
from lockstep.doctor.sightings import Sighting
from lockstep.doctor.story import Story, order
from lockstep.doctor.structure import scene
from lockstep.doctor.waits import Wait, doing, plain
from lockstep.watch.verdict import Fact

_LEAST, _MOST = 0.8, 2.0
"""How long the late rank's stage was, in time-outs."""
_NEAR = 0.9
"""How near to the time-out, as a part of it, the last collective before it came."""
_SEVERAL = 3
_STAGES = ("checkpoint_timeout", "slow_rank_preprocess")


def candidates(story: Story) -> Iterator[Candidate]:
    """Nothing without a time-out whose length is known."""
    said = [each for each in story.timeouts if each.timeout_ms]
    if not said:
        return
    first = min((each.sighting for each in said), key=order)
    limit = min(each.timeout_ms for each in said if each.timeout_ms) / 1000
    lengths = [each for each in story.facts("length") if each.fields.get("seconds")]
    yield from _late(story, lengths, first, limit)
    yield from _climbing(story, lengths, first, limit)


def _late(story: Story, lengths: Sequence[Sighting], first: Sighting, limit: float) -> Iterator[Candidate]:
    """One who is not among those that timed out came to the end of a long stage after they had given up."""
    waited = {each.who.rank for each in story.timeouts}
    after = [each for each in lengths if order(each) > order(first) and story.rank(each) not in {*waited, None}
             and _LEAST * limit <= _seconds(each) <= _MOST * limit]  # fmt: skip
    if not after:
        return
    cls = doing(after[0].text)
    ranks = tuple(sorted({rank for each in after if (rank := story.rank(each)) is not None}))
    text = f"Rank {ranks[0]} was done after {_seconds(after[0]):.0f} s, the others had given up after {limit:.0f} s."
    yield Candidate(cls if cls in _STAGES else "slow_collective_timeout", 0.65, [], ranks, story.timeouts[0].operation,
                    text, [_fact(each) for each in (after[0], first)])  # fmt: skip


def _climbing(story: Story, lengths: Sequence[Sighting], first: Sighting, limit: float) -> Iterator[Candidate]:
    """All ranks are in the collective which took nearly as long as its time-out before, and longer each time."""
    seen = scene(story)
    waits: list[Wait] = seen.timed_out
    if seen.absent or len(waits) < len(story.ranks) or len({(each.operation, each.seq) for each in waits}) > 1:
        return
    operation = waits[0].operation
    before = [each for each in lengths if order(each) < order(first)]
    same = [each for each in before if plain(each.fields.get("op", "")) == operation]
    took = [_seconds(each) for each in same]
    rises = sum(later >= earlier for earlier, later in pairwise(took))
    if len(took) < _SEVERAL or not _NEAR * limit <= took[-1] <= limit or rises < _NEAR * (len(took) - 1):
        return
    text = f"The {operation} took {took[0]:.0f} s at first and {took[-1]:.0f} s at last, of {limit:.0f} s that it may."
    yield Candidate("slow_collective_timeout", 0.7, [], (), operation, text,
                    [_fact(each) for each in (same[0], same[-1], first)])  # fmt: skip


def _seconds(seen: Sighting) -> float:
    return float(seen.fields["seconds"])


def _fact(seen: Sighting) -> Fact:
    return Fact(seen.text, file=seen.file, line=seen.line)
