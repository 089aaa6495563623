"""Small jobs of PyTorch, accelerate, transformers and Ray: `studio.py MODE`."""

import logging
import os
import sys
import time
import warnings
from pathlib import Path

MODE = sys.argv[1]
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
logging.basicConfig(
    level=logging.INFO, format=f"%(asctime)s [{RANK}] %(levelname)s %(name)s: %(message)s", stream=sys.stdout
)
log = logging.getLogger("studio")


def net():
    from torch import nn

    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def rows(count=64):
    import torch
    from torch.utils.data import Dataset

    class Rows(Dataset):
        def __len__(self):
            return count

        def __getitem__(self, index):
            if MODE == "loader" and RANK == 1 and index == 37:
                raise ValueError(f"image {index} has 4 channels, expected 3 (frames/000{index}.png)")
            return torch.randn(8, generator=torch.Generator().manual_seed(index))

    return Rows()


def loop(model, optimizer, data, steps=10, each=None):
    for step, batch in enumerate(data):
        if step >= steps:
            break
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.info(f"step {step} loss {float(loss):.4f}")
        if each:
            each(step)
        time.sleep(0.1)


def ranks():
    """DDP and collectives of PyTorch."""
    import datetime

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
    if MODE == "objects":
        import threading

        told = [None] * WORLD
        mine = {"rank": RANK, "seen": 12}
        if RANK == 1:
            mine["lock"] = threading.Lock()
        dist.all_gather_object(told, mine)
    if MODE == "chain":
        model = net()
        for step in range(8):
            log.info(f"micro-batch {step}")
            if RANK == 1 and step == 4:
                log.info("stage 1 has a cached activation for micro-batch 4, it does not receive")
            elif RANK == 0:
                dist.send(torch.ones(8), 1)
            else:
                model(torch.zeros(8))
                dist.recv(torch.zeros(8), 0)
            if RANK == 1:
                dist.send(torch.ones(1), 0)
            else:
                dist.recv(torch.zeros(1), 1)
        for _ in range(2):
            dist.barrier()
    if MODE == "spawn-collate":
        data = DataLoader(
            rows(), 8, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda each: torch.stack(each)
        )
        next(iter(data))
    model = torch.nn.parallel.DistributedDataParallel(net())
    data = DataLoader(rows(), 4, num_workers=1 if MODE == "loader" else 0)

    def each(step):
        if MODE == "ddp-fine" and step == 4:
            warnings.warn("Grad strides do not match bucket view strides; this may impair performance", stacklevel=1)
            with model.no_sync():
                model(torch.ones(1, 8)).sum().backward()
            log.error("prefetch of part 5 failed (connection reset by peer), reading it again: ok")

    loop(model, torch.optim.SGD(model.parameters(), 0.01), data, 14, each)
    dist.barrier()
    log.info("finished")
    dist.destroy_process_group()


def accelerated():
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    if MODE == "acc-precision":
        Accelerator(mixed_precision="fp12")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(rows(), 4))
    for step, batch in enumerate(data):
        with accelerator.accumulate(model):
            if MODE == "acc-raises" and step == 4 and accelerator.process_index == 1:
                batch = {"input": batch}["inputs"]
            loss = model(batch).square().mean()
            if MODE == "acc-nan" and step == 5:
                loss = loss * float("inf")
                total = accelerator.reduce(loss.detach())
                if not torch.isfinite(total):
                    raise FloatingPointError(f"loss became {float(total)} at step {step}, stopping")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            log.info(f"step {step} loss {float(loss):.4f}")
    accelerator.wait_for_everyone()
    accelerator.save_state("state")
    accelerator.print("state saved, done")
    accelerator.end_training()


def trained():
    import torch
    from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    tokens = [torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(n)) for n in range(40)]
    data = [{"input_ids": each, "labels": each.clone()} for each in tokens]
    if MODE == "hf-lengths":
        data[22] = {"input_ids": tokens[0][:11], "labels": tokens[0][:11]}
    given = {"save_steps": 5, "logging_steps": 2, "per_device_train_batch_size": 4, "max_steps": 16, "use_cpu": True}
    given |= {"report_to": [], "disable_tqdm": MODE == "hf-early", "eval_steps": 5, "eval_strategy": "steps"}
    if MODE == "hf-early":
        given |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 1e-9}
    if MODE == "hf-steps-differ":
        given |= {"load_best_model_at_end": True, "save_steps": 7}
    given = TrainingArguments("scratch/hf" if MODE == "hf-disk" else "hf", **given)
    calls = [EarlyStoppingCallback(1, 0.5)] if MODE == "hf-early" else []
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**shape)), given, train_dataset=data, eval_dataset=data[:8], callbacks=calls
    )
    print(trainer.train(resume_from_checkpoint=Path("hf/checkpoint-5").exists() or None))


def rayed():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="INFO")

    @ray.remote(num_cpus=0)
    class ParameterStore:
        def put(self, step):
            if MODE == "ray-store-exits" and step == 4:
                print("parameter store: quota of 0 snapshots left, exiting", flush=True)
                os._exit(9)
            return step

    @ray.remote(num_cpus=0, max_restarts=2, max_task_retries=2)
    class Judge:
        def score(self, step):
            flag = Path(os.environ["OUT"]).parent / "judge-struck"
            if MODE == "ray-fine" and step == 3 and not flag.exists():
                flag.touch()
                os._exit(1)
            if MODE == "ray-judge-parses" and step == 4:
                return float("score: 8/10")
            return 0.1 * step

    if MODE == "ray-tpu":

        @ray.remote(resources={"TPU-v5e": 4})
        class Policy:
            def ready(self):
                return True

        policy = Policy.remote()
        for turn in range(4):
            done, _ = ray.wait([policy.ready.remote()], timeout=12)
            if done:
                break
            log.warning(
                f"policy actor is not placed yet ({12 * (turn + 1)} s): needs TPU-v5e 4, "
                f"cluster has {ray.cluster_resources()}"
            )
        raise TimeoutError("policy actor was not scheduled within 48 s")
    store, judge = ParameterStore.options(name="parameter-store").remote(), Judge.options(name="judge").remote()
    for step in range(8):
        score = ray.get(judge.score.remote(step), timeout=15)
        ray.get(store.put.remote(step), timeout=15)
        log.info(f"iteration {step}: mean score {score:.2f}")
        time.sleep(0.2)
    log.info("all iterations done")


if __name__ == "__main__":
    kinds = {"acc": accelerated, "hf": trained, "ray": rayed}
    kinds.get(MODE.split("-")[0], ranks)()
