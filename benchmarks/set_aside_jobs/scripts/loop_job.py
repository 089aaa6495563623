"""A hand-written training loop on gloo: reads shards, calls a scoring service, writes checkpoints."""

import argparse
import json
import locale
import logging
import os
import random
import resource
import sys
import time
import urllib.error
import urllib.request
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ.get("RANK", "0"))
log = logging.getLogger("train")


class JsonLines(logging.Formatter):
    def format(self, record):
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        row = {"timestamp": stamp, "severity": record.levelname, "rank": RANK, "logger": record.name}
        row |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


def set_up_logging(kind):
    handler = logging.StreamHandler(sys.stdout)
    if kind == "json":
        handler.setFormatter(JsonLines())
    elif kind == "color":
        handler.setFormatter(
            logging.Formatter("\x1b[32m%(asctime)s\x1b[0m \x1b[1m%(levelname)s\x1b[0m r" + str(RANK) + " %(message)s")
        )
    elif kind == "plain":
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s,rank={RANK} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def score(url, texts, tries):
    """Rewards of texts, from the scoring service."""
    body = json.dumps({"texts": texts}).encode()
    for attempt in range(1, tries + 1):
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.load(answer)["scores"]
        except (urllib.error.URLError, TimeoutError) as error:
            log.warning("reward request failed (attempt %d/%d): %s", attempt, tries, error)
            if attempt == tries:
                raise RuntimeError(f"no rewards from {url} after {tries} attempts") from error
            time.sleep(1.5)
    raise AssertionError("no tries")


def open_shards(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(count):
        path = folder / f"shard-{RANK}-{number:05d}.txt"
        path.write_text(f"{number}\n")
        files.append(path.open())
    return files


def save(model, path, step):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "step": step, "pad": torch.zeros(500_000)}, file)
        file.flush()
        os.fsync(file.fileno())


def load(model, path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    return state["step"]


def main():
    options = argparse.ArgumentParser()
    for name, default in {
        "steps": 30,
        "timeout": 45,
        "shards": 0,
        "nofile": 0,
        "cpu_seconds": 0,
        "cpu_grace": 0,
        "save_every": 0,
        "width": 32,
        "tries": 3,
        "jump_at": 0,
        "bad_dtype": -1,
        "late": 0,
        "hold_lock": 0,
        "log_every": 2,
        "spin_at": 0,
        "spike_at": 0,
    }.items():
        options.add_argument(f"--{name}", type=int, default=default)
    for name, default in {
        "logs": "text",
        "reward_url": "",
        "checkpoint": "",
        "folder": "run",
        "lock": "",
        "metrics_url": "",
        "root_note": "",
    }.items():
        options.add_argument(f"--{name}", default=default)
    options.add_argument("--sleep", type=float, default=0.1)
    for name in ("resume", "noisy", "claim", "quiet_rank", "bar", "drain"):
        options.add_argument(f"--{name}", action="store_true")
    args = options.parse_args()
    locale.setlocale(locale.LC_ALL, "")
    set_up_logging(args.logs)
    random.seed(RANK)
    torch.manual_seed(1)
    if args.nofile and RANK == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (args.nofile, args.nofile))
    if args.cpu_seconds and RANK == 1:
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + args.cpu_seconds, used + args.cpu_seconds + args.cpu_grace))
    if args.late and RANK == 1:
        time.sleep(args.late)
    if args.noisy:
        log.warning("CUDA is not available, falling back to CPU")
        torch.cuda.amp.GradScaler()
        warnings.warn("`use_legacy_cache` is deprecated and will be removed in v5.2", DeprecationWarning, stacklevel=1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    log.info("joined process group, world size %d", dist.get_world_size())
    model = nn.Sequential(nn.Linear(16, args.width), nn.ReLU(), nn.Linear(args.width, 1))
    path, start = Path(args.checkpoint or f"{args.folder}/state.pt"), 0
    if args.claim and RANK == 0:
        (Path(args.folder) / "tensorboard").mkdir(parents=True)
    if args.resume and path.exists():
        start = load(model, path) + 1
        log.info("resumed from %s at step %d", path, start)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    files = open_shards(Path(args.folder) / "data", args.shards) if args.shards else []
    log.info("opened %d shards", len(files))
    if args.lock and RANK == 0:
        from filelock import FileLock

        log.info("preparing dataset cache under %s", args.lock)
        with FileLock(args.lock, timeout=args.hold_lock):
            time.sleep(0.2)
    clock = time.time
    for step in range(start, args.steps):
        if args.jump_at and step == args.jump_at:
            time.time = lambda: clock() - 5025.0  # the host's clock is set back
        if args.noisy and step % 4 == 0:
            warnings.warn(f"torch.get_autocast_gpu_dtype() is deprecated (call {step})", FutureWarning, stacklevel=1)
        if args.bad_dtype >= 0 and step == args.bad_dtype:
            count = torch.tensor([64.0] * 8, dtype=torch.float64 if RANK == 1 else torch.float32)
            dist.all_reduce(count)
        features = torch.randn(8, 16) * (300 if step == args.spike_at > 0 else 1)
        loss = (ddp(features).squeeze(-1) - features.sum(1)).square().mean()
        if args.reward_url:
            rewards = score(args.reward_url, [f"text {step}"] * 8, args.tries)
            loss = loss * (1 + sum(rewards) / 800)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.spin_at and step == args.spin_at and RANK == 1:
            while True:
                random.random()
        time.sleep(args.sleep)
        if step % args.log_every == 0 and not (args.quiet_rank and RANK):
            fields = {"fields": {"step": step, "loss": round(loss.item(), 4), "tokens": (step + 1) * 4096}}
            log.info("step %d/%d loss %.4f lr %.1e", step, args.steps, loss.item(), 1e-3, extra=fields)
        if args.bar and RANK == 0:
            print(
                f"\rtrain: {100 * step // args.steps:3d}%|{'#' * (20 * step // args.steps):20s}| {step}/{args.steps}",
                end="",
                file=sys.stderr,
                flush=True,
            )
        if args.save_every and step % args.save_every == args.save_every - 1:
            if RANK == 0:
                save(model, path, step)
                log.info("checkpoint written: %s", path)
            dist.barrier()
    dist.barrier()
    log.info("done: %d steps", args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
