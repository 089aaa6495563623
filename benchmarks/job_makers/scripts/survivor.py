"""A data-parallel loop that meets trouble and goes on: `survivor.py WHAT`, under torchrun."""

import faulthandler
import fcntl
import os
import signal
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

what = sys.argv[1]
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 36
backend = "nccl" if what == "nccl" else "gloo"
if what == "stacks":
    faulthandler.dump_traceback_later(9, file=open(f"out/stack-rank{os.environ['RANK']}.txt", "w"))
if what == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(backend, timeout=timedelta(seconds=14))
rank, world = dist.get_rank(), dist.get_world_size()
weights, skipped, stopping = torch.zeros(8), 0, False


def on_signal(number, _):
    global stopping
    print(f"[{rank}] caught signal {number}, will save and leave", flush=True)
    stopping = True


if what == "requeue":
    signal.signal(signal.SIGUSR1, on_signal)
if what == "warnings":
    warnings.warn("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=1)
    warnings.warn(
        "the `lr_scheduler.step()` order changed and will be an error in the next release", FutureWarning, stacklevel=1
    )
    torch.cuda.amp.GradScaler()
    torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weights.requires_grad_()], lr=0.1), 1).step()
    weights = weights.detach()


def load(step):
    if what in {"bad_record", "lost_mount"} and step == 14 and rank == 1:
        raise OSError(5, "Input/output error", "/mnt/nfs/shard-0014.tar")
    batch = torch.randn(16, 8)
    if what == "nan_batch" and step in (9, 22):
        batch[0, 0] = float("nan")
    if what == "slow_disk" and step == 15 and rank == 0:
        print(f"[{rank}] data loading took longer than expected, waiting for /mnt/nfs ...", flush=True)
        time.sleep(8)
    return batch


def agreed(flag):
    value = torch.tensor(float(flag))
    dist.all_reduce(value)
    return value.item() > 0


print(f"[{rank}] start: world {world}, {steps} steps", flush=True)
for step in range(1, steps + 1):
    lost = False
    try:
        batch = load(step)
    except OSError as error:
        if what == "lost_mount":
            raise
        print(f"[{rank}] ERROR reading the batch of step {step}: {error}; using a copy", flush=True)
        batch = torch.randn(16, 8)
    gradient = batch.mean(0) - weights
    lost = not torch.isfinite(gradient).all()
    if what == "nan_batch" and agreed(lost):
        skipped += 1
        print(f"[{rank}] step {step}: gradient is nan/inf, skipping the update ({skipped} so far)", flush=True)
        continue
    if what == "wrong_order" and step == 12:
        order = (dist.all_reduce, dist.broadcast) if rank else (dist.broadcast, dist.all_reduce)
        for call in order:
            call(gradient) if call is dist.all_reduce else call(gradient, 0)
    if what == "recv_cycle" and step == 12:
        dist.recv(gradient, (rank + 1) % world)
        dist.send(gradient, (rank - 1) % world)
    if what == "stacks" and step == 12 and rank == 2:
        import socket

        lookup = socket.create_server(("127.0.0.1", 0))
        lookup.accept()
    if what == "silent" and step == 16 and rank == 1:
        with open("run.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fcntl.flock(open("run.lock"), fcntl.LOCK_EX)
    if what == "recorder" and step == 14 and rank == 2:
        time.sleep(30)
    if what == "assertion" and rank == 3 and step == 20:
        torch.nn.functional.one_hot(torch.tensor([4, 9]), num_classes=8)
    if what == "early_exit" and rank == 1 and step == 18:
        print(f"[{rank}] nothing left to do here", flush=True)
        sys.exit(0)
    try:
        dist.all_reduce(gradient)
    except RuntimeError:
        if what == "recorder":
            dump = torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True)
            open(f"out/fr_trace_rank_{rank}.json", "wb").write(dump if isinstance(dump, bytes) else dump.encode())
        raise
    weights += 0.1 * gradient / world
    time.sleep(0.12)
    if step % 4 == 0:
        print(f"[{rank}] {step}/{steps} norm={weights.norm():.4f} errors=0 killed=0 oom=0", flush=True)
    if what == "requeue" and agreed(stopping):
        if rank == 0:
            torch.save(weights, "state.pt")
            print(f"[{rank}] state of step {step} saved, the job will be requeued", flush=True)
        break
else:
    print(f"[{rank}] reached step {steps}", flush=True)
dist.barrier()
dist.destroy_process_group()
if what == "at_exit":
    print(f"[{rank}] exiting with SystemExit: 0", flush=True)
    raise SystemExit(0)
