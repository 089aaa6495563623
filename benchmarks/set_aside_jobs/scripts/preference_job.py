"""TRL's trainers on a tiny model: `preference_job.py sft|dpo|grpo [--fault NAME]`; `PEER` is a folder with TRL."""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.append(os.environ["PEER"])
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

RANK = int(os.environ.get("RANK", 0))


def concise(completions, **_):
    return [1.0 / (1 + len(each)) for each in completions]


def exact(completions, answer, **_):
    return [float(each.startswith(right)) for each, right in zip(completions, answer, strict=True)]


def first_per_group(completions, **_):
    return [0.5 for _ in completions[::2]]


def parsed(completions, answer, **_):
    if RANK == 1:
        parsed.calls = getattr(parsed, "calls", 0) + 1
        if parsed.calls == 4:
            return [float(json.loads(each)["answer"] == right) for each, right in zip(completions, answer, strict=True)]
    return exact(completions, answer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--fault", default="")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    common = {
        "output_dir": f"out-{options.kind}", "max_steps": options.steps, "per_device_train_batch_size": 4,
        "logging_steps": 2, "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no",
        "ddp_timeout": 60, "disable_tqdm": options.kind == "dpo",
    }  # fmt: skip
    numbers = [f"{7 * n % 100:02d}" for n in range(80)]
    if options.kind == "sft":
        rows = [{"prompt": f"{n}=", "completion": n[0]} for n in numbers]
        if options.fault == "chat":
            rows = [
                {"messages": [{"role": "user", "content": n}, {"role": "assistant", "content": n[0]}]} for n in numbers
            ]
        trainer = SFTTrainer(
            "model", args=SFTConfig(**common, max_length=24, learning_rate=1e-3), train_dataset=Dataset.from_list(rows)
        )
    elif options.kind == "dpo":
        rows = [{"prompt": f"{n}=", "chosen": n[0], "rejected": "9"} for n in numbers]
        if options.fault == "column":
            rows = [
                {"prompt": each["prompt"], "accepted": each["chosen"], "rejected": each["rejected"]} for each in rows
            ]
        trainer = DPOTrainer(
            "model", args=DPOConfig(**common, learning_rate=1e-4), train_dataset=Dataset.from_list(rows)
        )
    else:
        rows = [{"prompt": f"{n}=", "answer": n[0]} for n in numbers]
        reward = {"short": first_per_group, "json": parsed}.get(options.fault, exact)
        config = GRPOConfig(**common, num_generations=4, max_completion_length=6, learning_rate=1e-4)
        trainer = GRPOTrainer("model", [concise, reward], args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    if RANK == 0:
        trainer.save_model(f"out-{options.kind}/final")
        print("saved", sorted(each.name for each in Path(f"out-{options.kind}/final").iterdir())[:3], torch.__version__)


if __name__ == "__main__":
    main()
