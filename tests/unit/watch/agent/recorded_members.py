"""Ranks that record calls in beacons, all in the process of the test."""

import time

from lockstep.watch.agent.process_monitor import ProcessState
from lockstep.watch.beacon import writer
from lockstep.watch.beacon.beacon_records import SEPARATOR
from lockstep.watch.beacon.call_ring import CommunicatorSlot, pack_text_numbers
from lockstep.watch.beacon.reader import read_beacon

IDENTITY = 11


class Member:
    """A rank that records calls in a beacon of its own."""

    def __init__(self, rank: int, size: int) -> None:
        writer._current = writer._NullBeacon()  # the ranks share a process here
        self.beacon = writer.open_beacon("run-1", f"policy-{rank}", "policy", rank)
        self.rings = self.beacon.call_rings()
        self.rank, self.size = rank, size
        self._open()

    def _open(self) -> None:
        slot = self.rings.open_slot(IDENTITY, 22, "0", "fsdp", "gloo", self.size, self.rank)
        assert slot is not None
        self.slot: CommunicatorSlot = slot
        self.seq = 0

    def reopen(self) -> None:
        """Destroys the communicator and creates it again, with the same identity."""
        self.slot.close()
        self._open()

    def call(self, what: str = "[4]", flags: int = 0, lead: int = 0, inside: bool = False) -> None:
        """Makes a call of which `what` is the shape. With `inside`, it does not return."""
        text = self.rings.text(SEPARATOR.join(["broadcast", "float32", "0", "", what]))
        self.seq += 1
        site = self.rings.text("/a/train.py:31 in f")
        signature = hash(what) & (2**63 - 1)
        at = self.slot.enter(self.seq + lead, self.seq, signature, pack_text_numbers(text, site), 0, flags)
        if not inside:
            self.slot.leave(at)

    def state(self) -> ProcessState:
        if self.beacon._open:
            self.beacon.beat()
        state = ProcessState(f"policy-{self.rank}", "policy", self.rank, 100 + self.rank, 1)
        state.beacon = read_beacon(self.beacon.path)
        state.progress_ns = time.monotonic_ns()
        return state
