"""A policy-gradient loop whose rewards come from a judge over HTTP."""

import argparse
import json
import os
import time
import urllib.error
import urllib.request
from datetime import timedelta

import torch
import torch.distributed as dist

p = argparse.ArgumentParser()
p.add_argument("--judge", default="http://127.0.0.1:8000/score")
p.add_argument("--updates", type=int, default=12)
p.add_argument("--retries", type=int, default=4)
p.add_argument("--request-timeout", type=float, default=4)
p.add_argument("--timeout", type=float, default=60)
p.add_argument("--normalize", choices=["safe", "raw"], default="safe")
p.add_argument("--gather", choices=["all", "kept"], default="all")
p.add_argument("--think", default="", help="rank:seconds of generation")
args = p.parse_args()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
prefix = f"[{time.strftime('%H:%M:%S')}] (rank {rank})"


def log(text):
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} | rank={rank} | {text}", flush=True)


def ask(samples):
    body = json.dumps({"samples": samples}).encode()
    for attempt in range(1, args.retries + 1):
        try:
            request = urllib.request.Request(args.judge, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=args.request_timeout) as answer:
                return json.loads(answer.read())["scores"]
        except (OSError, urllib.error.URLError) as error:
            log(f"WARNING judge request failed (attempt {attempt}/{args.retries}): {error}")
            if attempt == args.retries:
                raise
            time.sleep(0.4 * attempt)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout), rank=rank, world_size=world)
    torch.manual_seed(rank)
    logits = torch.zeros(8, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for update in range(1, args.updates + 1):
        began = time.time()
        policy = torch.distributions.Categorical(logits=logits)
        actions = policy.sample((16,))
        for one in args.think.split(","):
            if one.startswith(f"{rank}:") and update == 5:
                time.sleep(float(one.split(":")[1]))
        time.sleep(0.3)
        log(f"rollout {update}: 16 completions in {time.time() - began:.1f} s")
        rewards = torch.tensor(ask(actions.tolist()))
        if args.normalize == "safe":
            advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        else:
            advantage = (rewards - rewards.mean()) / rewards.std()
        if args.gather == "kept":
            kept = rewards[rewards > 0.2]
            everyone = [torch.empty_like(kept) for _ in range(world)]
            dist.all_gather(everyone, kept)
        loss = -(advantage * policy.log_prob(actions)).mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(logits.grad)
        optimizer.step()
        mean = rewards.mean()
        dist.all_reduce(mean)
        log(f"update {update}/{args.updates} reward {mean.item() / world:.3f} loss {loss.item():.4f}")
    log("training complete")
    dist.destroy_process_group()


main()
