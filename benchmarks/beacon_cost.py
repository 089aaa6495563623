"""The cost of a beacon and of a published wait: `python benchmarks/beacon_cost.py`. Prints CPU microseconds per
call."""

import os
import shutil
import statistics
import time
from collections.abc import Callable

from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.base.wait_state import track_wait
from lockstep.watch.beacon import beacon_table
from lockstep.watch.beacon.beacon_records import FIXED_SIZE
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.beacon.writer import close_beacon, open_beacon

ROUNDS = 7


def cost(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Median and minimum over rounds, in CPU microseconds per call."""
    taken = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        for _ in range(calls):
            call()
        taken.append((time.thread_time() - started) / calls * 1e6)
    return statistics.median(taken), min(taken)


def one_wait() -> None:
    with track_wait("collective", "fsdp", "all_reduce of step 7", timeout_s=600):
        pass


def main() -> None:
    run = new_run_id("beacon-cost")
    silent = cost(one_wait, 20_000)
    own = open_beacon(run, "bench", "policy", 0)
    own.progress("tokens", 0, 10**9)
    own.progress("fixed", 5, 10)
    try:
        rows = [
            ("stage", cost(lambda: own.stage("train"), 50_000)),
            ("add to a counter", cost(lambda: own.add("tokens"), 50_000)),
            ("counter unchanged", cost(lambda: own.progress("fixed", 5, 10), 50_000)),
            ("event", cost(lambda: own.event("step", "train 7"), 50_000)),
            ("beat", cost(own.beat, 50_000)),
            ("a wait, no beacon", silent),
            ("a wait, published and taken back", cost(one_wait, 20_000)),
            ("read one beacon", cost(lambda: read_beacon(own.path), 500)),
            (
                "reading and rows of one process",
                cost(lambda: beacon_table.process_rows(beacon_table.take_snapshot(run)), 300),
            ),
        ]
        for name, (median, least) in rows:
            print(f"{name:34} median {median:8.2f} us   minimum {least:8.2f} us")
        print(f"size of a beacon {FIXED_SIZE} bytes, pid {os.getpid()}, load {os.getloadavg()[0]:.1f}")
    finally:
        close_beacon(remove=True)
        shutil.rmtree(run_shm_dir(run), ignore_errors=True)


if __name__ == "__main__":
    main()
