"""What the run's folder says of what a run has on a Ray cluster."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.cluster.bundles import Wanted, shortened
from lockstep.config.placement import Placement
from lockstep.watch.folders import write_whole

RECORD = "ray.json"
"""Of the run's folder: where a later controller looks for what is left."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run was placed for."""

    processes: dict[str, list[float]] = field(default_factory=dict)
    """CPUs and GPUs by name."""
    placement: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(wanted: Sequence[Wanted], placement: Placement) -> "Needs":
        return Needs({each.name: [each.cpus, each.gpus] for each in wanted}, placement.model_dump(mode="json"))

    def difference(self, earlier: "Needs") -> str | None:
        """For people; None where the places of one do for the other."""
        mine, before = self.processes, earlier.processes
        for what, names in (
            ("has also", [name for name in mine if name not in before]),
            ("has no more", [name for name in before if name not in mine]),
            ("has other CPUs or GPUs for", [name for name in mine if name in before and mine[name] != before[name]]),
        ):
            if names:
                return f"the run {what} {shortened(names)}"
        return None if self.placement == earlier.placement else "its placement is another one"


@dataclass(frozen=True, slots=True)
class Record:
    """Which generation was the last to have the run, under which name it is on the cluster, and for what."""

    generation: int = 0
    run: str | None = None
    """None where nothing is left there."""
    needs: Needs = Needs()

    def write(self, affairs: Path) -> None:
        affairs.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(affairs / RECORD, json.dumps(asdict(self)).encode())

    @staticmethod
    def read(affairs: Path) -> "Record":
        """Of generation 0 where nobody wrote one."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            said = json.loads((affairs / RECORD).read_text())
            return Record(said["generation"], said["run"], Needs(**said["needs"]))
        return Record()
