"""What an agent tells the supervisor of its host's processes. Imports the standard library only.

Two kinds of messages, both JSON-able. A *roster* says who is there; it is sent at first, and again with the next
number whenever a process or a communicator was added or has gone. A *state* says how they are; it is sent at every
tick and names the roster that its indices mean. A state of an unknown roster is dropped, so a roster goes first after
every reconnect. What is said of times is said as *ages*, seconds before the message was made (`ages` below), NaN if
not known: clocks of hosts need not agree.

    {"m": "roster", "host": "b", "number": 7,
     "processes": [[name, role, rank, pid], ...],
     "communicators": [[key, name, description, backend, size, ranks], ...],
     "members": [[process, communicator, rank in it, made with], ...]}

- `key` names a communicator uniquely in the job: `policy/fsdp`; torch's own names ("0", "1") need the role or the
  world before them, because the worlds of two roles both have a "0".
- `size` is how many members it should have, 0 if not known. `ranks` are their ranks within the role of the members,
  in the order of the communicator; null where it is not known, or longer than is worth sending (64).
- *made with* is a number that stands for the list of members (see `Communicators.ranks`), -1 if not known.

    {"m": "state", "host": "b", "number": 7,
     "processes": base64 of PROCESS records, one for each of the roster's processes
     "members": base64 of MEMBER records, one for each of the roster's members
     "stages": [text, ...] of each process; may be empty
     "notes": {process: {"where", "error", "cause", "ours", "expected_s"}}, each field only if it says something
     "waits": [{"process", "whom", "kind", "why", "since", "moved", ...}, ...]: see Waiter, as ages
     "calls": base64 of CALL records, "about": {signature: [operation, shapes, dtype, root, site]},
     "sites": [[member, seq, site], ...], "gaps": [text, ...]}

- CALL records hold the newest calls of members, at most a few each (eight are plenty). `about` need only hold
  signatures that were not told since the agent's last connect: the supervisor keeps what it heard.
- `rendezvous_target` of a wait is a process's name, several with commas, a role (`policy`), an alias that the
supervisor was given
  (`the scorers`), or, when it is none of these, somebody outside of the job (`judge.example:8000`); in a *meeting*,
  when it is none of these, everybody of the role of the waiter.
- "expected" of a wait in a meeting: first and last rank that should be on the waiter's host, and how many there are.
"""

import math
import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.base.bounded_wait import WaitRecord
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
"""life, exit code, then ages: ended (or stopped, where it is), moved, active, same stack."""
MEMBER_RECORD = struct.Struct("<qqffbB")
"""entered, completed, then ages: entered, completed; blocked (1, 0, -1), blind (1, 0)."""
CALL_RECORD = struct.Struct("<IqQ")
"""member, sequence number, signature."""

WAITING_FOR_WORK = "the next call"
"""Why a service waits when it waits for work and owes nobody anything."""


@dataclass(frozen=True, slots=True)
class RosterCommunicator:
    """A communicator as its members on one host know it."""

    key: str
    about: CommunicatorInfo
    size: int = 0
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RosterMember:
    process: int
    communicator: int
    rank: int
    made_with: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Roster:
    """Who is on a host. Indices of members and of the state's records are places in these."""

    host: str
    number: int
    processes: tuple[ProcessInfo, ...] = ()
    communicators: tuple[RosterCommunicator, ...] = ()
    members: tuple[RosterMember, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitReport:
    """A wait of a process, by the names it gives. Ages in seconds."""

    process: int
    waits_for: str
    kind: str = ""
    why: str = ""
    since: float = NAN
    moved: float = NAN
    needs: WaitCondition | None = None
    """None: as the alias says, else all."""
    main: bool = True
    idle: bool = False
    meeting: str = ""
    members: str = ""
    """Whom the waiter takes for the members of what is made in the meeting, where it says that."""
    expected: ExpectedRanks | None = None
    """Who should come to the meeting, where the waiter says that."""
    left: float = NAN
    """Seconds until the waiter gives up by itself, as things stand."""


@dataclass(frozen=True, slots=True)
class StateReport:
    """How the processes of a roster are. `communicator_processes`, `archive_members` and `plan_attention_calls` are
    packed records."""

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
    gaps: tuple[str, ...] = ()


def pack_process(
    life: Liveness = Liveness.RUNNING,
    exit_code: int | None = None,
    ended: float = NAN,
    moved: float = NAN,
    active: float = NAN,
    same_stack: float = NAN,
) -> bytes:
    """How a process is; ages."""
    return PROCESS_RECORD.pack(life, NO_EXIT_CODE if exit_code is None else exit_code, ended, moved, active, same_stack)


def pack_member(
    entered: int = UNKNOWN,
    completed: int = UNKNOWN,
    entered_age: float = NAN,
    completed_age: float = NAN,
    blocked: bool | None = None,
    blind: bool = False,
) -> bytes:
    """How far a member is in a communicator."""
    return MEMBER_RECORD.pack(
        entered, completed, entered_age, completed_age, UNKNOWN if blocked is None else int(blocked), int(blind)
    )


def pack_calls(calls: Iterable[tuple[int, int, int]]) -> bytes:
    """Of (member, sequence number, signature)."""
    return b"".join(CALL_RECORD.pack(member, seq, signature & (2**64 - 1)) for member, seq, signature in calls)


def wait_report(process: int, record: WaitRecord, now_ns: int, main: bool = True) -> WaitReport:
    """A wait that a beacon shows. `now_ns` is the same monotonic clock."""
    since, moved = (now_ns - record.since_ns) / 1e9, (now_ns - record.moved_ns) / 1e9
    told = parse_rendezvous(record.kind, record.waits_for, record.why)
    left = NAN if record.deadline_ns is None else (record.deadline_ns - now_ns) / 1e9
    return WaitReport(
        process, record.waits_for, record.kind, record.why, since, moved, main=main,
        idle=record.why == WAITING_FOR_WORK,
        meeting=told.name, members=told.members, expected=told.expected, left=left,
    )  # fmt: skip


def encode_report(said: Roster | StateReport) -> dict[str, Any]:
    """The message, to be given to `json.dumps`."""
    return _encode_roster(said) if isinstance(said, Roster) else _encode_state(said)


def decode_report(message: Mapping[str, Any]) -> Roster | StateReport:
    """The other way.

    Raises:
        ValueError: it is neither of the two, or not as above.
    """
    try:
        if message["m"] == "roster":
            return _decode_roster(message)
        if message["m"] == "state":
            return _decode_state(message)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"no message of an agent: {error!r}") from error
    raise ValueError(f"no message of an agent: m={message['m']!r}, expected 'roster' or 'state'")


def _encode_roster(roster: Roster) -> dict[str, Any]:
    return {
        "m": "roster",
        "host": roster.host,
        "number": roster.number,
        "processes": [[each.name, each.role, each.rank, each.pid] for each in roster.processes],
        "communicators": [
            [each.key, each.about.name, each.about.description, each.about.backend, each.size,
             None if each.ranks is None else list(each.ranks)]
            for each in roster.communicators
        ],
        "members": [[each.process, each.communicator, each.rank, each.made_with] for each in roster.members],
    }  # fmt: skip


def _decode_roster(message: Mapping[str, Any]) -> Roster:
    host = str(message["host"])
    return Roster(
        host,
        int(message["number"]),
        tuple(ProcessInfo(name, role, rank, host, pid) for name, role, rank, pid in message["processes"]),
        tuple(
            RosterCommunicator(
                key, CommunicatorInfo(name, about, backend), size, None if ranks is None else tuple(ranks)
            )
            for key, name, about, backend, size, ranks in message["communicators"]
        ),
        tuple(RosterMember(*row) for row in message["members"]),
    )


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
    if state.gaps:
        message["gaps"] = list(state.gaps)
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
        tuple(message.get("gaps", ())),
    )


def _to_base64(records: bytes) -> str:
    return b2a_base64(records, newline=False).decode()


def _from_base64(said: str | bytes) -> bytes:
    """`hearing` has made bytes of the text already."""
    return said if isinstance(said, bytes) else a2b_base64(said)


def _encode_note(note: ProcessNote) -> dict[str, Any]:
    said = {"where": note.where, "error": note.error, "cause": note.cause, "ours": note.ours}
    said = {name: value for name, value in said.items() if value}
    return said if math.isnan(note.expected_s) else {**said, "expected_s": note.expected_s}


def _encode_wait(wait: WaitReport) -> dict[str, Any]:
    said: dict[str, Any] = {"process": wait.process, "whom": wait.waits_for, "kind": wait.kind, "why": wait.why}
    for name, age in (("since", wait.since), ("moved", wait.moved), ("left", wait.left)):
        if not math.isnan(age):
            said[name] = round(age, 4)
    if wait.needs is not None:
        said["needs"] = int(wait.needs)
    if not wait.main:
        said["main"] = False
    if wait.idle:
        said["idle"] = True
    if wait.meeting:
        said["meeting"] = wait.meeting
    if wait.members:
        said["members"] = wait.members
    if wait.expected is not None:
        said["expected"] = [wait.expected.first, wait.expected.last, wait.expected.size]
    return said


def _decode_wait(said: Mapping[str, Any]) -> WaitReport:
    fields = dict(said)
    if "needs" in fields:
        fields["needs"] = WaitCondition(fields["needs"])
    if "expected" in fields:
        fields["expected"] = ExpectedRanks(*fields["expected"])
    return WaitReport(waits_for=fields.pop("whom"), **fields)
