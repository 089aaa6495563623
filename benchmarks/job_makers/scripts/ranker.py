"""A hand-written data-parallel loop: logging, gradient averaging, metrics, evaluation, checkpoints, all by hand."""

import argparse
import logging
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

FORMATS = {
    "long": "%(asctime)s [rank %(rank)s] %(levelname)s %(message)s",
    "short": "%(levelname).1s %(relativeCreated)7d r%(rank)s] %(message)s",
    "glog": "%(levelname).1s%(asctime)s %(process)d ranker.py:%(lineno)d] [r%(rank)s] %(message)s",
    "bare": "%(asctime)s rank %(rank)s | %(message)s",
    "none": "%(message)s",
}
p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=40)
p.add_argument("--timeout", type=float, default=30)
p.add_argument("--init", default="env://")
p.add_argument("--lines", "--log", dest="log", choices=FORMATS, default="long")
p.add_argument("--pause", type=float, default=0.08)
p.add_argument("--index", choices=["none", "even", "rank1", "rank0"], default="none", help="whose index is built anew")
p.add_argument("--index-items", type=int, default=20)
p.add_argument("--metrics", choices=["plain", "tail", "typed"], default="plain")
p.add_argument("--eval-every", type=int, default=0)
p.add_argument("--eval-guard", choices=["all", "main", "root"], default="all")
p.add_argument("--save-every", type=int, default=0)
p.add_argument("--save-to", type=Path, default=Path("ckpt"))
p.add_argument("--save-seconds", type=float, default=0)
p.add_argument("--save-mb", type=float, default=0)
p.add_argument("--clip", type=float, default=0)
p.add_argument("--dim", type=int, default=24)
p.add_argument("--dims", default="", help="rank:dim")
p.add_argument("--lr", type=float, default=0.02)
p.add_argument("--forever", action="store_true")
p.add_argument("--cache-mb", type=int, default=0, help="grows by this much per step on the last rank")
p.add_argument("--threshold", type=float, default=0)
args = p.parse_args()
RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
WORLD = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))
logging.basicConfig(
    level=logging.INFO,
    format=FORMATS[args.log],
    datefmt="%H:%M:%S" if args.log == "bare" else "%m%d %H:%M:%S" if args.log == "glog" else None,
)
log = logging.LoggerAdapter(logging.getLogger("ranker"), {"rank": RANK})
logging.getLogger("ranker").addFilter(lambda record: True)


def average(parameters):
    for one in parameters:
        dist.all_reduce(one.grad)
        one.grad /= WORLD


def build_index(items):
    for item in range(items):
        if item % 5 == 0:
            log.info("building index: %d of %d documents", item, items)
        time.sleep(0.5)
    log.info("index ready")


def sync_metrics(loss, step):
    values = {"loss": loss, "seen": float(step)}
    if args.metrics == "tail" and loss > args.threshold and step > 10:
        values["tail_loss"] = loss
    for name in sorted(values):
        value = torch.tensor(values[name], dtype=torch.float64 if args.metrics == "typed" and RANK else None)
        dist.all_reduce(value)
        values[name] = value.item() / WORLD
    return values


def evaluate(model, step):
    log.info("evaluating at step %d", step)
    x = torch.randn(64, args.dim)
    score = (model(x).squeeze() > 0).float().mean()
    dist.all_reduce(score)
    log.info("step %d auc %.4f", step, score.item() / WORLD)


def save(model, step):
    args.save_to.mkdir(parents=True, exist_ok=True)
    path = args.save_to / f"step_{step:06d}.pkl"
    log.info("writing %s", path)
    began = time.time()
    with open(path, "wb") as out:
        pickle.dump({"model": model.state_dict(), "pad": os.urandom(int(args.save_mb * 2**20))}, out)
        if args.save_seconds:
            time.sleep(args.save_seconds)
    log.info("wrote %s in %.1f s", path, time.time() - began)


def main():
    dist.init_process_group("gloo", args.init, timeout=timedelta(seconds=args.timeout), rank=RANK, world_size=WORLD)
    log.info("process group ready: %d of %d, timeout %.0f s", RANK, WORLD, args.timeout)
    dim = dict(one.split(":") for one in args.dims.split(",") if one).get(str(RANK), args.dim)
    args.dim = int(dim)
    torch.manual_seed(RANK)
    model = torch.nn.Sequential(torch.nn.Linear(args.dim, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    if args.index in ("even", f"rank{RANK}"):
        log.info("no index in cache, making one")
        build_index(args.index_items)
    for one in model.parameters():
        dist.broadcast(one.data, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    kept = []
    step = 0
    while args.forever or step < args.steps:
        step += 1
        x = torch.randn(32, args.dim)
        target = (x[:, 0] * x[:, 1] > 0).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(), target)
        optimizer.zero_grad()
        loss.backward()
        average(model.parameters())
        optimizer.step()
        if args.cache_mb and RANK == WORLD - 1:
            kept.append(torch.ones(args.cache_mb * 2**18))
        time.sleep(args.pause)
        if step % 4 == 0:
            shown = sync_metrics(loss.item(), step)
            log.info("step %d loss %.4f", step, shown["loss"])
        if args.eval_every and step % args.eval_every == 0 and (args.eval_guard == "all" or RANK == 0):
            evaluate(model, step)
        if args.save_every and step % args.save_every == 0 and RANK == 0:
            save(model, step)
    log.info("finished after %d steps", step)
    dist.barrier()
    dist.destroy_process_group()


main()
