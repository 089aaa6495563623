"""`examples/faults.py` around a run of beacons and lines only: when it strikes, whom, and what it makes of the end."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WORKER = """
import sys, time
from lockstep.watch.beacon.writer import close_beacon, open_beacon
own = open_beacon(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
for step in range(100_000):
    own.progress("work", step)
    time.sleep(0.0005)
"""

RUN = """
from lockstep.base.folders import new_run_id
import signal, subprocess, sys, time
from pathlib import Path
import psutil
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.beacon.writer import close_beacon, open_beacon

folder, worker, heals, code = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "heals", int(sys.argv[4])
folder.mkdir()
run = new_run_id("broken")
own = open_beacon(run, "controller", "controller", 0)
(folder / "run-id").write_text(run)

def start(name, role, rank):
    return psutil.Popen([sys.executable, "-c", worker, run, name, role, str(rank)])

def failed(process):
    return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)

roles = {"policy-0": ("policy", 0), "policy-1": ("policy", 1), "engine-0": ("rollout", 0)}
there = {name: start(name, *where) for name, where in roles.items()}
until = time.monotonic() + 30
while len(read_beacons(run)) <= len(there) and time.monotonic() < until:  # on a loaded machine they start late
    time.sleep(0.01)
broken = []
for step in range(20):
    own.progress("step", step, 20)
    for stage in ("rollout", "train"):
        own.stage(stage)
        time.sleep(0.03)
        if step == 8:  # until it is struck: a loaded machine may be late
            until = time.monotonic() + 30
            while stage == "train" and not any(map(failed, there.values())) and time.monotonic() < until:
                time.sleep(0.01)
        for name in [name for name, process in there.items() if failed(process)]:
            broken.append((name, stage, step, there[name].status()))
            print(f"confirmed: {name} is in trouble", flush=True)
            there[name].kill()
            there[name].wait(10)
            if heals:
                there[name] = start(f"{name}.1", *roles[name])
                print(f"{name} was ended; restarted in 0.1 s", flush=True)
            else:
                del there[name]
        own.stage("")
    if step == 13 and heals:
        until = time.monotonic() + 30
        while len(broken) < 2 and time.monotonic() < until:
            own.stage("rollout")
            time.sleep(0.01)
            broken += [(n, "rollout", step, p.status()) for n, p in there.items() if failed(p)]
        print("notice: engine-0 is gone", flush=True)
        print("engine-0 died (SIGKILL); restarted in 0.1 s", flush=True)
    print(f"step {step + 1}/20", flush=True)
print("broken", broken, flush=True)
for process in there.values():
    process.kill()
    process.wait(10)
close_beacon(remove=True)
sys.exit(code)
"""


def broken(tmp_path: Path, heals: str, code: int = 0) -> tuple[int, str]:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", RUN, folder, WORKER, heals, str(code)]
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "faults.py", folder, "--", *command],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stderr == "", done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("code", [0, 3])
def test_both_faults_are_done_in_their_moment_and_followed(tmp_path: Path, code: int) -> None:
    returned, said = broken(tmp_path, "heals", code)
    assert returned == code, said
    assert re.search(r"^-- freezing policy-1, pid \d+ \(SIGSTOP\)\nconfirmed: policy-1", said, re.MULTILINE), said
    assert re.search(r"^-- killing engine-0, pid \d+ \(SIGKILL\)$", said, re.MULTILINE), said
    assert "'policy-1', 'train', 8, 'stopped'" in said and "('engine-0', 'rollout', " in said
    times = re.findall(
        r"^(\S+) \(SIG\w+\) in step (\d+) +([\d.]+ s) +(\S+(?: s)?) +([\d.]+ s) +([\d.]+ s)$", said, re.M
    )
    assert len(times) == 2 and times[0][:2] == ("policy-1", "9"), said


def test_a_run_that_ends_without_being_healed_is_a_failure(tmp_path: Path) -> None:
    returned, said = broken(tmp_path, "never")
    assert returned == 1
    assert re.search(r"^policy-1 \(SIGSTOP\) in step \d+ +[\d.]+ s +[\d.]+ s +never +never$", said, re.MULTILINE), said
    assert "no rollout" in said and "killing" not in said


def test_it_says_how_it_is_used() -> None:
    done = subprocess.run([sys.executable, ROOT / "examples" / "faults.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "python examples/faults.py runs/sort-grpo -- lockstep train" in done.stderr
