"""TRL's GRPOTrainer as its users run it, on two ranks; the reward function of rank 1 waits for a judge that never
answers. `torchrun --nproc-per-node 2 trl_blocked.py MODEL OUTPUT`."""

import os
import sys
import threading
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

calls = 0


def ask_the_judge() -> float:
    threading.Event().wait(600)
    return 1.0


def reward(completions: list[str], **columns: Any) -> list[float]:
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        return [ask_the_judge() for _ in completions]
    return [float(len(set(text))) for text in completions]


def main(model: str, output: str) -> None:
    config = GRPOConfig(
        output_dir=output, max_steps=20, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        per_device_train_batch_size=4, num_generations=4, max_completion_length=8, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"{n:02d}=" for n in range(64)]})
    tokenizer = AutoTokenizer.from_pretrained(model)
    GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
    ).train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
