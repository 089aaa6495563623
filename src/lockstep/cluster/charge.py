"""What a worker is to be: a file of the run, written by the controller that starts it and read by the worker, and by a
later controller that finds it alive."""

import hashlib
import hmac
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lockstep.cluster.protocol import WorkerSpec
from lockstep.watch.folders import write_whole

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

    def write(self, folder: Path) -> Path:
        """Puts it where the worker finds it, whole. Raises TypeError for arguments that are not JSON-like."""
        try:
            data = json.dumps(msgspec.to_builtins(self), allow_nan=True).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"arguments of worker {self.name!r} are not JSON-like: {error}") from None
        path = _path(folder, self.name)
        write_whole(path, data)
        return path

    @staticmethod
    def read(path: Path) -> "Charge":
        """Raises OSError, ValueError (msgspec's included)."""
        return msgspec.json.decode(path.read_bytes(), type=Charge)

    @staticmethod
    def of(folder: Path, name: str) -> "Charge | None":
        """What a worker of that name was started as; None where nothing readable says so."""
        try:
            return Charge.read(_path(folder, name))
        except (OSError, ValueError):
            return None

    @property
    def spec(self) -> WorkerSpec:
        """What was asked for, but for its environment and preload, which are in `fitness` only."""
        return WorkerSpec(self.name, self.role, self.rank, self.service, self.arguments, adoptable=bool(self.fitness))


def fitness(spec: WorkerSpec, environment: Mapping[str, str], token: str) -> str:
    """The same for two specs that the same process would do for: equal place, service and arguments, the same
    interpreter, folder and environment, whatever the name. Keyed, as an environment has secrets."""
    own = {
        name: value
        for name, value in environment.items()
        if name not in _SESSION and not name.startswith(_SESSION_PREFIXES)
    }
    parts = spec.role, spec.rank, spec.service, spec.arguments, spec.preload, own, sys.executable, str(Path.cwd())
    return hmac.new(token.encode(), json.dumps(parts, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"
