"""Builds an agent's reports to its supervisors: rosters and states, as defined in `report_messages`."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.watch.agent.call_comparison import CallComparison
from lockstep.watch.agent.process_monitor import ProcessMonitor, ProcessState
from lockstep.watch.agent.report_messages import (
    DIGEST_RECORD,
    NAN,
    Roster,
    RosterCommunicator,
    RosterMember,
    StateReport,
    WaitReport,
    list_number,
    pack_calls,
    pack_member,
    pack_process,
    wait_report,
)
from lockstep.watch.beacon.beacon_records import CallRecord, CommunicatorRecord
from lockstep.watch.beacon.reader import read_calls
from lockstep.watch.devices.device_sampler import DeviceSampler
from lockstep.watch.devices.device_samples import HostDevices
from lockstep.watch.diagnosis.evidence_types import (
    CALL_FROM_CPP,
    FROM_CPP,
    NO_EXIT_CODE,
    UNKNOWN,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
    ProcessNote,
)
from lockstep.watch.recorder.rendezvous_wait import rendezvous_name

QUIET_S = 1.0
"""Reports contain no details of processes that made progress within this time."""
CALLS_REPORTED = 8
"""The number of newest calls that are reported for a member without recent progress; for others it is one."""

SILENT_S = 1.0
"""If the recorder's thread of a process has been silent for this long, ten times its interval, the counts that only it
writes may be outdated: the interpreter lock is held, and what runs in the background has ended meanwhile."""


@dataclass
class ReportBuilder:
    """Builds a state report from each sample, and a roster when the set of processes or communicators has changed."""

    host: str
    roster: Roster = field(default_factory=lambda: Roster("", 0))
    devices: DeviceSampler | None = None
    last_devices: HostDevices = field(default_factory=HostDevices)
    """Those of the last report."""
    comparison: CallComparison = field(default_factory=CallComparison)
    _explained: set[int] = field(default_factory=set)
    """Signatures whose calls all supervisors have received."""

    def forget(self) -> None:
        """Reports all signatures again, for a new supervisor."""
        self._explained.clear()
        self.comparison.timings.forget()

    def build(self, monitor: ProcessMonitor) -> tuple[Roster, StateReport]:
        """Builds the reports of the last sample. A changed roster gets the next number."""
        states = sorted(monitor.tracked.values(), key=lambda process: (process.role, process.rank, process.name))
        memberships = [
            (index, record)
            for index, process in enumerate(states)
            if process.beacon is not None
            for record in process.beacon.communicators
            if not (record.closed and process.living)  # a process that ends destroys its communicators
        ]
        numbers = self._update_roster(states, memberships)
        if self.devices is not None:
            self.last_devices = _read_devices(self.devices, states)
        now = time.monotonic_ns()
        self.comparison.update((states[index], record) for index, record in memberships)
        calls = [self._reported_calls(states[index], record, now) for index, record in memberships]
        timings, timed = self.comparison.timings.take(numbers)
        state = StateReport(
            self.host,
            self.roster.number,
            processes=b"".join(_pack_process_state(each, now) for each in states),
            members=b"".join(_pack_membership(record, now, _is_silent(states[i], now)) for i, record in memberships),
            stages=tuple(each.beacon.stage if each.beacon is not None else "" for each in states),
            notes={i: note for i, each in enumerate(states) if (note := _process_note(each, monitor, now)) is not None},
            waits=tuple(_wait_reports(states, now)),
            calls=pack_calls((i, call.seq, call.signature) for i, some in enumerate(calls) for call in some),
            about=self._about(calls),
            sites=tuple((i, call.seq, call.where) for i, some in enumerate(calls) for call in some if call.site),
            digests=self._digests(numbers),
            differences=tuple(
                (numbers[life.identity], life.incarnation, seq)
                for life, seq in self.comparison.differences()
                if life.identity in numbers
            ),
            moved={i: _age_s(each.moved_ns, now) for i, each in enumerate(states) if each.moved_ns > each.progress_ns},
            devices=self.last_devices,
            timings=timings,
            timed=timed,
        )
        return self.roster, state

    def _update_roster(
        self, states: Sequence[ProcessState], memberships: Sequence[tuple[int, CommunicatorRecord]]
    ) -> Mapping[int, int]:
        """Replaces the roster, with the next number, if it has changed. Returns the communicators' indices in it, by
        identity."""
        processes = tuple(
            ProcessInfo(each.name, each.role, each.rank, self.host, each.pid, each.parent) for each in states
        )
        named: dict[int, RosterCommunicator] = {}
        for _, each in memberships:
            about = CommunicatorInfo(
                each.label, each.description, each.backend, rendezvous_name(each.name, each.description)
            )
            pair = each.pair
            ranks, of = (None, "") if pair is None else ((pair.sender, pair.receiver), f"{pair.of:x}")
            named.setdefault(each.identity, RosterCommunicator(f"{each.identity:x}", about, each.size, ranks, of))
        numbers = {identity: number for number, identity in enumerate(named)}
        members = tuple(
            RosterMember(index, numbers[each.identity], each.rank, list_number(each.members))
            for index, each in memberships
        )
        old, new = self.roster, (processes, tuple(named.values()), members)
        if not old.number or new != (old.processes, old.communicators, old.members):
            self.roster = Roster(self.host, old.number + 1, *new)
        return numbers

    def _digests(self, numbers: Mapping[int, int]) -> bytes:
        return b"".join(
            DIGEST_RECORD.pack(numbers[life.identity], life.incarnation, *digest)
            for life, digest in self.comparison.digests()
            if life.identity in numbers
        )

    def _reported_calls(self, process: ProcessState, record: CommunicatorRecord, now: int) -> Sequence[CallRecord]:
        """The newest collectives of a member, and those from the first difference of the members' calls on."""
        newest, differing = _newest_calls(process, record, now), self.comparison.calls_of(process, record)
        return newest if not differing else list({call.seq: call for call in (*differing, *newest)}.values())

    def _about(self, calls: Iterable[Sequence[CallRecord]]) -> dict[int, CollectiveCall]:
        about = {
            call.signature: CollectiveCall(call.operation, call.shapes, call.dtype, call.root, call.where)
            for some in calls
            for call in some
            if call.signature not in self._explained and call.operation
        }
        if len(self._explained) > 2048:  # the job uses ever new shapes; supervisors drop the oldest as well
            self._explained.clear()
        self._explained.update(about)
        return about


def _read_devices(devices: DeviceSampler, states: Sequence[ProcessState]) -> HostDevices:
    """The devices of this host. That /proc shows nothing of a process (as root in a container without the capability,
    say) is a gap in the evidence and must not end the agent, which would end the workers."""
    try:
        return devices.report([(each.pid, each.start_ticks) for each in states])
    except OSError as error:
        return HostDevices(gap=f"the devices of its processes are unknown: {error}")


def _pack_process_state(process: ProcessState, now: int) -> bytes:
    code = None if process.exit_code == NO_EXIT_CODE else process.exit_code
    return pack_process(
        process.liveness, code, _age_s(process.ended_ns, now), _age_s(process.progress_ns, now),
        _age_s(process.active_ns, now), _same_stack_s(process, now),
    )  # fmt: skip


def _same_stack_s(process: ProcessState, now: int) -> float:
    """For how long all stacks since the last progress have been equal: 0 before the first of them is sampled, NaN if
    sampling has failed since."""
    if process.same_stack_ns >= process.progress_ns or not process.same_stack_ns:
        return _age_s(process.same_stack_ns, now)
    return 0.0 if process.stack_ns < process.progress_ns else NAN


def _is_silent(process: ProcessState, now: int) -> bool:
    """Whether the recorder's thread of a running process writes no heartbeat."""
    beat = process.beacon.beat_ns if process.beacon is not None else 0
    return process.liveness == Liveness.RUNNING and beat > 0 and now - beat > SILENT_S * 1e9


def _pack_membership(record: CommunicatorRecord, now: int, silent: bool) -> bytes:
    outdated = silent and record.on_device
    completed, started = (UNKNOWN, UNKNOWN) if outdated else (record.completed, record.started)
    blocked = record.blocked
    if silent and blocked is None and not record.on_device:
        # Who waits for an operation in the background releases the lock, so that the recorder's thread would run.
        blocked = False
    return pack_member(
        record.entered, completed, _age_s(record.entered_ns, now), _age_s(record.completed_ns, now),
        blocked, record.blind, started, _age_s(record.pending_ns, now), record.on_device,
    )  # fmt: skip


def _newest_calls(process: ProcessState, record: CommunicatorRecord, now: int) -> Sequence[CallRecord]:
    """The newest collectives of a member: several if it makes no progress, because earlier calls show the cause."""
    newest = record.newest
    if newest is None or process.beacon is None:
        return ()
    if record.pair is not None:
        return [record.inside or newest]
    if now - process.progress_ns < QUIET_S * 1e9:
        found: Sequence[CallRecord] = (newest,)
    else:
        found = [*read_calls(process.beacon.path, record.slot, CALLS_REPORTED), *_calls_from_cpp(record)]
    # A call that failed before c10d counted it has the number of the next one.
    return list({call.seq: call for call in found if not call.p2p and call.seq != UNKNOWN}.values())


def _calls_from_cpp(record: CommunicatorRecord) -> list[CallRecord]:
    """The first unfinished collectives of a member that makes no progress, if they were issued from C++: c10d has
    counted them after the newest call from Python, which has returned. Those that c10d counts before are its parts."""
    newest = record.newest
    if newest is None or newest.seq == UNKNOWN or newest.inside or record.unsure:
        return []
    if record.blind or not record.counted:
        return []
    first = max(newest.seq, record.completed) + 1
    return [
        replace(newest, seq=seq, signature=FROM_CPP, operation=CALL_FROM_CPP.operation, shapes="", dtype="", root=None,
                site="", left_ns=0)
        for seq in range(first, min(record.entered, first + CALLS_REPORTED - 1) + 1)
    ]  # fmt: skip


def _process_note(process: ProcessState, monitor: ProcessMonitor, now: int) -> ProcessNote | None:
    """Details of a process that has ended or makes no progress."""
    unrecorded = process.beacon is not None and process.beacon.unrecorded > 0
    if process.living and now - process.progress_ns < QUIET_S * 1e9 and not unrecorded:
        return None
    stage = process.beacon.stage if process.beacon is not None else ""
    # A stack that is older than the last progress shows an earlier position.
    is_current = process.stack_ns >= process.progress_ns
    return ProcessNote(
        where=process.where if is_current else "", error=process.error, cause=process.cause,
        ours=process.ended_on_purpose, expected_s=monitor.history.expected_s(process.role, stage),
        unrecorded=unrecorded, waits_for_device=process.waits_for_device and is_current,
    )  # fmt: skip


def _wait_reports(states: Iterable[ProcessState], now: int) -> Iterable[WaitReport]:
    for index, process in enumerate(states):
        if not process.living or process.beacon is None:
            continue
        for record in process.beacon.waits:
            yield wait_report(index, record, now, main=record.thread == process.pid)


def _age_s(at_ns: int, now: int) -> float:
    return (now - at_ns) / 1e9 if at_ns else NAN
