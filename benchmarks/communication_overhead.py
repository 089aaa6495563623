"""What summing up which rank waits for which costs: `python -m benchmarks.communication_overhead`.

Watched torchrun jobs of two gloo ranks, as in `timeline_overhead`, run in turn with and without
`lockstep watch --communication`: compared are the CPU time of agent and supervisor, and the steps. Apart from that,
microseconds per call and member are measured in a loop, for the agent and the supervisor; a report has at most
`MOST_CALLS` sampled calls of a member, however many it makes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from lockstep.watch.agent.call_timings import MOST_CALLS, CallTimings, sampling_shift
from lockstep.watch.attach.run_observer import run_of_process
from lockstep.watch.beacon.beacon_records import CommunicatorRecord
from lockstep.watch.beacon.call_follower import CallTimes
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.communication.arrival_totals import ArrivalTotals, Entry

WARM_UP_S = 6.0


def one_job(folder: Path, summed: bool, seconds: float, reductions: int, size: int) -> tuple[float, float, int]:
    """Cores of agent and supervisor, the median step in ms, and the number of calls in it that the file has."""
    folder.mkdir()
    ready, found, stop, file = (folder / name for name in ("ready", "found", "stop", "communication.json"))
    words = ["-m", "benchmarks.timeline_overhead", "--job", "--reductions", str(reductions), "--size", str(size)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    options = ["--communication", str(file)] if summed else []
    watch = [sys.executable, "-m", "lockstep", "watch", "--incidents", str(folder / "incidents"), *options]
    paths = {"READY": str(ready), "FOUND": str(found), "STOP": str(stop)}
    with subprocess.Popen(
        [*watch, "--", *torchrun], env={**os.environ, **paths, "OMP_NUM_THREADS": "1", "AUTOGROUP": ""},
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        while not ready.exists():
            time.sleep(0.1)
        time.sleep(WARM_UP_S)
        run = run_of_process(int(ready.read_text()))
        assert run is not None, "the job has no beacon"
        monitors = [psutil.Process(each.pid) for each in read_beacons(run) if each.role in ("agent", "supervisor")]
        before, began = _cpu_s(monitors), time.monotonic_ns()
        time.sleep(seconds)
        cores, ended = (_cpu_s(monitors) - before) / seconds, time.monotonic_ns()
        stop.touch()
        process.wait(120)
    steps = [(last - first) / 1e6 for first, last in json.loads(found.read_text()) if began <= first and last <= ended]
    totals: Any = json.loads(file.read_text())["communicators"] if summed else []
    calls = sum(each["calls"] for communicator in totals for each in communicator["operations"])
    return cores, statistics.median(steps), calls


def _cpu_s(monitors: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (each.cpu_times() for each in monitors))


def microseconds_per_entry(loops: int = 200) -> tuple[float, float]:
    """Of the agent and of the supervisor, per sampled call and member."""
    record = CommunicatorRecord(
        0, "0", "dp", "gloo", 2, 0, 7, 1, 0, 0, False, False, True, 0, 0, 0, 0, 0, 0, False, 0, None, None
    )  # fmt: skip
    calls = [CallTimes(number, 1, 1000 * number, 1000 * number + 500, False) for number in range(1, MOST_CALLS + 1)]
    assert sampling_shift(len(calls), 2) == 0
    timings, agent, supervisor = CallTimings(wanted=True), [], []
    totals = ArrivalTotals(None, "run")
    for turn in range(loops):
        began = time.perf_counter()
        timings.add(record, -1, calls)
        timings.take({7: 0})
        agent.append((time.perf_counter() - began) / MOST_CALLS * 1e6)
        began = time.perf_counter()
        for number in range(MOST_CALLS):
            for rank in (0, 1):
                entry = Entry("h", 10**6 * number + 1000 * rank, 5000, 1, 0, False)
                totals.add("7", "dp", "gloo", 2, (turn, number), rank, f"rank-{rank}", entry)
        supervisor.append((time.perf_counter() - began) / MOST_CALLS / 2 * 1e6)
    return min(agent), min(supervisor)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--seconds", type=float, default=15.0)
    options.add_argument("--reductions", type=int, default=20, help="collectives of a step")
    options.add_argument("--size", type=int, default=512, help="side of the matrices multiplied before each of them")
    options.add_argument("--save", type=Path, help="a JSON file for the figures")
    given = options.parse_args()
    agent, supervisor = microseconds_per_entry()
    found: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(2 * given.pairs):
            summed = number % 4 in (1, 2)
            job = one_job(Path(name) / str(number), summed, given.seconds, given.reductions, given.size)
            found[summed].append(job)
    figures = {
        "pairs": given.pairs, "seconds": given.seconds, "load": round(os.getloadavg()[0], 1),
        "agent us per call and member": round(agent, 2), "supervisor us per call and member": round(supervisor, 2),
        **{
            f"monitor cores {name}": round(statistics.median(each[0] for each in found[summed]), 4)
            for name, summed in (("without", False), ("with", True))
        },
        **{
            f"median step ms {name}": round(statistics.median(each[1] for each in found[summed]), 2)
            for name, summed in (("without", False), ("with", True))
        },
        "calls summed up": [each[2] for each in found[True]],
    }  # fmt: skip
    for name, value in figures.items():
        print(f"{name:38} {value}")
    if given.save is not None:
        given.save.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
