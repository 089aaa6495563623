"""How a run that failed is told on the terminal: what, where, the user's own lines, and how to go on.

The whole traceback is in the run's `logs/controller.log`.
"""

import re
import signal
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape

import lockstep
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.config.errors import ConfigError
from lockstep.ledger.errors import LedgerError
from lockstep.rewards.api import RewardError
from lockstep.run.errors import NotStarted
from lockstep.watch.waits import WaitTimeout

LOG_LINES = 12
"""Of a dead worker's log."""
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in ')
_NOT_THE_USERS = tuple(
    str(Path(folder).resolve())
    for folder in (lockstep.__path__[0], *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
)


@dataclass(slots=True)
class Told:
    """An error in a person's words."""

    what: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Label and value, one line each."""
    lines: list[str] = field(default_factory=list)
    """Of a traceback or a log."""


def show_failure(error: BaseException, folder: Path) -> None:
    """What failed, where, and how to go on, on standard error."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    cause = error.__cause__ or error if isinstance(error, NotStarted) else error
    told = tell(cause)
    console.print(f"[bold red]error[/] {escape(told.what)}")
    width = max((len(label) for label, _ in told.facts), default=0)
    for label, value in told.facts:
        console.print(f"  [bold]{label:<{width}}[/]  {escape(value)}")
    for line in told.lines:
        console.print(f"    {escape(line)}".rstrip())
    if isinstance(error, NotStarted) and error.kept is not None:
        console.print(f"nothing was trained; {escape(str(folder))} is kept as {escape(str(error.kept))}")
        folder = error.kept
    else:
        console.print(f"go on with: lockstep train --resume {escape(str(folder))}")
    console.print(f"[dim]everything that is known: {escape(str(folder))}/logs[/]")


def show_interruption(folder: Path) -> None:
    """How to go on after Ctrl-C."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"go on with: lockstep train --resume {escape(str(folder))}")


def tell(error: BaseException) -> Told:
    """Takes an error apart by its fields."""
    match error:
        case RewardError():
            return _reward(error)
        case RemoteError():
            return Told(f"{error.worker}: {_short(error.kind)}: {error.message}", [], own_frames(error.traceback))
        case WorkerDied():
            return Told(f"{error.worker} {_end(error.exit_code)}", [], error.log_tail.splitlines()[-LOG_LINES:])
        case ConfigError() | LedgerError() | WaitTimeout():
            return Told(str(error))
        case OSError():
            return Told(str(error) or type(error).__name__)
    return Told(f"{type(error).__name__}: {error}")


def own_frames(traceback: str) -> list[str]:
    """The lines of a printed traceback that are the user's own code; without any, the frame that raised."""
    frames = _frames(traceback)
    own = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS) and not frame[0].startswith("<")]
    return [line for _, lines in own or frames[-1:] for line in lines]


def _frames(traceback: str) -> list[tuple[str, list[str]]]:
    """(file, its lines) of every frame."""
    frames: list[tuple[str, list[str]]] = []
    for line in traceback.splitlines():
        if found := _FRAME.match(line):
            frames.append((found["file"], [line.strip()]))
        elif frames and line.startswith("    "):
            frames[-1][1].append(line[2:])
    return frames


def _reward(error: RewardError) -> Told:
    facts = [
        ("sample", None if error.uid is None else f"{error.uid} (row {error.row} of the data)"),
        ("completion", None if error.completion is None else repr(_shortened(error.completion))),
        ("returned", error.returned),
    ]
    lines = (error.traceback or "").rstrip().splitlines()
    known = [(label, value) for label, value in facts if value is not None]
    return Told(f"reward {error.function}: {error.problem}", known, lines)


def _short(kind: str) -> str:
    """`ModelError` for `lockstep.models.errors.ModelError`."""
    return kind.rpartition(".")[2]


def _end(exit_code: int | None) -> str:
    if exit_code is None:
        return "vanished"
    if exit_code >= 0:
        return f"exited with {exit_code}; the end of its log:"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    memory = " (was memory short? `dmesg` says so)" if -exit_code == signal.SIGKILL else ""
    return f"was ended by {name}{memory}; the end of its log:"


def _shortened(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
