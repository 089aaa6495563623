"""A job with a fault that everybody has met: in step 5 rank 1 waits for a judge that never answers, and all others wait
in the next collective for rank 1.

    lockstep watch --on-stall kill --confirm-after 5 -- torchrun --nproc-per-node 2 examples/stuck_rank.py
"""

import argparse
import threading

import torch
import torch.distributed as dist


def reward() -> float:
    threading.Event().wait(600)
    return 1.0


def main(steps: int, stuck: int) -> None:
    dist.init_process_group("gloo")
    total = torch.ones(8)
    for step in range(steps):
        if step == 5 and dist.get_rank() == stuck:
            total += reward()
        dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stuck", type=int, default=1, help="the rank; -1 for none")
    chosen = parser.parse_args()
    main(chosen.steps, chosen.stuck)
