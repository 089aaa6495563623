"""How a failed run is reported on the terminal: what failed, where, the user's own stack frames, and how to resume.

The whole traceback is in the run's `logs/controller.log`.
"""

import re
import signal
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape

import lockstep
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.cluster_node import NodeRefused
from lockstep.cluster.node_network import UnreachableAddress
from lockstep.cluster.node_versions import VersionError
from lockstep.cluster.placement.bundles import PlacementError
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.config.errors import ConfigError
from lockstep.ledger.errors import LedgerError
from lockstep.ledger.run_folder import INDEX_FILE
from lockstep.report.command_events import TERMINAL, CommandEvent, CommandEvents, shown_text
from lockstep.rewards.scoring_messages import RewardError
from lockstep.rollout.environments.environment_protocol import EnvironmentFailed
from lockstep.run.errors import GaveUp, NotStarted
from lockstep.watch.agent.agent_client import AgentError

LOG_TAIL_LINES = 12
"""Lines of a dead worker's log that are shown."""
_DUMP = "(most recent call first)"
"""Header of each thread's stack in faulthandler's output."""
_FRAME = re.compile(r'\s+File "(?P<file>.+)", line \d+,? in ')
_PACKAGE_FOLDER = str(Path(lockstep.__path__[0]).resolve())
_LIBRARY_PREFIXES = (
    _PACKAGE_FOLDER,
    "<",
    *(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib")),
)


@dataclass(slots=True)
class FailureSummary:
    """What the terminal shows about an error."""

    headline: str
    details: list[tuple[str, str]] = field(default_factory=list)
    """Labels and values, one per line."""
    lines: list[str] = field(default_factory=list)
    """Lines of a traceback or log."""


def show_failure(error: BaseException, folder: Path, events: CommandEvents = TERMINAL) -> None:
    """Reports what failed, where, and how to resume.

    Args:
        folder: of the run.
    """
    cause = error.__cause__ or error if isinstance(error, NotStarted) else error
    summary = describe_failure(cause)
    if isinstance(cause, GaveUp) and cause.__cause__ is not None:
        details = describe_failure(cause.__cause__)
        summary = FailureSummary(summary.headline, details.details, details.lines)
    kept = error.kept if isinstance(error, NotStarted) else None
    resume = _resume_command(folder) if kept is None and (folder / INDEX_FILE).is_file() else None
    logs = (kept or folder) / "logs" if (kept or folder).is_dir() else None
    lines = _summary_lines(summary)
    if kept is not None:
        lines.append(f"nothing was trained; {escape(str(folder))} is kept as {escape(str(kept))}")
    if resume is not None:
        lines.append(f"resume with: {escape(resume)}")
    if logs is not None:
        lines.append(f"[dim]full logs: {escape(str(logs))}[/]")
    fields = {
        "details": dict(summary.details) or None, "lines": summary.lines or None, "kept": kept, "resume": resume,
        "logs": logs,
    }  # fmt: skip
    events.report(CommandEvent("failed", summary.headline, "\n".join(lines), "error", fields))


def show_interruption(folder: Path, events: CommandEvents = TERMINAL) -> None:
    """Reports, after Ctrl-C, how to resume."""
    command = _resume_command(folder)
    text = f"resume with: {command}"
    events.report(CommandEvent("interrupted", text, escape(text), "warning", {"resume": command}))


def _resume_command(folder: Path) -> str:
    return f"lockstep train --resume {folder}"


def _summary_lines(summary: FailureSummary) -> list[str]:
    """Headline, details, and the lines of a traceback or log, as rich's markup."""
    lines = [f"[bold red]error[/] {shown_text(summary.headline)}"]
    width = max((len(label) for label, _ in summary.details), default=0)
    lines += [f"  [bold]{label:<{width}}[/]  {shown_text(value)}" for label, value in summary.details]
    if summary.lines:
        lines += [f"    {shown_text(line)}".rstrip() for line in ["", *summary.lines, ""]]
    return lines


def describe_failure(error: BaseException) -> FailureSummary:
    """Summarises an error from its fields."""
    match error:
        case RewardError():
            return _reward_failure(error)
        case EnvironmentFailed():
            return _environment_failure(error)
        case RemoteError():
            return FailureSummary(
                f"{error.worker}: {_class_name(error.kind)}: {error.message}", [], _remote_lines(error)
            )
        case WorkerDied() if error.lost:
            return FailureSummary(f"{error.worker} {error.how}")
        case WorkerDied():
            return FailureSummary(
                f"{error.worker} {_exit_text(error.exit_code)}", [], error.log_tail.splitlines()[-LOG_TAIL_LINES:]
            )
        case ConfigError() | LedgerError() | WaitTimeout() | GaveUp():
            return FailureSummary(str(error))
        case PlacementError() | NodeRefused() | VersionError() | UnreachableAddress() | AgentError():
            return FailureSummary(str(error))
        case OSError():
            return FailureSummary(str(error) or type(error).__name__)
    return FailureSummary(f"{type(error).__name__}: {error}")


def user_frames(text: str) -> list[str]:
    """The frames of the user's own code in a traceback or in faulthandler's output, innermost call last."""
    is_dump = _DUMP in text
    latest = text.rpartition("Timeout (")[2] if is_dump else text  # faulthandler may have dumped repeatedly
    frames = [lines for file, lines in _frames(latest) if not file.startswith(_LIBRARY_PREFIXES)]
    if is_dump:
        frames.reverse()
    return [line for lines in frames for line in lines]


def _frames(text: str) -> list[tuple[str, list[str]]]:
    """File and lines of every frame, in order."""
    frames: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if found := _FRAME.match(line):
            frames.append((found["file"], [line.strip()]))
        elif frames and line.startswith("    "):
            frames[-1][1].append(line[2:])
    return frames


def _remote_lines(error: RemoteError) -> list[str]:
    """The user's own frames; without any, Lockstep's innermost frame, unless the error has a code that explains it."""
    frames = user_frames(error.traceback)
    if frames or error.code:
        return frames
    lockstep_frames = [lines for file, lines in _frames(error.traceback) if file.startswith(_PACKAGE_FOLDER)]
    return lockstep_frames[-1] if lockstep_frames else []


def _reward_failure(error: RewardError) -> FailureSummary:
    details = [
        ("sample", None if error.uid is None else f"{error.uid} (row {error.row} of the data)"),
        ("completion", None if error.completion is None else repr(_shortened(error.completion))),
        ("returned", error.returned),
    ]
    known = [(label, value) for label, value in details if value is not None]
    return FailureSummary(f"reward {error.function}: {error.problem}", known, _user_code_lines(error.traceback or ""))


def _environment_failure(error: EnvironmentFailed) -> FailureSummary:
    details = (
        [("sample", f"{error.sample} (step/prompt/completion)"), ("turn", str(error.turn + 1))] if error.sample else []
    )
    lines = _user_code_lines(error.traceback or "")
    return FailureSummary(f"environment {error.path}: {error.problem}", details, lines)


def _user_code_lines(text: str) -> list[str]:
    """Where the user's code was running, if the text contains a dump of its stack; else the whole traceback."""
    frames = user_frames(text) if _DUMP in text else []
    return ["running at:", *frames] if frames else text.rstrip().splitlines()


def _class_name(kind: str) -> str:
    """`ModelError` for `lockstep.models.errors.ModelError`."""
    return kind.rpartition(".")[2]


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None:
        return "vanished"
    if exit_code >= 0:
        return f"exited with {exit_code}; the end of its log:"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    cause = _SIGNAL_CAUSES.get(-exit_code, "")
    return f"was killed by {name}{f' ({cause})' if cause else ''}; the end of its log:"


_SIGNAL_CAUSES = {
    int(signal.SIGKILL): "out of memory? see `dmesg`",
    int(signal.SIGXFSZ): "it wrote a file over the limit of `ulimit -f`",
    int(signal.SIGXCPU): "it used more CPU time than `ulimit -t` allows",
}


def _shortened(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
