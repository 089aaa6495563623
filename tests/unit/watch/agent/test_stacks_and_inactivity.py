"""What sampling stacks does to a process's inactivity: py-spy's own stop is none, and progress ends equal stacks."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.base.folders import new_run_id
from lockstep.watch.agent import process_monitor
from lockstep.watch.agent.process_monitor import ProcessMonitor, ProcessState
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.agent.report_messages import PROCESS_RECORD
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon
from lockstep.watch.procfs.py_spy import SampledThread, StackFrame

LINE = (SampledThread(os.getpid(), "MainThread", (StackFrame("step", "train.py", 40),)),)


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ProcessMonitor]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    run = new_run_id("stacks")
    open_beacon(run, "policy-0", "policy", 0).stage("train")
    yield ProcessMonitor(run)
    close_beacon(remove=True)


def sampled(monitor: ProcessMonitor) -> ProcessState:
    monitor.sample({})
    return monitor.tracked["policy-0"]


def same_stack_s(monitor: ProcessMonitor) -> float:
    return float(PROCESS_RECORD.unpack(ReportBuilder("here").build(monitor)[1].processes)[5])


def test_the_time_in_which_py_spy_stops_a_process_is_not_its_inactivity(
    monitor: ProcessMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_monitor, "RECENT_S", 0.0)
    code = (
        "import sys; from lockstep.watch.beacon.writer import open_beacon\n"
        "open_beacon(sys.argv[1], 'policy-1', 'policy', 1); print('up', flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, monitor.run]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "up\n"
            for _ in range(4):
                monitor.sample({})
                time.sleep(0.3)
            process = monitor.tracked["policy-1"]
            before = process.active_ns
            monitor.sample({})
            assert process.active_ns == before, "it waits"
            monitor.sample({}, held=child.pid)
            held_at = process.active_ns
            assert held_at > before
            process.store_native_stacks((), before)
            assert process.active_ns > held_at, "py-spy held it until now, though it has seen nothing"
        finally:
            child.kill()


def test_a_line_in_two_steps_is_no_equal_stack(monitor: ProcessMonitor) -> None:
    process = sampled(monitor)
    process.store_stacks(LINE, time.monotonic_ns() - int(60e9))
    process.progress_ns = process.same_stack_ns - 1  # as if the last step were as old
    process.store_stacks(LINE, time.monotonic_ns() - int(30e9))
    assert same_stack_s(monitor) == pytest.approx(60.0, abs=1.0)
    current_beacon().progress("steps", 1)
    process = sampled(monitor)
    assert same_stack_s(monitor) == 0.0, "there is no stack of the new step"
    process.stack_ns = time.monotonic_ns()  # as if sampling failed
    assert math.isnan(same_stack_s(monitor))
    process.store_stacks(LINE, time.monotonic_ns())
    assert process.same_stack_ns == process.stack_ns
    process.store_stacks(LINE, time.monotonic_ns() + 10)
    assert process.same_stack_ns < process.stack_ns
