"""Whether a process on another host is still there: only what is heard of it tells."""

import time

ASK_S = 1.0
FROZEN_S = 2.5
"""Who looks is due once a second. When it comes this late, this process itself was stopped or starved, and the other
side may well have spoken meanwhile."""


class Silence:
    """Of a peer that answers when it is asked. One thread looks and hears; any may ask whether it is too long.

    Args:
        limit_s: so long it may last.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard_at = self._looked_at = time.monotonic()
        self._asked_at = 0.0

    def ask(self) -> bool:
        """A look; whether the peer should be asked something now."""
        now = time.monotonic()
        if now - self._looked_at > FROZEN_S:
            self._heard_at += now - self._looked_at
        self._looked_at = now
        if now - self._asked_at < min(ASK_S, self.limit_s / 3):
            return False
        self._asked_at = now
        return True

    def broken(self) -> None:
        """Something is heard."""
        self._heard_at = time.monotonic()

    @property
    def too_long(self) -> bool:
        """As of the last look."""
        return self._looked_at - self._heard_at > self.limit_s
