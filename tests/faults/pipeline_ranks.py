"""The programs of test_pipeline_schedules' ranks: a pipeline of three ranks, one of which fails in its forward pass.

torch.distributed.pipelining takes long to import, so each program imports it before its rank can be observed.
"""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from benchmarks.faults.emulated_nccl import device
from lockstep.watch.beacon.writer import current_beacon
from tests.faults.ranks import Job

CULPRIT = 1
MICROBATCHES, ROWS, WIDTH = 6, 2, 4
FAULTY_STEP = 3
HEALTHY_STEPS = 40
STEP_S = 0.1


class Fault:
    """The fault of a rank. It happens in the third forward pass of a step, when all stages are at work."""

    def __init__(self, rank: int, job: Job) -> None:
        self.name = job.environment["FAULT"] if rank == CULPRIT else "none"
        self.job, self.step, self.passes = job, 0, 0

    def begin_step(self) -> None:
        self.step, self.passes = self.step + 1, 0
        current_beacon().progress("steps", self.step)
        time.sleep(STEP_S)

    def forward_pass(self) -> None:
        """Called by every forward pass of a stage."""
        self.passes += 1
        if self.step == FAULTY_STEP and self.passes == 3:
            self.strike()

    def strike(self) -> None:
        if self.name == "stopped":
            if self.job.on_device:
                device().drain(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.name == "sleeps":
            self.job.wait()
        elif self.name == "kernel":
            device().compute.launch(threading.Event().wait)

    @property
    def over(self) -> bool:
        return self.step == HEALTHY_STEPS


class Layers(torch.nn.Module):
    """The layers of one stage."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.linear, self.fault = torch.nn.Linear(WIDTH, WIDTH), fault

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.fault.forward_pass()
        return self.linear(rows)


def _train(rank: int, job: Job, stages_per_rank: int) -> float:
    """Trains the stages of a rank; returns the loss of the last microbatch on the last rank, else 0."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    job.init(rank)
    torch.manual_seed(0)
    fault, last = Fault(rank, job), rank == job.world - 1
    shape = torch.zeros(ROWS, WIDTH, requires_grad=True)
    stages = [
        PipelineStage(
            Layers(fault), rank + k * job.world, stages_per_rank * job.world, torch.device("cpu"),
            input_args=(shape,), output_args=(shape,),
        )
        for k in range(stages_per_rank)
    ]  # fmt: skip
    schedule = (
        Schedule1F1B(stages[0], MICROBATCHES, _loss)
        if stages_per_rank == 1
        else ScheduleInterleaved1F1B(stages, MICROBATCHES, _loss)
    )
    rows = torch.ones(MICROBATCHES * ROWS, WIDTH)
    losses: list[torch.Tensor] = []
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # the first step exchanges objects, which CUDA tensors wait for
    while not fault.over:
        fault.begin_step()
        losses.clear()
        schedule.step(*(rows,) * (rank == 0), **({"target": rows, "losses": losses} if last else {}))
        job.synchronize()
        os.environ.pop("TORCH_NCCL_BLOCKING_WAIT", None)
    return losses[-1].item() if last else 0.0


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def one_forward_one_backward(rank: int, job: Job) -> float:
    """torch's Schedule1F1B: a stage on each rank."""
    return _train(rank, job, 1)


def interleaved(rank: int, job: Job) -> float:
    """torch's ScheduleInterleaved1F1B: two stages on each rank."""
    return _train(rank, job, 2)


def exchange(rank: int, job: Job) -> float:
    """A loop of batched messages: each rank sends to the next one and receives from the one before, as in a ring."""
    job.init(rank)
    fault = Fault(rank, job)
    given, taken = torch.full((WIDTH,), float(rank)), torch.zeros(WIDTH)
    while not fault.over:
        fault.begin_step()
        for _ in range(MICROBATCHES):
            fault.forward_pass()
            ring = [
                dist.P2POp(dist.isend, given, (rank + 1) % job.world),
                dist.P2POp(dist.irecv, taken, (rank - 1) % job.world),
            ]
            for work in dist.batch_isend_irecv(ring):
                work.wait()
        job.synchronize()
    return float(taken[0])
