"""A job that saves each few steps and goes on from there when its launcher starts it again."""

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=40)
p.add_argument("--fail-at", type=int, default=0)
p.add_argument("--fail-times", type=int, default=1)
p.add_argument("--timeout", type=float, default=20)
args = p.parse_args()
state = Path("state.pt")


def read_batch(step, attempt):
    """The mount of the data comes and goes."""
    if args.fail_at and step == args.fail_at and attempt < args.fail_times and dist.get_rank() == 1:
        with open("/mnt/corpus/part-00017.bin", "rb") as part:
            return part.read()
    return torch.randn(8, 4)


@record
def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    rank, first, weights = dist.get_rank(), 0, torch.zeros(4)
    if state.exists():
        loaded = torch.load(state)
        first, weights = loaded["step"], loaded["weights"]
        print(f"rank {rank}: restart {attempt}, continuing at step {first}", flush=True)
    for step in range(first, args.steps):
        batch = read_batch(step, attempt)
        gradient = batch.mean(0) - weights
        dist.all_reduce(gradient)
        weights = weights + 0.1 * gradient
        time.sleep(0.08)
        if step % 5 == 0:
            print(f"rank {rank}: step={step} norm={weights.norm():.4f}", flush=True)
            if rank == 0:
                torch.save({"step": step, "weights": weights}, state)
    dist.barrier()
    print(f"rank {rank}: done, {args.steps} steps", flush=True)
    dist.destroy_process_group()


main()
