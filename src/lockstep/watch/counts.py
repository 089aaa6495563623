"""How far each communicator is by c10d's own account, which sees what no patch sees: DDP's reducer, functional
collectives, compiled graphs.

The flight recorder keeps "last enqueued" and "last completed" per communicator (since when: docs/recorder.md); asking
for these alone costs some ten microseconds. It knows communicators by a number of its own, so the names are taken once
from its entries. Where there is no flight recorder, the communicator's sequence number says what was entered, and
nothing says what was completed.
"""

import json
import time
from collections.abc import Callable
from typing import Any

Status = dict[str, tuple[int, int]]
"""Last enqueued and last completed, by c10d's number of the communicator; -1 where it has none."""


class Flight:
    """One flight recorder of this process: gloo's or NCCL's."""

    def __init__(self, kind: str, dump: Callable[..., Any]) -> None:
        self.kind, self._dump = kind, dump
        self._names: dict[str, str] = {}
        self._asked: dict[str, tuple[float, int]] = {}

    def status(self) -> Status:
        """Of all communicators that have done something."""
        found = json.loads(self._dump(includeCollectives=False)).get("pg_status") or {}
        return {
            number: (int(each.get("last_enqueued_collective", -1)), int(each.get("last_completed_collective", -1)))
            for number, each in found.items()
        }

    def name(self, number: str) -> str | None:
        """c10d's name of the communicator with that number; None while its entries do not say. Asked again after one,
        two, four ... seconds, because it takes a dump of all entries (0.1 to 40 ms)."""
        known = self._names.get(number)
        if known is not None:
            return known
        asked, times = self._asked.get(number, (0.0, 0))
        now = time.monotonic()
        if times and now - asked < 2.0 ** (times - 1):
            return None
        self._asked[number] = (now, times + 1)
        for entry in self.entries().get("entries") or ():
            self._names[str(entry["pg_id"])] = str(entry["process_group"][0])
        return self._names.get(number)

    def entries(self) -> dict[str, Any]:
        """The whole dump."""
        dump: dict[str, Any] = json.loads(self._dump(includeCollectives=True))
        return dump

    def text(self) -> str | bytes:
        """The whole dump as JSON."""
        text: str | bytes = self._dump(includeCollectives=True)
        return text


def flights(c10d: Any) -> list[Flight]:
    """The flight recorders that this torch has. `c10d` is torch._C._distributed_c10d."""
    found = []
    for kind, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        dump = getattr(c10d, name, None)
        if dump is not None:
            found.append(Flight(kind, dump))
    return found


class Offsets:
    """c10d's sequence number also counts what is no collective (point-to-point with gloo), differently on each rank;
    this takes it off, so that all members count alike."""

    def __init__(self) -> None:
        self.total = 0
        self._steps: list[tuple[int, int]] = []
        self._forgotten = 0

    def skip(self, after: int, count: int) -> None:
        """The backend's number went to `after`, `count` more than the collectives among it."""
        if count:
            self.total += count
            self._steps.append((after, self.total))
            if len(self._steps) > 256:
                self._forgotten = self._steps[127][1]
                del self._steps[:128]

    def collective(self, number: int) -> int:
        """Which collective of the communicator has the backend's `number`."""
        for after, total in reversed(self._steps):
            if number >= after:
                return number - total
        return number - self._forgotten
