"""Candidates that no single line shows: who is silent, who is behind, who called something else."""

from collections.abc import Iterator

from lockstep.doctor.judge import Candidate
from lockstep.doctor.story import Story


def candidates(story: Story) -> Iterator[Candidate]:
    """What the structure of the job argues for."""
    yield from _mismatched(story)


def _mismatched(story: Story) -> Iterator[Candidate]:
    """The ranks called different things under one number: the same operation with other shapes is uneven data."""
    said = story.facts("mismatch")
    if not said:
        return
    operations = {each.fields.get("op", "") for each in said}
    ranks = sorted({int(each.fields["rank"]) for each in said if each.fields.get("rank")})
    operation = said[0].fields.get("op", "").lower()
    if len(operations) == 1:
        yield Candidate("uneven_data", 0.7, list(said), tuple(ranks), operation)
    else:
        yield Candidate("rank_divergent_branch", 0.8, list(said), tuple(ranks), operation)
