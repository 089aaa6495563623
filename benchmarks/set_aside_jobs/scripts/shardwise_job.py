"""Preference tuning of a small sharded model (FSDP2 or DDP on gloo): `shardwise_job.py [--form F] [--fault X] ...`."""

import argparse
import csv
import datetime
import faulthandler
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

OPTIONS = argparse.ArgumentParser()
for name, kind, value in (
    ("form", str, "logfmt"), ("fault", str, ""), ("on", int, 1), ("steps", int, 24), ("timeout", int, 20),
    ("out", str, "runs/a"), ("at", int, 9), ("seconds", float, 8), ("beta", float, 0.1), ("group", int, 4),
):  # fmt: skip
    OPTIONS.add_argument(f"--{name}", type=kind, default=value)
for name in ("ddp", "noise", "all", "evaluate", "resume", "save"):
    OPTIONS.add_argument(f"--{name}", action="store_true")
A = OPTIONS.parse_args()
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HERE = A.on == RANK
VOCABULARY, WIDE = 64, 48


def now(form):
    return datetime.datetime.now().strftime(form)


def say(text, level="info", **fields):
    """Prints a line in the form of the run; ranks other than the first only warn, unless --all."""
    if RANK and not A.all and level == "info":
        return
    pairs = " ".join(f"{key}={value}" for key, value in fields.items())
    if A.form == "logfmt":
        line = f'time={now("%Y-%m-%dT%H:%M:%S.%f")[:-3]}Z level={level} rank={RANK} msg="{text}" {pairs}'
    elif A.form == "glog":
        letter, place = level[0].upper(), "pref_trainer.py:118"
        line = f"{letter}{now('%m%d %H:%M:%S.%f')} {os.getpid()} {place}] [r{RANK}] {text} {pairs}"
    elif A.form == "bracket":
        line = f"[{now('%H:%M:%S')}] <{RANK}/{WORLD}> {level.upper():<7} {text} {pairs}"
    elif A.form == "table":
        line = f"{fields.get('step', '-'):>6} | {text[:28]:<28} | {pairs}" if level == "info" else f"!! {RANK}: {text}"
    else:
        line = f"{socket.gethostname()}:{os.getpid()}:{RANK} {text} {pairs}"
    print(line.rstrip(), flush=True)


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDE)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDE, WIDE) for _ in range(3))
        self.head = torch.nn.Linear(WIDE, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


def build():
    torch.manual_seed(7)
    model = Decoder()
    if A.ddp:
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def pairs(step):
    generator = torch.Generator().manual_seed(step * WORLD + RANK)
    rows = 12 if not (A.fault == "ragged" and HERE and step == A.at) else 11
    chosen = torch.randint(0, VOCABULARY // 2, (rows, 16), generator=generator)
    if A.fault == "token" and HERE and step == A.at:
        chosen[3, 5] = VOCABULARY + 2
    return chosen, torch.randint(VOCABULARY // 2, VOCABULARY, (12, 16), generator=generator)


def score(model, tokens):
    return model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).sum((1, 2)) / 16


def inject(step, model):
    if A.fault == "second-pass" and HERE and step == A.at:
        say("loss spike, running the batch again", "warning", step=step)
        model(pairs(step)[0])
    if not HERE or step != A.at:
        return
    if A.fault == "segv":
        faulthandler.enable()
        os.kill(os.getpid(), signal.SIGSEGV)
    elif A.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif A.fault == "exit":
        say("reached the end of shard", rows=12 * step)
        sys.exit(0)
    elif A.fault == "files":
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        model.opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(80)]
    elif A.fault == "slow":
        say("packing 1,883,014 conversations, 0 cached", "warning", step=step)
        time.sleep(A.seconds)
    elif A.fault == "nap":
        time.sleep(A.seconds)
    elif A.fault == "config":
        raise ValueError(f"beta must be in (0, 1], got {A.beta}")


def noisy(step):
    warnings.warn("lr_scheduler.step() was called before optimizer.step()", UserWarning, stacklevel=2)
    say("Error while uploading metrics: 502 Bad Gateway, will try again in 5s", "error", step=step)
    say("dropped 3 samples that exceed max_length=2048", "warning", step=step)


def save(model, step):
    place = Path(A.out) / f"step-{step}"
    began = time.time()
    if A.fault == "slow-save" and RANK == 0:
        time.sleep(A.seconds)
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(place))
    say("checkpoint written", path=place, seconds=round(time.time() - began, 2))


def load(model):
    last = max(Path(A.out).glob("step-*"), key=lambda each: int(each.name[5:]))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=str(last))
    model.load_state_dict(state["model"])
    say("restored", path=last)
    return int(last.name[5:])


def evaluate(model, step):
    if A.fault == "main-evaluates" and RANK:
        return
    total = torch.zeros(1)
    with torch.no_grad():
        for number in range(4):
            chosen, rejected = pairs(1000 + number)
            total += (score(model, chosen) > score(model, rejected)).float().mean()
    dist.all_reduce(total)
    say("validation", step=step, accuracy=round(total.item() / 4 / WORLD, 4))


def train(model, start):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = csv.writer(sys.stdout) if A.form == "csv" and RANK == 0 else None
    for step in range(start, A.steps):
        inject(step, model)
        chosen, rejected = pairs(step)
        gap = score(model, chosen) - score(model, rejected)
        loss = -torch.nn.functional.logsigmoid(A.beta * gap).mean()
        if A.fault == "nan" and HERE and step >= A.at:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen = loss.detach().reshape(1).clone()
        dist.all_reduce(seen)
        shown = {"step": step + 1, "loss": f"{seen.item() / WORLD:.4f}", "grad_norm": f"{float(norm):.3f}"}
        rows.writerow(shown.values()) if rows else say("train", **shown)
        if A.noise and step % 5 == 3:
            noisy(step)
        if A.save and (step + 1) % 8 == 0:
            save(model, step + 1)
        if (step + 1) % 12 == 0:
            evaluate(model, step + 1)
        time.sleep(0.05)


def main():
    if A.fault == "version" and HERE:
        from transformers.integrations import flash_attention_4_varlen  # noqa: F401
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=A.timeout))
    if WORLD % 2 and A.fault == "groups":
        raise ValueError(f"world size {WORLD} is not divisible by tensor_parallel=2, check parallel.yaml")
    say("process group ready", world=WORLD, backend="gloo", pid=os.getpid())
    model = build()
    start = load(model) if A.resume else 0
    if A.evaluate:
        evaluate(model, start)
    else:
        train(model, start)
    say("all done", steps=A.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
