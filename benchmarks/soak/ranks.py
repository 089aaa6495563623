"""A rank that trains without Lockstep: `python -m benchmarks.soak.ranks RUN NAME FOLDER SEED SILENCE_S`.

There are two gloo ranks with two communicators. Before a collective, one of them sometimes works for long: a data
loader that is slow on one rank, a checkpoint that one rank writes, work during an asynchronous collective."""

import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.soak.activities import ACTS, perform
from lockstep.watch.beacon.writer import current_beacon, open_beacon
from lockstep.watch.recorder import recorder

WORLD = 2
BOUND = timedelta(hours=1)


def train(rank: int, folder: Path, chance: random.Random, silence_s: float) -> None:
    """Both ranks draw the same random numbers, so they agree on the slow rank and on the next collective."""
    second = dist.new_group(group_desc="second", timeout=BOUND)
    value, step = torch.ones(1000), 0
    while True:
        step += 1
        current_beacon().stage(f"step {step}")
        slow, act, lasts = chance.randrange(WORLD), chance.choice(sorted(ACTS)), chance.choice((0.1, 0.3, 1.0, 1.15))
        under_way = dist.all_reduce(value, group=second, async_op=True) if chance.random() < 0.5 else None
        if rank == slow:
            perform(act, silence_s * lasts, folder / "acts.jsonl")
        if under_way is not None:
            under_way.wait()
        dist.all_reduce(value)
        if chance.random() < 0.3:
            dist.barrier(group=second)
        value.fill_(1.0)
        current_beacon().progress("step", step)


def main() -> None:
    run, name, folder, seed, silence_s = sys.argv[1:]
    role, _, rank = name.rpartition("-")
    open_beacon(run, name, role, int(rank)).stage("setup")
    torch.set_num_threads(1)
    recorder.install()
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=WORLD, timeout=BOUND)
    train(int(rank), Path(folder), random.Random(seed), float(silence_s))


if __name__ == "__main__":
    main()
