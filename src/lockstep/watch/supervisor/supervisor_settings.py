"""The settings a supervisor is started with."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.diagnosis.evidence_types import WaitCondition
from lockstep.watch.diagnosis.verdict import StallThresholds


@dataclass(frozen=True, slots=True)
class WaitAlias:
    """Resolves a name in waits that is neither a process nor a role: it means all or any processes of `role`."""

    role: str
    needs: WaitCondition = WaitCondition.ALL


TICK_S = 0.5


@dataclass
class SupervisorSettings:
    run: str
    generation: int
    folder: Path
    """The folder of `supervisor.json`, which holds the supervisor's address."""
    incidents: Path | None
    agents: list[ServiceAddress]
    controller: int | None = None
    patience: StallThresholds = field(default_factory=StallThresholds)
    on_stall: str = "report"
    """On a confirmed stall: report, dump (native stacks as well) or free (collectives in which processes wait
    are aborted). A collective that is aborted raises the verdict in any case."""
    aliases: dict[str, WaitAlias] = field(default_factory=dict)
    every_s: float = TICK_S
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the run for incidents: its config, versions, command."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""

    @staticmethod
    def read(text: str) -> "SupervisorSettings":
        """Reads the settings from JSON, as `dumped` writes them."""
        values = json.loads(text)
        values["folder"] = Path(values["folder"])
        values["incidents"] = None if values["incidents"] is None else Path(values["incidents"])
        values["agents"] = [ServiceAddress(**each) for each in values["agents"]]
        values["patience"] = StallThresholds(**values["patience"])
        values["aliases"] = {
            name: WaitAlias(each["role"], WaitCondition(each["needs"]))
            for name, each in values.get("aliases", {}).items()
        }
        return SupervisorSettings(**values)

    def dumped(self) -> str:
        values = asdict(self)
        values["folder"] = str(self.folder)
        values["incidents"] = None if self.incidents is None else str(self.incidents)
        return json.dumps(values)
