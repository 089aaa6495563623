"""Reads from c10d how many collectives of each communicator were entered and completed.

c10d also counts calls that pass no wrapper: those of DDP's reducer, functional collectives and compiled graphs.

c10d's flight recorder keeps "last enqueued" and "last completed" per communicator (docs/recorder.md names the
versions); reading them takes about ten microseconds. It numbers communicators in its own way, so their names are read
once from its entries. Without a flight recorder, the communicator's sequence number is the number of entered
collectives, and the number of completed ones is unknown.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lockstep.watch.recorder.communicator import NOT_REPORTED, CollectiveCounts, CommunicatorMember
from lockstep.watch.recorder.transfers import Message

ACTIVE_CHECK_S = 1.0
"""Seconds between two dumps of the operations, while a communicator with messages makes no progress."""
_MESSAGE = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)$")
_BATCH_END = "coalesced"


class FlightRecorder:
    """c10d's flight recorder for gloo or for NCCL in this process."""

    def __init__(self, kind: str, dump: Callable[..., Any]) -> None:
        self.kind, self._dump = kind, dump
        self._names: dict[str, str] = {}
        self._tries: dict[str, tuple[float, int]] = {}

    def status(self) -> dict[str, CollectiveCounts]:
        """Reads the counts of all communicators that have been used, by the flight recorder's number of each."""
        found = json.loads(self._dump(includeCollectives=False)).get("pg_status") or {}
        names = ("last_enqueued_collective", "last_completed_collective", "last_started_collective")
        return {
            number: CollectiveCounts(*(int(each.get(name, -1)) for name in names)) for number, each in found.items()
        }

    def operations(self, number: str, only_active: bool = False) -> list[dict[str, Any]]:
        """The entries of a communicator, oldest first; if this torch can, without those known to have completed."""
        try:
            dump = json.loads(self._dump(includeCollectives=True, onlyActive=only_active))
        except TypeError:
            dump = self.entries()
        return [each for each in dump.get("entries") or () if str(each["pg_id"]) == number]

    def name(self, number: str) -> str | None:
        """c10d's name of the communicator with this number; None until the flight recorder has an entry of it. A failed
        search is repeated after one, two, four ... seconds, because it dumps all entries (0.1 to 40 ms)."""
        known = self._names.get(number)
        if known is not None:
            return known
        tried_at, tries = self._tries.get(number, (0.0, 0))
        now = time.monotonic()
        if tries and now - tried_at < 2.0 ** (tries - 1):
            return None
        self._tries[number] = (now, tries + 1)
        for entry in self.entries().get("entries") or ():
            self._names[str(entry["pg_id"])] = str(entry["process_group"][0])
        return self._names.get(number)

    def entries(self) -> dict[str, Any]:
        """Dumps the flight recorder and parses the dump."""
        dump: dict[str, Any] = json.loads(self._dump(includeCollectives=True))
        return dump

    def text(self) -> str | bytes:
        """Dumps the flight recorder as JSON."""
        text: str | bytes = self._dump(includeCollectives=True)
        return text


def unfinished_collectives(operations: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of collectives that have not completed."""
    return [each for each in operations if not each.get("is_p2p") and each.get("state") != "completed"]


def unfinished_messages(operations: Sequence[dict[str, Any]]) -> dict[Message, list[bool]]:
    """Whether the device has started each of the unfinished messages of a communicator, by peer and direction, oldest
    first. The messages of a batch are recorded without a state; the entry after them has that of all."""
    batches = {
        _batch_key(each): each["state"] for each in operations if str(each["profiling_name"]).endswith(_BATCH_END)
    }
    found: dict[Message, list[bool]] = {}
    for each in operations:
        match = _MESSAGE.search(str(each["profiling_name"])) if each.get("is_p2p") else None
        state = batches.get(_batch_key(each), each["state"])
        if match is not None and state != "completed":
            found.setdefault(Message(match[1] == "send", int(match[2])), []).append(state == "started")
    return found


def _batch_key(entry: dict[str, Any]) -> tuple[int, int]:
    return int(entry["collective_seq_id"]), int(entry["p2p_seq_id"])


def flight_recorders(c10d: Any) -> list[FlightRecorder]:
    """The flight recorders of this torch. `c10d` is torch._C._distributed_c10d."""
    found = []
    for kind, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        dump = getattr(c10d, name, None)
        if dump is not None:
            found.append(FlightRecorder(kind, dump))
    return found


class C10dStatusReader:
    """Updates members with the counts of c10d's flight recorders, or with its sequence number where there are none."""

    def __init__(self, c10d: Any) -> None:
        self.flight_recorders: list[FlightRecorder] = flight_recorders(c10d)
        self._by_number: dict[tuple[str, str], CommunicatorMember | None] = {}
        """Members by kind of the flight recorder and its number of the communicator; None for destroyed ones."""
        self._destroyed: list[tuple[str, bool]] = []
        """Name, and whether it blocks the host, of each communicator that was used and destroyed before its number was
        known."""
        self._checked: dict[tuple[str, str], float] = {}
        """When the unfinished operations of a communicator were dumped last, by the same keys."""

    def update(self, members: Iterable[CommunicatorMember]) -> None:
        """Updates the counts of the members, which are given in the order of their creation."""
        all_members, counted = list(members), set()
        for each in all_members:
            each.transfers.poll()
        for flight in self.flight_recorders:
            for number, counts in sorted(flight.status().items(), key=lambda each: int(each[0])):
                key = flight.kind, number
                member = self._by_number[key] if key in self._by_number else self._assign(flight, number, all_members)
                if member is not None:
                    self._update_member(flight, number, member, counts)
                    counted.add(id(member))
        for each in all_members:
            each.verify()
            if id(each) not in counted and (each.sequence_reported or each.sequence() > 0):
                each.update_counts(CollectiveCounts(each.sequence(), NOT_REPORTED))

    def _update_member(
        self, flight: FlightRecorder, number: str, member: CommunicatorMember, counts: CollectiveCounts
    ) -> None:
        """NCCL's status has the number of the last operation of either sort, and messages are counted separately. So
        once there are messages, the entries say what has completed, and which messages the device has started."""
        if member.blocks_host or not member.transfers.used:
            member.update_counts(counts)
            return
        key, now = (flight.kind, number), time.monotonic()
        issued, newest, (entered, completed, *_) = member.sequence(), member.collectives, member.written_counts
        late_messages = member.starts_reported and member.transfers.waits_since(int((now - ACTIVE_CHECK_S) * 1e9))
        waits = completed < entered or late_messages
        if newest == entered and not (waits and now - self._checked.get(key, 0.0) >= ACTIVE_CHECK_S):
            return
        self._checked[key] = now
        before = member.transfers.counts()
        # After `issued` was read: a collective that they lack has completed.
        operations = flight.operations(number, only_active=not late_messages)
        unfinished = unfinished_collectives(operations)
        scheduled = [int(each["collective_seq_id"]) for each in unfinished if each.get("state") == "scheduled"]
        ended = min((int(each["collective_seq_id"]) for each in unfinished), default=issued + 1) - 1
        started = min(scheduled, default=issued + 1) - 1 if member.starts_reported else NOT_REPORTED
        member.update_counts(CollectiveCounts(issued, ended, started))
        if late_messages:
            member.transfers.update_starts(unfinished_messages(operations), before)

    def _assign(
        self, flight: FlightRecorder, number: str, members: list[CommunicatorMember]
    ) -> CommunicatorMember | None:
        """Assigns the number to the communicator of that name that has no number yet. Numbers ascend, and a name is
        used again after its communicator was destroyed."""
        name, blocks_host = flight.name(number), flight.kind == "gloo"
        if name is not None and (name, blocks_host) in self._destroyed:
            self._destroyed.remove((name, blocks_host))
            self._by_number[flight.kind, number] = None
            return None
        taken = {id(member) for member in self._by_number.values()}
        named = [each for each in members if each.name == name and id(each) not in taken]
        free = [each for each in named if each.blocks_host == blocks_host]
        if not free:
            return None
        self._by_number[flight.kind, number] = free[-1]
        return free[-1]

    def forget(self, member: CommunicatorMember) -> None:
        """Removes the member of a destroyed communicator; a later one of the same name gets another number. A flight
        recorder has no number for one on which only calls were made that it does not record (`monitored_barrier`)."""
        if all(kept is not member for kept in self._by_number.values()):
            if member.transfers.used or member.collectives > 0:
                self._destroyed.append((member.name, member.blocks_host))
            return
        self._by_number = {key: None if kept is member else kept for key, kept in self._by_number.items()}
