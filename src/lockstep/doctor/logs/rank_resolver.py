"""Finds the rank that wrote a line from its label or pid."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from lockstep.doctor.logs.line_origin import LineOrigin


def ranks_by_label(origins: Iterable[LineOrigin]) -> Mapping[int, set[int]]:
    """For each label, the ranks that appear behind it on lines that name their rank."""
    found: dict[int, set[int]] = defaultdict(set)
    for origin in origins:
        if origin.label is not None and origin.rank is not None and not origin.guessed:
            found[origin.label].add(origin.rank)
    return found


def with_exit_rank(origin: LineOrigin, fact: str | None, fields: Mapping[str, str]) -> LineOrigin:
    """The origin of a launcher's report that a rank ended: that rank, if the line has only a label."""
    rank = fields.get("rank", "") if fact in ("exit", "first_failure") else ""
    return replace(origin, rank=int(rank), guessed=False) if origin.guessed and rank.isdigit() else origin


def label_resolver(known: Mapping[int, set[int]]) -> Callable[[LineOrigin], LineOrigin]:
    """Returns a function that replaces labels by ranks.

    A label is taken as the rank itself unless some line contradicts that; then as the rank that appears only behind
    this label. If neither applies, the label stays. A rank claimed by several labels does not count: each process
    that knows of no others calls itself rank 0.
    """
    claims: Counter[int | None] = Counter(rank for ranks in known.values() for rank in ranks)
    own = {label: {rank for rank in ranks if claims[rank] == 1} for label, ranks in known.items()}
    tasks = any(ranks - {label} for label, ranks in own.items())

    def resolve(origin: LineOrigin) -> LineOrigin:
        if origin.label is None:
            return origin
        rank = origin.rank
        if origin.guessed and tasks:
            ranks = own.get(origin.label, set())
            rank = min(ranks) if len(ranks) == 1 else None
        elif not tasks and claims[rank] > 1:
            rank = origin.label
        return replace(origin, rank=rank, label=None if rank is not None else origin.label, guessed=False)

    return resolve


def ranks_by_pid(
    reports: Iterable[Mapping[str, str]], origins: Iterable[LineOrigin], *, one_host: bool
) -> dict[int, int]:
    """Ranks by process number.

    Args:
        reports: Fields of lines that name pid and rank, or pid and local rank.
        origins: Origins, some with both pid and rank; a pid that several ranks share, on different hosts, is ignored.
        one_host: The local rank is the rank.
    """
    fields = [each for each in reports if each.get("pid")]
    found = {int(each["pid"]): int(each["rank"]) for each in fields if each.get("rank")}
    spoken: dict[int, set[int]] = defaultdict(set)
    for origin in origins:
        if origin.pid is not None and origin.rank is not None:
            spoken[origin.pid].add(origin.rank)
    for pid, ranks in spoken.items():
        if len(ranks) == 1:
            found.setdefault(pid, min(ranks))
    for each in fields if one_host else ():
        if each.get("local"):
            found.setdefault(int(each["pid"]), int(each["local"]))
    return found
