"""Errors that are sent between processes, and the errors that a rank raises in place of the backend's own."""

from collections.abc import Callable
from typing import Any, ClassVar

PACKAGE_ERROR = "lockstep"
"""The code of an error of this package whose class declares none."""


class ForkedWorker(BaseException):
    """Raised in a worker that was forked from a controller, to leave the controller's stack before it runs."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self.run = run


class PicklableError(Exception):
    """Base class of errors whose constructor takes more than a message. Copying and unpickling restore their fields
    without calling the constructor."""

    error_code: ClassVar[str] = PACKAGE_ERROR

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_error, (type(self), self.args, self.__dict__)


def _restore_error(kind: type[PicklableError], args: tuple[Any, ...], fields: dict[str, Any]) -> PicklableError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


def error_code(kind: type[BaseException]) -> str:
    """The code by which other processes recognise an error of this class: its `error_code`; `lockstep` for an error of
    this package without one; empty for any other error. Unlike the dotted path of a class, the code does not change
    when the class is renamed, so recovery and retries compare codes only."""
    declared = getattr(kind, "error_code", "")
    if isinstance(declared, str) and declared:
        return declared
    return PACKAGE_ERROR if kind.__module__.partition(".")[0] == __name__.partition(".")[0] else ""


class CollectiveRefused(PicklableError, RuntimeError):
    """A collective did not match the call of a peer on this host, and was not started.

    It has not reached the backend, so the peer still waits for the right call."""

    error_code = "collective_refused"

    def __init__(self, communicator: str, number: int, own_call: str, peer_call: str, rank: int, peer: int) -> None:
        self.communicator, self.number, self.own_call, self.peer_call = communicator, number, own_call, peer_call
        self.rank, self.peer = rank, peer
        super().__init__(
            f"collective #{number} on {communicator!r} does not match: rank {rank} is about to enter {own_call}, "
            f"but rank {peer} has entered {peer_call}. The call was refused before it reached the backend."
        )


class CollectiveStalled(PicklableError, RuntimeError):
    """A collective failed, and the supervisor's verdict explains why.

    `verdict` is the verdict in JSON form (see `watch.diagnosis.verdict`), empty if only a text was given.
    `backend_message` is the message of the original error."""

    error_code = "collective_stalled"

    def __init__(self, text: str, verdict: dict[str, Any] | None = None, backend_message: str = "") -> None:
        self.text, self.verdict, self.backend_message = text, verdict or {}, backend_message
        super().__init__(text)
