"""Which controller a run has: the latest generation, as its workers find it and all before it learn of it.

One small file in the run's shared memory. A controller that takes a run over puts its own in place of its
predecessor's; from then on the predecessor is superseded, should it still live (stopped, say, and continued).
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.watch.errors import Carried
from lockstep.watch.folders import locked, make_run_dir, run_dir, write_whole

FILE = "leader.json"


class Superseded(Carried, RuntimeError):
    """A later generation has the run."""

    error_code = "superseded"

    def __init__(self, run: str, generation: int, current: int) -> None:
        super().__init__(f"generation {generation} of {run} is superseded: generation {current} has taken it over")
        self.run, self.generation, self.current = run, generation, current


@dataclass(frozen=True, slots=True)
class Leader:
    """A controller: where its workers dial, and for how long they outlive it."""

    generation: int
    host: str
    port: int
    pid: int | None
    """On this host; None where the controller is elsewhere."""
    start_ticks: int | None
    orphan_grace_s: float
    reconnect_s: float = 30.0
    """A controller that lives (or is elsewhere) and does not take a connection back for this long is gone too."""

    def publish(self, run: str) -> None:
        """Makes it the run's. Raises Superseded where a later one is."""
        path = make_run_dir(run) / FILE
        descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with locked(descriptor):
                current = Leader.read(run)
                if current is not None and current.generation > self.generation:
                    raise Superseded(run, self.generation, current.generation)
                write_whole(path, json.dumps(asdict(self)).encode())
        finally:
            os.close(descriptor)

    @staticmethod
    def read(run: str) -> "Leader | None":
        """The run's newest; None where there was none, or nothing of the run is left."""
        try:
            return Leader(**json.loads(_path(run).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def superseded(run: str, generation: int) -> bool:
    """Whether a later generation has the run."""
    leader = Leader.read(run)
    return leader is not None and leader.generation > generation


def _path(run: str) -> Path:
    return run_dir(run) / FILE
