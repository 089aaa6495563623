"""A training job on the emulation of NCCL, whose rank 1 fails: `torchrun device_job.py FAULT [ddp]`. With `ddp`, which
needs TORCH_NCCL_BLOCKING_WAIT=1, most collectives are issued from C++."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from benchmarks.faults import emulated_nccl
from lockstep.watch.recorder import recorder

CULPRIT, FAULT_STEP, STEP_S = 1, 20, 0.02


def fail(fault: str) -> None:
    if fault == "stopped":
        emulated_nccl.device().drain(1.0)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "operation":
        dist.broadcast(torch.ones(4), 0)
    elif fault == "kernel":
        emulated_nccl.device().compute.launch(threading.Event().wait)


def main() -> None:
    # The recorder looks for NCCL's flight recorder when torch is imported, which has no emulation yet.
    recorder.uninstall()
    emulated_nccl.register()
    recorder.install()
    dist.init_process_group(emulated_nccl.NAME)
    model = torch.nn.Linear(64, 64)
    if sys.argv[2:] == ["ddp"]:
        model = torch.nn.parallel.DistributedDataParallel(model)
    step = 0
    while True:
        step += 1
        if step == FAULT_STEP and dist.get_rank() == CULPRIT:
            fail(sys.argv[1])
        model(torch.ones(8, 64)).sum().backward()
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
        emulated_nccl.device().synchronize()
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
