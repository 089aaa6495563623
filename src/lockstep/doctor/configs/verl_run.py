"""verl's settings as a run sees them."""

import re
from dataclasses import dataclass
from typing import Any

from lockstep.doctor.configs.settings import NOWHERE, Place, Setting, Settings

A, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


_SELECT = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,([^}]*))?\}")


@dataclass(slots=True)
class Run:
    """Settings of one version, interpolations followed."""

    settings: Settings
    version: str
    engine: str
    """dp (FSDP), megatron, veomni, torchtitan."""
    at_start: Place = NOWHERE

    def get(self, name: str, depth: int = 0) -> Any:
        """The value, or what it is taken from."""
        value = self.settings.get(name)
        match = _SELECT.fullmatch(value) if isinstance(value, str) else None
        if match is None or depth > 8:
            return value
        taken = self.get(match[1], depth + 1)
        return taken if taken is not None else match[2]

    def _plain(self, name: str) -> Settings:
        return Settings({name: Setting(name, self.get(name), NOWHERE)})

    def whole(self, name: str) -> int | None:
        """See `Settings.whole`."""
        return self._plain(name).whole(name)

    def number(self, name: str) -> float | None:
        """See `Settings.number`."""
        return self._plain(name).number(name)

    def on(self, name: str) -> bool:
        """Of a boolean."""
        return self._plain(name).flag(name) is True

    def text(self, name: str) -> str | None:
        """See `Settings.text`."""
        return self._plain(name).text(name)

    def set(self, name: str) -> bool:
        """Whether it is not null; what nobody knows counts as set."""
        return (name in self.settings and self.settings.get(name) is not None) or self.get(name) not in (None, "null")

    def at(self, *names: str) -> Place:
        """Where the first of them is set, else the program."""
        place = self.settings.place(*names)
        return place if place.file else self.at_start

    @property
    def gpus(self) -> int | None:
        """Of the trainer."""
        nodes, each = self.whole("trainer.nnodes"), self.whole("trainer.n_gpus_per_node")
        return nodes * each if nodes and each else None
