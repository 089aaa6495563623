"""A rank of a small job that dumps its flight recorder when the job has reached the state of the case.

    python gloo_rank.py RANK WORLD FOLDER CASE

The last rank is the one that does something else; who has dumped waits for the others, so that nobody's end is seen by
anybody.
"""

import contextlib
import os
import pickle
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

BOUND_S = 120.0
COMMON = 6
"""Collectives that all ranks call before the case."""


def recorded() -> dict[str, Any]:
    return pickle.loads(_dump_fr_trace(True, False, False))


def dump_when(ready: Any, rank: int, world: int, folder: Path) -> None:
    """Dumps when `ready` accepts the recorder's content, waits for the dumps of all ranks, and exits."""
    deadline = time.monotonic() + BOUND_S
    while not ready(recorded()):
        if time.monotonic() > deadline:
            os._exit(3)
        time.sleep(0.02)
    (folder / f"rank{rank}.json").write_bytes(_dump_fr_trace_json(True, False))
    (folder / f"part_{rank}").write_bytes(_dump_fr_trace(True, True, False))
    (folder / f"part_{rank}").rename(folder / f"nccl_trace_rank_{rank}")
    while not all((folder / f"nccl_trace_rank_{other}").exists() for other in range(world)):
        if time.monotonic() > deadline:
            os._exit(4)
        time.sleep(0.02)
    os._exit(0)


def entries(count: int, retired: bool) -> Any:
    """A predicate: the recorder has `count` entries, and the last one has or has not ended."""
    return lambda content: len(content["entries"]) == count and content["entries"][-1]["retired"] is retired


def begin(rank: int, world: int, folder: Path, timeout_s: float) -> torch.Tensor:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world,
                            timeout=timedelta(seconds=timeout_s))  # fmt: skip
    numbers = torch.ones(4, 2)
    for _ in range(3):
        dist.all_reduce(numbers)
    dist.broadcast(numbers, 0)
    dist.all_gather([torch.zeros(3) for _ in range(world)], torch.ones(3))
    dist.barrier()
    return numbers


def last_step(numbers: torch.Tensor, case: str, odd: bool) -> None:
    if case == "mismatch" and odd:
        dist.all_gather([torch.zeros(4, 2) for _ in range(dist.get_world_size())], numbers)
    elif case == "recv" and odd:
        dist.recv(numbers, 0)
    else:
        dist.all_reduce(numbers)


def point_to_point(numbers: torch.Tensor, rank: int, world: int) -> None:
    """Sends from the first rank to the last, then calls a collective; the recorder shows the send only after that."""
    if rank == 0:
        dist.send(numbers, world - 1)
    elif rank == world - 1:
        dist.recv(numbers, 0)
    dist.all_reduce(numbers)


def main(rank: int, world: int, folder: Path, case: str) -> None:
    odd = rank == world - 1
    numbers = begin(rank, world, folder, 2.0 if case == "timed_out" else BOUND_S)
    common = COMMON + (case == "recv")
    if case == "recv":
        point_to_point(numbers, rank, world)
    away = case in ("absent", "timed_out") and odd
    unseen = away or (case == "recv" and odd)
    ready = entries(common, True) if unseen else entries(common + 1, case in ("healthy", "timed_out"))
    threading.Thread(target=dump_when, args=(ready, rank, world, folder)).start()
    if not away:
        with contextlib.suppress(RuntimeError):
            last_step(numbers, case, odd)
    time.sleep(BOUND_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
