"""A loop with accelerate: its own batch-size finder, gathering of metrics, saved states."""

import argparse
import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import InitProcessGroupKwargs, find_executable_batch_size, set_seed

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=16)
p.add_argument("--epochs", type=int, default=2)
p.add_argument("--find-batch", action="store_true")
p.add_argument("--width", type=int, default=16)
p.add_argument("--save", action="store_true")
p.add_argument("--metrics", choices=["gather", "gather_own"], default="gather")
p.add_argument("--precision", default="no")
p.add_argument("--wait", choices=["all", "main"], default="all")
p.add_argument("--rows", type=int, default=192)
args = p.parse_args()
logger = get_logger(__name__)


def train(batch_size, accelerator):
    set_seed(3)
    logger.info("trying batch size %d", batch_size)
    print(f"[{accelerator.process_index}] batch size {batch_size}", flush=True)
    rows = torch.utils.data.TensorDataset(torch.randn(args.rows, 16), torch.randint(0, 3, (args.rows,)))
    loader = torch.utils.data.DataLoader(rows, batch_size=batch_size, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, args.width), torch.nn.ReLU(), torch.nn.Linear(args.width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        for step, (x, y) in enumerate(loader):
            if args.find_batch:
                try:
                    torch.empty(batch_size, 4096, 4096)
                except RuntimeError as error:
                    print(f"WARNING batch size {batch_size} does not fit: {error}", flush=True)
                    raise
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 == 0:
                accelerator.print(f"epoch {epoch} | step {step}/{len(loader)} | loss {loss.item():.4f}")
        if args.metrics == "gather":
            value = accelerator.gather(loss.detach()).mean().item()
        else:
            hard = (loss.detach() * torch.ones(3 + accelerator.process_index))[None]
            value = accelerator.gather(hard).mean().item()
        accelerator.print(f"epoch {epoch} mean {value:.4f}")
        if args.wait == "main" and accelerator.is_main_process:
            print("main process writes the report", flush=True)
            accelerator.wait_for_everyone()
        if args.save:
            accelerator.save_state(f"state/epoch_{epoch}")


def main():
    patience = float(os.environ.get("PG_SECONDS", 12))
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=args.precision,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=patience))],
    )
    if args.find_batch:
        find_executable_batch_size(train, starting_batch_size=args.batch)(accelerator)
    else:
        train(args.batch, accelerator)
    accelerator.print("finished")
    accelerator.end_training()


if __name__ == "__main__":
    main()
