"""Whether the controller of an agent is still there."""

import time
from dataclasses import dataclass

from lockstep.watch import procs

FIRST_S = 60.0
"""A controller on another host, whose coming nothing but its connection tells, attaches within this."""


@dataclass
class Controller:
    """The one whose death ends the run: on this host a process, elsewhere a connection."""

    pid: int | None
    """None where it is on another host."""
    start: int | None
    patience_s: float = 0.0
    """It is not gone before it has been missing for so long, even where its orphans have no grace: a connection may
    break and be made again."""
    gone_since: float | None = None

    @staticmethod
    def expected(pid: int | None) -> "Controller":
        """One that has not attached yet."""
        return Controller(pid, None if pid is None else procs.start_ticks(pid), FIRST_S if pid is None else 0.0)

    def __str__(self) -> str:
        return "the controller, on another host," if self.pid is None else f"the controller (pid {self.pid})"

    def missing_s(self, connected: bool) -> float | None:
        """For how long it has been gone, as of this look; None where it is there."""
        if connected if self.pid is None else procs.alive(self.pid, self.start):
            self.gone_since = None
            return None
        now = time.monotonic()
        if self.gone_since is None:
            self.gone_since = now
        return now - self.gone_since

    def grace_s(self, orphan_grace_s: float) -> float:
        """For how long it may be gone."""
        return max(orphan_grace_s, self.patience_s)
