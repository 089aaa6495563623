"""What a worker is to be: noted with the agent by the controller that starts it, read from a file by the worker, and by
a later controller that finds it alive."""

import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lockstep.cluster.protocol import WorkerSpec

CHARGE = "LOCKSTEP_WORKER"
"""Variable that names the file."""

_SESSION = ("_", "SHLVL", "PWD", "OLDPWD", "TERM", "COLUMNS", "LINES", "WINDOWID", "TMUX", "TMUX_PANE", "STY", "WINDOW",
            "DISPLAY", "XAUTHORITY", "PS1", "LS_COLORS", "HISTFILE")  # fmt: skip
_SESSION_PREFIXES = ("SSH_", "XDG_", "DBUS_", "TERM_", "VSCODE_", "VTE_", "GPG_")
"""Variables of the terminal that a run was started from: it may be resumed from another one."""


class Charge(msgspec.Struct, frozen=True):
    """A worker's name, service and run."""

    name: str
    role: str
    rank: int
    service: str
    arguments: dict[str, Any]
    run: str
    generation: int
    """That started it."""
    fitness: str = ""
    """Of its spec, see `fitness`; empty where no other controller may have it."""

    def text(self) -> str:
        """What the worker finds in its file. Raises TypeError for arguments that are not JSON-like."""
        try:
            return json.dumps(msgspec.to_builtins(self), allow_nan=True)
        except (TypeError, ValueError) as error:
            raise TypeError(f"arguments of worker {self.name!r} are not JSON-like: {error}") from None

    @staticmethod
    def read(path: Path) -> "Charge":
        """Raises OSError, ValueError (msgspec's included)."""
        return msgspec.json.decode(path.read_bytes(), type=Charge)

    @staticmethod
    def of(text: str | None) -> "Charge | None":
        """What a worker was started as; None where nothing readable says so."""
        try:
            return None if text is None else msgspec.json.decode(text, type=Charge)
        except ValueError:
            return None

    @property
    def spec(self) -> WorkerSpec:
        """What was asked for, but for its environment and preload, which are in `fitness` only."""
        return WorkerSpec(self.name, self.role, self.rank, self.service, self.arguments, adoptable=bool(self.fitness))


def fitness(spec: WorkerSpec, environment: Mapping[str, str], token: str, python: str, folder: Path) -> str:
    """The same for two specs that the same process would do for: equal place, service and arguments, the same
    interpreter, folder and environment, whatever the name. Keyed, as an environment has secrets."""
    own = {
        name: value
        for name, value in environment.items()
        if name not in _SESSION and not name.startswith(_SESSION_PREFIXES)
    }
    parts = spec.role, spec.rank, spec.service, spec.arguments, spec.preload, own, python, str(folder)
    return hmac.new(token.encode(), json.dumps(parts, sort_keys=True).encode(), hashlib.sha256).hexdigest()
