"""The messages in which an agent reports the state of its host's processes to a supervisor.

There are two kinds of messages, both in JSON. A *roster* lists processes and communicators; it is sent first, and again
with the next number whenever one of them was added or removed. A *state* describes them; it is sent after every sample
and has the number of the roster that its indices refer to. A state of an unknown roster is dropped, so a roster is sent
first after every reconnect. Times are sent as *ages*, seconds before the message was built, NaN if unknown, because the
clocks of hosts may differ.

    {"m": "roster", "host": "b", "number": 7,
     "processes": [[name, role, rank, pid, parent], ...],
     "communicators": [[key, name, description, backend, size, ranks, of, rendezvous], ...],
     "members": [[process, communicator, rank in it, made with], ...]}

- `key` identifies a communicator uniquely in the job, such as `policy/fsdp`. torch's names ("0", "1") are not unique,
  because several roles have a communicator "0".
- `size` is the number of members that it should have, 0 if unknown. `ranks` are the members' ranks within their role,
  in the order of the communicator; null if unknown or longer than 64.
- `of` is empty. For the messages from one member of a communicator to another, which are a communicator of these two,
  it is the key of their communicator, and `ranks` are the sender's and the receiver's rank in that.
- `rendezvous` is the name of the rendezvous in which the members of the communicator create it.
- *made with* is a digest of the list of members with which the member created the communicator, -1 if unknown.

    {"m": "state", "host": "b", "number": 7,
     "processes": base64 of PROCESS records, one for each of the roster's processes
     "members": base64 of MEMBER records, one for each of the roster's members
     "stages": [text, ...] of each process; may be empty
     "notes": {process: {"where", "error", "cause", "ours", "expected_s",
              "unrecorded", "waits_for_device"}}, each field only if it is set
     "waits": [{"process", "whom", "kind", "why", "since", "moved", ...}, ...]: see WaitReport, as ages
     "calls": base64 of CALL records, "about": {signature: [operation, shapes, dtype, root, site]},
     "sites": [[member, seq, site], ...],
     "digests": base64 of DIGEST records, "differences": [[communicator, incarnation, seq], ...],
     "moved": {process: age of its last transfer of data or touch of new memory}, if later than its last progress
     "timings": base64 of TIMING records (`call_timings`), "timed": {signature: [operation, bytes]}
     "devices": {"devices": [...], "uses": [...], "gap": text}: see `devices.device_samples.HostDevices`}

- CALL records are the newest calls of members, at most about eight each. `about` describes the signatures that were not
  described since the agent's last connect; the supervisor keeps the descriptions.
- DIGEST records cover completed calls since the last report (see `call_windows`), of communicators with members on
  other hosts. `differences` are the first calls in which members on this host differ on such a communicator.
  `incarnation` says how often the members had created the communicator before.
- `whom`, the target of a wait, is the name of a process, several names with commas, a role (`policy`), an alias from
  the supervisor's settings (`the scorers`), or else a service outside the job (`judge.example:8000`). In a rendezvous
  ("meeting"), any other text means all processes of the waiting process's role.
- Fields that a supervisor does not know are ignored, and those that an agent does not send have their defaults.
- "expected" of a wait in a rendezvous: the first and the last rank on the waiting process's host, and the world size.
"""

import math
import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.base.wait_state import WAITING_FOR_WORK, WaitRecord
from lockstep.watch.devices.device_samples import HostDevices, record_from_json, record_to_json
from lockstep.watch.diagnosis.evidence_types import (
    NO_EXIT_CODE,
    UNKNOWN,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
    ProcessNote,
    WaitCondition,
)
from lockstep.watch.recorder.rendezvous_wait import ExpectedRanks, parse_rendezvous

NAN = float("nan")

PROCESS_RECORD = struct.Struct("<biffff")
"""Fields: liveness, exit code; then the ages of: end (or stop), last progress, last activity, same stack."""
MEMBER_RECORD = struct.Struct("<qqqfffbB")
"""Fields: entered, completed, started; the ages of entered, completed and of the oldest unfinished operation; blocked
(1, 0, -1), flags: 1 blind, 2 on a device (see `CommunicatorRecord`)."""
BLIND, ON_DEVICE = 1, 2
CALL_RECORD = struct.Struct("<IqQ")
"""Fields: member, sequence number, signature."""
DIGEST_RECORD = struct.Struct("<IIqQ")
"""Fields: communicator, incarnation, the number of the last call that the digest covers, the digest."""


@dataclass(frozen=True, slots=True)
class RosterCommunicator:
    """A communicator as its members on one host know it."""

    key: str
    about: CommunicatorInfo
    size: int = 0
    ranks: tuple[int, ...] | None = None
    of: str = ""
    """For the messages between two members (`CommunicatorRecord.pair`): the key of their communicator, in which these
    have the ranks `ranks`."""


@dataclass(frozen=True, slots=True)
class RosterMember:
    """The membership of a process in a communicator, both given as indices into the roster."""

    process: int
    communicator: int
    rank: int
    made_with: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Roster:
    """The processes and communicators of a host. Members and the state's records refer to them by index."""

    host: str
    number: int
    processes: tuple[ProcessInfo, ...] = ()
    communicators: tuple[RosterCommunicator, ...] = ()
    members: tuple[RosterMember, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitReport:
    """A wait of a process, in the words of the process. Ages are in seconds."""

    process: int
    waits_for: str
    kind: str = ""
    why: str = ""
    since: float = NAN
    moved: float = NAN
    needs: WaitCondition | None = None
    """Which processes of the role are needed; None: as the alias defines, or all if there is no alias."""
    main: bool = True
    """Whether the main thread waits."""
    idle: bool = False
    """Whether the process waits for work."""
    meeting: str = ""
    """The name of the rendezvous; empty if the wait is not in a rendezvous."""
    members: str = ""
    """The list of members with which the process creates the communicator, if the wait shows it."""
    expected: ExpectedRanks | None = None
    """The ranks that should come to the rendezvous, if the wait shows them."""
    left: float = NAN
    """Seconds until the bound of the wait if there is no progress."""


@dataclass(frozen=True, slots=True)
class StateReport:
    """The state of the processes of a roster. `processes`, `members`, `calls` and `digests` are packed records; the
    docstring of this module describes the other fields."""

    host: str
    number: int
    processes: bytes = b""
    members: bytes = b""
    stages: tuple[str, ...] = ()
    notes: Mapping[int, ProcessNote] = field(default_factory=dict)
    waits: tuple[WaitReport, ...] = ()
    calls: bytes = b""
    about: Mapping[int, CollectiveCall] = field(default_factory=dict)
    sites: Sequence[tuple[int, int, str]] = ()
    digests: bytes = b""
    differences: tuple[tuple[int, int, int], ...] = ()
    moved: Mapping[int, float] = field(default_factory=dict)
    devices: HostDevices = field(default_factory=HostDevices)
    timings: bytes = b""
    timed: Mapping[int, tuple[str, int | None]] = field(default_factory=dict)


def list_number(digest: int) -> int:
    """The digest of a member list as it is reported and compared (`MembershipTable.member_list`)."""
    return digest >> 1


def pack_process(
    liveness: Liveness = Liveness.RUNNING,
    exit_code: int | None = None,
    ended: float = NAN,
    moved: float = NAN,
    active: float = NAN,
    same_stack: float = NAN,
) -> bytes:
    """Packs the record of a process. Times are ages."""
    return PROCESS_RECORD.pack(
        liveness, NO_EXIT_CODE if exit_code is None else exit_code, ended, moved, active, same_stack
    )


def pack_member(
    entered: int = UNKNOWN,
    completed: int = UNKNOWN,
    entered_age: float = NAN,
    completed_age: float = NAN,
    blocked: bool | None = None,
    blind: bool = False,
    started: int = UNKNOWN,
    pending_age: float = NAN,
    on_device: bool = False,
) -> bytes:
    """Packs the record of a member: how many collectives it has entered, completed and started."""
    return MEMBER_RECORD.pack(
        entered, completed, started, entered_age, completed_age, pending_age,
        UNKNOWN if blocked is None else int(blocked), BLIND * blind | ON_DEVICE * on_device,
    )  # fmt: skip


def pack_calls(calls: Iterable[tuple[int, int, int]]) -> bytes:
    """Packs the records of calls, given as (member, sequence number, signature)."""
    return b"".join(CALL_RECORD.pack(member, seq, signature & (2**64 - 1)) for member, seq, signature in calls)


def wait_report(process: int, record: WaitRecord, now_ns: int, main: bool = True) -> WaitReport:
    """Converts a wait in a beacon to a report. `now_ns` is the time on the same monotonic clock."""
    since, moved = (now_ns - record.since_ns) / 1e9, (now_ns - record.moved_ns) / 1e9
    rendezvous = parse_rendezvous(record.kind, record.waits_for, record.why)
    left = NAN if record.deadline_ns is None else (record.deadline_ns - now_ns) / 1e9
    return WaitReport(
        process, record.waits_for, record.kind, record.why, since, moved, main=main,
        idle=record.why == WAITING_FOR_WORK,
        meeting=rendezvous.name, members=rendezvous.members, expected=rendezvous.expected, left=left,
    )  # fmt: skip


def encode_report(report: Roster | StateReport) -> dict[str, Any]:
    """Converts a report to a message for `json.dumps`."""
    return _encode_roster(report) if isinstance(report, Roster) else _encode_state(report)


def decode_report(message: Mapping[str, Any]) -> Roster | StateReport:
    """Converts a message to a report.

    Raises:
        ValueError: the message is not a valid report.
    """
    try:
        if message["m"] == "roster":
            return _decode_roster(message)
        if message["m"] == "state":
            return _decode_state(message)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"not a report of an agent: {error!r}") from error
    raise ValueError(f"not a report of an agent: m={message['m']!r}, expected 'roster' or 'state'")


def _encode_roster(roster: Roster) -> dict[str, Any]:
    return {
        "m": "roster",
        "host": roster.host,
        "number": roster.number,
        "processes": [[each.name, each.role, each.rank, each.pid, each.parent] for each in roster.processes],
        "communicators": [
            [each.key, each.about.name, each.about.description, each.about.backend, each.size,
             None if each.ranks is None else list(each.ranks), each.of, each.about.rendezvous]
            for each in roster.communicators
        ],
        "members": [[each.process, each.communicator, each.rank, each.made_with] for each in roster.members],
    }  # fmt: skip


def _decode_roster(message: Mapping[str, Any]) -> Roster:
    host = str(message["host"])
    return Roster(
        host,
        int(message["number"]),
        tuple(
            ProcessInfo(name, role, rank, host, pid, parent) for name, role, rank, pid, parent in message["processes"]
        ),
        tuple(_decode_communicator(*row) for row in message["communicators"]),
        tuple(RosterMember(*row) for row in message["members"]),
    )


def _decode_communicator(
    key: str, name: str, about: str, backend: str, size: int, ranks: Sequence[int] | None,
    of: str = "", rendezvous: str = "", *_: Any,
) -> RosterCommunicator:  # fmt: skip
    """A communicator of a roster. Older agents send fewer columns, newer ones may send more."""
    members = None if ranks is None else tuple(ranks)
    return RosterCommunicator(key, CommunicatorInfo(name, about, backend, rendezvous), size, members, of)


def _encode_state(state: StateReport) -> dict[str, Any]:
    message: dict[str, Any] = {
        "m": "state",
        "host": state.host,
        "number": state.number,
        "processes": _to_base64(state.processes),
        "members": _to_base64(state.members),
        "calls": _to_base64(state.calls),
        "stages": list(state.stages),
    }
    if state.notes:
        message["notes"] = {str(index): _encode_note(note) for index, note in state.notes.items()}
    if state.waits:
        message["waits"] = [_encode_wait(each) for each in state.waits]
    if state.about:
        message["about"] = {
            str(signature): [call.operation, call.shapes, call.dtype, call.root, call.site]
            for signature, call in state.about.items()
        }
    if state.sites:
        message["sites"] = [list(each) for each in state.sites]
    if state.digests:
        message["digests"] = _to_base64(state.digests)
    if state.differences:
        message["differences"] = [list(each) for each in state.differences]
    if state.moved:
        message["moved"] = {str(index): round(age, 4) for index, age in state.moved.items()}
    if state.timings:
        message["timings"] = _to_base64(state.timings)
    if state.timed:
        message["timed"] = {str(signature): list(each) for signature, each in state.timed.items()}
    if devices := record_to_json(state.devices):
        message["devices"] = devices
    return message


def _decode_state(message: Mapping[str, Any]) -> StateReport:
    return StateReport(
        message["host"],
        message["number"],
        _from_base64(message["processes"]),
        _from_base64(message["members"]),
        tuple(message["stages"]),
        {int(index): ProcessNote(**note) for index, note in message["notes"].items()} if "notes" in message else {},
        tuple([_decode_wait(each) for each in message["waits"]]) if "waits" in message else (),
        _from_base64(message["calls"]),
        {int(number): CollectiveCall(*call) for number, call in message["about"].items()} if "about" in message else {},
        tuple([(member, seq, site) for member, seq, site in message["sites"]]) if "sites" in message else (),
        _from_base64(message.get("digests", b"")),
        tuple([(int(number), int(life), int(seq)) for number, life, seq in message.get("differences", ())]),
        {int(index): float(age) for index, age in message.get("moved", {}).items()},
        record_from_json(HostDevices, message["devices"]) if "devices" in message else HostDevices(),
        _from_base64(message.get("timings", b"")),
        {int(number): (str(name), nbytes) for number, (name, nbytes) in message.get("timed", {}).items()},
    )


def _to_base64(records: bytes) -> str:
    return b2a_base64(records, newline=False).decode()


def _from_base64(records: str | bytes) -> bytes:
    """Decodes records, unless `agent_connections.parse_report` has done so already."""
    return records if isinstance(records, bytes) else a2b_base64(records)


def _encode_note(note: ProcessNote) -> dict[str, Any]:
    fields = {"where": note.where, "error": note.error, "cause": note.cause, "ours": note.ours}
    fields |= {"unrecorded": note.unrecorded, "waits_for_device": note.waits_for_device}
    fields = {name: value for name, value in fields.items() if value}
    return fields if math.isnan(note.expected_s) else {**fields, "expected_s": note.expected_s}


def _encode_wait(wait: WaitReport) -> dict[str, Any]:
    fields: dict[str, Any] = {"process": wait.process, "whom": wait.waits_for, "kind": wait.kind, "why": wait.why}
    for name, age in (("since", wait.since), ("moved", wait.moved), ("left", wait.left)):
        if not math.isnan(age):
            fields[name] = round(age, 4)
    if wait.needs is not None:
        fields["needs"] = int(wait.needs)
    if not wait.main:
        fields["main"] = False
    if wait.idle:
        fields["idle"] = True
    if wait.meeting:
        fields["meeting"] = wait.meeting
    if wait.members:
        fields["members"] = wait.members
    if wait.expected is not None:
        fields["expected"] = [wait.expected.first, wait.expected.last, wait.expected.size]
    return fields


def _decode_wait(wait: Mapping[str, Any]) -> WaitReport:
    fields = dict(wait)
    if "needs" in fields:
        fields["needs"] = WaitCondition(fields["needs"])
    if "expected" in fields:
        fields["expected"] = ExpectedRanks(*fields["expected"])
    return WaitReport(waits_for=fields.pop("whom"), **fields)
