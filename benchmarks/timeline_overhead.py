"""What capturing a timeline costs a job: `python -m benchmarks.timeline_overhead`.

One watched torchrun job of two gloo ranks computes and reduces in steps, and its timeline is captured in every other
window of some seconds. Compared are the steps of rank 0 inside and outside of the windows, which are interleaved within
one process, and the CPU time of agent and supervisor. The cost of what a process records itself, always, is measured in
a loop: microseconds of a span."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.watch.agent.timeline_follower import TimelineFollower
from lockstep.watch.attach.run_observer import run_of_process
from lockstep.watch.beacon.beacon_records import SEPARATOR
from lockstep.watch.beacon.call_ring import pack_text_numbers
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.beacon.span_ring import SpanKind
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.supervisor.agent_connections import parse_report
from lockstep.watch.supervisor.timeline_capture import CaptureRequest, answer_line, request_capture

WARM_UP_S = 8.0


@dataclass(frozen=True)
class Window:
    """A time of the monotonic clock, in ns, with or without a capture."""

    began_ns: int
    ended_ns: int
    captured: bool
    monitor_cpu_s: float
    """CPU seconds of agent and supervisor in it."""


def job(reductions: int, size: int) -> None:
    """The program of every rank."""
    import torch
    import torch.distributed as dist

    if os.environ["AUTOGROUP"]:  # torchrun starts its ranks in sessions of their own
        Path("/proc/self/autogroup").write_text(os.environ["AUTOGROUP"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    value, matrix, times = torch.ones(1024), torch.ones(size, size), []
    stop, found = Path(os.environ["STOP"]), Path(os.environ["FOUND"])
    if dist.get_rank() == 0:
        Path(os.environ["READY"]).write_text(str(os.getpid()))
    running = torch.ones(1)
    while running.item() > 0:
        began = time.monotonic_ns()
        for _ in range(reductions):
            matrix @ matrix
            dist.all_reduce(value)
        times.append((began, time.monotonic_ns()))
        running.fill_(0 if stop.exists() else 1)
        dist.all_reduce(running, op=dist.ReduceOp.MIN)
        value.fill_(1.0)
    if dist.get_rank() == 0:
        found.write_text(json.dumps(times))
    dist.destroy_process_group()


def measure(
    pairs: int, seconds: float, reductions: int, size: int, autogroup: str, folder: Path
) -> tuple[list[Window], list[list[int]]]:
    """The windows, and begin and end of each step."""
    ready, found, stop = folder / "ready", folder / "found", folder / "stop"
    words = ["-m", "benchmarks.timeline_overhead", "--job", "--reductions", str(reductions), "--size", str(size)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    watch = [sys.executable, "-m", "lockstep", "watch", "--incidents", str(folder / "incidents"), "--", *torchrun]
    variables = {
        "READY": str(ready),
        "FOUND": str(found),
        "STOP": str(stop),
        "OMP_NUM_THREADS": "1",
        "AUTOGROUP": autogroup,
    }
    windows = []
    with subprocess.Popen(watch, env={**os.environ, **variables}, stderr=subprocess.DEVNULL) as process:
        while not ready.exists():
            time.sleep(0.1)
        time.sleep(WARM_UP_S)
        run = run_of_process(int(ready.read_text()))
        assert run is not None, "the job has no beacon"
        monitors = [psutil.Process(each.pid) for each in read_beacons(run) if each.role in ("agent", "supervisor")]
        for number in range(2 * pairs):
            captured = number % 2 == 1
            file = folder / f"{number}.jsonl"
            if captured:
                request_capture(run, CaptureRequest(file, seconds + 2))
                while not file.exists():
                    time.sleep(0.05)
            before, began = _cpu_s(monitors), time.monotonic_ns()
            time.sleep(seconds)
            windows.append(Window(began, time.monotonic_ns(), captured, _cpu_s(monitors) - before))
            time.sleep(3.0 if captured else 0.0)
        stop.touch()
        process.wait(120)
    return windows, json.loads(found.read_text())


def _cpu_s(monitors: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (each.cpu_times() for each in monitors))


def span_us(loops: int = 50_000) -> float:
    """Microseconds of recording a span."""
    beacon = open_beacon(f"overhead-{os.getpid()}", "policy-0", "policy", 0)
    try:
        rounds = []
        for _ in range(5):
            began = time.perf_counter()
            for number in range(loops):
                beacon.span(SpanKind.UNIT, "microbatches 7/16", number)
            rounds.append((time.perf_counter() - began) / loops * 1e6)
        return min(rounds)
    finally:
        close_beacon(remove=True)


def call_us(calls: int = 90, rounds: int = 300) -> float:
    """CPU microseconds of agent and supervisor per captured collective, the least of all rounds: the agent reads a rank
    that has made so many since the last time, and the supervisor writes the answer. Other load does not change it."""
    beacon = open_beacon(f"overhead-{os.getpid()}", "policy-0", "policy", 0)
    try:
        rings = beacon.call_rings()
        slot = rings.open_slot(11, 22, "0", "fsdp", "gloo", 2, 0)
        assert slot is not None
        label = rings.text(SEPARATOR.join(["all_reduce", "float32", "", "", "[1024]"]))
        texts = pack_text_numbers(label, rings.text("/a/train.py:31 in f"))
        follower, costs, made = TimelineFollower(), [], 0
        for _ in range(rounds):
            for _ in range(calls):
                made += 1
                slot.leave(slot.enter(made, made, 7, texts))
            began = time.process_time_ns()
            frame = json.dumps({"reply": "1", **follower.read([beacon.path])}).encode()
            answer_line("host", 0, parse_report(frame), ())
            costs.append((time.process_time_ns() - began) / calls / 1e3)
        return min(costs[5:])
    finally:
        close_beacon(remove=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=6)
    options.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    options.add_argument("--reductions", type=int, default=20, help="collectives of a step")
    options.add_argument("--size", type=int, default=512, help="side of the matrices multiplied before each of them")
    options.add_argument(
        "--autogroup", default="", help="nice value of the ranks' sessions, on a machine with other load"
    )
    options.add_argument(
        "--calls-only", action="store_true", help="only measure what reading and writing a call costs, without a job"
    )
    options.add_argument("--save", type=Path, help="a JSON file for the figures")
    options.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.job:
        job(given.reductions, given.size)
        return
    if given.calls_only:
        _show({f"us per call in reads of {calls}": round(call_us(calls), 2) for calls in (30, 90, 180)}, given.save)
        return
    span, call = span_us(), call_us()
    with tempfile.TemporaryDirectory() as folder:
        windows, steps = measure(
            given.pairs, given.seconds, given.reductions, given.size, given.autogroup, Path(folder)
        )
    inside: dict[bool, list[float]] = {False: [], True: []}
    for window in windows:
        inside[window.captured] += [
            (ended - began) / 1e6 for began, ended in steps if window.began_ns <= began and ended <= window.ended_ns
        ]
    median = {captured: statistics.median(found) for captured, found in inside.items()}
    cpu = {c: sum(w.monitor_cpu_s for w in windows if w.captured == c) / (given.pairs * given.seconds) for c in inside}
    calls = 2 * given.reductions * len(inside[True])
    more_cpu_us = (cpu[True] - cpu[False]) * given.pairs * given.seconds * 1e6
    figures = {
        "pairs": given.pairs, "seconds": given.seconds, "collectives of a step": given.reductions,
        "steps without": len(inside[False]), "steps with": len(inside[True]), "load": os.getloadavg()[0],
        "median step ms without": round(median[False], 4), "median step ms with": round(median[True], 4),
        "ratio": round(median[True] / median[False], 5), "span us": round(span, 3),
        "monitor cores without": round(cpu[False], 4), "monitor cores with": round(cpu[True], 4),
        "monitor us per captured call": round(more_cpu_us / calls, 2),
        "of which reading and writing it": round(call, 2),
    }  # fmt: skip
    _show(figures, given.save)


def _show(figures: dict[str, float], save: Path | None) -> None:
    for name, value in figures.items():
        print(f"{name:38} {value}")
    if save is not None:
        save.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
