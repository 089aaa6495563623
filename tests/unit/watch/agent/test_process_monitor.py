"""The agent's view of real processes, which do not cooperate."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.base.folders import new_run_id
from lockstep.base.wait_state import track_wait
from lockstep.watch.agent.process_monitor import ProcessMonitor, StageDurations
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.agent.report_messages import MEMBER_RECORD, PROCESS_RECORD, decode_report, encode_report
from lockstep.watch.agent.worker_spawner import WorkerProcess
from lockstep.watch.attach.run_observer import RunObserver, run_of_process
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.verdict import StallThresholds, VerdictKind
from lockstep.watch.procfs import exit_causes, processes
from lockstep.watch.procfs.processes import PidfdHandle
from lockstep.watch.supervisor.agent_connections import ClockOffset

CHILD = "import sys; sys.stdin.readline(); "


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    name = new_run_id("eyes")
    open_beacon(name, "policy-0", "policy", 0).stage("train")
    yield name
    close_beacon(remove=True)


def until(check: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not check():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_sample_reports_processes_and_their_progress(run: str) -> None:
    monitor, builder = ProcessMonitor(run), ReportBuilder("here")
    monitor.sample({})
    roster, state = builder.build(monitor)
    (process,) = roster.processes
    assert (process.name, process.role, process.rank, process.pid, process.host) == (
        "policy-0",
        "policy",
        0,
        os.getpid(),
        "here",
    )
    life, _, ended, moved, _, same = PROCESS_RECORD.unpack(state.processes)
    assert life == Liveness.RUNNING and moved < 5 and ended != ended and same != same and state.stages == ("train",)
    current_beacon().progress("steps", 1)
    monitor.sample({})
    again, state = builder.build(monitor)
    assert again is roster and PROCESS_RECORD.unpack(state.processes)[3] < moved + 5
    assert decode_report(encode_report(roster)) == roster and decode_report(encode_report(state)) == state


def test_a_wait_is_reported_with_its_age(run: str) -> None:

    with track_wait("future", "reward-0", "scores of step 7"):
        monitor = ProcessMonitor(run)
        monitor.sample({})
        _, state = ReportBuilder("here").build(monitor)
    (wait,) = state.waits
    assert (wait.process, wait.waits_for, wait.kind, wait.main, wait.idle) == (0, "reward-0", "future", True, False)


@pytest.mark.parametrize("on_device", [False, True])
def test_what_runs_in_the_background_is_unknown_while_the_recorder_is_silent(
    run: str, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """A process that holds the interpreter lock cannot record what its device completes, and does not wait for what
    gloo completes."""
    rings = current_beacon().call_rings()
    assert rings is not None
    slot = rings.open_slot(7, 1, "0", "fsdp", "nccl" if on_device else "gloo", 2, 0, on_device=on_device)
    assert slot is not None
    slot.write_counts(12, 11, 1, 1, 12)
    current_beacon().beat()
    for silent_s, outdated in ((60.0, False), (0.0, on_device)):
        monkeypatch.setattr("lockstep.watch.agent.report_builder.SILENT_S", silent_s)
        monitor = ProcessMonitor(run)
        monitor.sample({})
        _, state = ReportBuilder("here").build(monitor)
        entered, completed, started, _, _, _, blocked, _ = MEMBER_RECORD.unpack(state.members)
        assert (entered, completed, started) == ((12, -1, -1) if outdated else (12, 11, 12))
        assert blocked == (-1 if on_device or silent_s else 0)


@pytest.mark.parametrize(
    ("how", "life", "code"),
    [
        ("sys.exit(0)", Liveness.EXITED, 0),
        ("sys.exit(3)", Liveness.DEAD, 3),
        ("import os; os.abort()", Liveness.DEAD, -6),
    ],
)
def test_the_exit_code_of_a_grandchild_is_known(run: str, how: str, life: Liveness, code: int) -> None:
    """The process is a grandchild, whose parent reaps it before its exit code is read."""
    parent = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]);"
         "print(p.pid, flush=True); p.wait(); print('over', flush=True); sys.stdin.readline()", CHILD + how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdin is not None and parent.stdout is not None
    pid = int(parent.stdout.readline())
    end = PidfdHandle(pid)
    assert end.exit_code() is None
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "over\n"
    known = end.exit_code()
    end.close()
    parent.kill()
    parent.wait()
    assert known in (code, None)
    if known is None:
        pytest.skip("this kernel reports exit codes to parents only (Linux before 6.15)")
    assert (Liveness.EXITED if known == 0 else Liveness.DEAD) == life


@pytest.fixture
def child(run: str) -> Iterator["subprocess.Popen[str]"]:
    """A rank of the run, policy-1, that sleeps in its stage."""
    script = (
        "import sys, time; from lockstep.watch.beacon.writer import open_beacon;"
        f"open_beacon({run!r}, 'policy-1', 'policy', 1).stage('train'); print('up', flush=True); time.sleep(60)"
    )
    made = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert made.stdout is not None and made.stdout.readline() == "up\n"
        yield made
    finally:
        made.kill()
        made.wait()


def test_a_stopped_process_is_reported_as_stopped(run: str, child: "subprocess.Popen[str]") -> None:
    monitor = ProcessMonitor(run)
    monitor.sample({})
    assert monitor.tracked["policy-1"].liveness is Liveness.RUNNING
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: processes.process_state(child.pid) == "T")
    monitor.sample({}, held=child.pid)  # py-spy stops it to sample its stack
    assert monitor.tracked["policy-1"].liveness is Liveness.RUNNING
    monitor.sample({})
    process = monitor.tracked["policy-1"]
    assert process.liveness is Liveness.STOPPED
    stopped = process.ended_ns
    assert 0 < stopped <= time.monotonic_ns()
    monitor.sample({})
    assert process.ended_ns == stopped
    child.kill()
    child.wait()
    (ended,) = monitor.sample({})
    assert ended.name == "policy-1" and ended.liveness is Liveness.DEAD and ended.exit_code in (-9, -(2**31))
    assert monitor.sample({}) == []


def worker(name: str, child: "subprocess.Popen[str]", code: int, log: Path) -> WorkerProcess:
    return WorkerProcess(name, child.pid, 0, [], str(log), False, 0.0, exit_code=code)


def test_an_intended_end_is_known_although_the_process_was_never_sampled(
    run: str, child: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    monitor = ProcessMonitor(run)
    monitor.intended_ends.add(("policy-1", child.pid))
    monitor.sample({"policy-1": worker("policy-1", child, -9, tmp_path / "log")})
    assert monitor.tracked["policy-1"].ended_on_purpose
    _, state = ReportBuilder("here").build(monitor)
    assert any(note.ours for note in state.notes.values())


def test_the_intention_to_end_a_process_does_not_pass_to_its_successor(
    run: str, child: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    monitor = ProcessMonitor(run)
    monitor.intended_ends.add(("policy-1", child.pid + 1))
    monitor.sample({"policy-1": worker("policy-1", child, -9, tmp_path / "log")})
    assert monitor.tracked["policy-1"].liveness is Liveness.DEAD
    assert not monitor.tracked["policy-1"].ended_on_purpose


@pytest.mark.parametrize(("bound_s", "intended"), [(60.0, True), (-1.0, False)])
def test_processes_of_a_job_that_was_asked_to_end_have_ended_on_purpose(
    run: str, child: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch, bound_s: float, intended: bool
) -> None:
    """But not long after the request, when the job has evidently continued."""
    monkeypatch.setattr(exit_causes, "END_REQUEST_S", bound_s)
    monitor = ProcessMonitor(run)
    monitor.sample({})
    exit_causes.record_end_request(run)
    child.terminate()
    child.wait()
    (ended,) = monitor.sample({})
    assert ended.name == "policy-1" and ended.ended_on_purpose is intended


def test_two_short_stops_are_not_one_long_stop(run: str, child: "subprocess.Popen[str]") -> None:
    monitor = ProcessMonitor(run)
    monitor.sample({})
    process = monitor.tracked["policy-1"]
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: processes.process_state(child.pid) == "T")
    monitor.sample({})
    first = process.ended_ns
    monitor.sample({})
    assert process.liveness is Liveness.STOPPED and process.ended_ns == first > process.progress_ns
    _, state = ReportBuilder("here").build(monitor)
    ended = [PROCESS_RECORD.unpack_from(state.processes, at)[2] for at in (0, PROCESS_RECORD.size)]
    assert ended[0] != ended[0] and 0 <= ended[1] < 5, "the age of the stop, not of the last progress"
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: processes.process_state(child.pid) == "S")
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: processes.process_state(child.pid) == "T")
    monitor.sample({})
    assert process.liveness is Liveness.STOPPED and process.ended_ns > first


def test_a_late_sample_counts_no_process_as_inactive(
    run: str, monkeypatch: pytest.MonkeyPatch, child: "subprocess.Popen[str]"
) -> None:
    from lockstep.watch.agent import process_monitor as module

    monkeypatch.setattr(module, "RECENT_S", 0.0)
    until(lambda: processes.process_state(child.pid) == "S")
    monitor = ProcessMonitor(run)
    for _ in range(3):
        monitor.sample({})
    process = monitor.tracked["policy-1"]
    before = process.active_ns
    monitor.sample({})
    assert process.active_ns == before
    monkeypatch.setattr(module, "LATE_SAMPLE_S", 0.0)
    monitor.sample({})
    assert process.active_ns > before


def test_work_counts_as_activity_and_waiting_does_not(run: str) -> None:
    script = (
        "import sys, time; from lockstep.watch.beacon.writer import open_beacon;"
        f"open_beacon({run!r}, 'policy-1', 'policy', 1).stage('train'); print('up', flush=True);"
        "sys.stdin.readline(); end = time.process_time() + 1.0\n"
        "while time.process_time() < end: pass\n"
        "print('done', flush=True); sys.stdin.readline()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert child.stdin is not None and child.stdout is not None and child.stdout.readline() == "up\n"
        until(lambda: processes.process_state(child.pid) == "S")
        monitor = ProcessMonitor(run)
        monitor.sample({})
        process = monitor.tracked["policy-1"]
        began = process.active_ns
        time.sleep(0.2)
        monitor.sample({})
        assert process.active_ns == began
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        monitor.sample({})
        assert process.active_ns > began
    finally:
        child.kill()
        child.wait()


def test_no_stall_while_all_processes_make_progress_or_are_idle(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.watch.agent import process_monitor as module
    from lockstep.watch.agent.report_messages import WAITING_FOR_WORK

    monitor = ProcessMonitor(run)
    monitor.sample({})
    assert monitor.shows_no_stall()
    monkeypatch.setattr(module, "RECENT_S", 0.0)
    assert not monitor.shows_no_stall()
    with track_wait("condition", "controller", WAITING_FOR_WORK):
        monitor.sample({})
        assert monitor.shows_no_stall()


def test_stacks_are_sampled_of_processes_that_make_no_progress_and_are_not_idle(run: str) -> None:
    from lockstep.watch.agent.report_messages import WAITING_FOR_WORK

    monitor = ProcessMonitor(run)
    monitor.sample({})
    assert list(monitor.stack_candidates(60.0)) == []
    assert [process.name for process in monitor.stack_candidates(0.0)] == ["policy-0"]
    with track_wait("condition", "controller", WAITING_FOR_WORK):
        monitor.sample({})
        assert list(monitor.stack_candidates(0.0)) == []


def test_the_progress_of_a_worker_of_a_process_is_its_progress(run: str) -> None:
    monitor, builder = ProcessMonitor(run), ReportBuilder("here")
    program = (
        "import sys; from lockstep.watch.beacon.writer import open_beacon\n"
        f"own = open_beacon({run!r}, 'policy-0.1', 'policy-0', 0, 'policy-0')\n"
        "for number, _ in enumerate(sys.stdin): own.progress('tokens', number); print('up', flush=True)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as worker:  # type: ignore[call-overload]
        for _ in range(2):
            worker.stdin.write("\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "up\n"
            before = time.monotonic_ns()
            monitor.sample({})
        assert monitor.tracked["policy-0"].progress_ns < before
        assert monitor.tracked["policy-0"].progress_ns == monitor.tracked["policy-0.1"].progress_ns
        roster, _ = builder.build(monitor)
        assert decode_report(encode_report(roster)) == roster
        assert [(each.name, each.parent) for each in roster.processes] == [("policy-0", ""), ("policy-0.1", "policy-0")]
        worker.kill()


def test_the_duration_of_an_ended_stage_is_the_expected_one(run: str) -> None:
    monitor = ProcessMonitor(run)
    monitor.sample({})
    current_beacon().stage("save")
    monitor.sample({})
    assert 0 < monitor.history.expected_s("policy", "train") < 60
    assert monitor.history.expected_s("policy", "save") != monitor.history.expected_s("policy", "save")


def test_the_longest_duration_of_a_stage_is_kept() -> None:
    history = StageDurations()
    for took in (3, 7, 5):
        history.stage_ended("policy", "train", 10, 10 + took * 10**9)
    history.stage_ended("policy", "", 1, 10**12)
    assert history.longest == {("policy", "train"): 7.0}


def test_the_clock_offset_is_that_of_the_quickest_reply() -> None:
    clock = ClockOffset()
    assert not clock.known and clock.ns == 0
    clock.add(0, 1_000_000 + 400, 800)
    clock.add(1000, 1_000_000 + 1000 + 900, 2000)
    assert clock.ns == 1_000_000
    clock.add(5000, 1, 4000)
    assert len(clock.samples) == 2
    for number in range(20):
        clock.add(number, number, number + 100)
    assert len(clock.samples) == clock.window


def test_a_replaced_process_is_dropped_from_the_reports(run: str) -> None:
    monitor, builder = ProcessMonitor(run), ReportBuilder("here")
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE)
    before = WorkerProcess("engine-0", child.pid, processes.start_ticks(child.pid) or 0, [], "log", False, time.time())
    monitor.sample({"engine-0": before})
    child.kill()
    before.exit_code = child.wait(10)
    monitor.sample({"engine-0": before})
    assert monitor.tracked["engine-0"].liveness == Liveness.DEAD
    monitor.forget("engine-0", 60.0)
    monitor.sample({"engine-0": before})
    assert "engine-0" in monitor.tracked, "its log and beacon can be collected for a while"
    monitor.forget("engine-0", 0.0)
    monitor.forget("policy-0", 0.0)
    monitor.sample({"engine-0": before})
    assert monitor.tracked == {} and builder.build(monitor)[0].processes == (), "its beacon does not bring it back"
    again = WorkerProcess(
        "engine-0", os.getpid(), processes.start_ticks(os.getpid()) or 0, [], "log", False, time.time()
    )
    monitor.sample({"engine-0": again})
    assert monitor.tracked["engine-0"].living, "a new process has the name"


WAITS = """
from lockstep.base.wait_state import track_wait
import sys, time
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon
from lockstep.base import waits
own = open_beacon(sys.argv[1], sys.argv[2], "policy", int(sys.argv[2][-1]))
own.stage("train")
print("up", flush=True)
if sys.argv[2] == "policy-0":
    with track_wait("future", "policy-1", "a step"):
        time.sleep(600)
time.sleep(600)
"""


def test_a_new_monitor_leaves_out_processes_that_were_replaced_before_it_began(run: str) -> None:
    """A former agent has seen how they ended. The successor has ended with that agent, and nothing has replaced it."""
    program = "import sys; from lockstep.watch.beacon.writer import open_beacon; open_beacon(*sys.argv[1:4], 1)"
    for name in ("policy-1", "policy-1.1"):
        subprocess.run([sys.executable, "-c", program, run, name, "policy"], check=True, timeout=60)
    monitor = ProcessMonitor(run)
    ended = [each.name for _ in range(2) for each in monitor.sample({})]
    assert ended == ["policy-1.1"] and sorted(monitor.tracked) == ["policy-0", "policy-1.1"]


def test_an_observer_from_outside_finds_the_same_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    run = new_run_id("look")
    children = [
        subprocess.Popen([sys.executable, "-c", WAITS, run, name], stdout=subprocess.PIPE, text=True)
        for name in ("policy-0", "policy-1")
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert run_of_process(children[1].pid) == run and run_of_process(1) is None
        observer = RunObserver(run, StallThresholds(notice_s=0.2))
        until(lambda: observer.poll())
        (verdict,) = observer.poll()
        assert [each.pid for each in verdict.culprits] == [children[1].pid]
        os.kill(children[1].pid, signal.SIGKILL)
        until(lambda: any(each.kind is VerdictKind.DEAD for each in observer.poll()))
    finally:
        for child in children:
            child.kill()
            child.wait()
