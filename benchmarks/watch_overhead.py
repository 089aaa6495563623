"""The overhead of `lockstep watch` on a torchrun job: `python -m benchmarks.watch_overhead`.

The same job, two gloo ranks in a loop of all_reduce, runs alternately with and without `lockstep watch`. Measured are
wall and CPU time of a collective on rank 0 (in the loop, without imports), and the CPU time of all processes of the
command, agent and supervisor included; each is reported with the ratio of the medians."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BOUND_S = 300.0


@dataclass(frozen=True)
class Run:
    """One run of the job. Microseconds of a collective, seconds of the whole command."""

    wall_us: float
    cpu_us: float
    command_wall_s: float
    command_cpu_s: float


def job(loops: int, numbers: int, pause_ms: float) -> None:
    """The program of every rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    value = torch.ones(numbers)
    for _ in range(50):
        dist.all_reduce(value)
    dist.barrier()
    began = time.perf_counter(), time.process_time()
    for _ in range(loops):
        dist.all_reduce(value)
        if pause_ms:
            time.sleep(pause_ms / 1e3)
    wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    if dist.get_rank() == 0:
        Path(os.environ["FOUND"]).write_text(json.dumps([wall / loops * 1e6, cpu / loops * 1e6]))
    dist.destroy_process_group()


def run(watched: bool, words: Sequence[str], folder: Path) -> Run:
    watch = [
        sys.executable,
        "-c",
        "from lockstep.cli import app; app()",
        "watch",
        "--incidents",
        str(folder / "i"),
        "--",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*(watch if watched else []), *torchrun, "-m", "benchmarks.watch_overhead", "--job", *words]
    found = folder / "found.json"
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        command, env={**os.environ, "FOUND": str(found), "OMP_NUM_THREADS": "1"}, check=True, timeout=BOUND_S,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wall_us, cpu_us = json.loads(found.read_text())
    return Run(wall_us, cpu_us, wall_s, cpu_s)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--loops", type=int, default=20000)
    options.add_argument("--numbers", type=int, default=1024, help="floats of a collective")
    options.add_argument("--pause-ms", type=float, default=0.0, help="the program's sleep between two collectives")
    options.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.job:
        job(given.loops, given.numbers, given.pause_ms)
        return
    words = ["--loops", str(given.loops), "--numbers", str(given.numbers), "--pause-ms", str(given.pause_ms)]
    runs: dict[bool, list[Run]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.pairs):
            for watched in (False, True) if number % 2 == 0 else (True, False):
                runs[watched].append(run(watched, words, Path(folder)))
    between = f"{given.pause_ms:g} ms between, 2 gloo ranks, {given.pairs} pairs"
    print(f"{given.loops} all_reduce of {given.numbers} floats, {between}")
    print(f"{'median of':34} {'bare':>9} {'watched':>9} {'ratio':>6}")
    names = {
        "wall us of a collective, rank 0": "wall_us", "CPU us of a collective, rank 0": "cpu_us",
        "wall s of the command": "command_wall_s", "CPU s of all its processes": "command_cpu_s",
    }  # fmt: skip
    for name, field in names.items():
        bare, watched = (statistics.median(getattr(each, field) for each in runs[which]) for which in (False, True))
        print(f"{name:34} {bare:9.2f} {watched:9.2f} {watched / bare:6.3f}")


if __name__ == "__main__":
    main()
