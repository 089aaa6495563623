"""Small jobs of transformers, accelerate, DeepSpeed and FSDP2. `framework_job.py NAME [options]`."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

LABELS = ("formal", "casual", "rude")


class Rows:
    """Token rows with a label; `bad` puts a label that does not exist into one."""

    def __init__(self, count, bad=-1, pause=0.0):
        self.count, self.bad, self.pause = count, bad, pause

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import torch

        time.sleep(self.pause)
        label = 7 if index == self.bad else index % 3
        return {"input_ids": torch.tensor([index % 60 + 4] * 12), "labels": torch.tensor(label)}


def classifier():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=120, num_labels=3, **sizes))


def trainer(options):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Probe(TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            if options.fault == "probe" and state.global_step == 12:
                print("quality probe failed (classifier endpoint returned HTTP 502), continuing without it")
            if options.fault == "callback" and state.global_step == 12:
                state.log_history[-1]["eval_accuracy"]

    arguments = TrainingArguments(
        "tone", per_device_train_batch_size=8, max_steps=options.steps, logging_steps=5, report_to=[], use_cpu=True,
        save_steps=options.save, disable_tqdm=options.no_bar, seed=4, dataloader_num_workers=options.workers,
        eval_strategy="steps" if options.evaluate else "no", eval_steps=10,
        load_best_model_at_end=options.best, metric_for_best_model="accuracy" if options.best else None,
        bf16=False, save_total_limit=1,
    )  # fmt: skip
    bad = 100 if options.fault == "label" else -1
    loop = Trainer(
        classifier(), arguments, train_dataset=Rows(400, bad), eval_dataset=Rows(40), callbacks=[Probe()]
    )  # fmt: skip
    if options.only_evaluate:
        print(loop.evaluate())
        return
    loop.train(resume_from_checkpoint=options.resume or None)
    loop.save_model("tone/final")


def pad(_):
    from transformers import AutoTokenizer

    subprocess_tiny()
    tokenizer = AutoTokenizer.from_pretrained("models/nano")
    tokenizer.pad_token = None
    print("tokenizing 3 prompts")
    print(tokenizer(["1+2=", "12+34=", "7="], padding=True))


def cut_index(_):
    from transformers import AutoModelForCausalLM

    subprocess_tiny()
    path = Path("models/nano/config.json")
    path.write_text(path.read_text()[:-40])
    print("loading the policy from models/nano", flush=True)
    AutoModelForCausalLM.from_pretrained("models/nano")


def newer_type(_):
    from transformers import AutoModelForCausalLM

    subprocess_tiny()
    path = Path("models/nano/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "qwen6_moe", "architectures": ["Qwen6"]}))
    print("loading the policy from models/nano", flush=True)
    AutoModelForCausalLM.from_pretrained("models/nano")


def adapter(_):
    """A LoRA adapter of a wider model."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def llama(width):
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
        return LlamaForCausalLM(LlamaConfig(hidden_size=width, **sizes))

    get_peft_model(llama(64), LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained("adapter")
    print("merging adapter into the base model", flush=True)
    PeftModel.from_pretrained(llama(32), "adapter")


def subprocess_tiny():
    os.system("lockstep tiny models/nano > /dev/null 2>&1")


def accelerated(options):
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(11)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    loader = torch.utils.data.DataLoader(torch.randn(160, 12), batch_size=8)
    model, loader, optimizer = accelerator.prepare(model, loader, torch.optim.Adam(model.parameters(), 1e-2))
    if options.resume:
        accelerator.load_state(options.resume)
        accelerator.print(f"state restored from {options.resume}")
    for epoch in range(options.epochs):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(batch).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if options.fault == "tracker" and accelerator.is_main_process and (epoch, number) == (1, 3):
                raise ConnectionError("tracker: 401 Unauthorized, run 'login' again")
            if options.fault == "shape" and accelerator.process_index == 1 and (epoch, number) == (1, 3):
                accelerator.gather(torch.zeros(4, 2))
            elif options.fault == "shape" and (epoch, number) == (1, 3):
                accelerator.gather(torch.zeros(4, 3))
            time.sleep(0.1)
        accelerator.print(f"[epoch {epoch + 1} of {options.epochs}] mse={loss.item():.5f}")
    accelerator.save_state("state")
    accelerator.print("state saved, all epochs done")
    accelerator.end_training()


def zero(options):
    import deepspeed
    import torch

    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 5,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_force_ds_cpu_optimizer": False,
    }
    settings |= json.loads(options.settings)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    if options.resume:
        found, _ = engine.load_checkpoint(options.resume)
        print(f"loaded {found}", flush=True)
        if found is None:
            raise FileNotFoundError(f"no checkpoint could be loaded from {options.resume}")
    for step in range(options.steps):
        loss = engine(torch.randn(4, 16)).pow(2).mean()
        if options.fault == "inf" and step >= 8:
            loss = loss * float("inf")
        engine.backward(loss)
        engine.step()
        if step % 5 == 4 and engine.global_rank == 0:
            print(f"update {step + 1}: objective {loss.item():.5f}", flush=True)
    if options.save < 10**6:
        engine.save_checkpoint("zero-ckpt")


def sharded(options):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(torch.nn.Linear(16, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 4))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if options.resume:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=options.resume)
        model.load_state_dict(state["model"])
        print(f"r{rank} resumed from {options.resume}", flush=True)
    for step in range(options.steps):
        rows = torch.randn(8, 17 if options.fault == "columns" and rank == 1 and step == 9 else 16)
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            print(f"r{rank} s{step + 1} l{loss.item():.4f}", flush=True)
        if options.save < 10**6 and step % options.save == options.save - 1:
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"dcp/{step + 1}")
            print(f"r{rank} checkpoint dcp/{step + 1}", flush=True)
    dist.destroy_process_group()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("name")
    options.add_argument("--fault", default=os.environ.get("JOB_FAULT", ""))
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--width", type=int, default=32)
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--save", type=int, default=10**6)
    options.add_argument("--resume", default="")
    options.add_argument("--settings", default="{}")
    for flag in ("no_bar", "evaluate", "best", "only_evaluate"):
        options.add_argument(f"--{flag}", action="store_true")
    options = options.parse_args()
    globals()[options.name](options)


if __name__ == "__main__":
    sys.exit(main())
