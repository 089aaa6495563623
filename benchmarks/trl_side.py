"""TRL's side of a comparison: `python -m benchmarks.trl_side FOLDER`, with build/peer on the path. See
`benchmarks.side_process`.

`FOLDER/trl.json` contains the kind of work, TRL's arguments and the table of lengths.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Image, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.length_table import force_generate
from benchmarks.reward import signal
from benchmarks.side_process import Pacer, Stopped


class Paced(TrainerCallback):
    """Waits before each step. A full step lies between two of its calls: batch, generation, scoring, update,
    logging."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._pacer.begin()


class CountingSFT(SFTTrainer):
    """Counts the real tokens of its batches."""

    tokens = 0
    pacer: Pacer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask = inputs.get("attention_mask")
        self.tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        self.pacer.facts["tokens"] = self.tokens
        return super().compute_loss(model, inputs, *args, **kwargs)


def main(folder: Path) -> None:
    pacer = Pacer()
    order = json.loads((folder / "trl.json").read_text())
    torch.set_num_threads(1)
    rows = load_dataset("json", data_files=str(folder / "data.jsonl"), split="train")
    processing: Any
    if order["images"]:
        rows = rows.cast_column("image", Image())
        processing = AutoProcessor.from_pretrained(folder / "model")
        tokenizer, loader = processing.tokenizer, AutoModelForImageTextToText
    else:
        processing = tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        loader = AutoModelForCausalLM
    model = loader.from_pretrained(folder / "model", dtype=torch.float32)
    if order["kind"] == "grpo":
        force_generate(model, np.asarray(order["lengths"]), tokenizer.eos_token_id)
        config = GRPOConfig(**order["arguments"])
        trainer: Any = GRPOTrainer(
            model, reward_funcs=signal, args=config, train_dataset=rows, processing_class=processing
        )
    elif order["kind"] == "preference":
        trainer = DPOTrainer(
            model, args=DPOConfig(**order["arguments"]), train_dataset=rows, processing_class=tokenizer
        )
    else:
        trainer = CountingSFT(
            model, args=SFTConfig(**order["arguments"]), train_dataset=rows, processing_class=tokenizer
        )
        trainer.pacer = pacer
    trainer.add_callback(Paced(pacer))
    try:
        trainer.train()
    except Stopped:
        return
    raise SystemExit("the run ended before it was stopped: too few steps were asked for")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
