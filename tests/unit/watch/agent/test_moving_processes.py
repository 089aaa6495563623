"""Work that advances no counter and is progress all the same: compilers, imports and I/O, but not busy loops."""

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.base.folders import new_run_id
from lockstep.watch.agent.process_monitor import ProcessMonitor
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.agent.report_messages import PROCESS_RECORD
from lockstep.watch.procfs.processes import descendant_pids

BEGIN = "import subprocess, sys, time; from lockstep.watch.beacon.writer import open_beacon\n"
CHILD = "subprocess.run([sys.executable, '-S', '-c', {!r}])"
BEGUN = "print('begun', flush=True)\n"
TOUCHES = "import mmap\nwhile True: mmap.mmap(-1, 1 << 20).write(bytes(1 << 20))"
WATCHED_S = 3.0


@pytest.mark.parametrize(
    ("code", "progresses"),
    [
        (f"{BEGUN}while True: pass", False),
        (CHILD.format(f"{BEGUN}while True: pass"), False),
        (CHILD.format(BEGUN + TOUCHES), True),
        (f"{BEGUN}file = open('/dev/zero', 'rb', 0)\nwhile True: file.read(1 << 16); time.sleep(0.2)", True),
    ],
    ids=["computes", "a child computes", "a child touches memory", "reads"],
)
def test_data_and_new_memory_are_progress(
    code: str, progresses: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    run = new_run_id("moving")
    begin = f"{BEGIN}open_beacon({run!r}, 'policy-0', 'policy', 0).stage('train')\n"
    process = subprocess.Popen([sys.executable, "-c", begin + code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        monitor, builder = ProcessMonitor(run), ReportBuilder("here")
        end = time.monotonic() + WATCHED_S
        while time.monotonic() < end:
            monitor.sample({})
            time.sleep(0.3)
        state = builder.build(monitor)[1]
    finally:
        for pid in [*descendant_pids(process.pid), process.pid]:
            subprocess.run(["kill", "-KILL", str(pid)], check=False)
        process.wait()
    _, _, _, progress_s, active_s, _ = PROCESS_RECORD.unpack(state.processes)
    assert active_s < 2.0 < progress_s
    assert (state.moved.get(0, math.inf) < 2.0) is progresses, state.moved
