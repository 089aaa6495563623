"""Monitors the processes of a run on this host: their beacons, states, resource usage and ends.

Nothing here blocks or needs the cooperation of a monitored process, which may be stopped, hung or dead. Times are
nanoseconds of the host's monotonic clock, 0 if unknown.
"""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.base.wait_state import WAITING_FOR_WORK
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
    """The longest duration of each stage of each role, in seconds."""

    longest: dict[tuple[str, str], float] = field(default_factory=dict)

    def stage_ended(self, role: str, stage: str, since_ns: int, until_ns: int) -> None:
        """Records that a stage has ended. If the samples have missed other stages in between, the recorded duration is
        too long, which makes later verdicts more careful."""
        if stage and until_ns > since_ns > 0:
            key = (role, stage)
            self.longest[key] = max(self.longest.get(key, 0.0), (until_ns - since_ns) / 1e9)

    def expected_s(self, role: str, stage: str) -> float:
        """The longest duration so far; NaN for a stage that no process of the role has finished yet."""
        return self.longest.get((role, stage), float("nan"))


MONITORING_ROLES = ("agent", "supervisor")
"""Roles of monitoring processes, which take no part in the job."""
RECENT_S = 1.0
"""A process whose last progress is not older than this is making progress."""
ENDED_S = 10.0
"""If other processes depend on one that ended, they begin to wait within this time."""
UNKNOWN_RANK = -1
"""The rank of a process that may be one of the missing ranks, but cannot be assigned to one."""
RANK_SEARCH_S = 1.0
"""Seconds between two searches for ranks that are missing from a rendezvous."""
LATE_SAMPLE_S = 3.0
"""If a sample comes this late, the monitor itself was stopped or starved, and the sample counts no process as
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
    parent: str = ""
    """The name of the process that this one is a part of; empty for the processes of the job themselves."""
    beacon: BeaconState | None = None
    liveness: Liveness = Liveness.RUNNING
    exit_code: int = NO_EXIT_CODE
    ended_ns: int = 0
    """When the process ended; for a stopped process, since when it has been stopped without running in between."""
    progress_ns: int = 0
    """When a counter, the stage or a collective of the process last changed."""
    active_ns: int = 0
    """When the process or a child last used noticeable CPU time or transferred a noticeable number of bytes."""
    same_stack_ns: int = 0
    """Since when all sampled stacks of the main thread have been equal. If there is later progress, there is no stack
    since."""
    moved_ns: int = 0
    """When the process or a child last transferred data or touched new memory as it worked: compilation, imports and
    I/O are progress that advances no counter."""
    threads: tuple[py_spy.SampledThread, ...] = ()
    """The latest sampled stacks."""
    stack_ns: int = 0
    stacks_taken: int = 0
    native_ns: int = 0
    """When the stack with native frames was last sampled."""
    waits_for_device: bool = False
    """Whether the main thread waits for a device, according to the latest stack; such a wait may use a core."""
    where: str = ""
    error: str = ""
    cause: str = ""
    ended_on_purpose: bool = False
    usage: ProcessUsage | None = None
    activity: ProcessActivity | None = None
    pidfd: PidfdHandle | None = None

    @property
    def living(self) -> bool:
        return self.liveness in (Liveness.RUNNING, Liveness.STOPPED)

    @property
    def idle(self) -> bool:
        """Whether the main thread of the process waits for work."""
        waits = self.beacon.waits if self.beacon is not None else ()
        return any(wait.why == WAITING_FOR_WORK and wait.thread == self.pid for wait in waits)

    def stop_watching(self) -> None:
        """Stops watching for the end of the process. Idempotent."""
        if self.pidfd is not None:
            self.pidfd.close()
            self.pidfd = None

    def store_stacks(self, threads: tuple[py_spy.SampledThread, ...], at_ns: int) -> None:
        """Stores sampled stacks of this process."""
        main = py_spy.main_thread(threads, self.pid)
        if main is None:
            return
        before = py_spy.main_thread(self.threads, self.pid)
        progressed = self.same_stack_ns < self.progress_ns  # the same line in another step is no equal stack
        if before is None or before.frames != main.frames or progressed:
            self.same_stack_ns, self.waits_for_device = at_ns, False
        self.waits_for_device |= py_spy.waits_for_device(main.frames)
        self.threads, self.stack_ns = threads, at_ns
        self.stacks_taken += 1
        self.where = py_spy.user_code_line(main.frames)

    def store_native_stacks(self, threads: tuple[py_spy.SampledThread, ...], at_ns: int) -> None:
        """Stores what native frames show of a process whose Python stack has not changed before `at_ns`; `threads` is
        empty if sampling failed. The process was stopped for it, so that it counts as active until now."""
        self.native_ns = at_ns
        self.active_ns = max(self.active_ns, time.monotonic_ns())
        main = py_spy.main_thread(threads, self.pid)
        self.waits_for_device |= main is not None and py_spy.waits_for_device(main.frames)

    def needs_native_stack(self, after_s: float) -> bool:
        """Whether only native frames can show if the process computes or waits for a device: it uses a core in one line
        for longer than `after_s`. True once for each such line, because sampling stops the process for a moment."""
        spins = self.active_ns > self.same_stack_ns > 0 and not self.waits_for_device
        return spins and self.native_ns < self.same_stack_ns and self.stack_ns - self.same_stack_ns > after_s * 1e9


@dataclass
class ProcessMonitor:
    """All processes of a run on this host."""

    run: str
    intended_ends: set[tuple[str, int]] = field(default_factory=set)
    """Names and pids of processes that are ended on purpose, so their exit codes do not matter. Recorded before the
    signal, and for a process that was not sampled yet as well."""
    tracked: dict[str, ProcessState] = field(default_factory=dict)
    """All processes by name, including ended ones."""
    replaced: dict[str, int] = field(default_factory=dict)
    """When replaced processes are dropped from the reports, by name."""
    history: StageDurations = field(default_factory=StageDurations)

    def __post_init__(self) -> None:
        self._oom_kills = exit_causes.oom_kill_count()
        self._reader = BeaconReader(self.run)
        self._searched_ns = 0
        self._host, self._looked_ns, self._late = HostCounters(), 0, False

    def sample(self, children: Mapping[str, WorkerProcess], held: int | None = None) -> list[ProcessState]:
        """Samples every process once; returns the processes that have ended since the last sample.

        Args:
            held: the pid of a process that py-spy stops for a moment to sample its native stack.
        """
        now = time.monotonic_ns()
        self._late, self._looked_ns = now - self._looked_ns > LATE_SAMPLE_S * 1e9, now
        self._host.begin_sample(now)
        dropped = self._drop_replaced(children, now)
        beacons = {
            state.name: state
            for state in self._reader.read()
            if state.role not in MONITORING_ROLES and state.name not in dropped
        }
        for each in children.values():
            if each.name not in dropped:
                self._add_worker(each, beacons.get(each.name))
        for state in beacons.values():
            child = children.get(state.name)
            if (child is None or child.pid == state.pid) and not self._ended_and_replaced(state, beacons):
                self._read(state)
        self._credit_parents()
        self._add_missing_ranks(now)
        ended = []
        for process in self.tracked.values():
            if process.living and not self._observe(process, children.get(process.name), held, now):
                ended.append(process)
        return ended

    def forget(self, name: str, after_s: float) -> None:
        """Drops an ended process that was replaced, because it no longer explains a stall. Takes effect after
        `after_s`; until then its log and beacon can be collected."""
        self.replaced[name] = time.monotonic_ns() + int(after_s * 1e9)

    def _drop_replaced(self, children: Mapping[str, WorkerProcess], now: int) -> set[str]:
        """Drops replaced processes from the reports once it is time; returns their names."""
        dropped = set()
        for name, due in list(self.replaced.items()):
            child = children.get(name)
            if child is not None and child.exit_code is None:  # the name is in use again
                del self.replaced[name]
            elif now >= due:
                dropped.add(name)
                process = self.tracked.pop(name, None)
                if process is not None:
                    process.stop_watching()
        return dropped

    def _ended_and_replaced(self, state: BeaconState, beacons: Mapping[str, BeaconState]) -> bool:
        """Whether a process had ended and been replaced before this monitor saw it, as an agent that has taken the
        place of another one finds it: its death is no news."""
        if state.name in self.tracked or processes.is_alive(state.pid, state.start_ticks):
            return False
        place = (state.role, state.rank, state.parent)
        others = (each for each in beacons.values() if (each.role, each.rank, each.parent) == place)
        return any(each.created_ns > state.created_ns for each in others)

    def shows_no_stall(self) -> bool:
        """Whether every process makes progress or is idle, and none has just ended."""
        now = time.monotonic_ns()
        return all(_shows_no_stall(process, now) for process in self.tracked.values())

    def stack_candidates(self, after_s: float) -> Iterable[ProcessState]:
        """Processes whose stacks should be sampled now: alive, without progress for `after_s`, and not waiting for
        work. The longer a process makes no progress, the less often its stacks are sampled."""
        now = time.monotonic_ns()
        for process in self.tracked.values():
            if not process.living or process.idle or now - max(process.progress_ns, 1) < after_s * 1e9:
                continue
            since_s = (now - process.progress_ns) / 1e9
            if now - process.stack_ns >= min(10.0, max(after_s / 2, since_s / 4)) * 1e9:
                yield process

    def _add_worker(self, child: WorkerProcess, state: BeaconState | None) -> None:
        """Adds a worker that the agent started and that may have no beacon yet."""
        known = self.tracked.get(child.name)
        if known is not None and known.pid == child.pid:
            return
        matched = _NAME_WITH_RANK.fullmatch(child.name)
        role, rank = (matched[1], int(matched[2])) if matched else (child.name, 0)
        if state is not None and state.pid == child.pid:
            role, rank = state.role, state.rank
        self._track(ProcessState(child.name, role, rank, child.pid, child.start_ticks, Path(child.log)))

    def _add_missing_ranks(self, now: int) -> None:
        """Finds processes that have no beacon yet and that others wait for in a rendezvous."""
        if now - self._searched_ns < RANK_SEARCH_S * 1e9:
            return
        waiting_ranks: dict[tuple[str, int], dict[int, int]] = {}
        for process in self.tracked.values():
            for wait in process.beacon.waits if process.living and process.beacon is not None else ():
                expected = parse_rendezvous(wait.kind, wait.waits_for, wait.why).expected
                if expected is not None and now - wait.since_ns > RANK_SEARCH_S * 1e9:
                    waiting_ranks.setdefault((process.role, expected.size), {})[process.rank] = process.pid
        if not waiting_ranks:
            return
        self._searched_ns = now
        known = {each.pid for each in self.tracked.values() if each.rank >= 0}
        for (role, size), waiting in waiting_ranks.items():
            ranks = {each.rank for each in self.tracked.values() if each.role == role and each.living}
            missing = [rank for rank in range(size) if rank not in ranks]
            if missing:
                found, candidates = find_unregistered_ranks(self.run, waiting, missing, known)
                for rank, pid in (*found.items(), *((UNKNOWN_RANK, pid) for pid in candidates)):
                    self._add_missing_rank(role, rank, pid)

    def _add_missing_rank(self, role: str, rank: int, pid: int) -> None:
        """Adds a process without a beacon."""
        name = f"{role}-{rank}" if rank >= 0 else f"process {pid}"
        if name not in self.tracked or self.tracked[name].pid != pid:
            self._remove_without_beacon(pid)
            self._track(ProcessState(name, role, rank, pid, processes.start_ticks(pid) or 0))

    def _remove_without_beacon(self, pid: int) -> None:
        """Removes entries without a beacon of a pid, which were made before its real name was known."""
        for name in [name for name, each in self.tracked.items() if each.pid == pid and each.beacon is None]:
            self.tracked.pop(name).stop_watching()

    def _track(self, process: ProcessState) -> None:
        before = self.tracked.get(process.name)
        if before is not None:
            before.stop_watching()
        process.progress_ns = process.active_ns = time.monotonic_ns()
        self.tracked[process.name] = process

    def _read(self, state: BeaconState) -> None:
        process = self.tracked.get(state.name)
        if process is None or (process.pid, process.start_ticks) != (state.pid, state.start_ticks):
            if process is not None and process.pid == state.pid:  # added before its start time was known
                process.start_ticks = state.start_ticks
            else:
                self._remove_without_beacon(state.pid)
                process = ProcessState(state.name, state.role, state.rank, state.pid, state.start_ticks)
                self._track(process)
        process.role, process.rank, process.parent = state.role, state.rank, state.parent
        if process.beacon is not None and process.beacon.stage_since_ns != state.stage_since_ns:
            self.history.stage_ended(
                process.role, process.beacon.stage, process.beacon.stage_since_ns, state.stage_since_ns
            )
        process.progress_ns = max(process.progress_ns, last_progress_ns(state))
        process.beacon = state

    def _credit_parents(self) -> None:
        """Counts the progress of parts as progress of the processes that they are parts of."""
        for part in self.tracked.values():
            whole = self.tracked.get(part.parent)
            if whole is not None:
                whole.progress_ns = max(whole.progress_ns, part.progress_ns)

    def _observe(self, process: ProcessState, child: WorkerProcess | None, held: int | None, now: int) -> bool:
        """Updates the state and usage of a process; returns False when the process has ended."""
        is_worker = child is not None and child.pid == process.pid
        if is_worker and child is not None and child.exit_code is not None:
            self._ended(process, child.exit_code, now)
            return False
        no_progress = now - process.progress_ns > RECENT_S * 1e9
        usage = processes.process_usage(process.pid, process.start_ticks or None, with_bytes=no_progress)
        if usage is None or usage.state in "ZX":
            if is_worker:  # the agent reaps it in a moment and then knows its exit code
                return True
            code = process.pidfd.exit_code() if process.pidfd is not None else None
            self._ended(process, NO_EXIT_CODE if code is None else code, now)
            return False
        if process.pidfd is None and not is_worker:
            try:
                process.pidfd = PidfdHandle(process.pid)
            except OSError:
                process.pidfd = None
        self._update_stopped(process, usage, held, now)
        if process.activity is None or process.activity.pid != process.pid:
            process.activity = ProcessActivity(process.pid)
        if not no_progress:
            process.active_ns = max(process.active_ns, process.progress_ns)
            process.activity.skip(usage, now)
        elif process.pid == held:  # py-spy stops it: that it uses nothing proves nothing
            process.active_ns = now
            process.activity.skip(usage, now)
        elif process.activity.sample(usage, now, self._host, closer=not process.idle) or self._late:
            process.active_ns = now
        if process.activity.moves and not process.waits_for_device:  # then other threads' work proves nothing
            process.moved_ns = now
        process.usage = usage
        return True

    def _update_stopped(self, process: ProcessState, usage: ProcessUsage, held: int | None, now: int) -> None:
        """Updates whether a process is stopped. If the process ran since the last sample, this is a new stop."""
        if usage.state not in "Tt":
            process.liveness, process.ended_ns = Liveness.RUNNING, 0
            return
        ran = process.usage is not None and process.usage.ran_ns != usage.ran_ns
        if process.liveness is Liveness.STOPPED and ran:
            process.ended_ns = now
        elif process.liveness is not Liveness.STOPPED and process.pid != held:
            process.liveness, process.ended_ns = Liveness.STOPPED, now

    def _ended(self, process: ProcessState, code: int, now: int) -> None:
        process.liveness = Liveness.EXITED if code == 0 else Liveness.DEAD
        process.exit_code, process.ended_ns = code, now
        intended = (process.name, process.pid) in self.intended_ends
        process.ended_on_purpose = intended or exit_causes.end_was_requested(self.run)
        known = None if code == NO_EXIT_CODE else code
        log_text = exit_causes.read_tail(process.log) if process.log is not None else ""
        out_of_memory = self._was_oom_killed(process, known)
        explained = exit_causes.explain_exit(known, log_text, out_of_memory, process.ended_on_purpose)
        process.cause, process.error = explained.cause, explained.error
        process.stop_watching()

    def _was_oom_killed(self, process: ProcessState, code: int | None) -> bool | None:
        """Whether the kernel killed the process for memory, according to the kernel's counter and log."""
        if code not in (None, -9) or process.ended_on_purpose:
            return False
        logged = exit_causes.was_oom_killed(process.pid)
        kills = exit_causes.oom_kill_count()
        rose = None if kills is None or self._oom_kills is None else kills > self._oom_kills
        self._oom_kills = kills
        if logged:
            return True
        return rose if logged is None or rose else False


def _shows_no_stall(process: ProcessState, now: int) -> bool:
    if not process.living:
        return now - process.ended_ns > ENDED_S * 1e9
    return process.liveness is Liveness.RUNNING and (process.idle or now - process.progress_ns < RECENT_S * 1e9)


def last_progress_ns(state: BeaconState) -> int:
    """When a counter, the stage or a communicator of a beacon last changed."""
    times = [state.created_ns, state.stage_since_ns, *(counter.updated_ns for counter in state.counters.values())]
    for communicator in state.communicators:
        times += (communicator.created_ns, communicator.entered_ns, communicator.completed_ns)
        if communicator.newest is not None:
            times += (communicator.newest.entered_ns, communicator.newest.left_ns)
    return max(times)
