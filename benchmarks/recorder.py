"""The cost of the recorder: `python -m benchmarks.recorder`.

Calls with and without the recorder alternate in one process, in blocks of 250. The result is the median difference of
neighbouring blocks, in CPU time of the calling thread: for calls back to back, and for calls with 50 us of other work
in between, which evicts the recorder's code and data from the nearest caches, as a real program does. Calls without the
recorder use no part of it, not even `Work.wait`, on a separate communicator. Polling is measured separately, and the
share of a step is computed from both."""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

BLOCK = 250
PAUSES_US = (0, 50)
"""Work of the program between two collectives."""
GOAL_US, GOAL_PERCENT = 2.0, 0.3
MODES = ("recorded", "recorded and held against the schedule")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--blocks", type=int, default=60)
    options.add_argument("--collectives", type=int, default=20, help="of a step, for its share")
    options.add_argument("--step-s", type=float, default=0.55, help="CPU seconds of a step, for its share")
    given = options.parse_args()
    rows = []
    for world in (1, 2):
        for refuse in (False, True):
            for pause in PAUSES_US:
                rows.append((world, refuse, pause, measure(world, refuse, pause, given.blocks)))
    print("microseconds of CPU per all_reduce of four floats, gloo, median of alternating blocks")
    print(f"{'ranks':>5} {'work between':>12}  {'':40} {'without':>8} {'with':>8} {'cost':>6}   (quartiles)")
    for world, refuse, pause, found in rows:
        low, middle, high = found["cost"]
        print(
            f"{world:>5} {pause:>9} us  {MODES[refuse]:40} {found['without']:8.2f} {found['with']:8.2f} "
            f"{middle:6.2f}   ({low:.2f} to {high:.2f})"
        )
    alone = [min(found["alone"] for _, mode, _, found in rows if mode == refuse) for refuse in (False, True)]
    print(f"noting alone, around a function that does nothing: {alone[0]:.2f} us; with the schedule {alone[1]:.2f} us")
    poll = statistics.median(found["poll"] for *_, found in rows)
    worst = max(found["cost"][1] for *_, found in rows)
    print(f"one look of the recorder's thread: {poll:.0f} us, ten times a second: {poll * 10 / 1e4:.3f} % of a core")
    share = (given.collectives * worst / 1e6 + poll * 10 / 1e6 * given.step_s) / given.step_s * 100
    print(
        f"a step of {given.collectives} collectives and {given.step_s} s: {share:.3f} % (goal {GOAL_PERCENT} %); "
        f"a collective: {worst:.2f} us at most (goal {GOAL_US} us)"
    )


def measure(world: int, refuse: bool, pause_us: int, blocks: int) -> dict[str, Any]:
    """Measure in a new group of ranks; returns the results of rank 0."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        facts = (world, refuse, pause_us, blocks, folder, queue)
        ranks = [context.Process(target=rank_main, args=(rank, *facts)) for rank in range(world)]
        for each in ranks:
            each.start()
        found: dict[str, Any] = queue.get(timeout=300)
        for each in ranks:
            each.join(60)
    return found


def nothing(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
    """Replaces all_reduce."""


def rank_main(rank: int, world: int, refuse: bool, pause_us: int, blocks: int, folder: str, queue: Any) -> None:
    os.environ["LOCKSTEP_BEACONS"] = folder
    import torch
    import torch.distributed as dist

    from lockstep.watch.beacon.writer import open_beacon
    from lockstep.watch.recorder import recorder
    from lockstep.watch.recorder.operations import OPERATIONS
    from lockstep.watch.recorder.wrappers import CollectiveWrappers

    torch.set_num_threads(1)
    open_beacon("benchmark", f"policy-{rank}", "policy", rank).stage("train")
    found = recorder.install(refuse=refuse)
    assert found is not None
    store = dist.FileStore(str(Path(folder, "store")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    value, add = torch.ones(4), dist.ReduceOp.SUM
    work, waits = torch._C._distributed_c10d.Work, torch._C._distributed_c10d.Work.wait
    bare, groups = dist.all_reduce.__wrapped__, [dist.new_group(list(range(world))) for _ in range(2)]

    def block(function: Any) -> float:
        plain = function is bare
        work.wait, group = waits.__wrapped__ if plain else waits, groups[plain]
        began = time.thread_time()
        for _ in range(BLOCK):
            function(value, add, group)
            pause = time.monotonic_ns() + 1000 * pause_us
            while time.monotonic_ns() < pause:
                pass
        return (time.thread_time() - began) / BLOCK * 1e6

    for function in (bare, dist.all_reduce) * 4:
        block(function)
    pairs = [(block(bare), block(dist.all_reduce)) for _ in range(blocks)]
    costs = [after - before for before, after in pairs]
    noting = CollectiveWrappers(found, torch).wrapper_of(nothing, OPERATIONS["all_reduce"])
    member = found.member(groups[0])
    assert member is not None
    member.next_query = 1 << 62  # c10d's sequence number does not change here
    alone = min(block(noting) for _ in range(10)) - min(block(nothing) for _ in range(10))
    member.resynchronize()
    began = time.thread_time()
    for _ in range(200):
        found.poll_once()
    poll = (time.thread_time() - began) / 200 * 1e6
    dist.barrier()
    if rank == 0:
        queue.put(
            {
                "without": statistics.median(before for before, _ in pairs),
                "with": statistics.median(after for _, after in pairs),
                "cost": statistics.quantiles(costs, n=4),
                "poll": poll,
                "alone": alone,
            }
        )
    recorder.uninstall()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
