"""What a rank is told instead of the backend's "Connection closed by peer"."""

from typing import Any


class CollectiveRefused(RuntimeError):
    """A collective did not fit what a peer on this host had already entered, and was not begun.

    The backend has not seen it, so nothing was paired wrongly and the peer still waits for the right call."""

    def __init__(self, communicator: str, number: int, mine: str, theirs: str, rank: int, peer: int) -> None:
        self.communicator, self.number, self.mine, self.theirs = communicator, number, mine, theirs
        self.rank, self.peer = rank, peer
        super().__init__(
            f"collective #{number} on {communicator!r} does not fit: rank {rank} is about to enter {mine}, "
            f"but rank {peer} has entered {theirs}. The call was refused before it reached the backend."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.communicator, self.number, self.mine, self.theirs, self.rank, self.peer)


class CollectiveStalled(RuntimeError):
    """A collective ended because the observer of the job gave a verdict and freed those who waited.

    `verdict` is its JSON form (see `watch.verdict`), empty when only a text was given; `was` what the backend said."""

    def __init__(self, text: str, verdict: dict[str, Any] | None = None, was: str = "") -> None:
        self.text, self.verdict, self.was = text, verdict or {}, was
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.verdict, self.was)
