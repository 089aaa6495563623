"""The programs of test_asynchronous_device's ranks."""

import threading
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.faults.emulated_nccl import device
from tests.faults.ranks import Job


def left_alone(rank: int, job: Job) -> Any:
    """All ranks but the last enter a third collective, and run ahead to a fourth; the last one waits for the test."""
    job.init(rank)
    for _ in range(2):
        dist.all_reduce(torch.ones(4))
    job.synchronize()
    if rank < job.world - 1:
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
        job.synchronize()
    else:
        job.wait()


def stuck_kernel(rank: int, job: Job) -> Any:
    """On rank 1, a kernel before the third collective hangs; its host issues the collective all the same."""
    job.init(rank)
    for _ in range(2):
        dist.all_reduce(torch.ones(4))
    job.synchronize()
    if rank == 1:
        device().compute.launch(threading.Event().wait)
    dist.all_reduce(torch.ones(4))
    job.synchronize()


def unsent(rank: int, job: Job) -> Any:
    """Rank 1 waits for a message that rank 0 never sends."""
    job.init(rank)
    pair = dist.new_group(list(range(job.world)), group_desc="pipeline")
    value = torch.ones(4)
    for _ in range(2):
        if rank == 0:
            dist.send(value, 1, group=pair)
        elif rank == 1:
            dist.recv(value, 0, group=pair)
        dist.all_reduce(torch.ones(4))
    job.synchronize()
    if rank == 0:
        job.wait()
    elif rank == 1:
        dist.recv(value, 0, group=pair)
    dist.all_reduce(torch.ones(4))
    job.synchronize()


def opposite_order(rank: int, job: Job) -> Any:
    """Two ranks enter two communicators of the same members in opposite order, after messages on one of them."""
    job.init(rank)
    one, two = dist.new_group(group_desc="one"), dist.new_group(group_desc="two")
    value = torch.ones(4)
    dist.send(value, 1, group=one) if rank == 0 else dist.recv(value, 0, group=one)
    dist.all_reduce(value, group=one)
    dist.all_reduce(value, group=two)
    job.synchronize()
    for group in (one, two) if rank == 0 else (two, one):
        dist.all_reduce(torch.ones(4), group=group)
    job.synchronize()
