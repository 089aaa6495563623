"""How a worker failed, derived from the errors that calls to workers raise."""

import re
import signal
import time
from dataclasses import dataclass, field
from typing import Literal

from lockstep.base.errors import CollectiveStalled
from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.rpc.futures import CallError
from lockstep.watch.diagnosis import failure_classes

FailureMode = Literal["died", "stalled", "raised"]
_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How a worker failed, and in which step."""

    role: str
    worker: str
    rank: int | None
    """None if it is unknown which of the role's workers failed."""
    how: FailureMode
    what: str
    """What happened, as a verb phrase: `died (SIGKILL)`, `raised RuntimeError: ...`."""
    kind: str = ""
    """Dotted path of the exception's class, if one was raised."""
    place: str = ""
    """File and line that raised the exception."""
    step: int = 0
    """The step in progress, from 1; 0 before the first."""
    starting: bool = False
    """Whether the worker was a replacement that did not start."""
    code: str = ""
    """The exception's `error_code`; empty for an exception that is not Lockstep's."""
    at: float = field(default_factory=time.monotonic)

    @property
    def signature(self) -> tuple[str, str, str, int]:
        """Equal for two failures with the same error at the same place in the same step."""
        return self.role, self.kind, self.place, self.step


def describe_failure(
    error: CallError, role: str, worker: str, rank: int | None, step: int, starting: bool = False
) -> WorkerFailure:
    """Derives how a worker failed from the error of a call to it."""
    match error:
        case WorkerDied():
            return WorkerFailure(role, worker, rank, "died", describe_death(error), step=step, starting=starting)
        case RemoteError():
            brief = f"{error.kind.rpartition('.')[2]}: {error.message.partition(chr(10))[0]}"
            place = innermost_frame(error.traceback)
            how: FailureMode = "stalled" if is_effect(error) else "raised"
            return WorkerFailure(
                role, worker, rank, how, f"raised {brief}", error.kind, place, step, starting, error.code
            )
    what = f"made no progress for {error.stall_s:g} s"
    return WorkerFailure(role, worker, rank, "stalled", what, step=step, starting=starting)


def failed_worker(error: CallError) -> str:
    """The name of the worker that failed, or of several."""
    return error.waits_for if isinstance(error, Stalled) else error.worker


def is_effect(error: CallError) -> bool:
    """Whether the error is only a consequence of another process's failure: the worker was released from a collective,
    or lost its connection to a peer."""
    if not isinstance(error, RemoteError):
        return False
    return error.code == CollectiveStalled.error_code or failure_classes.is_secondary_error(
        f"{error.kind}: {error.message.partition(chr(10))[0]}"
    )


def describe_death(error: WorkerDied) -> str:
    """How a worker ended: `died (SIGKILL)`, `died (exit code 3)`, `vanished`."""
    if error.exit_code is None:
        return error.how
    if error.exit_code >= 0:
        return f"died (exit code {error.exit_code})"
    known = -error.exit_code in set(signal.Signals)
    return f"died ({signal.Signals(-error.exit_code).name if known else f'signal {-error.exit_code}'})"


def innermost_frame(traceback: str) -> str:
    """`file:line` of the last frame of a printed traceback; empty if there is none."""
    frames = list(_FRAME.finditer(traceback))
    return f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""
