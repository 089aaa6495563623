"""TRL's trainers on the tiny model: `trl_train.py sft|dpo|grpo`."""

import argparse
import json
import os
import sys
import urllib.request

sys.path.append(os.environ["PEER"])
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

p = argparse.ArgumentParser()
p.add_argument("kind", choices=["sft", "dpo", "grpo"])
p.add_argument("--model", default="tiny")
p.add_argument("--steps", type=int, default=10)
p.add_argument("--generations", type=int, default=4)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--reward", choices=["length", "answer", "remote", "none"], default="length")
p.add_argument("--rename", default="", help="old:new column")
p.add_argument("--lr", type=float, default=1e-4)
p.add_argument("--save-steps", type=int, default=0)
p.add_argument("--timeout", type=int, default=60)
args = p.parse_args()


def length_reward(completions, **_):
    return [-float(len(text)) / 10 for text in completions]


def answer_reward(completions, solution, **_):
    return [float(str(right) in text) for text, right in zip(completions, solution, strict=True)]


def remote_reward(completions, **_):
    body = json.dumps({"samples": list(completions)}).encode()
    request = urllib.request.Request(os.environ["REWARD_URL"], body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.loads(answer.read())["scores"]


def no_reward(completions, **_):
    return [None for _ in completions]


REWARDS = {"length": length_reward, "answer": answer_reward, "remote": remote_reward, "none": no_reward}
rows = load_dataset("json", data_files="tiny/train.jsonl", split="train")
common = {
    "output_dir": "output",
    "max_steps": args.steps,
    "per_device_train_batch_size": args.batch,
    "learning_rate": args.lr,
    "logging_steps": 1,
    "save_strategy": "steps" if args.save_steps else "no",
    "save_steps": args.save_steps or 500,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "ddp_timeout": args.timeout,
}
if args.rename:
    rows = rows.rename_column(*args.rename.split(":"))
if args.kind == "sft":
    rows = rows.remove_columns([each for each in rows.column_names if each != "text" and not args.rename])
    trainer = SFTTrainer(args.model, args=SFTConfig(**common, max_length=32), train_dataset=rows)
elif args.kind == "dpo":
    rows = rows.remove_columns([each for each in ("text", "answer") if each in rows.column_names])
    trainer = DPOTrainer(args.model, args=DPOConfig(**common), train_dataset=rows)
else:
    rows = rows.remove_columns([each for each in ("text", "chosen", "rejected") if each in rows.column_names])
    config = GRPOConfig(**common, num_generations=args.generations, max_completion_length=8)
    trainer = GRPOTrainer(args.model, REWARDS[args.reward], args=config, train_dataset=rows)
trainer.train()
