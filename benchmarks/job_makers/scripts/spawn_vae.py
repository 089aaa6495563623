"""An autoencoder trained by torch.multiprocessing.spawn, with loader workers."""

import argparse
import os
import resource
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

p = argparse.ArgumentParser()
p.add_argument("--world", type=int, default=2)
p.add_argument("--workers", type=int, default=0)
p.add_argument("--context", choices=["fork", "spawn", "forkserver"], default="fork")
p.add_argument("--epochs", type=int, default=2)
p.add_argument("--rows", type=int, default=96)
p.add_argument("--port", default=os.environ.get("PORT", "29500"))
p.add_argument("--timeout", type=float, default=40)
p.add_argument("--augment", choices=["none", "scale"], default="none")
p.add_argument("--bad-row", type=int, default=-1)
p.add_argument("--open-files", type=int, default=0, help="keeps the file of each row open, with this limit")
p.add_argument("--kill-worker", type=int, default=0, help="row at which the loader worker ends by SIGKILL")
p.add_argument("--hidden", type=int, default=8)
p.add_argument("--big", action="store_true")
args = p.parse_args()


class Rows(Dataset):
    def __init__(self, rows, augment):
        self.rows = rows
        self.augment = (lambda x: x * 1.01) if augment == "scale" else None
        self.kept = []
        if args.open_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (args.open_files, args.open_files))

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        if args.open_files:
            path = f"rows/{i:05d}.txt"
            os.makedirs("rows", exist_ok=True)
            self.kept.append(open(path, "w"))
        if args.kill_worker and i == args.kill_worker:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(3, 400, 400) if args.big else torch.randn(16)
        if i == args.bad_row:
            x = x[:12]
        return self.augment(x) if self.augment else x


def train(rank, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=args.port)
    dist.init_process_group("gloo", rank=rank, world_size=args.world, timeout=timedelta(seconds=args.timeout))
    data = Rows(args.rows, args.augment)
    loader = DataLoader(
        data,
        batch_size=4,
        num_workers=args.workers,
        multiprocessing_context=args.context if args.workers else None,
    )
    size = 3 * 400 * 400 if args.big else 16
    model = torch.nn.Sequential(torch.nn.Linear(size, args.hidden), torch.nn.ReLU(), torch.nn.Linear(args.hidden, size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1, args.epochs + 1):
        for i, batch in enumerate(loader):
            batch = batch.flatten(1)
            loss = ((model(batch) - batch) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            for one in model.parameters():
                dist.all_reduce(one.grad)
            optimizer.step()
            time.sleep(0.02)
            if i % 6 == 0:
                done = 100.0 * i / len(loader)
                print(
                    f"[{rank}] Train Epoch: {epoch} [{i * 4}/{args.rows} ({done:.0f}%)]\tLoss: {loss.item():.6f}",
                    flush=True,
                )
        if rank == 0:
            print(f"====> Epoch: {epoch} Average loss: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(args,), nprocs=args.world)
    print("all workers joined", flush=True)
