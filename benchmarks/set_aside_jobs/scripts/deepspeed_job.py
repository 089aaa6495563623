"""A small regression with DeepSpeed ZeRO."""

import argparse
import os
import random
import resource
import sys
import time
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

CONFIG = {
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 4,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
}


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 1)

    def forward(self, features):
        return self.head(self.body(features)).squeeze(-1)


def evaluate(engine, batches):
    engine.eval()
    total = 0.0
    with torch.no_grad():
        for features, target in batches:
            time.sleep(float(os.environ.get("EVAL_SLEEP", "0")))
            total += nn.functional.mse_loss(engine(features).float(), target).item()
    engine.train()
    return total / max(1, len(batches))


def batches(count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 4, 16, generator=generator)
    return [(row.to(dtype), row.sum(1)) for row in rows]


def read_shard(rank, rows):
    """The rows of a rank: every worker reads its own file."""
    if rows[rank] > 1_000_000:
        return torch.zeros(rows[rank], 16).normal_()[:512]
    return torch.randn(rows[rank], 16)


def metric_groups(rank, swap, timeout):
    world = list(range(dist.get_world_size()))
    loss_group, norm_group = dist.new_group(world, timeout), dist.new_group(world, timeout)
    return (norm_group, loss_group) if swap and rank == 1 else (loss_group, norm_group)


def main():
    options = argparse.ArgumentParser()
    for name, default in {
        "local_rank": 0,
        "stage": 2,
        "steps": 40,
        "width": 32,
        "eval_every": 0,
        "save_every": 0,
        "timeout": 60,
        "train_batch": 0,
        "shard_rows": 512,
        "heavy_rows": 0,
        "leave_at": 0,
        "limit_mb": 0,
    }.items():
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--eval_batches", type=int, nargs=2, default=(6, 6))
    options.add_argument("--sleep", type=float, default=0.0)
    options.add_argument("--log_every", type=int, default=5)
    for name in ("swap_groups", "save_main_only", "pair_group", "half_on_last", "chatty", "warnings", "wide_metrics"):
        options.add_argument(f"--{name}", action="store_true")
    options.add_argument("--resume")
    args = options.parse_args()
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    torch.manual_seed(3)
    random.seed(rank)
    if args.limit_mb and rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (args.limit_mb << 20, args.limit_mb << 20))
    shard = read_shard(rank, [args.shard_rows, args.heavy_rows or args.shard_rows])
    config = {
        **CONFIG,
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
    }
    if args.train_batch:
        config["train_batch_size"] = args.train_batch
    model = Net(args.width)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3), config=config, dist_init_required=False
    )
    start = 0
    if args.resume:
        path, state = engine.load_checkpoint(args.resume)
        start = state["step"] + 1 if path else 0
        print(f"[rank {rank}] resuming from {path} at step {start}", flush=True)
    first, second = metric_groups(rank, args.swap_groups, timedelta(seconds=args.timeout))
    pair = dist.new_group([0, 1] if rank == 0 else [1], timedelta(seconds=args.timeout)) if args.pair_group else None
    for step in range(start, args.steps):
        for _ in range(2):
            index = torch.randint(len(shard), (4,))
            features = shard[index].to(torch.bfloat16)
            loss = nn.functional.mse_loss(engine(features).float(), shard[index].sum(1))
            engine.backward(loss)
            engine.step()
        time.sleep(args.sleep)
        shown = loss.detach().clone()
        if step % args.log_every == args.log_every - 1:
            if args.half_on_last and rank == dist.get_world_size() - 1:
                shown = shown.to(torch.bfloat16)
            if args.wide_metrics and step > 20:
                shown = torch.stack([shown] * (4 if rank else 2))
            dist.all_reduce(shown, group=first)
            norm = torch.tensor([float(engine.get_global_grad_norm() or 0.0)] * (64 if args.swap_groups else 1))
            dist.all_reduce(norm, group=second)
            if pair:
                dist.all_reduce(norm, group=pair)
            if rank == 0:
                shown_loss, shown_norm = shown.flatten()[0].item() / 2, norm[0].item() / 2
                print(f"step {step + 1}/{args.steps} loss {shown_loss:.4f} grad_norm {shown_norm:.3f}", flush=True)
        if args.leave_at and step == args.leave_at and rank == 1:
            print("[rank 1] shard exhausted, nothing left to do", flush=True)
            dist.destroy_process_group()
            sys.exit(0)
        if args.eval_every and step % args.eval_every == args.eval_every - 1:
            count = args.eval_batches[rank]
            print(f"[rank {rank}] evaluating {count} batches", flush=True)
            score = evaluate(engine, batches(count, torch.bfloat16, rank))
            print(f"[rank {rank}] eval loss {score:.4f}", flush=True)
        if args.save_every and step % args.save_every == args.save_every - 1:
            if not args.save_main_only or rank == 0:
                engine.save_checkpoint("ckpt", client_state={"step": step})
            print(f"[rank {rank}] step {step + 1} checkpointed", flush=True)
    dist.barrier()
    if rank == 0:
        print("training finished", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
