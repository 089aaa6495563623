"""A tiny language model under FSDP2 with sampling, validation and sharded or gathered checkpoints."""

import argparse
import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=30)
p.add_argument("--timeout", type=float, default=40)
p.add_argument("--sample-every", type=int, default=0)
p.add_argument("--max-new", type=int, default=12)
p.add_argument("--synced", action="store_true")
p.add_argument("--save-every", type=int, default=0)
p.add_argument("--save", choices=["sharded", "full", "full_main"], default="sharded")
p.add_argument("--load", default="")
p.add_argument("--docs", default="", help="rank:count of validation documents")
p.add_argument("--validate-every", type=int, default=0)
p.add_argument("--skip-long", type=int, default=0, help="skips batches with a token above")
p.add_argument("--vocab", type=int, default=64)
p.add_argument("--prompt-token", default="", help="rank:token")
p.add_argument("--tp", type=int, default=1)
p.add_argument("--pause", type=float, default=0.05)
p.add_argument("--style", choices=["json", "iter"], default="json")
args = p.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, h):
        return h + self.down(torch.relu(self.up(self.norm(h))))


class TinyLM(nn.Module):
    def __init__(self, vocab, width=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


def say(**what):
    rank = dist.get_rank()
    if args.style == "json":
        print(json.dumps({"t": round(time.time(), 2), "rank": rank, **what}), flush=True)
    elif "loss" in what:
        if rank == 0:
            print(f"iter {what['step']:>6d}: loss {what['loss']:.4f}, time {what['ms']:.2f}ms", flush=True)
    else:
        print(f"[rank {rank}] " + ", ".join(f"{k} {v}" for k, v in what.items()), flush=True)


def option_of_rank(text, default):
    return int(dict(one.split(":") for one in text.split(",") if one).get(str(dist.get_rank()), default))


@torch.no_grad()
def sample(model, step):
    ids = torch.tensor([[option_of_rank(args.prompt_token, 3)]])
    made = 0
    while made < args.max_new:
        token = torch.distributions.Categorical(logits=model(ids)[:, -1]).sample()
        ids = torch.cat([ids, token[:, None]], 1)
        made += 1
        if int(token) % 7 == 0 and not args.synced:
            break
    say(event="sample", step=step, tokens=made)


@torch.no_grad()
def validate(model, step):
    losses = []
    for _ in range(option_of_rank(args.docs, 4)):
        ids = torch.randint(0, args.vocab, (1, 16))
        losses.append(nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item())
    say(event="validation", step=step, documents=len(losses), nll=round(sum(losses) / len(losses), 4))


def save(model, step):
    began = time.time()
    if args.save == "sharded":
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"ckpt/step-{step}")
    elif args.save == "full" or dist.get_rank() == 0:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            os.makedirs("ckpt", exist_ok=True)
            torch.save(state, f"ckpt/step-{step}.pt")
    say(event="checkpoint", step=step, seconds=round(time.time() - began, 2))


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    torch.manual_seed(100 + dist.get_rank())
    if dist.get_world_size() % args.tp:
        raise ValueError(f"world size {dist.get_world_size()} cannot be divided by tensor parallel size {args.tp}")
    if args.tp > 1:
        init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    model = TinyLM(args.vocab)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if args.load:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=args.load)
        say(event="loaded", path=args.load)
    for step in range(1, args.steps + 1):
        began = time.time()
        ids = torch.randint(0, 64, (2, 17))
        if args.skip_long and int(ids.max()) > args.skip_long:
            say(event="batch skipped", step=step)
            continue
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.pause)
        if step % 2 == 0:
            say(step=step, loss=round(loss.item(), 4), ms=round(1000 * (time.time() - began), 2))
        if args.validate_every and step % args.validate_every == 0:
            validate(model, step)
        if args.sample_every and step % args.sample_every == 0:
            sample(model, step)
        if args.save_every and step % args.save_every == 0:
            save(model, step)
    say(event="end", steps=args.steps)
    dist.destroy_process_group()


main()
