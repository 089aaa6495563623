"""Which rank a process is."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from lockstep.doctor.prefixes import Who


def ranks_of(said: Iterable[Mapping[str, str]], speakers: Iterable[Who], *, one_host: bool) -> dict[int, int]:
    """Rank by number of process.

    Args:
        said: Fields of lines that name both, or the process and its number on the host.
        speakers: Some with both; a number that several ranks have, on different hosts, tells nothing.
        one_host: The number on the host is the rank.
    """
    fields = [each for each in said if each.get("pid")]
    found = {int(each["pid"]): int(each["rank"]) for each in fields if each.get("rank")}
    spoken: dict[int, set[int]] = defaultdict(set)
    for who in speakers:
        if who.pid is not None and who.rank is not None:
            spoken[who.pid].add(who.rank)
    for pid, ranks in spoken.items():
        if len(ranks) == 1:
            found.setdefault(pid, min(ranks))
    for each in fields if one_host else ():
        if each.get("local"):
            found.setdefault(int(each["pid"]), int(each["local"]))
    return found
