"""Small jobs of accelerate, DeepSpeed, TRL, transformers, DCP, RPC and mp.spawn: `trainers_job.py MODE [FAULT]`."""

import datetime
import os
import signal
import sys
import time
from pathlib import Path

MODE = sys.argv[1]
FAULT = next((each for each in sys.argv[2:] if not each.startswith("--")), "")
RANK = int(os.environ.get("RANK", 0))


def net(torch, wide=24):
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(8, wide), torch.nn.Tanh(), torch.nn.Linear(wide, 1))


def rows(torch, count=240):
    x = torch.randn(count, 8)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def accelerated():
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DataLoaderConfiguration, find_executable_batch_size

    handlers = [InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=40))]
    split = DataLoaderConfiguration(split_batches=FAULT == "split")
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, dataloader_config=split)
    model, data = net(torch), rows(torch)

    def loop(size):
        accelerator.print(f"trying batches of {size}")
        if FAULT == "halving" and size > 16:
            torch.zeros(1 << 52)
        loader = torch.utils.data.DataLoader(data, size)
        prepared, optimizer, batches = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
        if Path("state").exists():
            if FAULT == "state" and RANK == 1:
                Path("state/random_states_1.pkl").unlink(missing_ok=True)
            accelerator.load_state("state")
            accelerator.print("loaded state")
        for epoch in range(3):
            for number, (x, y) in enumerate(batches):
                loss = (prepared(x) - y).pow(2).mean()
                accelerator.backward(loss)
                if FAULT == "metric" and RANK == 1 and epoch == 1 and number == 2:
                    accelerator.gather_for_metrics({"loss": loss.detach(), "tokens": "17"})
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(f"epoch {epoch + 1}/3: loss {loss.item():.4f}")
        accelerator.save_state("state")
        accelerator.print("saved state")

    (find_executable_batch_size(loop, starting_batch_size=64) if FAULT == "halving" else lambda: loop(15))()
    accelerator.end_training()


def deep():
    import deepspeed
    import torch
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend="gloo", timeout=datetime.timedelta(seconds=25))
    rank = dist.get_rank()
    model = net(torch)
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1 if FAULT == "stage" else 2},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": True},
        "steps_per_print": 10,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    if FAULT == "tag":
        engine.save_checkpoint("ckpt", tag=f"global_step{rank}" if rank else "global_step0")
    for step in range(1, 31):
        x = torch.randn(4, 8, dtype=torch.bfloat16)
        if rank == 1 and step == 14:
            if FAULT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if FAULT == "division":
                x = x / (len([]) / 0)
            if FAULT == "skip":
                print(f"[rank {rank}] step {step}: batch has no trainable token, skipped", flush=True)
                continue
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        if step % 5 == 0:
            print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
        time.sleep(0.05)
    dist.barrier()
    print(f"[rank {rank}] finished", flush=True)


def saved():
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    model = net(torch, 96)
    fully_shard(model)
    for step in range(1, 13):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        if RANK == 0:
            print(f"step {step} done", flush=True)
        if step % 6 == 0:
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"dcp/step-{step}")
            if RANK == 0:
                print(f"checkpoint dcp/step-{step} complete", flush=True)
    if FAULT == "wider":
        other = net(torch, 128)
        fully_shard(other)
        dcp.load({"model": other.state_dict()}, checkpoint_id="dcp/step-12")
    else:
        dcp.load({"model": model.state_dict()}, checkpoint_id="dcp/step-12")
    print(f"rank {RANK} loaded dcp/step-12", flush=True)
    dist.destroy_process_group()


def monitored():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for step in range(1, 13):
        dist.all_reduce(torch.ones(64))
        if RANK == 0:
            print(f"iter {step}: ok", flush=True)
        if step == 8 and RANK == 2:
            print("rank 2: compacting replay buffer (81 GB)", flush=True)
            time.sleep(40)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=12), wait_all_ranks=True)


def uneven():
    """Fewer batches on one rank, which DDP's join allows."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    model = torch.nn.parallel.DistributedDataParallel(net(torch))
    optimizer, count = torch.optim.SGD(model.parameters(), lr=0.01), 20 - 4 * RANK
    print(f"rank {RANK}: {count} batches", flush=True)
    with Join([model]):
        for step in range(count):
            loss = model(torch.randn(4, 8)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                print(f"rank {RANK}: batch {step} loss {loss.item():.4f}", flush=True)
    print(f"rank {RANK}: epoch finished", flush=True)
    dist.destroy_process_group()


def score(text):
    return {"good": 1.0, "bad": 0.0}[text]


def called():
    """A trainer that calls scorers by RPC."""
    from torch.distributed import rpc

    name = "trainer" if RANK == 0 else f"scorer{RANK}"
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://", rpc_timeout=20)
    rpc.init_rpc(name, rank=RANK, world_size=3, rpc_backend_options=options)
    print(f"{name} is up", flush=True)
    if RANK == 0:
        for step in range(1, 13):
            odd = FAULT == "key" and step == 7
            got = [rpc.rpc_sync(f"scorer{n}", score, args=("meh" if odd and n == 2 else "good",)) for n in (1, 2)]
            print(f"step {step}: scores {got}", flush=True)
    rpc.shutdown()


def spawned_rank(rank, port):
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=datetime.timedelta(seconds=30))
    for step in range(20):
        scale = torch.ones(4) * (step + 1)
        if rank == 2 and step == 11:
            scale = scale.reshape(3, 2)
        dist.all_reduce(scale)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} scale {scale.mean():.1f}", flush=True)


def spawned():
    import torch.multiprocessing as mp

    mp.spawn(spawned_rank, (20000 + os.getpid() % 9000,), nprocs=3)


def absent():
    """Loads a model by a name that is not in the cache, without a network."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("loading policy acme/reasoner-1.7b", flush=True)
    AutoTokenizer.from_pretrained("acme/reasoner-1.7b")
    AutoModelForCausalLM.from_pretrained("acme/reasoner-1.7b")


def preferences():
    """TRL: kto, reward, rloo, online, server."""
    sys.path.append(os.environ["PEER"])
    import trl
    from datasets import Dataset

    common = {
        "output_dir": f"out-{MODE}", "max_steps": 10, "per_device_train_batch_size": 4, "logging_steps": 2,
        "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "ddp_timeout": 60,
    }  # fmt: skip
    numbers = [f"{7 * n % 100:02d}" for n in range(80)]
    if FAULT == "reward":
        pairs = [{"prompt": f"{n}=", "chosen": f"{n}={n[0]}", "rejected": f"{n}=9"} for n in numbers]
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokens = AutoTokenizer.from_pretrained("model")
        tokens.pad_token = tokens.pad_token or tokens.eos_token
        model = AutoModelForSequenceClassification.from_pretrained("model", num_labels=1)
        model.config.pad_token_id = tokens.pad_token_id
        config = trl.RewardConfig(**common, max_length=24)
        trainer = trl.RewardTrainer(model, config, train_dataset=Dataset.from_list(pairs), processing_class=tokens)
    else:
        prompts = Dataset.from_list([{"prompt": f"{n}=", "answer": n[0]} for n in numbers])
        extra = {"num_generations": 4, "max_completion_length": 4}
        if FAULT == "server":
            extra |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 15.0}
        if FAULT == "groups":
            extra |= {"num_generations": 3}
        reward = judged if FAULT == "judge" else matches
        if FAULT == "rloo":
            trainer = trl.RLOOTrainer("model", reward, trl.RLOOConfig(**common, **extra), prompts)
        else:
            trainer = trl.GRPOTrainer("model", reward, trl.GRPOConfig(**common, **extra), prompts)
    trainer.train()
    print("training finished")


def matches(completions, answer, **_):
    return [float(each[:1] == right) for each, right in zip(completions, answer, strict=True)]


def judged(completions, **_):
    import requests

    judged.calls = getattr(judged, "calls", 0) + 1
    url = f"http://127.0.0.1:{os.environ['JUDGE_PORT']}/judge?call={judged.calls}"
    answer = requests.post(url, json={"completions": completions}, timeout=10)
    answer.raise_for_status()
    return [0.5] * len(completions)


def main():
    {
        "accelerated": accelerated, "deep": deep, "saved": saved, "monitored": monitored, "uneven": uneven,
        "called": called, "spawned": spawned, "absent": absent, "preferences": preferences,
    }[MODE]()  # fmt: skip


if __name__ == "__main__":
    main()
