"""Small fine-tunings with transformers' Trainer and accelerate: `tuning_job.py MODE`."""

import datetime
import os
import signal
import sys
from pathlib import Path

import torch

MODE = sys.argv[1]
RANK = int(os.environ.get("RANK", 0))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, number):
        if MODE == "worker-killed" and number == 41 and torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens.clone()}


def tiny():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2))


def tuned():
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    early = MODE == "early"
    arguments = TrainingArguments(
        "out", num_train_epochs=3, per_device_train_batch_size=8, logging_steps=4, save_steps=6, report_to=[],
        use_cpu=True, ddp_timeout=40, eval_strategy="steps" if early else "no", eval_steps=6,
        load_best_model_at_end=early, metric_for_best_model="loss" if early else None,
        dataloader_num_workers=1 if MODE == "worker-killed" else 0, learning_rate=0.3 if early else 1e-3,
    )  # fmt: skip
    calls = [EarlyStoppingCallback(2)] if early else []
    trainer = Trainer(tiny(), arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=calls)
    if MODE == "evaluates":
        print(trainer.evaluate())
        return
    if MODE == "torn":
        place = next(Path("out").glob("checkpoint-36/model.safetensors"))
        place.write_bytes(place.read_bytes()[:5000])
    trainer.train(resume_from_checkpoint=MODE in ("resumed", "torn") or None)
    if RANK == 0:
        print("saved model to out/final")
        trainer.save_model("out/final")


def preferred():
    from accelerate import Accelerator, InitProcessGroupKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(0, 40))])
    reference, model = tiny(), tiny()
    loader = torch.utils.data.DataLoader(Rows(), 6)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), loader)
    for number, batch in enumerate(loader):
        chosen, rejected = batch["input_ids"], batch["input_ids"].flip(1)
        both = torch.cat([chosen, rejected])
        scores = [
            each(both).logits.log_softmax(-1).gather(2, both[..., None]).sum((1, 2)) for each in (model, reference)
        ]
        gaps = (scores[0] - scores[1].detach()).chunk(2)
        loss = -torch.nn.functional.logsigmoid(0.1 * (gaps[0] - gaps[1])).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accuracy = accelerator.gather((gaps[0] > gaps[1]).float()).mean()
        accelerator.print(f"{{'loss': {loss.item():.4f}, 'rewards/accuracies': {accuracy:.3f}, 'step': {number + 1}}}")
        if MODE == "dpo-raises" and RANK == 1 and number == 3:
            {"chosen": 1}["rejected_input_ids"]
    accelerator.end_training()


preferred() if MODE.startswith("dpo") else tuned()
