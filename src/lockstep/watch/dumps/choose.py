"""Which of the dumps in a folder are those of one moment of one run: one for each rank."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.watch.dumps.files import Found
from lockstep.watch.dumps.pool import Bad
from lockstep.watch.dumps.trace import Trace

_NAMED = 8
"""So many ranks are named in a sentence, then a number."""


@dataclass(frozen=True, slots=True)
class Dump:
    """A rank's dump."""

    rank: int
    file: Found
    trace: Trace

    @property
    def taken_at(self) -> float:
        """Unix seconds: when the file was written; what is in it cannot be newer."""
        newest = self.trace.newest
        return self.file.modified if math.isnan(newest) else max(newest, self.file.modified)


def choose(results: Iterable[tuple[Found, Trace | Bad]]) -> tuple[list[Dump], list[str]]:
    """One dump for each rank, of the newest run, in the order of their ranks; and what was left out and why."""
    gaps: list[str] = []
    by_rank: dict[int, list[Dump]] = defaultdict(list)
    versions: dict[str, list[int]] = defaultdict(list)
    for file, trace in sorted(results, key=lambda result: str(result[0].path)):
        if isinstance(trace, Bad):
            whose = "" if file.rank is None else f" (rank {file.rank})"
            gaps.append(f"{file.path.name}{whose} {trace.why}")
        elif file.rank is None:
            gaps.append(
                f"{file.path.name}: its name does not say of which rank it is; --ranks says where the rank stands"
            )
        else:
            by_rank[file.rank].append(Dump(file.rank, file, trace))
            gaps += [f"{file.path.name} (rank {file.rank}): {note}" for note in trace.notes]
    chosen = []
    for rank, dumps in sorted(by_rank.items()):
        best = max(dumps, key=_worth)
        chosen.append(best)
        versions[best.trace.version or "unknown"].append(rank)
        if len(dumps) > 1:
            gaps.append(f"rank {rank} has {len(dumps)} dumps: read {best.file.path.name}, the newest and fullest")
    if len(versions) > 1:
        gaps.append("dumps of several versions: " + ", ".join(f"{v} of {spoken(r)}" for v, r in versions.items()))
    return _newest_run(chosen, gaps), gaps


def spoken(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, `ranks 0, 1, ... (512 in all)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= _NAMED:
        return "ranks " + ", ".join(map(str, ranks))
    return "ranks " + ", ".join(map(str, ranks[: _NAMED - 2])) + f", ... ({len(ranks)} in all)"


def _worth(dump: Dump) -> tuple[float, bool, int, bool, float]:
    """A newer one is better; of equally new ones that with more in it."""
    trace = dump.trace
    newest = -math.inf if math.isnan(trace.newest) else trace.newest
    return newest, trace.whole, trace.entries, len(trace.sites) > 1, dump.file.modified


def _newest_run(dumps: list[Dump], gaps: list[str]) -> list[Dump]:
    """Without the dumps of processes that recorded their last before the newest run began."""
    began = max((dump.trace.began for dump in dumps if not math.isnan(dump.trace.began)), default=math.nan)
    if math.isnan(began):
        return dumps
    kept = []
    for dump in dumps:
        if dump.trace.newest < began:
            ago = began - dump.trace.newest
            gaps.append(f"{dump.file.path.name} (rank {dump.rank}) is of an earlier run: its last entry is {ago:.0f} s "
                        "older than the first of the newest run; left out")  # fmt: skip
        else:
            kept.append(dump)
    return kept
