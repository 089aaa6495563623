"""Monitors the processes of a run on this host: their beacons, their state and use of the machine, their ends.

Nothing here blocks or needs a process's cooperation: it may be stopped, wedged or dead. Times are nanoseconds of the
host's monotonic clock, 0 where nothing is known.
"""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.watch.agent.report_messages import WAITING_FOR_WORK
from lockstep.watch.agent.worker_spawner import WorkerProcess
from lockstep.watch.beacon.beacon_records import BeaconState
from lockstep.watch.beacon.reader import BeaconReader
from lockstep.watch.diagnosis.evidence_types import NO_EXIT_CODE, Liveness
from lockstep.watch.procfs import exit_causes, processes, py_spy
from lockstep.watch.procfs.launcher_env import find_unregistered_ranks
from lockstep.watch.procfs.process_activity import HostCounters, ProcessActivity
from lockstep.watch.procfs.processes import PidfdHandle, ProcessUsage
from lockstep.watch.recorder.rendezvous_wait import parse_rendezvous


@dataclass
class StageDurations:
    """The longest of each (role, stage). Seconds."""

    longest: dict[tuple[str, str], float] = field(default_factory=dict)

    def stage_ended(self, role: str, stage: str, since_ns: int, until_ns: int) -> None:
        """A stage has ended. Samples twice a second may have missed others in between: then it seems longer than it
        was, which makes later verdicts more careful."""
        if stage and until_ns > since_ns > 0:
            key = (role, stage)
            self.longest[key] = max(self.longest.get(key, 0.0), (until_ns - since_ns) / 1e9)

    def expected_s(self, role: str, stage: str) -> float:
        """The longest so far, NaN for a stage that no process of the role has finished yet."""
        return self.longest.get((role, stage), float("nan"))


MONITORING_ROLES = ("agent", "supervisor")
"""Roles of monitoring processes, which take no part in the job."""
CALM_S = 1.0
"""A process that made progress within this time is making progress."""
ENDED_S = 10.0
"""A process that waits for one that ended starts to wait within this time, or others stop making progress."""
UNKNOWN_RANK = -1
"""The rank of a process that may be one of the missing ranks, unknown which."""
RANK_SEARCH_S = 1.0
"""Seconds between two searches for ranks that are missing from a rendezvous."""
LATE_SAMPLE_S = 3.0
"""A sample that comes so late means that the monitor itself was stopped or starved: it then counts no process as
inactive."""
_NAME_WITH_RANK = re.compile(r"(.+?)-(\d+)")


@dataclass(slots=True)
class ProcessState:
    """A process of this host."""

    name: str
    role: str
    rank: int
    pid: int
    start_ticks: int
    log: Path | None = None
    beacon: BeaconState | None = None
    life: Liveness = Liveness.RUNNING
    exit_code: int = NO_EXIT_CODE
    ended_ns: int = 0
    """When the process ended; for a stopped process, since when it has been stopped in every sample without running in
    between."""
    moved_ns: int = 0
    """When a counter, the stage or a collective of the process last changed."""
    active_ns: int = 0
    """When the process or a child last used noticeable CPU time or transferred a noticeable number of bytes."""
    same_stack_ns: int = 0
    """Since when all sampled stacks of the main thread have been equal."""
    threads: tuple[py_spy.SampledThread, ...] = ()
    """The latest sampled stacks."""
    stack_ns: int = 0
    stacks_taken: int = 0
    where: str = ""
    error: str = ""
    cause: str = ""
    ours: bool = False
    usage: ProcessUsage | None = None
    activity: ProcessActivity | None = None
    end: PidfdHandle | None = None

    @property
    def living(self) -> bool:
        return self.life in (Liveness.RUNNING, Liveness.STOPPED)

    @property
    def idle(self) -> bool:
        """Whether its main thread waits for work."""
        waits = self.beacon.waits if self.beacon is not None else ()
        return any(wait.why == WAITING_FOR_WORK and wait.thread == self.pid for wait in waits)

    def stop_watching(self) -> None:
        """Stops watching for the end of the process. Idempotent."""
        if self.end is not None:
            self.end.close()
            self.end = None

    def take_stacks(self, threads: tuple[py_spy.SampledThread, ...], at_ns: int) -> None:
        """Stores sampled stacks of this process."""
        main = py_spy.main_thread(threads, self.pid)
        if main is None:
            return
        before = py_spy.main_thread(self.threads, self.pid)
        if before is None or before.frames != main.frames:
            self.same_stack_ns = at_ns
        self.threads, self.stack_ns = threads, at_ns
        self.stacks_taken += 1
        self.where = py_spy.user_code_line(main.frames)


@dataclass
class ProcessMonitor:
    """All processes of a run on this host."""

    run: str
    intended_ends: set[str] = field(default_factory=set)
    """Names of processes that were ended on purpose: their ends are no causes, whatever the exit code."""
    seen: dict[str, ProcessState] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)
    """Replaced processes, and when they are dropped from the reports (monotonic ns)."""
    history: StageDurations = field(default_factory=StageDurations)

    def __post_init__(self) -> None:
        self._oom_kills = exit_causes.oom_kill_count()
        self._reader = BeaconReader(self.run)
        self._searched_ns = 0
        self._host, self._looked_ns, self._late = HostCounters(), 0, False

    def sample(self, children: Mapping[str, WorkerProcess], held: int | None = None) -> list[ProcessState]:
        """Samples every process once; returns those that were found to have ended since the last sample.

        Args:
            held: the pid of a process that py-spy stops for a moment to take its native stack.
        """
        now = time.monotonic_ns()
        self._late, self._looked_ns = now - self._looked_ns > LATE_SAMPLE_S * 1e9, now
        self._host = HostCounters()
        gone = self._gone(children, now)
        beacons = {
            state.name: state
            for state in self._reader.read()
            if state.role not in MONITORING_ROLES and state.name not in gone
        }
        for each in children.values():
            if each.name not in gone:
                self._add_worker(each, beacons.get(each.name))
        for state in beacons.values():
            child = children.get(state.name)
            if child is None or child.pid == state.pid:
                self._read(state)
        self._add_missing_ranks(now)
        ended = []
        for seen in self.seen.values():
            if seen.living and not self._observe(seen, children.get(seen.name), held, now):
                ended.append(seen)
        return ended

    def forget(self, name: str, after_s: float) -> None:
        """Drops an ended process that was replaced, since it explains no stall any more. Takes effect after `after_s`:
        until then its log and beacon can be collected."""
        self.replaced[name] = time.monotonic_ns() + int(after_s * 1e9)

    def _gone(self, children: Mapping[str, WorkerProcess], now: int) -> set[str]:
        """Returns the names that are dropped from the reports now."""
        gone = set()
        for name, due in list(self.replaced.items()):
            child = children.get(name)
            if child is not None and child.exit_code is None:  # the name is in use again
                del self.replaced[name]
            elif now >= due:
                gone.add(name)
                seen = self.seen.pop(name, None)
                if seen is not None:
                    seen.stop_watching()
        return gone

    def is_calm(self) -> bool:
        """Whether every process makes progress or has nothing to do, and none has just ended."""
        now = time.monotonic_ns()
        return all(_is_calm(seen, now) for seen in self.seen.values())

    def suspects(self, after_s: float) -> Iterable[ProcessState]:
        """Processes whose stacks should be taken now: alive, without progress for `after_s`, and not waiting
        for work. The longer a process makes no progress, the less often its stacks are taken."""
        now = time.monotonic_ns()
        for seen in self.seen.values():
            if not seen.living or seen.idle or now - max(seen.moved_ns, 1) < after_s * 1e9:
                continue
            since_s = (now - seen.moved_ns) / 1e9
            if now - seen.stack_ns >= min(10.0, max(after_s / 2, since_s / 4)) * 1e9:
                yield seen

    def _add_worker(self, child: WorkerProcess, state: BeaconState | None) -> None:
        """Adds a worker that the agent started; it need not have a beacon yet."""
        known = self.seen.get(child.name)
        if known is not None and known.pid == child.pid:
            return
        matched = _NAME_WITH_RANK.fullmatch(child.name)
        role, rank = (matched[1], int(matched[2])) if matched else (child.name, 0)
        if state is not None and state.pid == child.pid:
            role, rank = state.role, state.rank
        self._begin(ProcessState(child.name, role, rank, child.pid, child.start_ticks, Path(child.log)))

    def _add_missing_ranks(self, now: int) -> None:
        """Finds processes that others wait for in a rendezvous and that have no beacon yet."""
        if now - self._searched_ns < RANK_SEARCH_S * 1e9:
            return
        there: dict[tuple[str, int], dict[int, int]] = {}
        for seen in self.seen.values():
            for wait in seen.beacon.waits if seen.living and seen.beacon is not None else ():
                expected = parse_rendezvous(wait.kind, wait.waits_for, wait.why).expected
                if expected is not None and now - wait.since_ns > RANK_SEARCH_S * 1e9:
                    there.setdefault((seen.role, expected.size), {})[seen.rank] = seen.pid
        if not there:
            return
        self._searched_ns = now
        known = {each.pid for each in self.seen.values() if each.rank >= 0}
        for (role, size), waiting in there.items():
            ranks = {each.rank for each in self.seen.values() if each.role == role and each.living}
            missing = [rank for rank in range(size) if rank not in ranks]
            if missing:
                placed, unplaced = find_unregistered_ranks(self.run, waiting, missing, known)
                for rank, pid in (*placed.items(), *((UNKNOWN_RANK, pid) for pid in unplaced)):
                    self._place(role, rank, pid)

    def _place(self, role: str, rank: int, pid: int) -> None:
        """Notes a process without a beacon."""
        name = f"{role}-{rank}" if rank >= 0 else f"process {pid}"
        if name not in self.seen or self.seen[name].pid != pid:
            self._displace(pid)
            self._begin(ProcessState(name, role, rank, pid, processes.start_ticks(pid) or 0))

    def _displace(self, pid: int) -> None:
        """Removes the entries of a pid that was taken for another process."""
        for name in [name for name, each in self.seen.items() if each.pid == pid and each.beacon is None]:
            self.seen.pop(name).stop_watching()

    def _begin(self, seen: ProcessState) -> None:
        before = self.seen.get(seen.name)
        if before is not None:
            before.stop_watching()
        self.intended_ends.discard(seen.name)
        seen.moved_ns = seen.active_ns = time.monotonic_ns()
        self.seen[seen.name] = seen

    def _read(self, state: BeaconState) -> None:
        seen = self.seen.get(state.name)
        if seen is None or (seen.pid, seen.start_ticks) != (state.pid, state.start_ticks):
            if seen is not None and seen.pid == state.pid:  # a child whose start time was not known when it was met
                seen.start_ticks = state.start_ticks
            else:
                self._displace(state.pid)
                seen = ProcessState(state.name, state.role, state.rank, state.pid, state.start_ticks)
                self._begin(seen)
        seen.role, seen.rank = state.role, state.rank
        if seen.beacon is not None and seen.beacon.stage_since_ns != state.stage_since_ns:
            self.history.stage_ended(seen.role, seen.beacon.stage, seen.beacon.stage_since_ns, state.stage_since_ns)
        seen.moved_ns = max(seen.moved_ns, last_progress_ns(state))
        seen.beacon = state

    def _observe(self, seen: ProcessState, child: WorkerProcess | None, held: int | None, now: int) -> bool:
        """Updates the state and usage of a process; returns False when the process has ended."""
        mine = child is not None and child.pid == seen.pid
        if mine and child is not None and child.exit_code is not None:
            self._ended(seen, child.exit_code, now)
            return False
        still = now - seen.moved_ns > CALM_S * 1e9
        usage = processes.process_usage(seen.pid, seen.start_ticks or None, moved=still)
        if usage is None or usage.state in "ZX":
            if mine:  # the agent reaps it in a moment and then knows its exit code
                return True
            code = seen.end.exit_code() if seen.end is not None else None
            self._ended(seen, NO_EXIT_CODE if code is None else code, now)
            return False
        if seen.end is None and not mine:
            try:
                seen.end = PidfdHandle(seen.pid)
            except OSError:
                seen.end = None
        self._stopped(seen, usage, held, now)
        if seen.activity is None or seen.activity.pid != seen.pid:
            seen.activity = ProcessActivity(seen.pid)
        if not still:
            seen.active_ns = max(seen.active_ns, seen.moved_ns)
            seen.activity.rest(usage, now)
        elif seen.activity.seen(usage, now, self._host, closer=not seen.idle) or self._late:
            seen.active_ns = now
        seen.usage = usage
        return True

    def _stopped(self, seen: ProcessState, usage: ProcessUsage, held: int | None, now: int) -> None:
        """Updates whether a process is stopped. If it ran since the last sample, that sample saw an earlier stop."""
        if usage.state not in "Tt":
            seen.life, seen.ended_ns = Liveness.RUNNING, 0
            return
        ran = seen.usage is not None and seen.usage.ran_ns != usage.ran_ns
        if seen.life is Liveness.STOPPED and ran:
            seen.ended_ns = now
        elif seen.life is not Liveness.STOPPED and seen.pid != held:
            seen.life, seen.ended_ns = Liveness.STOPPED, now

    def _ended(self, seen: ProcessState, code: int, now: int) -> None:
        seen.life = Liveness.EXITED if code == 0 else Liveness.DEAD
        seen.exit_code, seen.ended_ns = code, now
        seen.ours = seen.name in self.intended_ends
        known = None if code == NO_EXIT_CODE else code
        end = exit_causes.explain_exit(
            known, exit_causes.read_tail(seen.log) if seen.log is not None else "", self._oom(seen, known), seen.ours
        )
        seen.cause, seen.error = end.cause, end.error
        seen.stop_watching()

    def _oom(self, seen: ProcessState, code: int | None) -> bool | None:
        """Whether the kernel killed the process for memory, according to the kernel's counter and log."""
        if code not in (None, -9) or seen.ours:
            return False
        logged = exit_causes.was_oom_killed(seen.pid)
        kills = exit_causes.oom_kill_count()
        rose = None if kills is None or self._oom_kills is None else kills > self._oom_kills
        self._oom_kills = kills
        if logged:
            return True
        return rose if logged is None or rose else False


def _is_calm(seen: ProcessState, now: int) -> bool:
    if not seen.living:
        return now - seen.ended_ns > ENDED_S * 1e9
    return seen.life is Liveness.RUNNING and (seen.idle or now - seen.moved_ns < CALM_S * 1e9)


def last_progress_ns(state: BeaconState) -> int:
    """When a counter, the stage or a communicator of a beacon last changed."""
    moves = [state.created_ns, state.stage_since_ns, *(counter.updated_ns for counter in state.counters.values())]
    for communicator in state.communicators:
        moves += (communicator.created_ns, communicator.entered_ns, communicator.completed_ns)
        if communicator.newest is not None:
            moves += (communicator.newest.entered_ns, communicator.newest.left_ns)
    return max(moves)
