"""What carries parcels from one courier to another, behind one small protocol."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep.weights.parcels import Parcel

Moved = Callable[[int], None]
"""Told of bytes that have moved; may raise to end the transfer."""


class Outlet(Protocol):
    """The sender's end."""

    def send(self, header: bytes, cut: Sequence[Parcel], memory: memoryview, moved: Moved) -> None:
        """Sends the header and then the parcels, in their order. Raises LinkFailed."""

    def close(self) -> None: ...


class Inlet(Protocol):
    """The receiver's end."""

    def header(self) -> bytes:
        """What the sender sent first. Raises LinkFailed."""

    def receive(self, cut: Sequence[Parcel], memory: memoryview, moved: Moved) -> None:
        """Puts the parcels into their places in `memory`. Raises LinkFailed."""

    def close(self) -> None: ...
