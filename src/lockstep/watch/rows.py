"""Rows of a verdict as people read it, a name and a text each, of whatever it was made from."""

from collections.abc import Iterable, Iterator

from lockstep.watch.verdict import Verdict


def beside(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The name stands beside the first of the texts only."""
    for at, text in enumerate(texts):
        yield name if at == 0 else "", text


def advice(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """What else it may have been, what helps, and what would tell more."""
    yield from beside("or else", [f"{each.what} ({each.confidence:.2f})" for each in verdict.alternatives])
    yield from beside("what helps", [verdict.fix] if verdict.fix else [])
    yield from beside("to know more", verdict.collect)
