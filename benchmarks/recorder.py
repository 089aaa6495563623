"""The cost of the recorder: `python -m benchmarks.recorder`.

    python -m benchmarks.recorder --json benchmarks/results/cpu/recorder.json

Three ways to issue a collective alternate in one process, in blocks of 25 calls: torch's function itself; the same
behind the *floor*, which is the least that any recorder written in Python does (a wrapper that passes its arguments on,
two readings of the clock, and one record packed into mapped memory); and the function as it is recorded. The costs of
the last two are medians of the differences from the first within a round, in CPU time of the calling thread: for calls
back to back, and for calls with 50 us of other work in between, as in a real program. Calls not recorded use no
part of the recorder, not even `Work.wait`, on a separate communicator. *Alone* is the same around a function that does
nothing. Polling is measured separately, and the share of a step is computed from both."""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.comparison_table import markdown, markdown_head

BLOCK = 25
PAUSES_US = (0, 50)
"""Work of the program between two collectives."""
GOAL_US, GOAL_PERCENT = 2.0, 0.3
MAX_FLOORS = 4.0
"""The bound where the processor is too slow for the goal: so many times the floor of the same run, both alone."""
COLLECTIVES, STEP_S = 20, 0.55
"""A step, for the recorder's share of it."""
WAYS = ("bare", "floor", "recorded")
Call = Callable[..., Any]
Row = Mapping[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--ranks", type=int, nargs="+", default=(1, 2))
    options.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    given = options.parse_args()
    rows = [
        measure(world, refuse, pause, given.rounds)
        for world in given.ranks
        for refuse in (False, True)[: 1 if world == 1 else 2]  # a single rank has nobody to check its order against
        for pause in PAUSES_US
    ]
    print("\n".join(table(rows)))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown."""
    lines = markdown_head(
        "ranks", "order checked", "work in between", "call", "floor", "recorded", "quartiles", "floor, alone",
        "recorded, alone",
    )  # fmt: skip
    for row in rows:
        (low, middle, high), alone = row["recorded"], row["alone"]
        setting = str(row["ranks"]), "yes" if row["schedule"] else "no", f"{row['pause us']} us"
        costs = f"{row['floor'][1]:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"
        around_nothing = f"{alone['floor'][1]:.2f}", f"{alone['recorded'][1]:.2f}"
        lines.append(markdown(*setting, f"{row['bare']:.1f}", *costs, *around_nothing))
    poll, worst = statistics.median(row["poll"] for row in rows), max(row["recorded"][1] for row in rows)
    alone = [(row["alone"]["recorded"][1], row["alone"]["floor"][1]) for row in rows if not row["schedule"]]
    most = max(recorded / floor for recorded, floor in alone)
    share = (COLLECTIVES * worst / STEP_S + poll * 10) / 1e4
    return [
        *lines,
        "",
        f"Microseconds of CPU per `all_reduce` of four floats with gloo, medians of {rows[0]['rounds']} rounds, load "
        f"average {min(row['load'] for row in rows):.1f} to {max(row['load'] for row in rows):.1f}.",
        f"Goal: {GOAL_US:g} us for a recorded call, order not checked: "
        f"{_verdict([row['recorded'][1] for row in rows if not row['schedule']], GOAL_US)}. Alone: "
        f"{_verdict([recorded for recorded, _ in alone], GOAL_US)}. Bound: {MAX_FLOORS:g} times the floor, both alone: "
        f"{'kept' if most <= MAX_FLOORS else 'not kept'}, {most:.1f} times at most.",
        f"A poll of the recorder's thread takes {poll:.0f} us, ten times a second. Of a step of {STEP_S} s with "
        f"{COLLECTIVES} collectives at the highest cost in the table, both are {share:.3f}% (goal {GOAL_PERCENT}%).",
    ]


def _verdict(costs: Sequence[float], goal: float) -> str:
    return f"{'met' if max(costs) <= goal else 'not met'} ({min(costs):.2f} to {max(costs):.2f})"


def measure(world: int, refuse: bool, pause_us: int, rounds: int) -> dict[str, Any]:
    """Measures in a new group of ranks; returns the results of rank 0."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        facts = (world, refuse, pause_us, rounds, folder, queue)
        ranks = [context.Process(target=rank_main, args=(rank, *facts)) for rank in range(world)]
        for each in ranks:
            each.start()
        found: dict[str, Any] = queue.get(timeout=300)
        for each in ranks:
            each.join(60)
    about = {"ranks": world, "schedule": refuse, "pause us": pause_us, "rounds": rounds, "load": os.getloadavg()[0]}
    return about | found


def nothing(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
    """Replaces all_reduce."""


def behind_floor(function: Call) -> Call:
    """The function behind the least that a recorder in Python does."""
    import mmap

    from lockstep.watch.beacon.beacon_records import CALL_ENTRY_STRUCT

    memory = mmap.mmap(-1, mmap.PAGESIZE)
    pack_into, monotonic_ns = CALL_ENTRY_STRUCT.pack_into, time.monotonic_ns

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        entered = monotonic_ns()
        result = function(*args, **kwargs)
        pack_into(memory, 0, 1, 2, monotonic_ns(), entered, 5, 6, 7, 1)
        return result

    return wrapper


def differences(block: Callable[[str], float], rounds: int) -> dict[str, Any]:
    """The median of the bare calls, and quartiles of what the other ways cost more within a round."""
    taken = [{way: block(way) for way in order} for order in orders(rounds)]
    costs = {way: statistics.quantiles([each[way] - each["bare"] for each in taken], n=4) for way in WAYS[1:]}
    return {"bare": statistics.median(each["bare"] for each in taken), **costs}


def orders(rounds: int) -> Iterator[Sequence[str]]:
    """The ways, with another one first in each round."""
    for number in range(rounds):
        first = number % len(WAYS)
        yield WAYS[first:] + WAYS[:first]


def rank_main(rank: int, world: int, refuse: bool, pause_us: int, rounds: int, folder: str, queue: Any) -> None:
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
    groups = {recorded: dist.new_group(list(range(world))) for recorded in (False, True)}

    def blocks(ways: Mapping[str, Call]) -> Callable[[str], float]:
        def block(way: str) -> float:
            recorded, function = way == "recorded", ways[way]
            work.wait, group = waits if recorded else waits.__wrapped__, groups[recorded]
            spent = 0
            for _ in range(BLOCK if pause_us else 1):
                began = time.thread_time_ns()
                for _ in range(1 if pause_us else BLOCK):
                    function(value, add, group)
                spent += time.thread_time_ns() - began
                pause = time.monotonic_ns() + 1000 * pause_us
                while time.monotonic_ns() < pause:
                    pass
            return spent / BLOCK / 1e3

        for way in WAYS * 4:
            block(way)
        return block

    bare = dist.all_reduce.__wrapped__
    ways = {"bare": bare, "floor": behind_floor(bare), "recorded": dist.all_reduce}
    costs = differences(blocks(ways), rounds)
    wrapped = CollectiveWrappers(found, torch).wrapper_of(nothing, OPERATIONS["all_reduce"])
    member = found.member(groups[True])
    assert member is not None
    member.next_query = 1 << 62  # c10d's sequence number does not change here
    alone = differences(blocks({"bare": nothing, "floor": behind_floor(nothing), "recorded": wrapped}), rounds)
    member.resynchronize()
    began = time.thread_time()
    for _ in range(200):
        found.poll_once()
    poll = (time.thread_time() - began) / 200 * 1e6
    work.wait = waits
    dist.barrier()
    if rank == 0:
        queue.put({**costs, "alone": alone, "poll": poll})
    recorder.uninstall()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
