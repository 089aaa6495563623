"""A classifier under DDP, one shard of JSON lines per rank."""

import argparse
import datetime
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

p = argparse.ArgumentParser()
p.add_argument("--data", type=Path, default=Path("data"))
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--batch-size", type=int, default=4)
p.add_argument("--lr", type=float, default=0.05)
p.add_argument("--classes", type=int, default=4)
p.add_argument("--timeout", type=float, default=60)
p.add_argument("--print-freq", type=int, default=4)
p.add_argument("--pause", type=float, default=0.03)
p.add_argument("--checkpoints", type=Path)
p.add_argument("--resume", action="store_true")
p.add_argument("--eval-only", action="store_true")
p.add_argument("--patience", type=int, default=0)
p.add_argument("--init-method", default="env://")
p.add_argument("--rank", type=int, default=int(os.environ.get("RANK", 0)))
p.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
p.add_argument("--style", choices=["imagenet", "bracket", "json", "bar"], default="imagenet")
p.add_argument("--find-unused", action="store_true")
p.add_argument("--heads", action="store_true", help="one head per domain, the sample's domain decides")


def samples(path):
    rows = []
    with open(path) as lines:
        for line in lines:
            rows.append(json.loads(line))
    return rows


def collate(rows):
    x = torch.tensor([row["x"] for row in rows])
    y = torch.tensor([row["label"] for row in rows])
    return x, y


class Net(nn.Module):
    def __init__(self, classes, heads):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU())
        self.head = nn.Linear(32, classes)
        self.rare = nn.Linear(32, classes) if heads else None

    def forward(self, x, rare=False):
        h = self.body(x)
        return self.rare(h) if rare else self.head(h)


def report(args, epoch, step, steps, loss, took):
    if args.style == "imagenet":
        print(f"Epoch: [{epoch}][{step:3d}/{steps}]\tTime {took:6.3f}\tLoss {loss:.4e}\tLR {args.lr:g}", flush=True)
    elif args.style == "bracket":
        print(f"[{epoch * steps + step}] loss={loss:.4f} ({1 / took:.1f} it/s)", flush=True)
    elif args.style == "json":
        line = {"rank": args.rank, "epoch": epoch, "iter": step, "loss": round(loss, 5), "time": round(time.time(), 2)}
        print(json.dumps(line), flush=True)
    else:
        done = int(20 * (step + 1) / steps)
        print(
            f"\rEpoch {epoch}: {100 * (step + 1) // steps:3d}%|{'#' * done}{' ' * (20 - done)}| {step + 1}/{steps} "
            f"[{1 / took:.2f}it/s, loss={loss:.3f}]",
            end="" if step + 1 < steps else "\n",
            flush=True,
        )


def save(args, net, optimizer, epoch):
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    state = {"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, args.checkpoints / "last.pt")
    print(f"=> saved checkpoint '{args.checkpoints / 'last.pt'}' (epoch {epoch})", flush=True)


def main():
    args = p.parse_args()
    torch.manual_seed(args.rank)
    dist.init_process_group(
        "gloo",
        init_method=args.init_method,
        rank=args.rank,
        world_size=args.world_size,
        timeout=datetime.timedelta(seconds=args.timeout),
    )
    rows = samples(args.data / f"shard-{args.rank:03d}.jsonl")
    net = DDP(Net(args.classes, args.heads), find_unused_parameters=args.find_unused)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    first = 0
    if args.resume:
        print(f"=> loading checkpoint '{args.checkpoints / 'last.pt'}'", flush=True)
        state = torch.load(args.checkpoints / "last.pt")
        net.module.load_state_dict(state["model"])
        first = state["epoch"] + 1
        print(f"=> loaded checkpoint (epoch {state['epoch']})", flush=True)
    loss_of = nn.CrossEntropyLoss()
    steps = len(rows) // args.batch_size
    if args.eval_only:
        right = 0
        with torch.no_grad():
            for i in range(steps):
                x, y = collate(rows[i * args.batch_size : (i + 1) * args.batch_size])
                right += int((net.module(x).argmax(1) == y).sum())
                time.sleep(args.pause)
                if i % args.print_freq == 0:
                    print(f"Test: [{i:3d}/{steps}]\tAcc@1 {100 * right / (i + 1) / args.batch_size:.2f}", flush=True)
        print(f" * Acc@1 {100 * right / steps / args.batch_size:.3f}", flush=True)
        dist.destroy_process_group()
        return
    best, bad = math.inf, 0
    for epoch in range(first, args.epochs):
        total = 0.0
        for i in range(steps):
            began = time.time()
            x, y = collate(rows[i * args.batch_size : (i + 1) * args.batch_size])
            rare = args.heads and bool((x[:, 1] > 1.9).any())
            loss = loss_of(net(x, rare), y)
            if not math.isfinite(loss.item()):
                print(f"Loss is {loss.item()}, stopping training", flush=True)
                sys.exit(1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            time.sleep(args.pause)
            if i % args.print_freq == 0 or i + 1 == steps:
                report(args, epoch, i, steps, loss.item(), time.time() - began)
        mean = torch.tensor(total / max(steps, 1))
        dist.all_reduce(mean)
        mean = mean.item() / args.world_size
        if args.rank == 0:
            print(f"Epoch {epoch} done, mean loss {mean:.4f}", flush=True)
            if args.checkpoints:
                save(args, net, optimizer, epoch)
        dist.barrier()
        best, bad = (mean, 0) if mean < best - 1e-2 else (best, bad + 1)
        if args.patience and bad >= args.patience:
            if args.rank == 0:
                print(f"no improvement for {bad} epochs (best {best:.4f}), stopping early", flush=True)
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
