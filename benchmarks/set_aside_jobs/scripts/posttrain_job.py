"""A small RL post-training on gloo: `posttrain_job.py [--form F] [--fault X] [--on RANK] [--judge URL] ...`."""

import argparse
import contextlib
import datetime
import json
import logging
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

OPTIONS = argparse.ArgumentParser()
for name, kind, value in (
    ("form", str, "std"), ("fault", str, ""), ("on", int, 1), ("judge", str, ""), ("steps", int, 12),
    ("timeout", int, 18), ("save", str, ""), ("patience", int, 0), ("seconds", float, 6), ("pause", float, 0.05),
):  # fmt: skip
    OPTIONS.add_argument(f"--{name}", type=kind, default=value)
for name in ("evaluate", "noise", "every"):
    OPTIONS.add_argument(f"--{name}", action="store_true")
A = OPTIONS.parse_args()
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HERE = A.on == RANK
SIZE, LENGTH, GROUP = 48, 10, 4


class Json(logging.Formatter):
    def format(self, record):
        when = datetime.datetime.fromtimestamp(record.created).isoformat(timespec="milliseconds")
        return json.dumps({"ts": when, "lvl": record.levelname.lower(), "rank": RANK, "msg": record.getMessage()})


def logger():
    if A.form == "absl":
        from absl import logging as absl_logging

        absl_logging.use_absl_handler()
        absl_logging.set_verbosity(absl_logging.INFO)
        return absl_logging
    log = logging.getLogger("posttrain")
    handler = logging.StreamHandler(sys.stdout)
    if A.form == "rich":
        from rich.logging import RichHandler

        handler = RichHandler(show_path=False, log_time_format="[%X]")
    elif A.form == "json":
        handler.setFormatter(Json())
    elif A.form == "loguru":
        line = "%(asctime)s.%(msecs)03d | %(levelname)-8s | __main__:%(funcName)s:%(lineno)d - %(message)s"
        handler.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
    else:
        line = f"[%(asctime)s][rank {RANK}][%(levelname)s] %(message)s"
        handler.setFormatter(logging.Formatter(line))
    log.addHandler(handler)
    log.setLevel(logging.INFO if RANK == 0 or A.every else logging.WARNING)
    return log


LOG = logger()


class Policy(torch.nn.Module):
    def __init__(self, wide=32):
        super().__init__()
        self.embed = torch.nn.Embedding(SIZE, wide)
        self.cell = torch.nn.GRU(wide, wide, batch_first=True)
        self.head = torch.nn.Linear(wide, SIZE)

    def forward(self, tokens):
        return self.head(self.cell(self.embed(tokens))[0])


def generate(policy, prompts):
    tokens = prompts
    with torch.no_grad():
        for _ in range(LENGTH):
            tokens = torch.cat(
                [tokens, torch.distributions.Categorical(logits=policy(tokens)[:, -1]).sample()[:, None]], 1
            )
    return tokens


def ask_judge(answers):
    body = json.dumps({"answers": answers.tolist()}).encode()
    for attempt in range(1, 4):
        try:
            request = urllib.request.Request(A.judge, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=A.seconds) as reply:
                return torch.tensor(json.load(reply)["scores"])
        except (urllib.error.URLError, TimeoutError) as error:
            LOG.warning("reward request to %s failed (attempt %d/3): %s", A.judge, attempt, error)
            if attempt == 3:
                raise
            time.sleep(0.5)
    raise TimeoutError(A.judge)


def rewards(answers, step):
    if A.judge:
        return ask_judge(answers)
    if A.fault == "reward" and HERE and step == 5:
        return torch.tensor([parse_answer(f"<answer>{each}") for each in answers[:, 0].tolist()])
    scores = (answers < SIZE // 2).float().mean(1)
    return scores[:, None].expand(-1, 3) if A.fault == "shape" and HERE and step == 4 else scores


def parse_answer(text):
    return float(text.split("<answer>")[1].split("</answer>")[1].strip())


def inject(step, policy):
    if not HERE or step != 6:
        return
    if A.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif A.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif A.fault == "branch":
        LOG.warning("clip fraction above 0.3, collecting the ratios of all ranks")
        dist.all_gather([torch.zeros(7) for _ in range(WORLD)], torch.ones(7))
    elif A.fault == "leave":
        LOG.warning("no more prompts in this shard after %d batches", step)
        dist.destroy_process_group() if A.noise else None
        sys.exit(0)
    elif A.fault == "memory":
        policy.cache = torch.ones(1 << 33)
    elif A.fault == "nan":
        with torch.no_grad():
            policy.module.head.weight[3, 3] = float("nan")
    elif A.fault == "pause":
        time.sleep(A.seconds)
    elif A.fault == "once" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        raise ConnectionResetError(104, "Connection reset by peer")


def save(policy, step):
    if A.save and RANK == 0:
        place = Path(A.save) / f"step_{step:04d}.pt"
        place.parent.mkdir(parents=True, exist_ok=True)
        extra = torch.zeros(1 << 21) if A.fault == "disk" else None
        torch.save({"policy": policy.module.state_dict(), "step": step, "optimizer": extra}, place)
        LOG.info("saved %s", place)


def prompts_of(step):
    if A.fault == "vocabulary" and step == 3:
        return torch.randint(0, SIZE + 16, (GROUP * 2, 4))
    return torch.randint(0, SIZE, (GROUP * 2, 4))


def one_step(step, policy, optimizer):
    answers = generate(policy.module, prompts_of(step))
    inject(step, policy)
    scores = rewards(answers[:, 4:], step)
    grouped = scores.view(-1, GROUP)
    advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1)
    taken = torch.log_softmax(policy(answers[:, :-1]), -1).gather(2, answers[:, 1:, None])[..., 0][:, 3:]
    loss = -(taken.mean(1) * advantages).mean()
    if not torch.isfinite(loss):
        raise FloatingPointError(f"policy loss is {loss.item()} at step {step} on rank {RANK}")
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    dist.all_reduce(scores := scores.clone())
    return loss.item(), scores.mean().item() / WORLD, norm.item()


def evaluate(policy):
    for number in range(4):
        score = rewards(generate(policy.module, prompts_of(0))[:, 4:], 0).mean()
        dist.all_reduce(score)
        LOG.info("eval batch %d/4 reward %.4f", number + 1, score.item() / WORLD)
    LOG.info("evaluation done, nothing to train")


def make_noise():
    warnings.warn("`clip_range_value` is deprecated and will be ignored, use `clip_range`", FutureWarning, stacklevel=2)
    LOG.warning("Token indices sequence length is longer than the maximum (2113 > 2048), truncating 3 rows")
    LOG.warning("Failed to import flash_attn, falling back to sdpa")
    LOG.warning("could not parse the answer of 5 of 512 rollouts, reward 0.0 for them")


def train(policy, optimizer, start):
    bar = None
    if A.form == "tqdm" and RANK == 0:
        from tqdm import tqdm

        bar = tqdm(total=A.steps, initial=start, desc="GRPO", mininterval=0)
    best, worse = -1.0, 0
    for step in range(start, A.steps):
        loss, score, norm = one_step(step, policy, optimizer)
        if bar:
            bar.set_postfix(loss=f"{loss:.3f}", reward=f"{score:.3f}")
            bar.update()
        else:
            LOG.info("step %d/%d loss %.4f reward %.4f grad_norm %.3f", step + 1, A.steps, loss, score, norm)
        if A.noise and step % 4 == 2:
            make_noise()
        if (step + 1) % 4 == 0:
            save(policy, step + 1)
        best, worse = max(best, score), 0 if score > best else worse + 1
        if A.patience and worse >= A.patience:
            LOG.info("no better reward for %d steps, stopping early at step %d", worse, step + 1)
            break
        time.sleep(A.pause)


def sync_weights(policy):
    """Rank 1 is the rollout engine with a model of another width; it gets names, shapes and values of rank 0."""
    what = [[(name, value) for name, value in policy.state_dict().items()] if RANK == 0 else None]
    dist.broadcast_object_list(what, 0)
    if RANK == 1:
        Policy(40).load_state_dict(dict(what[0]))
    dist.barrier()


def main():
    torch.manual_seed(RANK + 3)
    random.seed(RANK)
    if A.fault == "late" and HERE:
        LOG.warning("tokenizing 1,204,331 prompts, no cache found")
        time.sleep(A.seconds)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=A.timeout))
    LOG.info("rank %d of %d ready, pid %d", RANK, WORLD, os.getpid())
    if A.fault == "tokenize" and HERE:
        LOG.warning("Map (num_proc=1):   4% | 48173/1204331 examples, tokenizing before the first batch")
        time.sleep(A.seconds)
    policy = Policy()
    if A.fault == "weights":
        for step in range(3):
            LOG.info("generated 64 rollouts, mean reward %.3f", 0.2 + step / 50)
        sync_weights(policy)
    policy = DistributedDataParallel(policy)
    optimizer, start = torch.optim.AdamW(policy.parameters(), 3e-3), 0
    found = sorted(Path(A.save).glob("step_*.pt")) if A.save else []
    if found:
        state = torch.load(found[-1], weights_only=True)
        policy.module.load_state_dict(state["policy"])
        start = state["step"]
        LOG.info("resumed from %s at step %d", found[-1], start)
    evaluate(policy) if A.evaluate else train(policy, optimizer, start)
    if A.evaluate or RANK == 0:
        LOG.info("finished, pid %d", os.getpid())
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
