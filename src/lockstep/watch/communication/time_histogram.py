"""A histogram of durations in logarithmic buckets, which can be merged with others and added to without end.

Bucket i counts durations from `GROWTH**i` to `GROWTH**(i + 1)` nanoseconds (as in DDSketch, Masson et al. 2019), so a
quantile is exact to `RELATIVE_ERROR`, however many durations were added, in at most some 400 numbers.
"""

import math
from collections.abc import Mapping

GROWTH = 2 ** (1 / 8)
RELATIVE_ERROR = GROWTH**0.5 - 1
"""Of a quantile: 4.4%."""
_PER_LOG = 1 / math.log(GROWTH)


class TimeHistogram:
    """Counts durations.

    Args:
        counts: by number of bucket, as `to_json` returns them.
    """

    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.counts: dict[int, int] = {int(bucket): int(count) for bucket, count in dict(counts or {}).items()}

    def add(self, ns: int, times: int = 1) -> None:
        """Adds a duration; less than a nanosecond counts as one."""
        bucket = int(math.log(ns) * _PER_LOG) if ns > 1 else 0
        self.counts[bucket] = self.counts.get(bucket, 0) + times

    def merge(self, other: "TimeHistogram") -> None:
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> float:
        """Returns the duration in nanoseconds that this share of the durations does not exceed, to `RELATIVE_ERROR`; 0
        without durations."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return float(GROWTH ** (bucket + 0.5))
        return 0.0

    def to_json(self) -> dict[str, int]:
        return {str(bucket): count for bucket, count in sorted(self.counts.items())}
