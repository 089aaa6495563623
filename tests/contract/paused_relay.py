"""A relay that pauses in the middle of a transfer at a test's request."""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

from lockstep.weights.relay.relay_api import ReceiveResult, RelayLink
from lockstep.weights.relay.weight_relay import WeightRelay


class PausedRelay(WeightRelay):
    """Pauses after the first chunk while the file `<hold>/<node>` exists, and creates `<hold>/<node>.<pid>`. If the
    file contains `receive`, the relay pauses only while it receives."""

    def __init__(self, hold: str, space: str | None = None, **arguments: Any) -> None:
        if space is not None:
            enter(space)
        super().__init__(**arguments)
        self._hold = Path(hold) / self.node
        self._receiving = False

    def receive(self, version: int, ranks: list[int], link: RelayLink) -> ReceiveResult:
        self._receiving = True
        try:
            return super().receive(version, ranks, link)
        finally:
            self._receiving = False

    def _count(self, count: int) -> None:
        super()._count(count)
        if self._hold.exists() and (self._receiving or self._hold.read_text() != "receive"):
            self._hold.with_name(f"{self.node}.{os.getpid()}").touch()
            end = time.monotonic() + 60
            while self._hold.exists() and time.monotonic() < end:
                time.sleep(0.005)


def enter(space: str) -> None:
    """Move this thread, and threads it starts, into a network namespace; open connections stay in the old one."""
    with Path(f"/run/netns/{space}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"setns {space}")
