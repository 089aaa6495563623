"""Whether the numbers that a launcher puts before lines are ranks: srun and mpirun number tasks, each of which may
start processes of its own, and torchrun numbers the processes of a host."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from lockstep.doctor.prefixes import Who


def pairs(speakers: Iterable[Who]) -> Mapping[int, set[int]]:
    """By label, the ranks that say behind it which rank they are."""
    found: dict[int, set[int]] = defaultdict(set)
    for who in speakers:
        if who.label is not None and who.rank is not None and not who.guessed:
            found[who.label].add(who.rank)
    return found


def told(who: Who, fact: str | None, fields: Mapping[str, str]) -> Who:
    """Who speaks; where a launcher behind a label reports the end of a rank, that rank, which it had started."""
    rank = fields.get("rank", "") if fact in ("exit", "first_failure") else ""
    return replace(who, rank=int(rank), guessed=False) if who.guessed and rank.isdigit() else who


def settled(known: Mapping[int, set[int]]) -> Callable[[Who], Who]:
    """Takes labels for ranks unless some rank says otherwise; then for the rank that alone has the label. Whoever has
    no rank keeps the label.

    What several labels take for their rank is none: each process that knows of no others calls itself rank 0.
    """
    claims: Counter[int | None] = Counter(rank for ranks in known.values() for rank in ranks)
    own = {label: {rank for rank in ranks if claims[rank] == 1} for label, ranks in known.items()}
    tasks = any(ranks - {label} for label, ranks in own.items())

    def settle(who: Who) -> Who:
        if who.label is None:
            return who
        rank = who.rank
        if who.guessed and tasks:
            ranks = own.get(who.label, set())
            rank = min(ranks) if len(ranks) == 1 else None
        elif not tasks and claims[rank] > 1:
            rank = who.label
        return replace(who, rank=rank, label=None if rank is not None else who.label, guessed=False)

    return settle
