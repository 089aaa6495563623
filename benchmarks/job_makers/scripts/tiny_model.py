"""Makes a tiny GPT-2, its tokenizer and a data set in a folder: `tiny_model.py FOLDER`."""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

folder = Path(sys.argv[1])
words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789+=?."]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
fast.chat_template = "{% for m in messages %}{{ m['content'] }} <eos> {% endfor %}"
fast.save_pretrained(folder)
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(words),
    n_positions=64,
    n_embd=32,
    n_layer=2,
    n_head=2,
    bos_token_id=1,
    eos_token_id=1,
    pad_token_id=0,
)
GPT2LMHeadModel(config).save_pretrained(folder)
draw = random.Random(1)
with open(folder / "train.jsonl", "w") as out:
    for _ in range(96):
        a, b = draw.randint(0, 4), draw.randint(0, 5)
        row = {"prompt": f"{a} + {b} =", "chosen": f" {a + b} .", "rejected": f" {(a + b + 3) % 10} .", "answer": a + b}
        out.write(json.dumps({**row, "text": row["prompt"] + row["chosen"]}) + "\n")
