"""A rank with workers of its own, as an inference engine has: `nested_workers.py --fault hangs|killed --rank 1`. The
workers inherit the rank's environment and form a communicator of their own, in which they have ranks from 0 as well."""

import argparse
import multiprocessing
import os
import signal
import threading

import torch
import torch.distributed as dist


def generate_forever() -> None:
    threading.Event().wait(600)


def worker(rank: int, path: str, fault: str, answers: "multiprocessing.Queue[int]") -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for step in range(1000000):
        if step == 5 and rank == 1 and fault == "hangs":
            generate_forever()
        if step == 5 and rank == 1 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))
        if fault == "none" and step == 20:
            break
    answers.put(rank)
    dist.destroy_process_group()


def ask_the_engine(path: str, fault: str) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[int] = context.Queue()
    workers = [context.Process(target=worker, args=(rank, path, fault, answers), daemon=True) for rank in range(2)]
    for each in workers:
        each.start()
    for _ in workers:
        answers.get(timeout=600)
    for each in workers:
        each.join(60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="none")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--path", required=True)
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(8))
    if dist.get_rank() == chosen.rank:
        ask_the_engine(chosen.path, chosen.fault)
    dist.all_reduce(torch.ones(8))
    dist.destroy_process_group()
