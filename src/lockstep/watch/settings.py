"""What a supervisor is told when it is started."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.watch.agent_client import Address
from lockstep.watch.assemble import Alias
from lockstep.watch.facts import Needs
from lockstep.watch.verdict import Patience

TICK_S = 0.5


@dataclass
class Settings:
    run: str
    generation: int
    folder: Path
    """Where `supervisor.json`, its address, is written."""
    incidents: Path | None
    agents: list[Address]
    controller: int | None = None
    patience: Patience = field(default_factory=Patience)
    on_stall: str = "report"
    """Of what is confirmed: report, dump (native stacks as well) or free (who waits for it in a collective is freed). A
    collective that breaks raises the verdict in any case."""
    aliases: dict[str, Alias] = field(default_factory=dict)
    every_s: float = TICK_S
    facts: dict[str, Any] = field(default_factory=dict)
    """What an incident says of the run: its config, versions, command."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: whichever is free."""

    @staticmethod
    def read(text: str) -> "Settings":
        """From JSON, as `dumped` writes it."""
        told = json.loads(text)
        told["folder"] = Path(told["folder"])
        told["incidents"] = None if told["incidents"] is None else Path(told["incidents"])
        told["agents"] = [Address(**each) for each in told["agents"]]
        told["patience"] = Patience(**told["patience"])
        told["aliases"] = {
            name: Alias(each["role"], Needs(each["needs"])) for name, each in told.get("aliases", {}).items()
        }
        return Settings(**told)

    def dumped(self) -> str:
        told = asdict(self)
        told["folder"] = str(self.folder)
        told["incidents"] = None if self.incidents is None else str(self.incidents)
        return json.dumps(told)
