"""Bounds the time at which dumps were taken, which no dump contains."""

import math
from collections.abc import Sequence

from lockstep.watch.dumps.dump_files import DEFAULT_TIMEOUT_S, RankDump

_WRITING_S = 120.0
"""Ranks write their dumps so long after the first time-out at the latest."""


def bound_times(dumps: Sequence[RankDump]) -> dict[int, float]:
    """When each rank's dump was taken, in Unix seconds: when its file was written, but not before its newest entry, and
    no later than the first time-out, after which all ranks dump. A file may have been copied long after that."""
    first_timeout = min((_timeout_at(dump) for dump in dumps), default=math.inf)
    newest = max((dump.trace.newest for dump in dumps if not math.isnan(dump.trace.newest)), default=math.nan)
    if math.isinf(first_timeout) and not math.isnan(newest):
        first_timeout = newest + DEFAULT_TIMEOUT_S
    latest = first_timeout if math.isnan(newest) else max(first_timeout, newest)
    return {dump.rank: latest if dump.taken_at > latest + _WRITING_S else dump.taken_at for dump in dumps}


def _timeout_at(dump: RankDump) -> float:
    """When the oldest unfinished operation of a rank times out; infinite if there is none."""
    since = min((each.since for each in dump.trace.unfinished if not math.isnan(each.since)), default=math.inf)
    timeout = dump.trace.timeout_s
    return since + (DEFAULT_TIMEOUT_S if math.isnan(timeout) else timeout)
