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
    """Whom a wait means that names neither a process nor a role: the processes of a role, all or any of them."""

    role: str
    needs: WaitCondition = WaitCondition.ALL


TICK_S = 0.5


@dataclass
class SupervisorSettings:
    run: str
    generation: int
    folder: Path
    """Where `supervisor.json`, its address, is written."""
    incidents: Path | None
    agents: list[ServiceAddress]
    controller: int | None = None
    patience: StallThresholds = field(default_factory=StallThresholds)
    on_stall: str = "report"
    """Of what is confirmed: report, dump (native stacks as well) or free (who waits for it in a collective is freed). A
    collective that breaks raises the verdict in any case."""
    aliases: dict[str, WaitAlias] = field(default_factory=dict)
    every_s: float = TICK_S
    facts: dict[str, Any] = field(default_factory=dict)
    """What an incident says of the run: its config, versions, command."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: whichever is free."""

    @staticmethod
    def read(text: str) -> "SupervisorSettings":
        """From JSON, as `dumped` writes it."""
        told = json.loads(text)
        told["folder"] = Path(told["folder"])
        told["incidents"] = None if told["incidents"] is None else Path(told["incidents"])
        told["agents"] = [ServiceAddress(**each) for each in told["agents"]]
        told["patience"] = StallThresholds(**told["patience"])
        told["aliases"] = {
            name: WaitAlias(each["role"], WaitCondition(each["needs"]))
            for name, each in told.get("aliases", {}).items()
        }
        return SupervisorSettings(**told)

    def dumped(self) -> str:
        told = asdict(self)
        told["folder"] = str(self.folder)
        told["incidents"] = None if self.incidents is None else str(self.incidents)
        return json.dumps(told)
