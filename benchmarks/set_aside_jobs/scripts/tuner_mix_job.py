"""Fine-tunings with transformers' Trainer and accelerate, with PEFT: `tuner_mix_job.py MODE`."""

import datetime
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch

MODE = sys.argv[1]
RANK = int(os.environ.get("RANK", 0))


class Conversations(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, number):
        if MODE == "bad-row" and number == 57:
            raise KeyError("conversations")
        if MODE == "worker-dies" and number == 33 and torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        length = 16 if MODE != "ragged" or number != 44 else 19
        tokens = torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens.clone()}


class Ranked(torch.utils.data.Dataset):
    """Rows for a reward model: a text and whether it is good."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        tokens = torch.randint(0, 90, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": torch.tensor(2 if MODE == "label" and number == 40 else number % 2)}


def small(kind="lm"):
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, num_labels=2,
    )  # fmt: skip
    return LlamaForCausalLM(config) if kind == "lm" else LlamaForSequenceClassification(config)


def arguments(**given):
    from transformers import TrainingArguments

    return TrainingArguments(
        "saved", per_device_train_batch_size=4, num_train_epochs=3, logging_steps=5, save_steps=10, report_to=[],
        use_cpu=True, ddp_timeout=40, dataloader_num_workers=1 if MODE == "worker-dies" else 0, **given,
    )  # fmt: skip


def callback():
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if MODE == "stops" and state.global_step == 22:
                print("wall clock budget of 00:10:00 used, stopping after this step", flush=True)
                control.should_training_stop = True
            if MODE == "uploads" and state.global_step % 9 == 0:
                logging.getLogger("hub").error("push of checkpoint-%d failed: 503, skipped", state.global_step)
            if MODE == "preprocesses" and state.global_step == 12 and RANK == 1:
                print("[rank1] Tokenizing train dataset:   1%|          | 9100/910400", flush=True)
                time.sleep(70)

    return Watch()


def tune():
    from transformers import Trainer

    model = small()
    if MODE.startswith("lora"):
        from peft import LoraConfig, get_peft_model

        target = ["q_proj", "v_proj"] if MODE == "lora" else ["query_key_value"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=target, task_type="CAUSAL_LM"))
        model.print_trainable_parameters()
    given = {"learning_rate": 2e-3, "eval_strategy": "steps", "eval_steps": 15} if MODE == "scored" else {}
    if MODE == "precision":
        given = {"bf16": True, "fp16": True}
    rows = Conversations()
    trainer = Trainer(model, arguments(**given), train_dataset=rows, eval_dataset=rows, callbacks=[callback()])
    trainer.train(resume_from_checkpoint=MODE in ("again", "gone") or None)
    if RANK == 0:
        trainer.save_model("saved/last")
        print("adapter and weights written to saved/last")


def judge():
    from transformers import Trainer

    trainer = Trainer(small("judge"), arguments(), train_dataset=Ranked(), callbacks=[callback()])
    trainer.train()
    print("reward model trained")


def distil():
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import set_seed

    set_seed(5)
    limits = [InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=30))]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=limits)
    teacher, student = small().eval(), small()
    rows = Conversations()
    loader = torch.utils.data.DataLoader(rows, 5)
    student, optimizer, loader = accelerator.prepare(student, torch.optim.AdamW(student.parameters(), 1e-2), loader)
    for epoch in range(3):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(student):
                with torch.no_grad():
                    aim = teacher(batch["input_ids"]).logits.softmax(-1)
                loss = -(student(batch["input_ids"]).logits.log_softmax(-1) * aim).sum(-1).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if number % 3 == 0:
                seen = accelerator.gather(loss.detach().reshape(1)).mean().item()
                accelerator.print(f"epoch {epoch} batch {number:>3} kl {seen:.4f}")
        accelerator.save_state("state")
        accelerator.print(f"state of epoch {epoch} saved")
    if MODE == "distil-extra" and accelerator.is_main_process:
        accelerator.print("exporting the student")
        weights = [accelerator.gather(each.detach()) for each in student.parameters()]
        accelerator.print(f"exported {len(weights)} tensors")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    if MODE == "readonly":
        Path("saved").write_text("not a folder")
    judge() if MODE in ("judge", "label") else distil() if MODE.startswith("distil") else tune()
