"""Fine-tunes a causal language model with the Hugging Face Trainer."""

import argparse
import time

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

p = argparse.ArgumentParser()
p.add_argument("--model", default="tiny")
p.add_argument("--data", default="tiny/train.jsonl")
p.add_argument("--column", default="text")
p.add_argument("--output", default="output")
p.add_argument("--steps", type=int, default=24)
p.add_argument("--save-steps", type=int, default=0)
p.add_argument("--lr", type=float, default=1e-3)
p.add_argument("--resume", action="store_true")
p.add_argument("--patience", type=int, default=0)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--workers", type=int, default=0)
p.add_argument("--map-processes", type=int, default=0)
p.add_argument("--optim", default="adamw_torch")
p.add_argument("--evaluate", action="store_true")
p.add_argument("--ddp-timeout", type=int, default=60)
p.add_argument("--max-length", type=int, default=32)
p.add_argument("--report-to", default="none")
p.add_argument("--best", default="")
p.add_argument("--pause", type=float, default=0.0)
args = p.parse_args()


class Slow(TrainerCallback):
    def on_step_end(self, *_, **__):
        time.sleep(args.pause)


def main():
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    rows = load_dataset("json", data_files=args.data, split="train")

    def encode(row):
        return tokenizer(row[args.column], truncation=True, max_length=args.max_length)

    rows = rows.map(encode, remove_columns=rows.column_names, num_proc=args.map_processes or None)
    parts = rows.train_test_split(0.2, seed=0)
    config = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.lr,
        optim=args.optim,
        logging_steps=2,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        eval_strategy="steps" if args.evaluate or args.patience else "no",
        eval_steps=args.save_steps or 6,
        load_best_model_at_end=bool(args.patience or args.best),
        metric_for_best_model=args.best or None,
        dataloader_num_workers=args.workers,
        report_to=args.report_to,
        ddp_timeout=args.ddp_timeout,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=config,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[Slow(), *([EarlyStoppingCallback(args.patience)] if args.patience else [])],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    if args.evaluate:
        print(trainer.evaluate())


if __name__ == "__main__":
    main()
