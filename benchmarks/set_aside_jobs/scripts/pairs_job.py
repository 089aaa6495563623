"""Ranks on gloo that train on pairs (DDP), with shards (FSDP2) or as stages of a pipeline, with one of many faults."""

import argparse
import datetime
import json
import logging
import math
import os
import signal
import sys
import time
import warnings
from pathlib import Path

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
log = logging.getLogger("train")


class Cloud(logging.Formatter):
    def format(self, record):
        stamp = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat()
        row = {
            "timestamp": stamp,
            "severity": record.levelname,
            "labels": {"rank": RANK},
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["stack_trace"] = self.formatException(record.exc_info)
        return json.dumps(row)


def set_up_log(form):
    """Chooses how lines look: glog, cloud (JSON), logfmt, rich, loguru or bare."""
    global log
    handler = logging.StreamHandler(sys.stderr if form in ("glog", "rich") else sys.stdout)
    if form == "loguru":
        import loguru

        log = loguru.logger.bind(rank=RANK)
        log.exception = loguru.logger.opt(exception=True).error
        return
    if form == "rich":
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(width=120, file=sys.stderr), rich_tracebacks=False)
    lines = {
        "glog": logging.Formatter(
            "%(levelname).1s%(asctime)s.%(msecs)06d %(process)d %(filename)s:%(lineno)d] %(message)s", "%m%d %H:%M:%S"
        ),
        "cloud": Cloud(),
        "logfmt": logging.Formatter(
            f'ts=%(asctime)s level=%(levelname)s rank={RANK} msg="%(message)s"', "%Y-%m-%dT%H:%M:%SZ"
        ),
        "rich": logging.Formatter(f"r{RANK} %(message)s"),
        "bare": logging.Formatter(f"({RANK}) %(message)s"),
        "titan": logging.Formatter("[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s"),
    }
    handler.setFormatter(lines[form])
    log.addHandler(handler)
    log.setLevel(logging.INFO)


class Captions:
    """Images (drawn) with captions that have a label; one row of one rank may be bad."""

    def __init__(self, rows, options):
        import torch

        self.options = options
        self.rows = [
            {"image": torch.randn(32), "caption": torch.randint(0, 200, (8,)), "label": n % 7} for n in range(rows)
        ]
        if options.on == RANK and options.fault == "label":
            del self.rows[options.at * options.batch]["label"]
        if options.on == RANK and options.fault == "caption":
            self.rows[options.at * options.batch]["caption"] = torch.randint(0, 200, (11,))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.options.on == RANK and index == self.options.at * self.options.batch:
            if self.options.fault == "image":
                import io

                from PIL import Image

                Image.open(io.BytesIO(b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(40))).load()
            if self.options.fault == "worker":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.options.fault == "stuck-worker":
                time.sleep(1000)
        row = self.rows[index]
        return row["image"], row["caption"], row["label"]


def towers(options):
    import torch

    wide = options.width + (8 if options.fault == "wider" and options.on == RANK else 0)

    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.image = torch.nn.Sequential(torch.nn.Linear(32, wide), torch.nn.GELU(), torch.nn.Linear(wide, 16))
            self.text = torch.nn.Sequential(torch.nn.Embedding(200, 16), torch.nn.Flatten(), torch.nn.Linear(128, 16))
            self.aux = torch.nn.Linear(16, 7)

        def forward(self, image, caption, use_aux=True):
            a, b = self.image(image), self.text(caption)
            return a @ b.T, self.aux(a) if use_aux else None

    return Towers()


def strike(options, step):
    """What happens to the process of the fault at its step."""
    import torch
    import torch.distributed as dist

    fault = options.fault
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "grow":
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 20)) * 8)
    if fault == "index":
        log.info("rebuilding the hard-negative index on this rank (1.2M rows)")
        time.sleep(options.seconds)
        log.info("index rebuilt")
    if fault == "validate-alone":
        log.info("validating on the first rank")
        dist.barrier()
    if fault == "threads":
        import resource
        import threading

        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        os.setuid(65534)
        for _ in range(4):
            threading.Thread(target=time.sleep, args=(30,)).start()
    if fault == "metrics":
        import urllib.request

        urllib.request.urlopen("http://127.0.0.1:9/api/v1/runs/clip/metrics", b"{}", timeout=4)
    if fault == "exit":
        log.info("early stop: no gain in 3 evaluations")
        sys.exit(0)
    if fault == "flaky" and ATTEMPT == 0:
        raise OSError(5, "Input/output error", "/mnt/nfs/captions/part-00017.arrow")
    if fault == "odd-reduce":
        dist.all_reduce(torch.zeros(3))


def train(options, dist, torch):
    dataset = Captions(
        options.rows if not (options.fault == "fewer" and options.on == RANK) else options.rows - 60, options
    )
    model, first = towers(options), 0
    if options.shard:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if options.hybrid else None
        for part in (model.image, model.text, model):
            fully_shard(part, mesh=mesh)
        net = model
    else:
        net = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr)
    snapshot = Path(options.snapshot) if options.snapshot else None
    if snapshot and snapshot.exists():
        kept = torch.load(snapshot, weights_only=True)
        model.load_state_dict(kept["model"])
        first = kept["step"]
        log.info(f"resuming from {snapshot} at step {first} (restart {ATTEMPT})")
    loader = torch.utils.data.DataLoader(
        dataset, options.batch, num_workers=options.workers, timeout=options.loader_timeout
    )
    asked = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    scale, began = 65536.0, time.monotonic()
    for step, (image, caption, label) in enumerate(loader, 1):
        if step <= first or step > options.steps:
            continue
        struck = options.on == RANK and step == options.at
        if struck:
            strike(options, step)
        skip_aux = options.fault == "aux" and options.on in (RANK, -1) and step >= options.at
        if options.fault == "pixels" and struck:
            image = image / 0.0
        scores, aux = net(image, caption, not skip_aux)
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
        if aux is not None:
            loss = loss + torch.nn.functional.cross_entropy(aux, label)
        if options.evaluate:
            log.info(
                f"eval batch {step}: recall@1 {(scores.argmax(1) == torch.arange(len(scores))).float().mean():.3f}"
            )
            continue
        if not math.isfinite(loss.item()):
            log.error(f"step {step}: local loss is {loss.item()} on rank {RANK}")
        loss.backward()
        if options.fault == "overflow" and step in (2, 3, 9):
            scale /= 2
            log.warning(
                f"gradient overflow at step {step}: inf in 3 of 9 gradients, skipping this update, loss scale "
                f"-> {scale:.0f}"
            )
            optimizer.zero_grad()
            continue
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=options.fault == "pixels")
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            norm = norm.full_tensor() if options.shard else norm
            speed = step * options.batch / (time.monotonic() - began)
            log.info(f"step {step}/{options.steps} loss {loss.item():.4f} gnorm {norm:.3f} {speed:.0f} pairs/s")
        if options.noise and step in (6, 13):
            warnings.warn("Corrupt EXIF data. Expecting to read 10 bytes but only got 0.", stacklevel=1)
            log.warning(f"caption {step * 17} is empty after cleaning, replaced by its file name")
        if options.noise and step == 10:
            try:
                json.loads("<html><title>503 Service Temporarily Unavailable</title>")
            except ValueError:
                log.exception("could not read the tracker's answer, metrics stay in the local buffer")
        if snapshot and step % options.every == 0:
            if RANK == 0:
                torch.save({"model": model.state_dict(), "step": step}, snapshot)
                log.info(f"saved {snapshot} at step {step}")
            dist.barrier()
        if options.own_shard and step % options.every == 0:
            place = Path(options.own_shard) / f"step{step}-rank{RANK}.pt"
            torch.save({"pad": torch.zeros(400_000), "step": step}, place)
            log.info(f"wrote {place}")
        flag = torch.tensor([len(asked)])
        dist.all_reduce(flag)
        if flag.item():
            log.warning(f"SIGUSR1 (time limit is near): snapshot at step {step}, then requeue")
            if RANK == 0 and snapshot:
                torch.save({"model": model.state_dict(), "step": step}, snapshot)
            break
        time.sleep(options.sleep)
    if options.fault == "save-alone" and RANK == 0:
        dist.all_gather_object([None] * WORLD, "config")


def pipeline(options, dist, torch):
    """Four stages: each takes what the one before it sends and sends its own on."""
    torch.manual_seed(RANK)
    stage = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Tanh())
    vocabulary = {str(n): n for n in range(50)}
    for step in range(1, options.steps + 1):
        struck = options.on == RANK and step == options.at
        if RANK == 0:
            inward = torch.randn(4, 24)
        else:
            inward = torch.empty(4, 24)
            dist.recv(inward, RANK - 1)
        if struck and options.fault == "vocabulary":
            vocabulary["<tool_call>"]
        if struck:
            strike(options, step)
        outward = stage(inward)
        if struck and options.fault == "longer":
            outward = torch.cat((outward, outward))
        if RANK < WORLD - 1:
            dist.send(outward.detach().contiguous(), RANK + 1)
        elif step % 5 == 0:
            log.info(f"microbatch {step}: stage {RANK} out {outward.norm():.3f}")
        if step % 10 == 0:
            log.info(f"stage {RANK}: {step} microbatches done")
        time.sleep(options.sleep)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    for name, default in {
        "on": 1,
        "at": 9,
        "steps": 24,
        "rows": 400,
        "batch": 8,
        "workers": 0,
        "width": 32,
        "every": 6,
        "loader_timeout": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"seconds": 20.0, "timeout": 60.0, "sleep": 0.15, "lr": 1e-3}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    for name in ("snapshot", "own_shard"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--form", default="bare")
    for name in ("noise", "shard", "hybrid", "evaluate", "stages", "prepare"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    set_up_log(options.form)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=max(options.timeout, 150)))
    log.info(f"rank {RANK} of {WORLD} ready, pid {os.getpid()}")
    if options.prepare:
        if RANK == 0:
            for shard in range(6):
                log.info(f"tokenizing shard {shard + 1}/6, the other ranks wait")
                time.sleep(options.seconds / 6)
        log.info("waiting for the data of rank 0")
        dist.barrier()
    dist.all_reduce(torch.zeros(1))
    if not options.prepare and os.environ.get("TORCH_DISTRIBUTED_DEBUG") != "DETAIL":
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=options.timeout))
    (pipeline if options.stages else train)(options, dist, torch)
    dist.barrier()
    dist.destroy_process_group()
    log.info(f"rank {RANK}: finished")


if __name__ == "__main__":
    main()
