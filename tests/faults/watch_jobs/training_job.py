"""A training job for the tests of launchers: `training_job.py [--how spawn] [--stuck 1] ...`. Rank and world size come
from the environment of any launcher, or from the function that starts each rank."""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

if "--late-import" in sys.argv and os.environ.get("RANK") == "1":
    threading.Event().wait(600)

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PLACES = {"mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "pmi": ("PMI_RANK", "PMI_SIZE"),
          "slurm": ("SLURM_PROCID", "SLURM_NTASKS")}  # fmt: skip


def ask_the_judge() -> None:
    threading.Event().wait(600)


def load_the_data() -> None:
    threading.Event().wait(600)


def rank_main(rank: int, world: int, init_method: str, chosen: argparse.Namespace) -> None:
    if chosen.late == rank:
        load_the_data()
    if init_method:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
    total = torch.ones(8)
    for step in range(chosen.steps):
        if step == 5 and rank == chosen.stuck:
            ask_the_judge()
        dist.all_reduce(total)
    dist.destroy_process_group()


def start(chosen: argparse.Namespace) -> None:
    init_method, world = f"tcp://127.0.0.1:{chosen.port}", chosen.world or chosen.ranks
    if chosen.how == "alone":
        time.sleep(chosen.steps)
    elif chosen.how == "env":
        rank_main(int(os.environ["RANK"]), 0, "", chosen)
    elif chosen.how in PLACES:
        rank, size = (int(os.environ[name]) for name in PLACES[chosen.how])
        rank_main(rank, size, init_method, chosen)
    elif chosen.how == "torch-spawn":
        mp.spawn(rank_main, (world, init_method, chosen), nprocs=chosen.ranks)
    else:
        context = mp.get_context(chosen.how)
        ranks = [
            context.Process(target=rank_main, args=(rank, world, init_method, chosen)) for rank in range(chosen.ranks)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="env")
    parser.add_argument("--ranks", type=int, default=2, help="how many are started")
    parser.add_argument("--world", type=int, default=0, help="how many should be")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000000)
    parser.add_argument("--stuck", type=int, default=-1, help="rank that never answers in step 5")
    parser.add_argument("--late", type=int, default=-1, help="rank that never comes")
    parser.add_argument("--late-import", action="store_true", help="rank 1 never comes as far as to import torch")
    parser.add_argument("--folder", type=Path)
    start(parser.parse_args())
