"""The program of a rank with NCCL, for test_watch_cuda."""

import time
from typing import Any

import torch
import torch.distributed as dist

from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.beacon.writer import current_beacon
from lockstep.watch.dumps.dump_parser import normalize_entry, parse_dump
from lockstep.watch.recorder import recorder
from tests.faults.ranks import BOUND_S, Job

KERNEL_S = 3.0
"""A kernel of about this long lies before the collective."""


def state() -> tuple[int, int]:
    """(entered, completed) of the default communicator as the beacon has them."""
    found = recorder.current()
    assert found is not None
    found.poll_once()
    beacon = read_beacon(current_beacon().path)
    assert beacon is not None
    (world,) = [each for each in beacon.communicators if each.label == "default_pg"]
    return world.entered, world.completed


def collective_behind_a_kernel(rank: int, job: Job) -> Any:
    """A collective is entered at once, and completed only after the kernel before it."""
    torch.cuda.set_device(rank)
    job.init(rank)
    values = torch.ones(1024, device="cuda")
    dist.all_reduce(values)  # makes the communicator
    torch.cuda.synchronize()
    until_completed(1)

    torch.cuda._sleep(int(KERNEL_S * 1.5e9))  # cycles
    dist.all_reduce(values)
    pending = state()
    torch.cuda.synchronize()
    completed = until_completed(2)
    dump = parse_dump(torch._C._distributed_c10d._dump_nccl_trace())
    entries = [normalize_entry(entry) for entry in dump["entries"]]
    return {
        "pending": pending,
        "completed": completed,
        "sum": float(values[0]),
        "world": dist.get_world_size(),
        "operations": [entry["profiling_name"] for entry in dump["entries"]],
        "normalized": sum(entry is not None for entry in entries),
    }


def until_completed(number: int) -> tuple[int, int]:
    """Waits until NCCL's watchdog has counted the collective as completed, which takes it up to a second."""
    end = time.monotonic() + BOUND_S
    while (found := state())[1] < number:
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found
