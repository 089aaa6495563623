"""Errors that travel between processes, and what a rank raises in place of the backend's "Connection closed by
peer"."""

from typing import Any, ClassVar

PACKAGE_ERROR = "lockstep"
"""The code of an error of this package whose class declares none."""


class PicklableError(Exception):
    """A mixin for errors whose constructor takes more than a message: they are copied and unpickled with their fields
    and without the constructor."""

    error_code: ClassVar[str] = PACKAGE_ERROR

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_error, (type(self), self.args, self.__dict__)


def _restore_error(kind: type[PicklableError], args: tuple[Any, ...], fields: dict[str, Any]) -> PicklableError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


def error_code(kind: type[BaseException]) -> str:
    """The code by which other processes recognise an error of this class: its `error_code`, `lockstep` for an error of
    this package that declares none, empty for any other. Unlike a class's dotted path it survives a move or a renaming,
    so recovery and retries compare codes only."""
    declared = getattr(kind, "error_code", "")
    if isinstance(declared, str) and declared:
        return declared
    return PACKAGE_ERROR if kind.__module__.partition(".")[0] == __name__.partition(".")[0] else ""


class CollectiveRefused(PicklableError, RuntimeError):
    """A collective did not fit what a peer on this host had already entered, and was not begun.

    The backend has not seen it, so nothing was paired wrongly and the peer still waits for the right call."""

    error_code = "collective_refused"

    def __init__(self, communicator: str, number: int, mine: str, theirs: str, rank: int, peer: int) -> None:
        self.communicator, self.number, self.mine, self.theirs = communicator, number, mine, theirs
        self.rank, self.peer = rank, peer
        super().__init__(
            f"collective #{number} on {communicator!r} does not fit: rank {rank} is about to enter {mine}, "
            f"but rank {peer} has entered {theirs}. The call was refused before it reached the backend."
        )


class CollectiveStalled(PicklableError, RuntimeError):
    """A collective ended because the supervisor published a verdict and freed the waiting ranks.

    `verdict` is its JSON form (see `watch.diagnosis.verdict`), empty when only a text was given; `was` is the backend's
    message."""

    error_code = "collective_stalled"

    def __init__(self, text: str, verdict: dict[str, Any] | None = None, was: str = "") -> None:
        self.text, self.verdict, self.was = text, verdict or {}, was
        super().__init__(text)
