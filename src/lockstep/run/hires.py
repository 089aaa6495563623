"""Who starts and ends engines."""

from collections.abc import Sequence
from typing import Protocol

from lockstep.cluster.protocol import Worker


class Hires(Protocol):
    """Who starts and ends engines."""

    def engine(self, rank: int) -> Worker: ...

    def dismiss(self, workers: Sequence[Worker]) -> None: ...
