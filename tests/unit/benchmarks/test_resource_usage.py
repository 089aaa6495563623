"""CPU time and memory of process trees whose use is known."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks.resource_usage import PeakMemory, cpu_ns, members, pss, usage

BUSY = "import time\nwhile time.process_time() < 0.5: pass\n"
LIVES = BUSY + "print('done', flush=True)\ntime.sleep(60)\n"
TREE = f"""
import subprocess, sys
print("ready", flush=True)
sys.stdin.readline()
subprocess.run([sys.executable, "-c", {BUSY!r}], timeout=60)
child = subprocess.Popen([sys.executable, "-c", {LIVES!r}])
sys.stdin.readline()
child.kill()
child.wait(10)
"""


def test_a_tree_counts_children_that_ended_and_children_that_live():
    root = subprocess.Popen([sys.executable, "-c", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert root.stdout.readline() == "ready\n"
        before = usage(root.pid)
        root.stdin.write("go\n")
        root.stdin.flush()
        assert root.stdout.readline() == "done\n"
        after = usage(root.pid)
        # Each of the two children used half a second by its own clock; ends of ticks are rounded off per process.
        assert 0.95 <= after.cpu_s - before.cpu_s <= 1.3
        assert len(members(root.pid)) == 2
        living = set(members(root.pid)) - {root.pid}
        assert after.by_process[living.pop()] >= 0.48
    finally:
        root.kill()
        root.wait(10)
    assert members(root.pid) == []
    assert usage(root.pid).cpu_s == 0


def test_idle_trees_use_nothing():
    root = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"], stdout=-1)
    try:
        root.stdout.readline()
        before = usage(root.pid)
        time.sleep(0.2)
        assert usage(root.pid).cpu_s - before.cpu_s <= 0.02
    finally:
        root.kill()
        root.wait(10)


def test_nanoseconds_agree_with_the_clock_of_the_process():
    before, began = cpu_ns(os.getpid()), time.process_time()
    while time.process_time() - began < 0.05:
        pass
    assert (cpu_ns(os.getpid()) - before) / 1e9 == pytest.approx(time.process_time() - began, rel=0.2)


def test_peak_memory_sees_what_was_freed():
    code = (
        "import time; print(1, flush=True); x = bytearray(64 << 20); time.sleep(1.0); del x; "
        "print(2, flush=True); time.sleep(60)"
    )
    root = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        root.stdout.readline()
        with PeakMemory(root.pid) as memory:
            root.stdout.readline()
        assert memory.bytes >= 64 << 20
        assert pss(root.pid) < 48 << 20
    finally:
        root.kill()
        root.wait(10)
